package sandbox

import (
	"errors"
	"strings"
	"testing"
)

func TestBackendOf(t *testing.T) {
	for _, c := range []struct{ backend, runtime, want string }{
		{"", "", ""}, {"vm", "", "vm"}, {"", "gvisor", "container/gvisor"}, {"container", "crun", "container/crun"}, {"container", "direct", "container"},
		{"vm", "gvisor", "!"}, {"", "kata", "!"}, {"", "../x", "!"},
	} {
		got, err := BackendOf(c.backend, c.runtime)
		if c.want == "!" {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%q under %q: %q, %v; want it refused", c.backend, c.runtime, got, err)
			}
			continue
		}
		if err != nil || got != c.want {
			t.Errorf("%q under %q: %q, %v; want %q", c.backend, c.runtime, got, err, c.want)
		}
	}
	for backend, want := range map[string]string{"container": "", "vm": "", "container/gvisor": "gvisor", "": ""} {
		if got := RuntimeOf(backend); got != want {
			t.Errorf("runtime of %q: %q, want %q", backend, got, want)
		}
	}
	all := []Capabilities{{Backend: "vm"}, {Backend: "container", Features: map[string]string{RuntimeFeature("gvisor"): "no runsc: build it"}}}
	if got := NoBackend("container/gvisor", all); !strings.Contains(got, "no runsc: build it") {
		t.Errorf("%q does not tell the reason", got)
	}
	if got := NoBackend("microvm", all); !strings.Contains(got, "microvm") || !strings.Contains(got, "container, vm") {
		t.Errorf("%q", got)
	}
}
