package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func TestSameCommandRunsOnce(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	base := sandbox.Command{ID: "c", Argv: []string{"cat"}, Env: []string{"A=1"}, Cwd: "/tmp", User: "u", Stdin: []byte("x\xff")}
	ctx := context.Background()
	start := func(c sandbox.Command) (bool, error) {
		_, existed, err := b.start(ctx, &c)
		return existed, err
	}
	if existed, err := start(base); existed || err != nil {
		t.Fatal(existed, err)
	}
	b.mustWait(t, "c")
	if existed, err := start(base); !existed || err != nil {
		t.Fatal(existed, err)
	}
	for _, c := range []struct {
		change func(*sandbox.Command)
		names  string
	}{
		{func(c *sandbox.Command) { c.Argv = []string{"cat", "-"} }, "argv"},
		{func(c *sandbox.Command) { c.Argv = []string{"dog"} }, "argv[0]"},
		{func(c *sandbox.Command) { c.Env = []string{"A=2"} }, "env[0]"},
		{func(c *sandbox.Command) { c.Stdin = []byte("y\xff") }, "input"},
		{func(c *sandbox.Command) { c.Stdin = nil }, "input"},
		{func(c *sandbox.Command) { c.Cwd = "/" }, "cwd"},
		{func(c *sandbox.Command) { c.User = "v" }, "user"},
		{func(c *sandbox.Command) { c.Timeout = time.Second }, "timeout_ms"},
	} {
		other := base
		c.change(&other)
		_, err := start(other)
		wantErr(t, err, sandbox.ErrExists, c.names)
	}
	if n := r.world.Runs()[string(b.id)+" c"]; n != 1 {
		t.Fatalf("ran %d times", n)
	}
	if got := b.output(t, "c"); got != "x\xff" {
		t.Fatalf("stdin came out as %q", got)
	}
}

func TestSecretsStayOutOfTheLog(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k", func(s *dsecv1.Spec) {
		s.Env = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "create-secret", Secret: true}}
	})
	ctx := context.Background()
	c := func() *sandbox.Command {
		return &sandbox.Command{ID: "c", Argv: []string{"env"}, Env: []string{"PW=step-secret", "OPEN=seen"}, SecretEnv: []string{"PW"}}
	}
	if _, _, err := b.start(ctx, c()); err != nil {
		t.Fatal(err)
	}
	b.mustWait(t, "c")
	if out := b.output(t, "c"); !strings.Contains(out, "PW=step-secret") || !strings.Contains(out, "TOKEN=create-secret") {
		t.Fatalf("the command got %q", out)
	}
	for _, rec := range r.records(b) {
		if rec.Stream == 0 && bytes.Contains(rec.Payload, []byte("-secret")) {
			t.Fatalf("a secret lies in record %d (%v)", rec.Seq, rec.Kind)
		}
	}
	if _, existed, err := b.start(ctx, c()); err != nil || !existed {
		t.Fatal(existed, err)
	}
	other := c()
	other.Env[0] = "PW=guess"
	_, _, err := b.start(ctx, other)
	wantErr(t, err, sandbox.ErrExists, "env[0]")
}

