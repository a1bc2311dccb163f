package sandbox

import "fmt"

// TraceLevel says how much is recorded of what a step did, beside its outcome.
type TraceLevel string

const (
	TraceOff   TraceLevel = "off"
	TraceLight TraceLevel = "light" // changed files, processes, I/O, pressure
	TraceFull  TraceLevel = "full"  // also files read and connections
)

// Check refuses a level that there is none of.
func (l TraceLevel) Check() error {
	if l != TraceOff && l != TraceLight && l != TraceFull {
		return fmt.Errorf("trace %.40q: want off, light or full: %w", string(l), ErrInvalid)
	}
	return nil
}
