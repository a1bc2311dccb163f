package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Reader streams a file's octets. It is for one goroutine; Close it in any case.
type Reader struct {
	Info Info // of the file when it was opened
	c    *call
	err  error
}

// Read opens a file from offset. length 0 reads to the end as it was when opened (files whose size says 0, as in /proc, and FIFOs
// and devices: to where they end). No length is promised before: what was there is sent. A FIFO without a writer ends with the
// context's deadline, or after 30 s with ErrState.
func (f *Files) Read(ctx context.Context, path string, offset, length int64) (*Reader, error) {
	act := fmt.Sprintf("read %q", path)
	if err := checkPath(act, path); err != nil {
		return nil, err
	}
	if offset < 0 || length < 0 {
		return nil, fmt.Errorf("%s: offset %d, length %d: must not be negative: %w", act, offset, length, sandbox.ErrInvalid)
	}
	c, err := f.start(ctx, act, &filewire.Request{Op: filewire.OpRead, Path: path, Offset: offset, Length: length})
	if err != nil {
		return nil, err
	}
	it, err := c.item()
	if err != nil {
		return nil, err
	}
	if it == nil {
		if _, err := c.finish(); err != nil {
			return nil, err
		}
	}
	if it == nil || len(it.Entries) != 1 {
		err := fmt.Errorf("%s: file server in the sandbox described no file: %w", act, sandbox.ErrLost)
		f.fail(err)
		return nil, err
	}
	return &Reader{Info: it.Entries[0], c: c}, nil
}

// Read gives io.EOF only after the server said that the file ended there.
func (r *Reader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, _, err := r.c.octets(p)
	r.err = err
	return n, err
}

// Close ends the transfer.
func (r *Reader) Close() error {
	r.c.abandon()
	if r.err == nil {
		r.err = fmt.Errorf("%s: closed: %w", r.c.act, sandbox.ErrState)
	}
	return nil
}

// octets reads data frames; io.EOF comes with the result.
func (c *call) octets(p []byte) (int, *filewire.Result, error) {
	if len(p) == 0 {
		return 0, nil, nil
	}
	err := c.await(c.ctx, func() bool {
		_, ok := c.queue.Front()
		return ok || c.result != nil
	})
	if err != nil {
		c.abandon()
		return 0, nil, err
	}
	c.mu.Lock()
	t, ok := c.queue.Front()
	n := 0
	if ok && t == filewire.GuestData {
		n = c.queue.Take(p)
	}
	result := c.result
	c.mu.Unlock()
	switch {
	case ok && t != filewire.GuestData:
		err := fmt.Errorf("%s: file server in the sandbox: frame type %#x amid octets: %w", c.act, t, sandbox.ErrLost)
		c.f.fail(err)
		return 0, nil, err
	case ok:
		c.grant()
		return n, nil, nil
	}
	if err := c.failure(result); err != nil {
		return 0, result, err
	}
	return 0, result, io.EOF
}

// WriteHeader says what Write does with its body.
type WriteHeader struct {
	Path    string
	Mode    uint32 // of a new file; 0 is 0644
	SetMode bool   // also of one that exists
	Parents bool   // make missing parents as 0755
	Append  bool
	// StartOffset is the size that the file must have before an append (another: ErrState); -1 takes any.
	StartOffset int64
	Modified    time.Time // zero: now
	Size        int64     // of the body; -1 unknown. Another length is ErrInvalid.
}

// WriteResult is what a write did.
type WriteResult struct {
	Info    Info
	Written int64
	Start   int64 // the size before, of an append
}

// Write replaces or creates a file as `cat >` would: in place, so that inode, hard links, owner, ACL and attributes stay; or
// appends. A body that ends with an error, or a context that ends, leaves the file with what came so far and gives *Incomplete.
// body must end when ctx does.
func (f *Files) Write(ctx context.Context, h WriteHeader, body io.Reader) (WriteResult, error) {
	act := fmt.Sprintf("write %q", h.Path)
	if h.Append {
		act = fmt.Sprintf("append to %q", h.Path)
	}
	if err := checkPath(act, h.Path); err != nil {
		return WriteResult{}, err
	}
	if err := CheckMode(h.Mode, false); err != nil {
		return WriteResult{}, fmt.Errorf("%s: %w", act, err)
	}
	req := &filewire.Request{Op: filewire.OpWrite, Path: h.Path, Mode: h.Mode, Modified: h.Modified,
		Flags: flag(h.SetMode, filewire.SetMode) | flag(h.Parents, filewire.Parents) | flag(h.Append, filewire.Append) |
			flag(!h.Modified.IsZero(), filewire.HasTime)}
	if h.Append {
		if h.StartOffset < -1 {
			return WriteResult{}, fmt.Errorf("%s: start offset %d: -1 or more: %w", act, h.StartOffset, sandbox.ErrInvalid)
		}
		req.Offset = h.StartOffset
	}
	if h.Size >= 0 {
		body = &exactly{r: body, left: h.Size, size: h.Size}
	}
	r, err := f.upload(ctx, act, req, body)
	if r == nil {
		return WriteResult{}, err
	}
	return WriteResult{Info: infoOf(r), Written: r.Applied, Start: r.Start}, err
}

