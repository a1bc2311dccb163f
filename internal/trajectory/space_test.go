package trajectory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
	"github.com/dsec-dev/dsec/internal/trajectory/crashfs"
)

func memory(fs *crashfs.FS) trajectory.Config {
	c := trajectory.Default("")
	c.FS, c.SegmentBytes, c.Reserve = fs, 64<<10, 100<<10
	return c
}

// TestFullDisk: ordinary records are refused in time, ends still go through, also after a restart, and room comes back by Remove.
func TestFullDisk(t *testing.T) {
	ctx := context.Background()
	for _, how := range []string{"disk", "limit"} {
		t.Run(how, func(t *testing.T) {
			fs := crashfs.New(1)
			c := memory(fs)
			if how == "disk" {
				fs.SetSize(600 << 10)
			} else {
				c.Limit = 600 << 10
			}
			l := open(t, c)
			add(t, l, "old", create())
			add(t, l, "new", create())
			var off int64
			var err error
			for err == nil {
				_, err = l.Append(ctx, testID("old"), []trajectory.Record{output("s", off, string(make([]byte, 4000)))}, sandbox.DurabilityProcess)
				off += 4000
			}
			if !errors.Is(err, sandbox.ErrExhausted) {
				t.Fatal(err)
			}
			if !l.Space().Short {
				t.Error("space is not told to be short")
			}
			w := l.NewInputWriter()
			if _, err := w.Write(make([]byte, 200<<10)); !errors.Is(err, sandbox.ErrExhausted) {
				t.Errorf("blob: %v", err)
			}
			w.Abort()
			l.Close()
			l = open(t, c)
			end := trajectory.Record{Kind: trajectory.KindStepEnd, Step: "s", Payload: make([]byte, 900)}
			for i := range 90 {
				if _, err := l.Append(ctx, testID("new"), []trajectory.Record{end}, sandbox.DurabilityHost); err != nil {
					t.Fatalf("end %d: %v", i, err)
				}
			}
			if _, err := l.Append(ctx, testID("new"), []trajectory.Record{output("s", 0, "x")}, sandbox.DurabilityProcess); !errors.Is(err, sandbox.ErrExhausted) {
				t.Fatal(err)
			}
			if err := l.Remove(ctx, testID("old")); err != nil {
				t.Fatal(err)
			}
			if err := l.Maintain(ctx); err != nil {
				t.Fatal(err)
			}
			if err := l.Maintain(ctx); err != nil {
				t.Fatal(err)
			}
			if l.Space().Short {
				t.Error("space is short after a removal")
			}
			add(t, l, "new", output("s", 0, "x"))
			if n := len(readAll(t, l, "new")); n != 92 {
				t.Errorf("%d records, want 92", n)
			}
		})
	}
}

// TestRetention: what is removed goes from the disk, a straggler is copied and stays readable, blobs go with their last record.
func TestRetention(t *testing.T) {
	ctx := context.Background()
	fs := crashfs.New(1)
	c := memory(fs)
	l := open(t, c)
	blob := func(key string) {
		w := l.NewInputWriter()
		w.Write(bytes.Repeat([]byte("x"), 100<<10))
		in, err := w.Finish(sandbox.DurabilityProcess)
		if err != nil {
			t.Fatal(err)
		}
		add(t, l, key, trajectory.Record{Kind: trajectory.KindStepStart, Step: "up", Input: in})
	}
	add(t, l, "keep", create())
	var gone []trajectory.ID
	for i := range 40 {
		key := fmt.Sprint("gone", i)
		add(t, l, key, create(), output("s", 0, string(make([]byte, 15000))))
		add(t, l, "keep", output("s", int64(i)*10, "0123456789"))
		gone = append(gone, testID(key))
		if i < 2 {
			blob(key)
		}
	}
	if b := l.Space().Blobs; b != 100<<10 {
		t.Errorf("blobs take %d: the same content is kept once", b)
	}
	follow := make(chan error, 1)
	go func() { follow <- l.Wait(ctx, gone[0], 1000) }()
	before := l.Space()
	if err := l.Remove(ctx, gone...); err != nil {
		t.Fatal(err)
	}
	if err := <-follow; !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("waiting for a removed trajectory: %v", err)
	}
	for range 2 {
		if err := l.Maintain(ctx); err != nil {
			t.Fatal(err)
		}
	}
	after := l.Space()
	if after.Blobs != 0 || after.Segments > before.Segments/2 {
		t.Errorf("after removal %+v, before %+v", after, before)
	}
	for range 2 {
		recs := readAll(t, l, "keep")
		p := make([]byte, 1000)
		n, err := l.ReadOutput(ctx, testID("keep"), "s", sandbox.Stdout, 0, p)
		if len(recs) != 41 || n != 400 || err != nil || !bytes.Equal(p[:n], bytes.Repeat([]byte("0123456789"), 40)) {
			t.Fatalf("the straggler has %d records, output of %d octets: %v", len(recs), n, err)
		}
		if all := l.Trajectories(); len(all) != 1 {
			t.Fatalf("%d trajectories are left, want 1", len(all))
		}
		if in := l.Space(); in.Blobs != 0 {
			t.Fatal(in)
		}
		l.Close()
		fs = fs.Kill()
		c = memory(fs)
		l = open(t, c)
	}
}