func attachAll(t *testing.T, b *box, s *step, stdout int64, late bool) (data string, gaps [][2]int64, ended *dsecv1.Command) {
	t.Helper()
	at := stdout
	err := b.attach(context.Background(), s, stdout, 0, late, func(e *dsecv1.AttachResponse) error {
		switch e := e.Event.(type) {
		case *dsecv1.AttachResponse_Chunk:
			if e.Chunk.Stream != "stdout" {
				return nil
			}
			if e.Chunk.Offset != at {
				t.Errorf("chunk at %d, want %d", e.Chunk.Offset, at)
			}
			at += int64(len(e.Chunk.Data))
			data += string(e.Chunk.Data)
		case *dsecv1.AttachResponse_Gap:
			gaps = append(gaps, [2]int64{e.Gap.From, e.Gap.To})
			at = e.Gap.To
		case *dsecv1.AttachResponse_Ended:
			ended = e.Ended
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return data, gaps, ended
}

// B33: truncation is told, by wait, attach and read, whatever the offset.
func TestB33Truncation(t *testing.T) {
	const C = 1 << 20
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	for _, total := range []int64{C - 1, C, C + 1, 10 * C} {
		id := fmt.Sprintf("c%d", total)
		s, _, err := b.start(context.Background(), &sandbox.Command{ID: id, Argv: []string{"print", fmt.Sprint(total)}, OutputCap: C})
		if err != nil {
			t.Fatal(err)
		}
		o := b.mustWait(t, id)
		if o.Stdout.Total != total || o.Stdout.Truncated != (total > C) {
			t.Fatalf("%d: %+v", total, o.Stdout)
		}
		data, gaps, ended := attachAll(t, b, s, 0, false)
		kept := o.Stdout.Head + o.Stdout.Tail
		if int64(len(data)) != kept || ended == nil || ended.Outcome.Stdout.Total != total {
			t.Fatalf("%d: attach gave %d octets, kept %d; %v", total, len(data), kept, ended)
		}
		if o.Stdout.Truncated != (len(gaps) == 1) || (len(gaps) == 1 && gaps[0] != [2]int64{o.Stdout.Head, total - o.Stdout.Tail}) {
			t.Fatalf("%d: gaps %v of %+v", total, gaps, o.Stdout)
		}
		tail, _, _ := attachAll(t, b, s, total-5, false)
		if len(tail) != 5 {
			t.Fatalf("%d: the last octets: %q", total, tail)
		}
		if o.Stdout.Truncated {
			got, err := b.readOutput(context.Background(), s, sandbox.Stdout, o.Stdout.Head, 10)
			if err != nil || got.Gap.GetFrom() != o.Stdout.Head || got.Gap.GetTo() != total-o.Stdout.Tail {
				t.Fatalf("read in the gap: %v %v", got, err)
			}
		}
		got, err := b.readOutput(context.Background(), s, sandbox.Stdout, total-1, 10)
		if err != nil || len(got.Data) != 1 || !got.End {
			t.Fatalf("read at the end: %v %v", got, err)
		}
	}
}

func TestAttachFollowsAndIsNotHeldUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k")
		s := b.mustStart(t, "c", "echo", "one", ";", "sleep", "5s", ";", "echo", "two", ";", "late", "3s")
		slow, release := make(chan struct{}), make(chan struct{})
		go func() {
			first := true
			b.attach(context.Background(), s, 0, 0, false, func(*dsecv1.AttachResponse) error {
				if first {
					first = false
					close(slow)
					<-release
				}
				return nil
			})
		}()
		<-slow
		start := time.Now()
		data, _, ended := attachAll(t, b, s, 0, false)
		if data != "one\ntwo\n" || ended.GetOutcome().GetKind() != "exited" || !ended.GetOutcome().GetOutputOpen() {
			t.Fatalf("%q %v", data, ended)
		}
		if d := time.Since(start); d != 5*time.Second {
			t.Fatalf("took %v", d)
		}
		o := b.mustWait(t, "c")
		time.Sleep(4 * time.Second)
		// Late octets: beyond the end, readable, not part of the result.
		got, err := b.readOutput(context.Background(), s, sandbox.Stdout, o.Stdout.Total, 100)
		if err != nil || string(got.Data) != "late\n" {
			t.Fatalf("%q %v", got.GetData(), err)
		}
		go func() { time.Sleep(time.Second); r.h.end(b, cancelled) }()
		data, _, _ = attachAll(t, b, s, 0, true)
		if data != "one\ntwo\nlate\n" {
			t.Fatalf("%q", data)
		}
		close(release)
	})
}

func TestStdinByOffset(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	ctx := context.Background()
	if _, _, err := b.start(ctx, &sandbox.Command{ID: "c", Argv: []string{"cat"}, Stdin: []byte("ab"), StdinOpen: true}); err != nil {
		t.Fatal(err)
	}
	write := func(off int64, data string, eof bool, want int64) {
		t.Helper()
		n, err := b.writeStdin(ctx, "c", off, []byte(data), eof)
		if err != nil || n != want {
			t.Fatalf("write at %d: %d, %v", off, n, err)
		}
	}
	write(2, "cd", false, 4)
	write(2, "cd", false, 4)
	write(3, "def", false, 6)
	_, err := b.writeStdin(ctx, "c", 9, []byte("x"), false)
	wantErr(t, err, sandbox.ErrState, "6")
	big := strings.Repeat("z", 200<<10) // larger than what lies in a record
	write(6, big, true, 6+200<<10)
	write(6, big, true, 6+200<<10)
	b.mustWait(t, "c")
	if got := b.output(t, "c"); got != "abcdef"+big {
		t.Fatalf("%d octets", len(got))
	}
}

func TestSignalOnce(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	b.mustStart(t, "c", "hang")
	ctx := context.Background()
	if err := b.signal(ctx, "c", 15, "s1"); err != nil {
		t.Fatal(err)
	}
	if o := b.mustWait(t, "c"); o.Kind != sandbox.Signalled || o.Signal != 15 {
		t.Fatalf("%+v", o)
	}
	if err := b.signal(ctx, "c", 15, "s1"); err != nil {
		t.Fatalf("the same step again: %v", err)
	}
	wantErr(t, b.signal(ctx, "c", 9, "s1"), sandbox.ErrExists, "signal")
	wantErr(t, b.signal(ctx, "c", 15, "s2"), sandbox.ErrState)
	wantErr(t, b.signal(ctx, "c", 15, "c"), sandbox.ErrExists, "command")
	for in, want := range map[string]int{"TERM": 15, "sigkill": 9, "2": 2} {
		if n, err := signalNumber(0, in); err != nil || n != want {
			t.Errorf("%s: %d %v", in, n, err)
		}
	}
	if _, err := signalNumber(0, "NOPE"); err == nil {
		t.Error("NOPE is a signal")
	}
}

