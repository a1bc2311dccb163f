package main

import (
	"fmt"
	"os"
)

// reclaim has the kernel look for memory that nobody has used for two minutes and give it up (DAMON_RECLAIM), where the host asks for it and the
// kernel has it. Without swap that is pages of files that are as the disk has them: programs' own memory stays. The host then gets the pages by
// the balloon. A look at one page of each region in ten seconds finds what is cold well enough, and costs nothing that could be measured. What
// is given up at once is bounded by size: a bound by time would be by the host's clock, and a busy host's machines would give up next to nothing.
func reclaim() {
	if v, _ := argument("dsec.reclaim="); v != "1" {
		return
	}
	const dir = "/sys/module/damon_reclaim/parameters/"
	os.WriteFile(dir+"skip_anon", []byte("Y"), 0) // of newer kernels: without swap these pages are looked at in vain
	for _, p := range []struct{ name, value string }{
		{"min_age", "120000000"}, // µs without use
		{"min_nr_regions", "10"},
		{"max_nr_regions", "50"},
		{"sample_interval", "10000000"}, // µs
		{"aggr_interval", "40000000"},   // µs
		{"quota_ms", "0"},               // no bound
		{"quota_sz", "134217728"},       // octets, in each interval below
		{"quota_reset_interval_ms", "40000"},
		{"wmarks_interval", "40000000"}, // µs
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
