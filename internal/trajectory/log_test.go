package trajectory_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

var quiet = slog.New(slog.DiscardHandler)

func testID(key string) trajectory.ID {
	return trajectory.ID{Project: "default", Job: "train", Key: key}
}

func small(dir string) trajectory.Config {
	c := trajectory.Default(dir)
	c.SegmentBytes, c.Reserve = 64<<10, 64<<10
	return c
}

func open(t testing.TB, c trajectory.Config) *trajectory.Log {
	t.Helper()
	l, err := trajectory.Open(c, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func add(t testing.TB, l *trajectory.Log, key string, recs ...trajectory.Record) uint64 {
	t.Helper()
	seq, err := l.Append(context.Background(), testID(key), recs, sandbox.DurabilityProcess)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

func create() trajectory.Record {
	return trajectory.Record{Kind: trajectory.KindCreate, Payload: []byte(`{"spec":1}`)}
}

func output(step string, off int64, data string) trajectory.Record {
	return trajectory.Record{Kind: trajectory.KindOutput, Step: step, Stream: sandbox.Stdout, Offset: off, Payload: []byte(data)}
}

func readAll(t testing.TB, l *trajectory.Log, key string) []trajectory.Record {
	t.Helper()
	var all []trajectory.Record
	for from := uint64(1); ; {
		recs, next, err := l.Read(context.Background(), testID(key), trajectory.Query{From: from})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, recs...)
		if next == from {
			return all
		}
		from = next
	}
}

// TestLife writes over many segments, opens again and reads everything back.
func TestLife(t *testing.T) {
	c := small(t.TempDir())
	l := open(t, c)
	ctx := context.Background()
	for k := range 3 {
		add(t, l, fmt.Sprint(k), create())
	}
	var off int64
	for i := range 400 {
		for k := range 3 {
			key, step := fmt.Sprint(k), fmt.Sprintf("s%d", i)
			add(t, l, key, trajectory.Record{Kind: trajectory.KindStepStart, Step: step, Payload: []byte(`{"argv":["true"]}`)})
			add(t, l, key, output("long", off, fmt.Sprintf("%0100d", i)))
			add(t, l, key, trajectory.Record{Kind: trajectory.KindStepEnd, Step: step, Payload: []byte(`{"kind":"exited"}`)})
		}
		off += 100
	}
	check := func() {
		t.Helper()
		for k := range 3 {
			recs := readAll(t, l, fmt.Sprint(k))
			if len(recs) != 1201 {
				t.Fatalf("%d records, want 1201", len(recs))
			}
			for i, r := range recs {
				if r.Seq != uint64(i)+1 {
					t.Fatalf("record %d has seq %d", i, r.Seq)
				}
			}
			p := make([]byte, 50000)
			n, err := l.ReadOutput(ctx, testID(fmt.Sprint(k)), "long", sandbox.Stdout, 50, p)
			if err != nil || n != 400*100-50 || string(p[50:150]) != fmt.Sprintf("%0100d", 1) {
				t.Fatalf("output: %d, %v, %s", n, err, p[50:150])
			}
			if _, err := l.ReadOutput(ctx, testID(fmt.Sprint(k)), "long", sandbox.Stdout, 40000, p); err != io.EOF {
				t.Fatalf("at the end: %v", err)
			}
		}
	}
	check()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, c)
	check()
	if _, err := trajectory.Open(c, quiet); err == nil {
		t.Fatal("opened twice")
	}
	if err := l.Remove(ctx, testID("0"), testID("1")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Stat(testID("0")); !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatal(err)
	}
}
