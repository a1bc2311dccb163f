package sandbox

import (
	"errors"
	"strings"
	"testing"
)

func TestTraceOfASpec(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Spec)
		names  string // in the error; empty: none
	}{
		"nothing":       {func(*Spec) {}, ""},
		"light":         {func(s *Spec) { s.Trace = TraceLight }, ""},
		"full":          {func(s *Spec) { s.Trace, s.Volatile = TraceFull, []string{"/cache", "/var/cache/go-build"} }, ""},
		"another level": {func(s *Spec) { s.Trace = "all" }, "trace"},
		"relative":      {func(s *Spec) { s.Volatile = []string{"/ok", "cache"} }, "volatile_paths[1]"},
		"not clean":     {func(s *Spec) { s.Volatile = []string{"/a/../b"} }, "volatile_paths[0]"},
		"all":           {func(s *Spec) { s.Volatile = []string{"/"} }, "volatile_paths[0]"},
		"too many":      {func(s *Spec) { s.Volatile = make([]string, MaxVolatile+1) }, "volatile_paths"},
	} {
		s := &Spec{Layers: []string{"l"}}
		c.change(s)
		s.Fill()
		err := s.Validate()
		if (err != nil) != (c.names != "") || err != nil && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.names)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := &Spec{}
	if s.Fill(); s.Trace != DefaultTrace {
		t.Errorf("%q by default", s.Trace)
	}
}
