package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/placement"
)

type doctorCmd struct {
	places
}

// Run probes this machine's kernel for real and says what a host here could do, and what to do about the rest.
func (x *doctorCmd) Run(ctx context.Context, c *cli) error {
	if err := x.load(); err != nil {
		return err
	}
	checks := slices.Concat(container.Doctor(ctx, x.State, x.settings.Host.UnpackLayers), x.runtimeChecks(ctx), x.vmChecks(ctx))
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(checks)
	}
	var rows [][]string
	bad := 0
	for _, k := range checks {
		mark := "yes"
		switch {
		case !k.OK && k.Needed:
			mark = "NO"
			bad++
		case !k.OK:
			mark = "no"
		}
		detail := k.Detail
		if !k.OK && k.Fix != "" {
			detail += " -> " + k.Fix
		}
		rows = append(rows, []string{k.Feature, mark, detail})
	}
	table(os.Stdout, []string{"FEATURE", "OK", "DETAIL"}, rows)
	if bad > 0 {
		fmt.Printf("\nthis host can run container sandboxes: no, %s that a host needs (NO above)\n", missing(bad))
		return exitCode(1)
	}
	fmt.Printf("\nthis host can run container sandboxes: yes\n")
	return nil
}

func missing(n int) string {
	if n == 1 {
		return "1 thing is missing"
	}
	return fmt.Sprintf("%d things are missing", n)
}

func printFleet(f *placement.Fleet) {
	var rows [][]string
	for _, h := range f.Hosts {
		state := "up"
		switch {
		case !h.Up:
			state = "down: " + h.Fault
		case h.Draining:
			state = "draining"
		}
		rows = append(rows, []string{string(h.ID), state, fmt.Sprint(h.Running), fmt.Sprint(h.SlotsFree), octetText(h.MemoryAvailable), octetText(h.DiskFree), fmt.Sprintf("%.1f", h.Load), h.Addr})
	}
	for _, a := range f.Nameless {
		rows = append(rows, []string{"-", "never answered", "-", "-", "-", "-", "-", a})
	}
	table(os.Stdout, []string{"HOST", "STATE", "RUNNING", "FREE", "MEMORY", "DISK", "LOAD", "ADDRESS"}, rows)
}