// TestFailedSync: after it nothing is acknowledged, since the kernel may have dropped the pages.
func TestFailedSync(t *testing.T) {
	ctx := context.Background()
	fs := crashfs.New(1)
	l := open(t, memory(fs))
	add(t, l, "a", create())
	fs.SetFail(func(op, _ string) error {
		if op == "sync" {
			return unix.EIO
		}
		return nil
	})
	end := []trajectory.Record{{Kind: trajectory.KindStepEnd, Step: "s"}}
	if _, err := l.Append(ctx, testID("a"), end, sandbox.DurabilityHost); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	fs.SetFail(nil)
	if _, err := l.Append(ctx, testID("a"), end, sandbox.DurabilityHost); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
}

// TestDamage: a rotten record is lost to its reader, and nothing else is.
func TestDamage(t *testing.T) {
	ctx := context.Background()
	fs := crashfs.New(1)
	l := open(t, memory(fs))
	add(t, l, "a", create())
	for i := range 40 {
		add(t, l, "a", output("s", int64(i)*4000, string(bytes.Repeat([]byte{byte('A' + i)}, 4000))))
	}
	l.Close()
	f, err := fs.Open("00000001.log")
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64<<10)
	f.ReadAt(b, 0)
	f.WriteAt([]byte{'!'}, int64(bytes.Index(b, []byte("CCCC")))+100)
	fs = fs.Kill()
	l = open(t, memory(fs))
	var lost []uint64
	var got []uint64
	for from := uint64(1); ; {
		recs, next, err := l.Read(ctx, testID("a"), trajectory.Query{From: from})
		for _, r := range recs {
			got = append(got, r.Seq)
		}
		if errors.Is(err, sandbox.ErrLost) {
			lost = append(lost, next-1)
		} else if err != nil {
			t.Fatal(err)
		}
		if next == from {
			break
		}
		from = next
	}
	if len(got) != 40 || len(lost) != 1 || lost[0] != 4 {
		t.Errorf("read %v, lost %v", got, lost)
	}
	p := make([]byte, 10)
	if _, err := l.ReadOutput(ctx, testID("a"), "s", sandbox.Stdout, 8000, p); !errors.Is(err, sandbox.ErrLost) {
		t.Error(err)
	}
	if n, err := l.ReadOutput(ctx, testID("a"), "s", sandbox.Stdout, 12000, p); err != nil || string(p[:n]) != "DDDDDDDDDD" {
		t.Error(n, err)
	}
}

// Appends that meet at the end of a segment all find room: what one has allocated another may take.
func TestRoomForAllAtOnce(t *testing.T) {
	l := open(t, small(t.TempDir()))
	var g errgroup.Group
	for k := range 32 {
		g.Go(func() error {
			id := testID(fmt.Sprint(k))
			if _, err := l.Append(context.Background(), id, []trajectory.Record{create()}, sandbox.DurabilityProcess); err != nil {
				return err
			}
			for i := range 60 {
				rec := trajectory.Record{Kind: trajectory.KindStepEnd, Step: fmt.Sprint(i), Payload: make([]byte, 20_000)}
				if _, err := l.Append(context.Background(), id, []trajectory.Record{rec}, sandbox.DurabilityProcess); err != nil {
					return fmt.Errorf("append %d to %d: %w", i, k, err)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// A record that rots in a segment which takes records ends the log there; that is told, and what was behind it is kept aside.
func TestDamageBeforeTheEndIsTold(t *testing.T) {
	for _, rot := range []bool{false, true} {
		fs := crashfs.New(1)
		l := open(t, memory(fs))
		add(t, l, "a", create())
		for i := range 5 {
			add(t, l, "a", output("s", int64(i)*100, string(bytes.Repeat([]byte{byte('A' + i)}, 100))))
		}
		fs = fs.Kill()
		f, err := fs.Open("00000001.log")
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 64<<10)
		f.ReadAt(b, 0)
		if rot {
			f.WriteAt([]byte{'!'}, int64(bytes.Index(b, []byte("CCCC")))+10)
		}
		var told bytes.Buffer
		l, err = trajectory.Open(memory(fs), slog.New(slog.NewTextHandler(&told, nil)))
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		_, err = fs.Open("00000001.log.damaged")
		if is := strings.Contains(told.String(), "level=ERROR"); is != rot || (err == nil) != rot {
			t.Errorf("damaged %v: copy %v, told %q", rot, err, &told)
		}
	}
}
