package sandbox

import (
	"fmt"
	"path"
)

// TraceLevel says how much is recorded of what a step did, beside its outcome.
type TraceLevel string

const (
	TraceOff   TraceLevel = "off"
	TraceLight TraceLevel = "light" // changed files, processes, I/O, pressure
	TraceFull  TraceLevel = "full"  // also files read and connections

	DefaultTrace = TraceOff
)

// MaxVolatile bounds what is compared with every path of a tree.
const MaxVolatile = 128

// Check refuses a level that there is none of.
func (l TraceLevel) Check() error {
	if l != TraceOff && l != TraceLight && l != TraceFull {
		return fmt.Errorf("trace %.40q: want off, light or full: %w", string(l), ErrInvalid)
	}
	return nil
}

// CheckVolatile checks the paths of caches and the like.
func CheckVolatile(list []string) error {
	if len(list) > MaxVolatile {
		return fmt.Errorf("volatile_paths: %d given, at most %d: %w", len(list), MaxVolatile, ErrInvalid)
	}
	for i, p := range list {
		if err := CheckPath(fmt.Sprintf("volatile_paths[%d]", i), p); err != nil {
			return err
		}
		switch clean := path.Clean(p); {
		case clean == "/":
			return fmt.Errorf("volatile_paths[%d]: all of the tree can't be volatile: %w", i, ErrInvalid)
		case clean != p:
			return fmt.Errorf("volatile_paths[%d] %.80q: write it as %.80q: %w", i, p, clean, ErrInvalid)
		}
	}
	return nil
}
