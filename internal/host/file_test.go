package host

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const testToken = "0123456789abcdef"

// serve gives a client of the rig's host.
func (r *rig) serve() *rpc.Peer {
	r.t.Helper()
	guard, err := rpc.ClusterGuard(testToken)
	if err != nil {
		r.t.Fatal(err)
	}
	h := r.h
	srv := httptest.NewUnstartedServer(h.Handler(&rpc.Edge{Log: slog.New(slog.DiscardHandler), Guard: guard}))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	p, err := rpc.Dial(srv.URL, rpc.PeerConfig{Token: testToken})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		p.Close()
		srv.Close()
	})
	return p
}

func filesRig(t testing.TB) *rig {
	return newRig(t, fake.Options{Files: func(ctx context.Context, _ sandbox.ID, _ string, conn io.ReadWriteCloser) {
		guest.ServeFiles(ctx, conn)
	}}, nil)
}

func write(p *rpc.Peer, h *dsecv1.WriteRequest, body io.Reader) (*dsecv1.WriteResponse, error) {
	ctx, cancel := context.WithCancel(in("default"))
	defer cancel()
	s := p.FileStreams.Write(ctx)
	if err := s.Send(h); err != nil {
		_, err = s.CloseAndReceive()
		return nil, rpc.FromError(err)
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			if s.Send(&dsecv1.WriteRequest{Data: buf[:n]}) != nil {
				break // the answer says why
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err // cancelled: the body breaks off
		}
	}
	resp, err := s.CloseAndReceive()
	if err != nil {
		return nil, rpc.FromError(err)
	}
	return resp.Msg, nil
}