// exactly is a body that must have a stated length.
type exactly struct {
	r          io.Reader
	left, size int64
}

func (e *exactly) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.left -= int64(n)
	switch {
	case e.left < 0:
		return int(int64(n) + e.left), fmt.Errorf("body is longer than the %d octets announced: %w", e.size, sandbox.ErrInvalid)
	case err == io.EOF && e.left > 0:
		return n, fmt.Errorf("body ends %d octets before the %d announced: %w", e.left, e.size, io.ErrUnexpectedEOF)
	}
	return n, err
}

// UploadHeader says where a tar stream goes.
type UploadHeader struct {
	Path    string // the folder
	Parents bool   // make it and those above it when missing
	// KeepOwner takes owner and group from the tar; the server must run as root, else ErrDenied.
	KeepOwner bool
}

// UploadResult is what an upload did.
type UploadResult struct {
	Entries int64
	Applied int64    // octets of the tar stream
	Skipped []string // what could not be laid down (devices, attributes), with the reason; at most filewire.MaxSkipped lines
	Left    int64    // how many were skipped in all
}

// Upload lays a tar stream into a folder. What is there under the same names is replaced. Names are confined to the folder.
// A body that breaks off gives *Incomplete.
func (f *Files) Upload(ctx context.Context, h UploadHeader, tar io.Reader) (UploadResult, error) {
	act := fmt.Sprintf("upload to %q", h.Path)
	if err := checkPath(act, h.Path); err != nil {
		return UploadResult{}, err
	}
	r, err := f.upload(ctx, act, &filewire.Request{Op: filewire.OpUpload, Path: h.Path,
		Flags: flag(h.Parents, filewire.Parents) | flag(h.KeepOwner, filewire.KeepOwner)}, tar)
	if r == nil {
		return UploadResult{}, err
	}
	return UploadResult{Entries: r.Entries, Applied: r.Applied, Skipped: lines(r.Skipped), Left: r.Left}, err
}

func lines(in []string) []string {
	for i, s := range in {
		in[i] = printable(s)
	}
	return in
}

// bodies holds frame buffers: one is used from a call to the writer goroutine and back.
var bodies = sync.Pool{New: func() any { b := make([]byte, filewire.HeaderSize+filewire.MaxData); return &b }}

// upload runs a call with a body. Its result is nil only when none came.
func (f *Files) upload(ctx context.Context, act string, req *filewire.Request, body io.Reader) (*filewire.Result, error) {
	c, err := f.start(ctx, act, req)
	if err != nil { // the guest never heard of it
		return nil, &Incomplete{Start: -1, Interrupted: true, Err: err}
	}
	broken := c.sendBody(body)
	if broken == nil {
		r, err := c.awaitResult(ctx)
		if err == nil {
			return r, c.incomplete(r, nil)
		}
		broken = err
	}
	// The body broke off, or its client went away: the guest ends the call and says how far it came.
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), breakOffWait)
	defer cancel()
	select {
	case f.out <- filewire.Frame(filewire.End, filewire.BrokenOff, c.id, nil):
	case <-wait.Done():
	case <-f.gone:
	}
	r, err := c.awaitResult(wait)
	if err != nil {
		c.abandon()
		return nil, &Incomplete{Applied: -1, Interrupted: true, Err: errors.Join(fmt.Errorf("%s: %w", act, broken), sandbox.ErrLost)}
	}
	return r, c.incomplete(r, broken)
}

func (c *call) awaitResult(ctx context.Context) (*filewire.Result, error) {
	if err := c.await(ctx, func() bool { return c.result != nil }); err != nil {
		return nil, err
	}
	return c.result, nil
}

