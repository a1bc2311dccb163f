package container

import (
	"log/slog"
	"os"

	"github.com/dsec-dev/dsec/internal/trace"
)

// trace tries what tells what steps do. Changed files need nothing of the kernel.
func (d *doctor) trace() {
	light, full := trace.Probe(slog.New(slog.DiscardHandler))
	say := func(feature string, err error, seen, fix string) {
		c := Check{Feature: feature, OK: err == nil, Detail: seen, Fix: fix}
		if err != nil {
			c.Detail = err.Error()
		}
		d.add(c)
	}
	const fix = "a kernel with BPF and its type information (CONFIG_BPF_SYSCALL, CONFIG_DEBUG_INFO_BTF), and root with CAP_BPF and CAP_PERFMON; else traces tell changed files alone"
	say("trace: processes", light, "programs with arguments, their I/O", fix)
	say("trace: reads", full, "files read and connections (trace full)", fix)
	_, err := os.Stat("/proc/pressure/cpu")
	if err == nil {
		_, err = os.ReadFile("/proc/pressure/cpu")
	}
	say("trace: pressure", err, "what sandboxes wait for", "boot with psi=1 (CONFIG_PSI)")
}
