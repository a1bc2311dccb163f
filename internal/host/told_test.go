package host

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// mute breaks the connection instead of telling how a call ended.
type mute struct {
	io.ReadWriteCloser
	file string
}

func (m *mute) Write(p []byte) (int, error) {
	if b, _ := os.ReadFile(m.file); len(b) > 0 {
		m.Close()
		return 0, net.ErrClosed
	}
	return m.ReadWriteCloser.Write(p)
}

// An append that goes wherever the file ends has no place to carry: when nobody saw its end it is not done again.
func TestAppendWithoutAPlaceIsNotDoubled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	var calls atomic.Int32
	r := newRig(t, fake.Options{Files: func(ctx context.Context, _ sandbox.ID, _ string, conn io.ReadWriteCloser) {
		if calls.Add(1) == 1 {
			conn = &mute{conn, file}
		}
		guest.ServeFiles(ctx, conn)
	}}, nil)
	p := r.serve()
	b := r.create("k")
	q := &dsecv1.WriteRequest{At: &dsecv1.Path{Sandbox: string(b.id), Path: file}, Step: "a", Append: true, StartOffset: -1}
	for range 3 {
		_, err := write(p, q, strings.NewReader("once\n"))
		wantErr(t, err, sandbox.ErrLost)
	}
	if got, _ := os.ReadFile(file); string(got) != "once\n" {
		t.Fatalf("the file has %q", got)
	}
	q.Step = "b" // another step goes on
	if _, err := write(p, q, strings.NewReader("twice\n")); err != nil {
		t.Fatal(err)
	}
}

// What a child prints after the end of a command is not part of its result, whenever that is asked for.
func TestLateOutputIsNoResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k")
		b.mustStart(t, "c", "echo", "in", "time", ";", "late", "50ms")
		b.mustWait(t, "c")
		for range 2 {
			time.Sleep(100 * time.Millisecond)
			if recs := r.records(b); recs[len(recs)-1].Flags&trajectory.Late == 0 {
				t.Fatal("nothing came late")
			}
			if out := b.output(t, "c"); out != "in time\n" {
				t.Fatalf("the result is %q", out)
			}
			r.restart()
			b = r.box(b.id)
		}
	})
}

// An end that two tell is recorded once.
func TestSessionEndIsRecordedOnce(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	for _, name := range []string{"s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"} {
		if _, err := b.openSession(context.Background(), &sandbox.Session{Name: name}, nil); err != nil {
			t.Fatal(err)
		}
		var g sync.WaitGroup
		for range 4 {
			g.Go(func() {
				if err := (*sink)(b).SessionEnded(context.Background(), name, sandbox.Outcome{Kind: sandbox.Killed}); err != nil {
					t.Error(err)
				}
			})
		}
		g.Wait()
	}
	once(t, r.records(b), trajectory.KindSessionClose)
}

// Commands that end while their sandbox is being stopped have one end each, and nothing follows that of the sandbox.
func TestEndsThatMeetAStop(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	for i := range 60 {
		b := r.create(fmt.Sprint("k", i))
		for _, c := range []string{"a", "b", "c", "d"} {
			b.mustStart(t, c, "sleep", "1ms", ";", "echo", c, ";", "late", "1ms")
		}
		time.Sleep(time.Duration(i*40) * time.Microsecond)
		r.mustStop(b)
		time.Sleep(2 * time.Millisecond)
		recs := r.records(b)
		once(t, recs, trajectory.KindStepEnd)
		if last := recs[len(recs)-1]; last.Kind != trajectory.KindState {
			t.Errorf("%v of %s follows the end", last.Kind, last.Step)
		}
	}
}

func once(t *testing.T, recs []trajectory.Record, kind trajectory.Kind) {
	t.Helper()
	seen := map[string]bool{}
	for _, r := range recs {
		if r.Kind == kind && seen[r.Step] {
			t.Errorf("%v of %s is recorded twice", kind, r.Step)
		}
		seen[r.Step] = seen[r.Step] || r.Kind == kind
	}
	if len(seen) == 0 {
		t.Error("nothing was recorded")
	}
}

// A signal of which nobody knows whether it was sent is unknown, then and after a restart; it is neither sent again nor told as sent.
func TestSignalThatMayNotHaveBeenSent(t *testing.T) {
	var tries atomic.Int32
	r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		if op == fake.OpSignal && tries.Add(1) == 1 {
			return sandbox.ErrLost
		}
		return nil
	}}, nil)
	b := r.create("k")
	b.mustStart(t, "c", "hang")
	ctx := context.Background()
	for range 3 {
		wantErr(t, b.signal(ctx, "c", 15, "s1"), sandbox.ErrLost)
		r.restart()
		b = r.box(b.id)
	}
	if n := tries.Load(); n != 1 {
		t.Fatalf("it was tried %d times", n)
	}
	if err := b.signal(ctx, "c", 15, "s2"); err != nil {
		t.Fatal(err)
	}
	if o := b.mustWait(t, "c"); o.Kind != sandbox.Signalled {
		t.Fatalf("%+v", o)
	}
	r.restart()
	if err := r.box(b.id).signal(ctx, "c", 15, "s2"); err != nil { // its result
		t.Fatal(err)
	}
}
