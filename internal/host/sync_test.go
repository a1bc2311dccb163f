package host

import (
	"context"
	"sync"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"

	"connectrpc.com/connect"
)

// syncedLog notes what waits for the disk.
type syncedLog struct {
	Log
	mu    sync.Mutex
	waits []string
}

func (l *syncedLog) note(what string) {
	l.mu.Lock()
	l.waits = append(l.waits, what)
	l.mu.Unlock()
}

func (l *syncedLog) Append(ctx context.Context, id trajectory.ID, recs []trajectory.Record, d sandbox.Durability) (uint64, error) {
	if d != sandbox.DurabilityProcess {
		l.note(recs[0].Kind.String())
	}
	return l.Log.Append(ctx, id, recs, d)
}

func (l *syncedLog) Sync(ctx context.Context) error {
	l.note("sync")
	return l.Log.Sync(ctx)
}

func (l *syncedLog) taken() (n map[string]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = map[string]int{}
	for _, w := range l.waits {
		n[w]++
	}
	l.waits = nil
	return n
}

// With durability host a command waits for the disk once, at its end, unless it is told before that it runs; where it could do something
// that outlives the machine, its start is on the disk before.
func TestWaitsForTheDisk(t *testing.T) {
	var log *syncedLog
	r := newRig(t, fake.Options{}, func(_ *Config, d *Deps) {
		log = &syncedLog{Log: d.Log}
		d.Log = log
	})
	p := r.serve()
	ctx := in("default")
	start := func(b *box, id string, wait int64, argv ...string) {
		t.Helper()
		if _, err := p.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: string(b.id), Id: id, Argv: argv, WaitMs: wait})); err != nil {
			t.Fatal(err)
		}
	}
	host := func(network string) func(*dsecv1.Spec) {
		return func(s *dsecv1.Spec) { s.Durability, s.Network = "host", network }
	}
	none, open := r.create("none", host("none")), r.create("open", host("open"))
	log.taken()
	start(none, "a", 10_000, "echo", "x")
	if n := log.taken(); n["step-end"] != 1 || len(n) != 1 {
		t.Errorf("a command that is waited for waits for the disk at %v", n)
	}
	start(none, "b", 0, "hang")
	if n := log.taken(); n["sync"] != 1 || len(n) != 1 {
		t.Errorf("one that is told to run: %v", n)
	}
	start(none, "b", 0, "hang")
	if _, err := p.Commands.List(ctx, connect.NewRequest(&dsecv1.ListCommandsRequest{Sandbox: string(none.id)})); err != nil {
		t.Fatal(err)
	}
	if n := log.taken(); len(n) != 0 {
		t.Errorf("told again: %v", n)
	}
	start(open, "c", 10_000, "echo", "x")
	if n := log.taken(); n["step-start"] != 1 || n["step-end"] != 1 || len(n) != 2 {
		t.Errorf("with a network: %v", n)
	}
}
