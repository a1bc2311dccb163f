package vm

import (
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Whatever a guest says of an end, what comes out has the form that an end may have.
func TestEndsOfGuestsAreBounded(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	rapid.Check(t, func(t *rapid.T) {
		stream := func(name string) sandbox.StreamEnd {
			return sandbox.StreamEnd{Total: rapid.Int64().Draw(t, name), Head: rapid.Int64().Draw(t, name), Tail: rapid.Int64().Draw(t, name),
				Truncated: rapid.Bool().Draw(t, name), SHA256: rapid.StringN(0, 70, -1).Draw(t, name)}
		}
		o := sandbox.Outcome{
			Kind: sandbox.OutcomeKind(rapid.SampledFrom([]string{"exited", "signalled", "unknown", "interrupted", "", "evil", "killed"}).Draw(t, "kind")),
			Code: rapid.Int().Draw(t, "code"), Signal: rapid.Int().Draw(t, "signal"), Error: strings.Repeat("x", rapid.IntRange(0, 9000).Draw(t, "error")),
			Stdout: stream("out"), Stderr: stream("err"),
			Usage:   sandbox.Usage{CPU: time.Duration(rapid.Int64().Draw(t, "cpu")), MemoryPeak: rapid.Int64().Draw(t, "peak")},
			Started: time.Unix(rapid.Int64Range(-1<<40, 1<<40).Draw(t, "started"), 0), Ended: time.Unix(rapid.Int64Range(-1<<40, 1<<40).Draw(t, "ended"), 0),
		}
		began := now.Add(-time.Duration(rapid.Int64Range(0, 1000).Draw(t, "began")) * time.Second)
		got := checkOutcome(o, began, now)
		switch {
		case got.Kind == "" || got.Kind == "evil" || got.Kind == sandbox.Interrupted:
			t.Fatalf("kind %q", got.Kind)
		case got.Code < 0 || got.Code > 255 || got.Signal < 0 || got.Signal > 64 || len(got.Error) > maxDetail:
			t.Fatalf("%+v", got)
		case got.Started.Before(began) || got.Started.After(got.Ended) || got.Ended.After(now):
			t.Fatalf("times %v to %v, the host saw %v to %v", got.Started, got.Ended, began, now)
		case got.Usage.CPU < 0 || got.Usage.MemoryPeak < -1:
			t.Fatalf("usage %+v", got.Usage)
		}
		for _, e := range []sandbox.StreamEnd{got.Stdout, got.Stderr} {
			if e.Head < 0 || e.Tail < 0 || e.Total < 0 || e.Head+e.Tail > e.Total || e.Truncated != (e.Head+e.Tail < e.Total) || e.Total > 1<<50 || e.SHA256 != "" && len(e.SHA256) != 64 {
				t.Fatalf("stream %+v", e)
			}
		}
	})
}

func TestOutputOfGuestsIsBounded(t *testing.T) {
	x := &instance{id: "htests-aaaaaaaaaaaaaaaa", budgets: map[string]*budget{}}
	x.budgets["c"] = newBudget(1 << 20)
	total := 0
	for x.spend("c", sandbox.Stdout, 64<<10) == nil {
		if total += 64 << 10; total > 1<<30 {
			t.Fatal("a command of a cap of 1 MiB may write a GiB")
		}
	}
	if total < 1<<20 {
		t.Errorf("only %d octets of a cap of 1 MiB", total)
	}
	if x.spend("c", 3, 1) == nil || x.spend("c", 0, 1) == nil {
		t.Error("a stream that there is not")
	}
	for i := range 3 * maxRunning {
		if x.spend(string(rune(i+1000)), sandbox.Stdout, math.MaxInt32) != nil {
			return
		}
	}
	t.Error("a guest may speak of commands without end")
}