func TestFileSteps(t *testing.T) {
	r := filesRig(t)
	p := r.serve()
	b := r.create("k")
	dir := t.TempDir()
	ctx := in("default")
	place := func(name string) *dsecv1.Path {
		return &dsecv1.Path{Sandbox: string(b.id), Path: filepath.Join(dir, name)}
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 20<<10) // beyond what lies in a record
	for range 2 {
		w, err := write(p, &dsecv1.WriteRequest{At: place("f"), Step: "w1"}, bytes.NewReader(big))
		if err != nil || w.Written != int64(len(big)) || w.Info.GetSize() != int64(len(big)) {
			t.Fatalf("%v %v", w, err)
		}
		// A resend touches nothing, also after a later step.
		if w.Existed {
			if got, _ := os.ReadFile(filepath.Join(dir, "f")); string(got) != "later" {
				t.Fatalf("a resend overwrote a later step: %.20q", got)
			}
			break
		}
		if _, err := write(p, &dsecv1.WriteRequest{At: place("f"), Step: "w2"}, strings.NewReader("later")); err != nil {
			t.Fatal(err)
		}
	}
	_, err := write(p, &dsecv1.WriteRequest{At: place("f"), Step: "w1"}, strings.NewReader("other"))
	wantErr(t, err, sandbox.ErrExists, "body")
	_, err = write(p, &dsecv1.WriteRequest{At: place("g"), Step: "w1"}, bytes.NewReader(big))
	wantErr(t, err, sandbox.ErrExists, "path")

	for range 2 {
		if _, err := p.Files.MakeDir(ctx, connect.NewRequest(&dsecv1.MakeDirRequest{At: place("d"), Step: "m"})); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Files.Move(ctx, connect.NewRequest(&dsecv1.MoveRequest{From: place("f"), To: filepath.Join(dir, "d", "f"), Step: "v"})); err != nil {
			t.Fatal(err)
		}
	}
	// A refusal is the step's result, and is answered again.
	for range 2 {
		_, err := p.Files.Remove(ctx, connect.NewRequest(&dsecv1.RemoveRequest{At: place("nosuch"), Step: "r"}))
		wantErr(t, rpc.FromError(err), sandbox.ErrNotFound, "nosuch")
		os.WriteFile(filepath.Join(dir, "nosuch"), nil, 0o600)
	}
	r.restart()
	p, b = r.serve(), r.box(b.id)
	w, err := write(p, &dsecv1.WriteRequest{At: place("f"), Step: "w1"}, bytes.NewReader(big))
	if err != nil || !w.Existed {
		t.Fatalf("after a restart: %v %v", w, err)
	}
	kinds := ""
	var input *trajectory.Input
	for _, rec := range r.records(b) {
		kinds += logRecord(&rec, false).Kind + " "
		if rec.Step == "w1" && rec.Input != nil {
			input = rec.Input
		}
	}
	if want := "create state write end write end makedir end move end remove end "; kinds != want {
		t.Fatalf("log: %s", kinds)
	}
	in, err := r.log.OpenInput(input)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if got, err := io.ReadAll(in); err != nil || !bytes.Equal(got, big) {
		t.Fatalf("input of %d octets, %v", len(got), err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// eventually waits for what another goroutine is about to do; its bound is for tests that would hang.
func eventually(t *testing.T, cond func() bool) {
	t.Helper()
	for range 30_000 {
		if cond() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("never came")
}

func TestInterruptedWriteRunsAgain(t *testing.T) {
	r := filesRig(t)
	p := r.serve()
	b := r.create("k")
	file := filepath.Join(t.TempDir(), "f")
	at := &dsecv1.Path{Sandbox: string(b.id), Path: file}
	is := func(id string, state stepState) func() bool {
		return func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.steps[id] != nil && b.steps[id].state == state
		}
	}
	broken := func(id string) io.Reader { // breaks off once the host works on it
		return io.MultiReader(strings.NewReader(strings.Repeat("x", 100_000)), readerFunc(func([]byte) (int, error) {
			eventually(t, is(id, working))
			return 0, errors.New("client died")
		}))
	}
	if _, err := write(p, &dsecv1.WriteRequest{At: at, Step: "w"}, broken("w")); err == nil {
		t.Fatal("a broken body was taken")
	}
	eventually(t, is("w", over))
	var end *dsecv1.LogRecord
	for _, rec := range r.records(b) {
		if rec.Kind == trajectory.KindStepEnd {
			end = logRecord(&rec, false)
		}
	}
	if end.Outcome.GetKind() != "interrupted" || end.Outcome.GetApplied() > 100_000 {
		t.Fatalf("%v", end)
	}
	w, err := write(p, &dsecv1.WriteRequest{At: at, Step: "w"}, strings.NewReader("whole"))
	if err != nil || w.Existed {
		t.Fatalf("%v %v", w, err)
	}
	if got, _ := os.ReadFile(file); string(got) != "whole" {
		t.Fatalf("%.20q", got)
	}

	// An append carries where it starts: at another size it is refused.
	if _, err := write(p, &dsecv1.WriteRequest{At: at, Step: "a", Append: true, StartOffset: 5}, broken("a")); err == nil {
		t.Fatal("a broken body was taken")
	}
	eventually(t, is("a", over))
	if st, _ := os.Stat(file); st.Size() > 5 {
		_, err = write(p, &dsecv1.WriteRequest{At: at, Step: "a", Append: true, StartOffset: 5}, strings.NewReader("y"))
		wantErr(t, err, sandbox.ErrState)
	}
	os.Truncate(file, 5)
	// After a refusal the step has ended; another ID goes on.
	if _, err = write(p, &dsecv1.WriteRequest{At: at, Step: "b", Append: true, StartOffset: 5}, strings.NewReader(" more")); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(file); string(got) != "whole more" {
		t.Fatalf("%q", got)
	}
}

// The main path through the wire: create, exec with output in the answer, logs, stop.
func TestThroughTheWire(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	p := r.serve()
	ctx := in("default")
	c, err := p.Host.Create(ctx, connect.NewRequest(createRequest("k")))
	if err != nil {
		t.Fatal(err)
	}
	id := c.Msg.Sandbox.Id
	run, err := p.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Argv: []string{"echo", "hi", ";", "err", "no", ";", "exit", "4"}, WaitMs: 10_000, TextOutput: true}))
	if err != nil {
		t.Fatal(err)
	}
	if m := run.Msg; m.StdoutText != "hi\n" || m.StderrText != "no\n" || m.Command.Outcome.GetCode() != 4 || m.Command.State != "ended" || m.Command.Id == "" {
		t.Fatalf("%v", m)
	}
	_, err = p.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Argv: []string{"a"}, ArgvRaw: [][]byte{[]byte("b")}}))
	wantErr(t, rpc.FromError(err), sandbox.ErrInvalid, "argv")
	_, err = p.Commands.Start(in("other"), connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Argv: []string{"a"}}))
	wantErr(t, rpc.FromError(err), sandbox.ErrNotFound)
	raw, err := p.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Id: "raw", ArgvRaw: [][]byte{[]byte("echo"), []byte("\xff")}, WaitMs: 10_000}))
	if err != nil || string(raw.Msg.Stdout) != "\xff\n" || len(raw.Msg.Command.ArgvRaw) != 2 {
		t.Fatalf("%v %v", raw, err)
	}
	list, err := p.Commands.List(ctx, connect.NewRequest(&dsecv1.ListCommandsRequest{Sandbox: id, PageSize: 1}))
	if err != nil || len(list.Msg.Commands) != 1 || list.Msg.Commands[0].Argv[0] != "echo" || list.Msg.NextPageToken == "" {
		t.Fatalf("%v %v", list, err)
	}
	list, err = p.Commands.List(ctx, connect.NewRequest(&dsecv1.ListCommandsRequest{Sandbox: id, PageSize: 1, PageToken: list.Msg.NextPageToken}))
	if err != nil || len(list.Msg.Commands) != 1 || list.Msg.Commands[0].Id != "raw" || list.Msg.NextPageToken != "" {
		t.Fatalf("%v %v", list, err)
	}
	follow, err := p.Logs.Read(ctx, connect.NewRequest(&dsecv1.ReadLogRequest{Sandbox: id, Follow: true, Output: true}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Id: id})); err != nil {
		t.Fatal(err)
	}
	kinds := ""
	for follow.Receive() {
		for _, rec := range follow.Msg().Records {
			kinds += rec.Kind + " "
		}
	}
	if want := "create state command output output end command output end state state "; kinds != want || follow.Err() != nil {
		t.Fatalf("log: %s, %v", kinds, follow.Err())
	}
	found, err := p.Host.FindKey(ctx, connect.NewRequest(&dsecv1.FindKeyRequest{Job: "j", Key: "k"}))
	if err != nil || found.Msg.Sandbox.State != "stopped" {
		t.Fatal(found, err)
	}
	st, err := p.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{}))
	if err != nil || st.Msg.Running != 0 || st.Msg.SlotsFree == 0 {
		t.Fatal(st, err)
	}
	if _, err := p.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Selector: &dsecv1.Selector{}})); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
		t.Fatalf("a selector of everything: %v", err)
	}
	many, err := p.Sandboxes.List(ctx, connect.NewRequest(&dsecv1.ListRequest{Selector: &dsecv1.Selector{IncludeEnded: true, Job: "j"}}))
	if err != nil || len(many.Msg.Sandboxes) != 1 {
		t.Fatal(many, err)
	}
	if many, err = p.Sandboxes.List(ctx, connect.NewRequest(&dsecv1.ListRequest{})); err != nil || len(many.Msg.Sandboxes) != 0 {
		t.Fatal(many, err)
	}
}

