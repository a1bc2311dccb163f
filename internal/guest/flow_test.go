package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/google/go-cmp/cmp"
)

// Streams that nobody reads hold up no other call.
func TestSlowReadersHoldUpNobody(t *testing.T) {
	f := serve(t)
	ctx := within(t)
	p := filepath.Join(t.TempDir(), "big")
	want := make([]byte, 3<<20+7)
	rand.New(rand.NewSource(1)).Read(want)
	check(t, os.WriteFile(p, want, 0o644))
	var idle []*Reader
	for range filewire.MaxCalls - 4 {
		r, err := f.Read(ctx, "/dev/zero", 0, 0)
		check(t, err)
		idle = append(idle, r)
	}
	var group sync.WaitGroup
	for n := range 12 {
		group.Add(1)
		go func() {
			defer group.Done()
			if got := readAll(t, f, p, 0, 0); got != string(want) {
				t.Errorf("read %d octets", len(got))
			}
			q := p + strconv.Itoa(n)
			if _, err := f.Write(ctx, WriteHeader{Path: q, Size: int64(len(want))}, bytes.NewReader(want)); err != nil {
				t.Error(err)
			}
			if got, _ := os.ReadFile(q); !bytes.Equal(got, want) {
				t.Errorf("wrote %d octets", len(got))
			}
		}()
	}
	group.Wait()
	for _, r := range idle {
		r.Close()
	}
	if s := readAll(t, f, p, 5, 10); s != string(want[5:15]) {
		t.Errorf("%q", s)
	}
	deadline := time.Now().Add(20 * time.Second)
	for f.Calls() > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if n := f.Calls(); n > 0 {
		t.Errorf("%d calls run on", n)
	}
}

// A body that nobody takes (a FIFO whose reader sleeps) holds up no other call, and its end by the context is told.
func TestStuckBody(t *testing.T) {
	f := serve(t)
	p := filepath.Join(t.TempDir(), "fifo")
	check(t, exec.Command("mkfifo", p).Run())
	hold, err := os.OpenFile(p, os.O_RDWR, 0)
	check(t, err)
	defer hold.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := f.Write(ctx, WriteHeader{Path: p, Size: -1}, zeroes{})
		done <- err
	}()
	for range 100 {
		write(t, f, WriteHeader{Path: p + ".other"}, "x")
	}
	cancel()
	var part *Incomplete
	if err := <-done; !errors.As(err, &part) || !part.Interrupted || part.Applied < 1 || part.Applied > 64<<10 {
		t.Errorf("%v", err)
	}
}

// The server's memory does not grow with what goes through it.
func TestMemoryStaysSmall(t *testing.T) {
	root := jail(t)
	f, pid := startIn(t, root, 0)
	ctx := within(t)
	const size = 512 << 20
	_, err := f.Write(ctx, WriteHeader{Path: "/big", Size: -1}, io.LimitReader(&sparseZeroes{}, 64<<20))
	check(t, err)
	check(t, os.Truncate(filepath.Join(root, "big"), size))
	r, err := f.Read(ctx, "/big", 0, 0)
	check(t, err)
	if n, err := io.Copy(io.Discard, r); err != nil || n != size {
		t.Errorf("%d, %v", n, err)
	}
	for d := range 10 {
		check(t, os.MkdirAll(fmt.Sprintf("%s/many/d%d", root, d), 0o755))
		for n := range 200 {
			check(t, os.WriteFile(fmt.Sprintf("%s/many/d%d/%0100d", root, d, n), nil, 0o644))
		}
	}
	n := 0
	check(t, f.List(ctx, "/many", 9, func(l []Info) error { n += len(l); return nil }))
	if n != 10*201 {
		t.Errorf("%d entries", n)
	}
	tree, err := f.Download(ctx, "/many", nil)
	check(t, err)
	_, err = f.Upload(ctx, UploadHeader{Path: "/copy", Parents: true}, tree)
	check(t, err)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check(t, err)
	_, after, _ := strings.Cut(string(status), "VmHWM:")
	peak, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil || peak > 40<<10 {
		t.Errorf("the server took %d KiB at its peak, %v", peak, err)
	}
	t.Logf("peak %d KiB", peak)
}

type sparseZeroes struct{}

func (*sparseZeroes) Read(p []byte) (int, error) { return len(p), nil }

// scripted is a guest that says what it likes.
func scripted(t *testing.T, say func(w io.Writer, first filewire.Header)) *Files {
	t.Helper()
	host, inside := socketpair(t)
	go func() {
		defer inside.Close()
		inside.Write(filewire.Frame(filewire.Hello, 0, 0, filewire.HelloBody(0, 0)))
		h, _, err := filewire.ReadFrame(inside, make([]byte, filewire.MaxBody))
		if err != nil {
			return
		}
		say(inside, h)
		io.Copy(io.Discard, inside)
	}()
	f := NewFiles(host)
	t.Cleanup(func() { f.Close() })
	return f
}

