package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Calls runs function calls in the keeper that runs the sandboxes, on the layers that it has mounted. It implements fncall.Runner.
type Calls struct {
	b      *Backend
	filter []byte

	mu   sync.Mutex
	base uint32 // first uid of calls; 0: no slot was taken yet
}

var _ fncall.Runner = (*Calls)(nil)

// callsSlot is whose the uid range of calls is. It is no sandbox's ID.
const callsSlot = sandbox.ID("function-calls")

// sentFiles is how many descriptors go with one request, for the longest files; the others go by their octets, which have a bound.
const (
	sentFiles  = 7
	sentOctets = 16 << 20
)

// Calls makes the runner of function calls.
func (b *Backend) Calls() (*Calls, error) {
	filter, err := confine.FnCall().Compile(true)
	if err != nil {
		return nil, fmt.Errorf("container: filter of function calls: %w", err)
	}
	return &Calls{b: b, filter: filter}, nil
}

// uids takes a slot at the first call, for as long as this host lives.
func (c *Calls) uids() (uint32, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.base == 0 {
		slot, err := c.b.slots.take(callsSlot, false)
		if err != nil {
			return 0, fmt.Errorf("function calls: %w", err)
		}
		c.base = c.b.slots.uid(slot)
	}
	return c.base, nil
}

// request makes the keeper's form. The files are those that go as descriptors.
func (c *Calls) request(e *fncall.Exec, room int) (*keeper.Call, []*os.File, error) {
	base, err := c.uids()
	if err != nil {
		return nil, nil, err
	}
	l := e.Limits
	r := &keeper.Call{Layers: e.Layers, UIDBase: base, Argv: e.Argv, Env: e.Env, Stdin: e.Stdin, CPU: l.CPU, Wall: l.Wall, Memory: l.Memory, Pids: int64(l.Processes),
		Output: min(l.Output, keeper.MaxCallOutput), FSize: l.FileSize, Disk: l.Disk, Inodes: int64(l.Files), Stack: l.Stack, NoFile: int64(l.OpenFiles),
		Pooled: e.Pooled, Devices: e.Devices, Filter: c.filter, Hold: e.Hold, Standbys: e.Standbys,
		Card: e.Card, Alone: e.Alone}
	var files []*os.File
	if e.StdinF != nil {
		r.StdinFD, files, room = true, append(files, e.StdinF), room-1
	}
	long, err := longest(e.Files, room)
	if err != nil {
		return nil, nil, err
	}
	left := int64(sentOctets)
	for i, f := range e.Files {
		k := keeper.CallFile{Path: f.Path, Data: f.Data, Exec: f.Exec}
		switch {
		case f.From != nil && long[i]:
			k.FD, files = true, append(files, f.From)
		case f.From != nil:
			if k.Data, err = io.ReadAll(io.NewSectionReader(f.From, 0, left+1)); err != nil {
				return nil, nil, fmt.Errorf("file %.80q: %w", f.Path, err)
			}
		}
		if left -= int64(len(k.Data)); left < 0 {
			return nil, nil, fmt.Errorf("file %.80q: the files have more than %d octets, but for the %d longest kept ones: %w", f.Path, sentOctets, room, sandbox.ErrInvalid)
		}
		r.Files = append(r.Files, k)
	}
	for _, o := range e.Copy {
		r.Copy = append(r.Copy, keeper.CallCopy{Path: o.Path, Max: o.Max})
	}
	return r, files, nil
}

// longest finds the n longest kept files.
func longest(list []fncall.File, n int) (map[int]bool, error) {
	type kept struct {
		at   int
		size int64
	}
	var all []kept
	for i, f := range list {
		if f.From == nil {
			continue
		}
		st, err := f.From.Stat()
		if err != nil {
			return nil, fmt.Errorf("file %.80q: %w", f.Path, err)
		}
		all = append(all, kept{i, st.Size()})
	}
	slices.SortStableFunc(all, func(a, b kept) int { return cmp.Compare(b.size, a.size) })
	out := map[int]bool{}
	for _, k := range all[:min(len(all), n)] {
		out[k.at] = true
	}
	return out, nil
}

