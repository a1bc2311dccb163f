package main

import (
	"fmt"
	"os"
)

// reclaim has the kernel look for memory that nobody has used for two minutes and give it up (DAMON_RECLAIM), where the host asks for it and the
// kernel has it. Without swap that is pages of files that are as the disk has them: programs' own memory stays. The host then gets the pages by
// the balloon. One look at each region in a second and one decision in twenty cost next to nothing.
func reclaim() {
	if v, _ := argument("dsec.reclaim="); v != "1" {
		return
	}
	const dir = "/sys/module/damon_reclaim/parameters/"
	for _, p := range []struct{ name, value string }{
		{"min_age", "120000000"},       // µs without use
		{"sample_interval", "1000000"}, // µs
		{"aggr_interval", "20000000"},  // µs
		{"quota_ms", "10"},             // of a processor, in each interval below
		{"quota_sz", "33554432"},       // octets, in the same
		{"quota_reset_interval_ms", "1000"},
		{"wmarks_interval", "20000000"}, // µs
		// Also while most of the memory is free: it is the host that wants it.
		{"wmarks_high", "1000"},
		{"wmarks_mid", "999"},
		{"wmarks_low", "0"},
		{"enabled", "Y"},
	} {
		if err := os.WriteFile(dir+p.name, []byte(p.value), 0); err != nil {
			fmt.Fprintf(os.Stderr, "dsec-guest-vm: no memory is reclaimed: %v\n", err)
			return
		}
	}
}
