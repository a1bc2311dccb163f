package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trace"
)

// tracing is that of one sandbox.
type tracing struct {
	x     *instance
	tree  *trace.Tree
	stack trace.Stack
	watch *trace.Watch // nil where the kernel does not tell
	dir   string       // of its groups in the v2 tree; "" unknown

	mu      sync.Mutex
	closed  bool
	lacking []string
	waited  [3]time.Duration // cpu, memory, io: as last read; -1 unknown
	groups  map[string]uint64
}

// beginTrace remembers a sandbox as it is before its first step, or when it was taken back. What it can't do is told with each step.
func (x *instance) beginTrace(ctx context.Context) {
	if x.spec.Trace != sandbox.TraceLight && x.spec.Trace != sandbox.TraceFull {
		return
	}
	t := &tracing{x: x, groups: map[string]uint64{}}
	lack := func(what string, err error) { t.lacking = append(t.lacking, what+": "+err.Error()) }
	var lower trace.Lower
	if stack, err := x.b.openLayers(ctx, x.spec.Layers); err != nil {
		lack("files before they were changed", err)
	} else {
		t.stack, lower = stack, stack
	}
	t.tree = trace.NewTree(x.upper, lower, x.spec.Volatile, outside, &x.b.names)
	dir, err := x.groupsDir()
	if err == nil {
		t.dir = dir
		t.waited = pressures(dir)
	} else {
		lack("pressure", err)
	}
	var k *trace.Kernel
	var kerr error
	if !x.ownKernel {
		k, kerr = x.b.kernel()
	}
	switch {
	case x.ownKernel:
		lack("processes, connections and pressure", errors.New("the sandbox has a kernel of its own"))
	case kerr != nil:
		lack("processes", kerr)
	case x.ownKernel:
		lack("processes", errors.New("they run under a kernel of the sandbox's own"))
	case err != nil:
		lack("processes", err)
	default:
		var st unix.Stat_t
		err := unix.Stat(dir, &st)
		if err == nil {
			t.watch, err = k.Watch(st.Ino, x.spec.Trace)
		}
		if err != nil {
			lack("processes", err)
		} else if why := k.Full(); why != "" && x.spec.Trace == sandbox.TraceFull {
			lack("files read or connections", errors.New(why))
		}
	}
	x.mu.Lock()
	x.tracing = t
	x.mu.Unlock()
	x.undo.push("end the trace", func(context.Context) error { return t.close() })
}

func (t *tracing) close() error {
	t.mu.Lock() // a look under way ends first
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	t.tree.Close()
	for _, fd := range t.stack {
		unix.Close(fd)
	}
	t.stack = nil
	if t.watch == nil {
		return nil
	}
	return t.watch.Close()
}

func (b *Backend) kernel() (*trace.Kernel, error) {
	if b.trace == nil {
		return nil, fmt.Errorf("not asked of the kernel: %w", sandbox.ErrUnsupported)
	}
	return b.trace.Kernel()
}

// TraceStep tells what a step did.
func (x *instance) TraceStep(ctx context.Context, q trace.Ask) (*trace.Answer, error) {
	x.mu.Lock()
	t, state := x.tracing, x.state
	x.mu.Unlock()
	if t == nil || state != living {
		return nil, fmt.Errorf("trace in %s: it has ended, or is not traced: %w", x.id, sandbox.ErrNotFound)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, fmt.Errorf("trace in %s: it has ended: %w", x.id, sandbox.ErrNotFound)
	}
	a := &trace.Answer{Lacking: slices.Clone(t.lacking)}
	if t.watch != nil && q.Group != "" {
		if id, ok := t.group(q.Group); ok {
			s := t.watch.Take(id)
			a.Seen = &s
		} else {
			a.Lacking = append(a.Lacking, "processes: the group of the step is gone")
		}
	}
	if t.dir != "" {
		a.Pressure = t.pressure()
	}
	if q.Files {
		f := t.tree.Look(ctx, q.From)
		a.Files = &f
	}
	return a, nil
}