// cpu reports the CPU time of an operation, client and fake included: wall time on a shared machine says little.
func cpu(b *testing.B, loop func()) {
	var before, after unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &before)
	loop()
	unix.Getrusage(unix.RUSAGE_SELF, &after)
	used := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(float64(used)/float64(b.N)/1000, "cpu-us/op")
}

// One command through the host, without and with the wire.
func BenchmarkExec(b *testing.B) {
	r := newRig(b, fake.Options{}, nil)
	x := r.create("k")
	b.Run("direct", func(b *testing.B) {
		b.ReportAllocs()
		cpu(b, func() {
			for b.Loop() {
				s, _, err := x.start(context.Background(), &sandbox.Command{Argv: []string{"true"}})
				if err != nil || x.waitCommand(context.Background(), s, 1e10) != nil {
					b.Fatal(err)
				}
			}
		})
	})
	b.Run("wire", func(b *testing.B) {
		p := r.serve()
		ctx := in("default")
		b.ReportAllocs()
		cpu(b, func() {
			for b.Loop() {
				resp, err := p.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: string(x.id), Argv: []string{"echo", "x"}, WaitMs: 10_000}))
				if err != nil || resp.Msg.Command.State != "ended" {
					b.Fatal(err)
				}
			}
		})
	})
	b.Run("create", func(b *testing.B) {
		b.ReportAllocs()
		cpu(b, func() {
			for b.Loop() {
				y, _, err := r.h.create(context.Background(), createRequest(sandbox.NewKey()))
				if err != nil || r.h.stop(context.Background(), y, cancelled) != nil {
					b.Fatal(err)
				}
			}
		})
	})
}

// A stop in the middle of an upload is its client's: the step is killed, and the sandbox has not failed by the platform.
func TestStopDuringAWrite(t *testing.T) {
	r := filesRig(t)
	p := r.serve()
	b := r.create("k")
	at := &dsecv1.Path{Sandbox: string(b.id), Path: filepath.Join(t.TempDir(), "f")}
	over := make(chan struct{})
	body := io.MultiReader(strings.NewReader(strings.Repeat("x", 1<<20)), readerFunc(func([]byte) (int, error) {
		<-over
		return 0, io.EOF
	}))
	done := make(chan error, 1)
	go func() {
		_, err := write(p, &dsecv1.WriteRequest{At: at, Step: "w"}, body)
		done <- err
	}()
	eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.steps["w"] != nil && b.steps["w"].state == working
	})
	r.mustStop(b)
	close(over)
	if err := <-done; err == nil || errors.Is(err, sandbox.ErrLost) {
		t.Errorf("the write: %v", err)
	}
	if s, cause := b.now(); s != sandbox.Stopped || cause.Class != sandbox.ClassNone {
		t.Errorf("%s %+v", s, cause)
	}
	for _, rec := range r.records(b) {
		if rec.Kind == trajectory.KindStepEnd {
			if kind := logRecord(&rec, false).Outcome.GetKind(); kind != "killed" && kind != "interrupted" {
				t.Errorf("the step is %s", kind)
			}
		}
	}
}