func TestSessions(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	ctx := context.Background()
	open := func() *dsecv1.OpenSessionResponse {
		t.Helper()
		p, err := b.openSession(ctx, &sandbox.Session{Name: "s"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := open(); p.Joined || p.Restarted {
		t.Fatalf("%v", p)
	}
	if p := open(); !p.Joined || p.Session.State != "open" {
		t.Fatalf("%v", p)
	}
	run := func(id, text string) sandbox.Outcome {
		t.Helper()
		if _, _, err := b.start(ctx, &sandbox.Command{ID: id, Session: "s", Text: text}); err != nil {
			t.Fatal(err)
		}
		return b.mustWait(t, id)
	}
	run("1", "echo in session")
	if got := b.output(t, "1"); got != "in session\n" {
		t.Fatalf("%q", got)
	}
	if o := run("2", "exit 3"); o.Code != 3 || !o.SessionEnd {
		t.Fatalf("%+v", o)
	}
	if o := run("3", "echo next"); o.Kind != sandbox.SessionEnded {
		t.Fatalf("%+v", o)
	}
	for { // the session's end is an event of its own
		all, _ := b.listSessions(ctx)
		if len(all) == 1 && all[0].State == "ended" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if p := open(); !p.Restarted {
		t.Fatalf("%v", p)
	}
	se, err := b.closeSession(ctx, "s")
	if err != nil || se.State != "ended" {
		t.Fatal(se, err)
	}
	_, err = b.closeSession(ctx, "nosuch")
	wantErr(t, err, sandbox.ErrNotFound)
	_, _, err = b.start(ctx, &sandbox.Command{ID: "4", Session: "s", Text: "pwd", Cwd: "/x"})
	wantErr(t, err, sandbox.ErrInvalid)
}

func TestSnapshotOnce(t *testing.T) {
	n := 0
	r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		if op == fake.OpSnapshot {
			n++
		}
		return nil
	}}, nil)
	b := r.create("k")
	one, _, err := b.snapshot(context.Background(), "s")
	if err != nil {
		t.Fatal(err)
	}
	b.mustStart(t, "c", "true")
	r.restart()
	two, _, err := r.box(b.id).snapshot(context.Background(), "s")
	if err != nil || one != two || n != 1 {
		t.Fatalf("%s %s, taken %d times, %v", one, two, n, err)
	}
}

func TestDeniedIsLimited(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	start := time.Now()
	for range 1000 {
		(*sink)(b).Denied(context.Background(), "", "swapon", "")
	}
	most := 51 + 10*int(time.Since(start).Seconds()+1) // in a burst, and each second
	n := 0
	for _, rec := range r.records(b) {
		if p := logRecord(&rec, true); p.Kind == "denied" {
			n++
		}
	}
	if n < 50 || n > most {
		t.Fatalf("%d records of 1000 denials, want at most %d", n, most)
	}
}

// A command that meets the end of its sandbox is refused for the state, not as one that nobody knows.
func TestStartMeetsTheEnd(t *testing.T) {
	meet := make(chan struct{}, 1)
	var r *rig
	r = newRig(t, fake.Options{Hook: func(ctx context.Context, op fake.Op, id sandbox.ID, _ string) error {
		if op == fake.OpStart {
			meet <- struct{}{}
			for slices.Contains(r.world.Alive(), id) {
				time.Sleep(time.Millisecond)
			}
			return fmt.Errorf("sandbox %s has ended: %w", id, sandbox.ErrState)
		}
		return nil
	}}, nil)
	b := r.create("k")
	failed := make(chan error, 1)
	go func() {
		_, _, err := b.start(context.Background(), &sandbox.Command{ID: "c", Argv: []string{"true"}})
		failed <- err
	}()
	<-meet
	r.mustStop(b)
	err := <-failed
	wantErr(t, err, sandbox.ErrState)
	if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrLost) {
		t.Error(err)
	}
	if s, cause := b.now(); s != sandbox.Stopped || cause.Class != sandbox.ClassNone {
		t.Errorf("%s %+v", s, cause)
	}
}

// The longest command that is taken fits into a record.
func TestLongestCommandIsRecorded(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	c := &sandbox.Command{ID: "c", Session: "s", Text: strings.Repeat("#", 16<<20)}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if n := len(encode(tagCommand, r.h.canonicalCommand(c))); n+sandbox.MaxArguments > trajectory.MaxPayload {
		t.Errorf("%d octets, and a record takes %d", n, trajectory.MaxPayload)
	}
}