// Whatever a hostile guest answers is an error of the connection, never a hang, a panic or growth.
func TestHostileAnswers(t *testing.T) {
	ok := (&filewire.Result{}).Encode()
	flood := func(body []byte, ty filewire.Type) func(io.Writer, filewire.Header) {
		return func(w io.Writer, h filewire.Header) {
			for range 1 << 20 {
				if _, err := w.Write(filewire.Frame(ty, 0, h.ID, body)); err != nil {
					return
				}
			}
		}
	}
	one := func(ty filewire.Type, body []byte) func(io.Writer, filewire.Header) {
		return func(w io.Writer, h filewire.Header) { w.Write(filewire.Frame(ty, 0, h.ID, body)) }
	}
	for name, say := range map[string]func(io.Writer, filewire.Header){
		"flood of data":      flood(make([]byte, filewire.MaxData), filewire.GuestData),
		"flood of one octet": flood([]byte{1}, filewire.GuestData),
		"flood of nothing":   flood(nil, filewire.GuestData),
		"too long": func(w io.Writer, h filewire.Header) {
			w.Write(filewire.Frame(filewire.GuestData, 0, h.ID, make([]byte, filewire.MaxBody+1)))
		},
		"unknown type":    one(0x99, nil),
		"host's own type": one(filewire.Call, nil),
		"other call":      func(w io.Writer, h filewire.Header) { w.Write(filewire.Frame(filewire.GuestResult, 0, h.ID+1, ok)) },
		"result twice": func(w io.Writer, h filewire.Header) {
			w.Write(append(filewire.Frame(filewire.GuestResult, 0, h.ID, ok), filewire.Frame(filewire.GuestResult, 0, h.ID, ok)...))
		},
		"result no result":  one(filewire.GuestResult, []byte{1, 2, 3}),
		"credit out of air": one(filewire.GuestCredit, filewire.U32(1)),
		"credit of nothing": one(filewire.GuestCredit, filewire.U32(0)),
		"credit overflow":   one(filewire.GuestCredit, filewire.U32(0xffffffff)),
		"claimed entries":   one(filewire.GuestItem, []byte{1, 0xff, 0xff, 0xff, 0xff}),
		"descriptors": func(w io.Writer, h filewire.Header) {
			b := filewire.Frame(filewire.GuestResult, 0, h.ID, ok)
			b[5] = 1
			w.Write(b)
		},
		"no info":           one(filewire.GuestResult, ok),
		"data before info":  one(filewire.GuestData, []byte("x")),
		"silence, then end": func(w io.Writer, h filewire.Header) { w.(io.Closer).Close() },
	} {
		t.Run(name, func(t *testing.T) {
			f := scripted(t, say)
			r, err := f.Read(within(t), "/x", 0, 0)
			if err == nil {
				_, err = io.Copy(io.Discard, r)
			}
			wantErr(t, "read", err, sandbox.ErrLost)
			wantErr(t, "after", f.Remove(within(t), "/x", false, false), sandbox.ErrLost)
		})
	}
}

// Nor can it send without end what its reader no longer wants.
func TestFloodAfterCancel(t *testing.T) {
	var b filewire.Batch
	b.AddInfo(&Info{Path: "/x", Kind: Char})
	f := scripted(t, func(w io.Writer, h filewire.Header) {
		w.Write(filewire.Frame(filewire.GuestItem, 0, h.ID, b.Bytes()))
		time.Sleep(50 * time.Millisecond)
		for {
			if _, err := w.Write(filewire.Frame(filewire.GuestData, 0, h.ID, make([]byte, 1000))); err != nil {
				return
			}
		}
	})
	r, err := f.Read(within(t), "/x", 0, 0)
	check(t, err)
	check(t, r.Close())
	select {
	case <-f.Done():
		wantErr(t, "the connection", f.Err(), sandbox.ErrLost)
	case <-time.After(30 * time.Second):
		t.Error("the flood goes on")
	}
}

func TestOtherVersionIsUnsupported(t *testing.T) {
	host, inside := socketpair(t)
	defer inside.Close()
	f := NewFiles(host)
	defer f.Close()
	b := filewire.HelloBody(0, 0)
	b[0] = 9
	inside.Write(filewire.Frame(filewire.Hello, 0, 0, b))
	_, err := f.Stat(within(t), "/", false)
	wantErr(t, "stat", err, sandbox.ErrUnsupported)
}

// A guest that says nothing (its sandbox is paused) is left when the context ends, by more callers than calls may run.
func TestSilentGuest(t *testing.T) {
	host, inside := socketpair(t)
	defer inside.Close()
	f := NewFiles(host)
	defer f.Close()
	inside.Write(filewire.Frame(filewire.Hello, 0, 0, filewire.HelloBody(0, 0)))
	var group sync.WaitGroup
	for range 2 * filewire.MaxCalls {
		group.Add(1)
		go func() {
			defer group.Done()
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			_, err := f.Stat(ctx, "/", false)
			wantErr(t, "stat", err, context.DeadlineExceeded)
		}()
	}
	group.Wait()
}

// The program's imports are pinned: it runs in every sandbox that files are asked of.
func TestProgramImportsLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "github.com/dsec-dev/dsec/cmd/dsec-guest").Output()
	check(t, err)
	want := []string{"golang.org/x/sys/unix", "github.com/dsec-dev/dsec/internal/guest/filewire", "github.com/dsec-dev/dsec/internal/guest/fileserver", "github.com/dsec-dev/dsec/cmd/dsec-guest"}
	if d := cmp.Diff(sorted(want), sorted(strings.Fields(string(out)))); d != "" {
		t.Error(d)
	}
	out, err = exec.Command("go", "list", "-deps", "github.com/dsec-dev/dsec/cmd/dsec-guest").Output()
	check(t, err)
	for _, p := range strings.Fields(string(out)) {
		switch {
		case p == "net" || strings.HasPrefix(p, "net/"), strings.HasPrefix(p, "crypto"), p == "encoding/json", p == "regexp":
			t.Errorf("imports %s", p)
		}
	}
	p, err := built()
	check(t, err)
	if st, err := os.Stat(p); err != nil || st.Size() > 4<<20 {
		t.Errorf("the program has %d octets, at most 4 MiB: %v", st.Size(), err)
	}
}

func sorted(s []string) map[string]bool {
	m := map[string]bool{}
	for _, x := range s {
		m[x] = true
	}
	return m
}