// group is the ID of a command's group.
func (t *tracing) group(name string) (uint64, bool) {
	if t.dir == "" || strings.ContainsAny(name, "/\x00") {
		return 0, false
	}
	if id, ok := t.groups[name]; ok {
		return id, true
	}
	var st unix.Stat_t
	if unix.Stat(filepath.Join(t.dir, name), &st) != nil {
		return 0, false
	}
	if len(t.groups) < 1024 {
		t.groups[name] = st.Ino
	}
	return st.Ino, true
}

func (t *tracing) pressure() *trace.Pressure {
	now := pressures(t.dir)
	p := &trace.Pressure{}
	known := false
	for i, to := range []*time.Duration{&p.CPU, &p.Memory, &p.IO} {
		if now[i] >= 0 && t.waited[i] >= 0 {
			*to = now[i] - t.waited[i]
			known = true
		}
	}
	t.waited = now
	if !known {
		return nil
	}
	return p
}

// pressures reads how long something of a group has waited; -1 where the kernel does not tell (CONFIG_PSI, psi=1).
func pressures(dir string) (out [3]time.Duration) {
	for i, f := range []string{"cpu.pressure", "memory.pressure", "io.pressure"} {
		out[i] = -1
		text, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			continue
		}
		line, _, _ := strings.Cut(string(text), "\n")
		if _, total, ok := strings.Cut(line, "total="); ok {
			if n, err := strconv.ParseInt(strings.TrimSpace(total), 10, 64); err == nil {
				out[i] = time.Duration(n) * time.Microsecond
			}
		}
	}
	return out
}

// groupsDir is the folder of the sandbox's groups in the v2 tree.
func (x *instance) groupsDir() (string, error) {
	if x.groups != "" {
		return x.groups, nil
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	class := "ls"
	if x.spec.BestEffort {
		class = "be"
	}
	for line := range strings.SplitSeq(string(info), "\n") {
		pre, post, _ := strings.Cut(line, " - ")
		a := strings.Fields(pre)
		if len(a) < 5 || !strings.HasPrefix(post, "cgroup2 ") {
			continue
		}
		dir := filepath.Join(a[4], "dsec-"+x.b.cfg.Instance, class, string(x.id))
		if _, err := os.Stat(dir); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no group of the sandbox in the v2 tree: %w", sandbox.ErrUnsupported)
}

// openLayers opens mounted layers, the uppermost first. They are mounted in a namespace that the keeper has a thread in.
func (b *Backend) openLayers(ctx context.Context, ids []string) (s trace.Stack, err error) {
	c, err := b.link(ctx)
	if err != nil {
		return nil, err
	}
	at, err := layersOf(c.Info().Pid)
	if err != nil {
		return nil, err
	}
	for _, id := range slices.Backward(ids) {
		fd, err := unix.Open(filepath.Join(at, id), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			for _, fd := range s {
				unix.Close(fd)
			}
			return nil, &os.PathError{Op: "open layer", Path: id, Err: err}
		}
		s = append(s, fd)
	}
	return s, nil
}

// layersOf is the folder of layers as the keeper's thread in their namespace sees it.
func layersOf(pid int) (string, error) {
	proc := "/proc/" + strconv.Itoa(pid)
	own, err := os.Readlink(proc + "/ns/mnt")
	if err != nil {
		return "", err
	}
	tasks, err := os.ReadDir(proc + "/task")
	if err != nil {
		return "", err
	}
	for _, t := range tasks {
		dir := proc + "/task/" + t.Name()
		if ns, err := os.Readlink(dir + "/ns/mnt"); err != nil || ns == own {
			continue
		}
		layers := filepath.Join(dir, "root", "layers")
		if st, err := os.Stat(layers); err == nil && st.IsDir() {
			return layers, nil
		}
	}
	return "", fmt.Errorf("the keeper's namespace of layers is not found: %w", sandbox.ErrNotFound)
}