// incomplete is the error of a call with a body. broken is why the body broke off, nil where it did not.
func (c *call) incomplete(r *filewire.Result, broken error) error {
	err := c.failure(r)
	switch {
	case err == nil:
		return nil // also where the break came after the guest had all of it
	case r.Code == filewire.Interrupted || r.Code == filewire.Cancelled:
		if broken != nil {
			err = fmt.Errorf("%s: %w", c.act, broken)
		}
		return &Incomplete{Applied: r.Applied, Start: r.Start, Interrupted: true, Err: err}
	case r.Applied > 0:
		return &Incomplete{Applied: r.Applied, Start: r.Start, Err: err}
	}
	return err
}

// sendBody sends the body as the guest grants it and returns why it broke off. A result that comes early ends it.
func (c *call) sendBody(body io.Reader) error {
	empty := 0
	for {
		buf := bodies.Get().(*[]byte)
		n, rerr := body.Read((*buf)[filewire.HeaderSize:])
		if n > 0 {
			early, err := c.sendData((*buf)[:filewire.HeaderSize+n])
			if early || err != nil {
				return err
			}
			empty = 0
		} else {
			bodies.Put(buf)
			empty++
		}
		switch {
		case empty > 100 && rerr == nil:
			return io.ErrNoProgress
		case rerr == io.EOF:
			return c.post(filewire.Frame(filewire.End, 0, c.id, nil))
		case rerr != nil:
			return rerr
		case c.ctx.Err() != nil:
			return context.Cause(c.ctx)
		}
	}
}

// sendData sends one frame of data, waiting for the window; early says that the call has ended.
func (c *call) sendData(frame []byte) (early bool, err error) {
	n := len(frame) - filewire.HeaderSize
	err = c.await(c.ctx, func() bool {
		early = c.result != nil
		if early || c.send < filewire.Cost(n) {
			return early
		}
		c.send -= filewire.Cost(n)
		return true
	})
	if early || err != nil {
		return early, err
	}
	filewire.Header{Length: uint32(n), Type: filewire.Data, ID: c.id}.Put(frame)
	return false, c.post(frame)
}

func (c *call) post(frame []byte) error {
	select {
	case c.f.out <- frame:
		return nil
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	case <-c.f.gone:
		return c.f.Err()
	}
}

// checkPatterns refuses what the server could not match.
func checkPatterns(exclude []string) error {
	if len(exclude) > 256 {
		return fmt.Errorf("exclude: %d patterns, at most 256: %w", len(exclude), sandbox.ErrInvalid)
	}
	for _, p := range exclude {
		if _, err := path.Match(p, ""); err != nil || p == "" || len(p) > sandbox.MaxPath || strings.IndexByte(p, 0) >= 0 {
			return fmt.Errorf("exclude %.80q: not a shell pattern: %w", p, sandbox.ErrInvalid)
		}
	}
	return nil
}

// Tree streams a folder as a tar. It is for one goroutine; Close it in any case.
type Tree struct {
	c      *call
	err    error
	result *filewire.Result
}

// Download streams a folder (or a file, as one entry) as a PAX tar whose names are relative to it, "./" first. What tar can't hold
// or can't be read is left out and told by Skipped after io.EOF. exclude holds shell patterns: one without "/" is matched with
// each name, another with the relative path; what matches is left out with all it holds, untold.
func (f *Files) Download(ctx context.Context, folder string, exclude []string) (*Tree, error) {
	act := fmt.Sprintf("download %q", folder)
	if err := checkPath(act, folder); err != nil {
		return nil, err
	}
	if err := checkPatterns(exclude); err != nil {
		return nil, fmt.Errorf("%s: %w", act, err)
	}
	c, err := f.start(ctx, act, &filewire.Request{Op: filewire.OpDownload, Path: folder, Exclude: exclude})
	if err != nil {
		return nil, err
	}
	return &Tree{c: c}, nil
}

// Read gives the tar's octets and io.EOF only after a whole tar.
func (t *Tree) Read(p []byte) (int, error) {
	if t.err != nil {
		return 0, t.err
	}
	n, r, err := t.c.octets(p)
	t.err = err
	if r != nil {
		t.result = r
	}
	return n, err
}

// Skipped tells after io.EOF what was left out, path and reason, at most filewire.MaxSkipped lines, and how many in all.
func (t *Tree) Skipped() ([]string, int64) {
	if t.result == nil {
		return nil, 0
	}
	return lines(t.result.Skipped), t.result.Left
}

// Close ends the transfer.
func (t *Tree) Close() error {
	t.c.abandon()
	if t.err == nil {
		t.err = fmt.Errorf("%s: closed: %w", t.c.act, sandbox.ErrState)
	}
	return nil
}
