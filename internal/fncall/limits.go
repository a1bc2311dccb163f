package fncall

import (
	"fmt"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Limits bound one process tree. Zero means: not said.
type Limits struct {
	CPU       time.Duration // of all processes together
	Wall      time.Duration // from the exec of the program
	Memory    int64         // octets, with the files of the work folder; swap included
	Processes int           // and threads
	Output    int64         // octets of standard output and of standard error, each
	FileSize  int64         // of one file
	Disk      int64         // of all files together
	Files     int           // number of files and folders
	Stack     int64         // of the main thread
	OpenFiles int
}

// DefaultLimits are the platform's for a run, where neither the call nor its language says otherwise.
func DefaultLimits() Limits {
	return Limits{CPU: 10 * time.Second, Wall: 20 * time.Second, Memory: 512 << 20, Processes: 128, Output: 1 << 20, FileSize: 64 << 20,
		Disk: 128 << 20, Files: 1024, Stack: 64 << 20, OpenFiles: 1024}
}

// DefaultCompileLimits are the platform's for a compiler.
func DefaultCompileLimits() Limits {
	return Limits{CPU: 30 * time.Second, Wall: 60 * time.Second, Memory: 1 << 30, Processes: 128, Output: 256 << 10, FileSize: 256 << 20,
		Disk: 512 << 20, Files: 8192, Stack: 64 << 20, OpenFiles: 4096}
}

// MostLimits are above what anybody gets.
func MostLimits() Limits {
	return Limits{CPU: 8 * time.Minute, Wall: 8 * time.Minute, Memory: 1 << 40, Processes: 1 << 16, Output: 4 << 20, FileSize: 16 << 30,
		Disk: 16 << 30, Files: 1 << 20, Stack: 8 << 30, OpenFiles: 1 << 16}
}

// Or takes what l does not say from d.
func (l Limits) Or(d Limits) Limits {
	or(&l.CPU, d.CPU)
	or(&l.Wall, d.Wall)
	or(&l.Memory, d.Memory)
	or(&l.Processes, d.Processes)
	or(&l.Output, d.Output)
	or(&l.FileSize, d.FileSize)
	or(&l.Disk, d.Disk)
	or(&l.Files, d.Files)
	or(&l.Stack, d.Stack)
	or(&l.OpenFiles, d.OpenFiles)
	return l
}

func or[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Check refuses limits that are out of range, naming the field as on the wire.
func (l Limits) Check() error {
	m := MostLimits()
	for _, f := range []struct {
		name          string
		v, least, top int64
	}{
		{"cpu_ms", l.CPU.Milliseconds(), 1, m.CPU.Milliseconds()}, {"wall_ms", l.Wall.Milliseconds(), 1, m.Wall.Milliseconds()},
		{"memory", l.Memory, 1 << 20, m.Memory}, {"processes", int64(l.Processes), 1, int64(m.Processes)}, {"output", l.Output, 1, m.Output},
		{"file_size", l.FileSize, 1, m.FileSize}, {"disk", l.Disk, 4096, m.Disk}, {"files", int64(l.Files), 1, int64(m.Files)},
		{"stack", l.Stack, 64 << 10, m.Stack}, {"open_files", int64(l.OpenFiles), 4, int64(m.OpenFiles)},
	} {
		if f.v < f.least || f.v > f.top {
			return fmt.Errorf("limits.%s: %d is out of range, want %d to %d: %w", f.name, f.v, f.least, f.top, sandbox.ErrInvalid)
		}
	}
	return nil
}
