package oci_test

import (
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/oci"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// A step's CPU time is told under gVisor too, whether it is a process of its own or a session's command.
func TestGVisorTellsTime(t *testing.T) {
	u := newUnder(t, oci.GVisor, containertest.Options{})
	s := u.spec()
	k := newSink()
	x, err := u.backend.Create(sandboxtest.Within(t), sandbox.NewID(sandbox.NewHostID()), s, k)
	if err != nil {
		t.Fatal(err)
	}
	defer destroy(t, x)
	if err := x.OpenSession(sandboxtest.Within(t), &sandbox.Session{Name: "s", User: "root", Cwd: "/"}); err != nil {
		t.Fatal(err)
	}
	const loop = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
	for id, c := range map[string]sandbox.Command{"own": {Argv: []string{"/bin/sh", "-c", loop}}, "session": {Session: "s", Text: loop}} {
		c.ID = id
		c.Fill(s)
		if err := x.Start(sandboxtest.Within(t), &c); err != nil {
			t.Fatal(err)
		}
		var o sandbox.Outcome
		k.until(t, "end of "+id, func() (ok bool) { o, ok = k.ends[id]; return ok })
		if o.Kind != sandbox.Exited || o.Usage.CPU <= 0 || o.Usage.MemoryPeak != -1 {
			t.Errorf("%s: %+v; want CPU time and no memory figure", id, o)
		}
	}
}
