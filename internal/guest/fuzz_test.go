package guest

import (
	"bytes"
	"context"
	"io"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
)

// FuzzClient feeds a client with any stream of answers.
func FuzzClient(f *testing.F) {
	hello := filewire.Frame(filewire.Hello, 0, 0, filewire.HelloBody(0, 0))
	result := filewire.Frame(filewire.GuestResult, 0, 1, (&filewire.Result{}).Encode())
	f.Add(append(bytes.Clone(hello), result...))
	f.Add(append(append(bytes.Clone(hello), filewire.Frame(filewire.GuestData, 0, 1, []byte("x"))...), result...))
	var b filewire.Batch
	b.AddInfo(&filewire.Info{Path: "/x", Kind: File})
	f.Add(append(append(bytes.Clone(hello), filewire.Frame(filewire.GuestItem, 0, 1, b.Bytes())...), result...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		c := NewFiles(&replay{Reader: bytes.NewReader(stream)})
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if r, err := c.Read(ctx, "/x", 0, 0); err == nil {
			io.Copy(io.Discard, r)
			r.Close()
		}
		_ = c.List(ctx, "/x", 1, func([]Info) error { return nil })
		if ctx.Err() != nil {
			t.Error("waited for what never comes")
		}
	})
}

type replay struct{ io.Reader }

func (*replay) Write(p []byte) (int, error) { return len(p), nil }
func (*replay) Close() error                { return nil }

// FuzzServer feeds a server with any stream of calls; the paths that it may be asked for are kept from doing harm by their
// operation: only those that look are let through.
func FuzzServer(f *testing.F) {
	call := func(q *filewire.Request) []byte { return filewire.Frame(filewire.Call, 0, 1, q.Encode()) }
	f.Add(call(&filewire.Request{Op: filewire.OpStat, Path: "/"}))
	f.Add(append(call(&filewire.Request{Op: filewire.OpRead, Path: "/dev/zero"}), filewire.Frame(filewire.Credit, 0, 1, filewire.U32(1))...))
	f.Add(append(call(&filewire.Request{Op: filewire.OpRead, Path: "/dev/zero"}), filewire.Frame(filewire.Cancel, 0, 1, nil)...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		// Only harmless operations, each whole frame looked at beforehand.
		r := bytes.NewReader(stream)
		scratch := make([]byte, filewire.MaxBody)
		for {
			h, body, err := filewire.ReadFrame(r, scratch)
			if err != nil {
				break
			}
			if h.Type != filewire.Call {
				continue
			}
			if q, err := filewire.DecodeRequest(body); err == nil && (q.Op != filewire.OpStat && (q.Op != filewire.OpRead || q.Path != "/dev/zero")) {
				return
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		ServeFiles(ctx, &replay{Reader: bytes.NewReader(stream)})
		if ctx.Err() != nil {
			t.Error("the server went on after the end of its stream")
		}
	})
}
