package vm_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A host takes a machine of another one only where nothing that its saved state depends on is otherwise, and says what is.
func TestMovedMachineMustFit(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Firecracker, c.Jailer = "", "" }) // its machines do not move
	x, err := e.Backend.Create(within(t), sandbox.NewID("htests"), small(e), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Destroy(within(t))
	m := x.(sandbox.Movable)
	if _, err := m.Luggage(within(t)); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("files of one that runs: %v", err)
	}
	text, size, err := m.Needs(within(t))
	if err != nil || size < 128<<20 {
		t.Fatalf("%d octets, %v", size, err)
	}
	if err := e.Backend.Admit(within(t), text, size); err != nil {
		t.Fatalf("to a host that is the same: %v", err)
	}
	if err := e.Backend.Admit(within(t), text, 1<<60); !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "of disk free") {
		t.Errorf("to one without room: %v", err)
	}
	missing := "sha256:" + strings.Repeat("0", 64)
	for _, c := range []struct {
		part, field string
		is          any
		says        string
	}{
		{"fits", "driver", "another", "it was saved by another"},
		{"fits", "version", "1.2.3", "it was saved by qemu 1.2.3"},
		{"fits", "accelerator", "hvf", "it was saved under hvf"},
		{"fits", "kernel", "x", "another kernel for guests"},
		{"fits", "machine", "pc", "its machine was another one"},
		{"cpu", "name", "Another Processor", "its processor is a \"Another Processor\""},
		{"cpu", "flags", "fpu nosuchflag", "lacks nosuchflag"},
		{"handle", "layer", missing, "its layers are image"},
		{"handle", "own", true, "can't be moved"},
		{"", "layers", []string{missing}, "its layers"},
		{"", "volumes", []sandbox.Volume{{Path: "/data", Layer: missing}}, "its volume at /data"},
	} {
		all := map[string]any{}
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		to := all
		if c.part != "" {
			to = all[c.part].(map[string]any)
		}
		to[c.field] = c.is
		other, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Backend.Admit(within(t), other, size); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s.%s: %v; want %q", c.part, c.field, err, c.says)
		}
	}
	if err := e.Backend.Admit(within(t), []byte("{"), size); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("what is no JSON: %v", err)
	}
	if _, err := e.Backend.Unpack(within(t), "htests-x", "../passwd"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a file of another name: %v", err)
	}
}