// answer is the reverse for what came back; it takes the files.
func answer(e *fncall.Exec, k *keeper.CallEnd, files []*os.File) (*fncall.Exit, []*os.File) {
	x := &fncall.Exit{
		Facts: fncall.Facts{Code: k.Code, Signal: k.Signal, Filter: k.Filter, Output: k.OutputOver, OOM: k.OOM, CPUOver: k.CPUOver, WallOver: k.WallOver,
			CPU: k.CPU, Wall: k.Wall, Memory: k.Memory, Processes: k.PidsHit, Leftover: k.Leftover},
		Stdout: k.Stdout, Stderr: k.Stderr, StdoutCut: k.StdoutCut, StderrCut: k.StderrCut, EventsTotal: k.EventsTotal, Ahead: k.Ahead,
	}
	if k.NotBegun != "" {
		x.NotBegun = fmt.Sprintf("%.200s: %s", e.Argv[0], k.NotBegun)
	}
	for i, f := range k.Files {
		if i >= len(e.Copy) {
			break
		}
		o := fncall.Copied{Path: e.Copy[i].Path, Data: f.Data, Exec: f.Exec, Err: f.Err}
		if f.FD && len(files) > 0 {
			o.From, files = files[0], files[1:]
		}
		x.Files = append(x.Files, o)
	}
	at := map[string]int{}
	for _, ev := range k.Events {
		name := confine.CallName(ev.Arch, ev.Call, [6]uint64{ev.Arg0, ev.Arg1})
		if i, ok := at[name]; ok {
			x.Events[i].Count += ev.Count
			continue
		}
		at[name] = len(x.Events)
		x.Events = append(x.Events, fncall.Event{Call: name, Count: ev.Count, Fatal: confine.Fatal(ev.Arch, ev.Call)})
	}
	return x, files
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// with runs a request with its layers mounted.
func (c *Calls) with(ctx context.Context, layers []string, do func(*keeper.Client) error) error {
	k, err := c.b.link(ctx)
	if err != nil {
		return err
	}
	if err := c.b.mounts.acquire(ctx, k, c.b.files, layers); err != nil {
		return err
	}
	defer c.b.mounts.release(layers)
	err = do(k)
	// What the kernel says when a layer was unmounted in the same moment, or when the keeper went away: the next try meets neither.
	if errors.Is(err, sandbox.ErrNotFound) {
		err = fmt.Errorf("%w: %w", err, sandbox.ErrLost)
	}
	return err
}

// Exec implements fncall.Runner.
func (c *Calls) Exec(ctx context.Context, e *fncall.Exec) (*fncall.Exit, error) {
	r, files, err := c.request(e, sentFiles)
	if err != nil {
		return nil, err
	}
	var end *keeper.CallEnd
	var got []*os.File
	err = c.with(ctx, e.Layers, func(k *keeper.Client) (err error) {
		end, got, err = k.Call(ctx, r, files...)
		return err
	})
	if err != nil {
		return cancelled(ctx, err)
	}
	x, rest := answer(e, end, got)
	closeFiles(rest)
	return x, nil
}

func cancelled(ctx context.Context, err error) (*fncall.Exit, error) {
	if ctx.Err() != nil {
		return &fncall.Exit{Facts: fncall.Facts{Cancelled: true, Memory: -1}}, nil
	}
	return nil, err
}

// Pair implements fncall.Runner.
func (c *Calls) Pair(ctx context.Context, a, b *fncall.Exec) (x, y *fncall.Exit, first int, err error) {
	ra, fa, err := c.request(a, 4)
	if err != nil {
		return nil, nil, 0, err
	}
	rb, fb, err := c.request(b, 4)
	if err != nil {
		return nil, nil, 0, err
	}
	var end *keeper.CallPairEnd
	var got []*os.File
	err = c.with(ctx, append(append([]string(nil), a.Layers...), b.Layers...), func(k *keeper.Client) (err error) {
		end, got, err = k.CallPair(ctx, &keeper.CallPair{A: *ra, B: *rb}, append(fa, fb...)...)
		return err
	})
	if err != nil {
		if x, err = cancelled(ctx, err); err != nil {
			return nil, nil, 0, err
		}
		return x, x, 0, nil
	}
	x, got = answer(a, &end.A, got)
	y, got = answer(b, &end.B, got)
	closeFiles(got)
	return x, y, end.First, nil
}

// Standbys implements fncall.Runner. A host whose keeper does not answer has none.
func (c *Calls) Standbys(ctx context.Context) (int, error) {
	k, err := c.b.link(ctx)
	if err != nil {
		return 0, err
	}
	return k.Standbys(ctx)
}
