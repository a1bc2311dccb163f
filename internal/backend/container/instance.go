package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// instanceState is how far a sandbox is.
type instanceState int

const (
	creating instanceState = iota
	living
	undone    // its create failed; what remains is being removed
	lost      // the keeper died
	destroyed // or on its way
)

// instance is a living sandbox.
type instance struct {
	b       *Backend
	id      sandbox.ID
	spec    *sandbox.Spec
	sink    sandbox.Sink
	slot    int
	upper   string // folder
	limit   int64  // of the upper, octets
	note    string // what of the upper is otherwise than asked
	ifindex int    // of the host's side of its veth; 0 none
	handle  []byte
	runtime *Runtime // that makes it; nil: the keeper, or it was taken back
	// ownKernel: see Runtime.
	ownKernel bool
	undo      teardown

	snapshots sync.Mutex // one at a time

	disk atomic.Int64 // when the disk was last seen with room, and
	room atomic.Int64 // how much, for diskHit

	mu     sync.Mutex
	state  instanceState
	frozen bool
	ends   map[string]sandbox.Outcome // of commands that Destroy ended
	used   *sandbox.Stats             // as Destroy found it

	tracing *tracing // nil: not traced
	groups  string   // folder of its groups of the v2 tree; "" from a keeper that does not tell
}

var _ sandbox.Instance = (*instance)(nil)

var totalCause = sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"}

// Notes are what the sandbox has otherwise than asked, for its client.
func (x *instance) Notes() map[string]string {
	if x.note == "" {
		return nil
	}
	return map[string]string{"disk": x.note}
}

// Ends are how the commands ended that Destroy found running.
func (x *instance) Ends() map[string]sandbox.Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.ends
}

// Used is what the sandbox had used when Destroy had ended all in it: its CPU time and its memory's maximum. Nil where nothing ran, or
// where Destroy found nothing of it any more.
func (x *instance) Used() *sandbox.Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.used
}

func (x *instance) setState(s instanceState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.state = s
}

func (x *instance) isUndone() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.state == undone
}

// lose marks a sandbox whose keeper died; it reports whether that is news to its sink.
func (x *instance) lose() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.state != living {
		return false
	}
	x.state = lost
	return true
}

// use is the keeper's connection for a call to the living sandbox.
func (x *instance) use(ctx context.Context, act string) (*keeper.Client, error) {
	x.mu.Lock()
	s := x.state
	x.mu.Unlock()
	switch s {
	case lost:
		return nil, fmt.Errorf("%s in %s: its keeper died: %w", act, x.id, sandbox.ErrLost)
	case destroyed, undone:
		return nil, fmt.Errorf("%s in %s: it was destroyed: %w", act, x.id, sandbox.ErrNotFound)
	}
	c, err := x.b.link(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s in %s: %w", act, x.id, err)
	}
	return c, nil
}

// said adds the act and the sandbox to an error of the keeper.
func (x *instance) said(act string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s in %s: %w", act, x.id, err)
}

func (x *instance) Handle() []byte { return x.handle }

func (x *instance) Start(ctx context.Context, cmd *sandbox.Command) error {
	c, err := x.use(ctx, "start")
	if err != nil {
		return err
	}
	return x.said("start "+cmd.ID, c.Start(ctx, x.id, cmd))
}

func (x *instance) Known(ctx context.Context, cmd string) (bool, error) {
	c, err := x.use(ctx, "look up "+cmd)
	if err != nil {
		return false, err
	}
	known, err := c.Known(ctx, x.id, cmd)
	return known, x.said("look up "+cmd, err)
}

func (x *instance) Stdin(ctx context.Context, cmd string, offset int64, data []byte, eof bool) (int64, error) {
	c, err := x.use(ctx, "write stdin of "+cmd)
	if err != nil {
		return offset, err
	}
	taken, err := c.Stdin(ctx, x.id, cmd, offset, data, eof)
	return taken, x.said("write stdin of "+cmd, err)
}

func (x *instance) Signal(ctx context.Context, cmd string, sig int) error {
	c, err := x.use(ctx, "signal "+cmd)
	if err != nil {
		return err
	}
	return x.said("signal "+cmd, c.Signal(ctx, x.id, cmd, sig))
}

func (x *instance) Resize(ctx context.Context, cmd string, size sandbox.Size) error {
	c, err := x.use(ctx, "resize "+cmd)
	if err != nil {
		return err
	}
	return x.said("resize "+cmd, c.Resize(ctx, x.id, cmd, size))
}

func (x *instance) OpenSession(ctx context.Context, s *sandbox.Session) error {
	c, err := x.use(ctx, "open session "+s.Name)
	if err != nil {
		return err
	}
	return x.said("open session "+s.Name, c.OpenSession(ctx, x.id, s))
}

func (x *instance) CloseSession(ctx context.Context, name string) error {
	c, err := x.use(ctx, "close session "+name)
	if err != nil {
		return err
	}
	return x.said("close session "+name, c.CloseSession(ctx, x.id, name))
}

func (x *instance) Files(ctx context.Context, user string) (io.ReadWriteCloser, error) {
	if x.b.cfg.Guest == nil {
		return nil, fmt.Errorf("files in %s: this build has no guest program: %w", x.id, sandbox.ErrUnsupported)
	}
	c, err := x.use(ctx, "open files")
	if err != nil {
		return nil, err
	}
	if user == "" {
		user = x.spec.User
	}
	conn, err := c.Files(ctx, x.id, user)
	if err != nil {
		return nil, x.said("open files", err)
	}
	return conn, nil
}

func (x *instance) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	c, err := x.use(ctx, "dial")
	if err != nil {
		return nil, err
	}
	if x.ownKernel {
		conn, err := c.DialInside(ctx, x.id, port)
		if err != nil {
			return nil, x.said("dial", err)
		}
		return conn, nil
	}
	ns, err := c.Netns(ctx, x.id)
	if err != nil {
		return nil, x.said("dial", err)
	}
	defer ns.Close()
	conn, err := dialIn(ctx, int(ns.Fd()), port)
	if err != nil {
		return nil, x.said("dial", err)
	}
	return conn, nil
}

func (x *instance) Pause(ctx context.Context, level sandbox.PauseLevel) error {
	if level != sandbox.Frozen {
		return fmt.Errorf("pause %s to level %q: this backend has %s alone: %w", x.id, level, sandbox.Frozen, sandbox.ErrUnsupported)
	}
	c, err := x.use(ctx, "pause")
	if err != nil {
		return err
	}
	x.snapshots.Lock() // a snapshot under way thaws when it is done
	defer x.snapshots.Unlock()
	if err := c.Freeze(ctx, x.id); err != nil {
		return x.said("pause", err)
	}
	x.setFrozen(true)
	return nil
}

func (x *instance) Resume(ctx context.Context) error {
	c, err := x.use(ctx, "resume")
	if err != nil {
		return err
	}
	x.snapshots.Lock()
	defer x.snapshots.Unlock()
	if err := c.Thaw(ctx, x.id); err != nil {
		return x.said("resume", err)
	}
	x.setFrozen(false)
	return nil
}

func (x *instance) setFrozen(on bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.frozen = on
}

func (x *instance) SetDeadline(ctx context.Context, at time.Time) error {
	c, err := x.use(ctx, "set deadline")
	if err != nil {
		return err
	}
	return x.said("set deadline", c.SetDeadline(ctx, x.id, keeper.DeadlineTotal, at, totalCause))
}

func (x *instance) Stats(ctx context.Context) (sandbox.Stats, error) {
	c, err := x.use(ctx, "stats")
	if err != nil {
		return sandbox.Stats{}, err
	}
	s, err := c.Stats(ctx, x.id)
	if err != nil {
		return s, x.said("stats", err)
	}
	if s.Disk, err = x.b.uppers.Usage(string(x.id)); err != nil {
		return s, x.said("disk use", err)
	}
	return s, nil
}

// Destroy runs the teardown. Callers that come while one is at it wait for it; one that failed goes on where it stopped.
func (x *instance) Destroy(ctx context.Context) error {
	x.setState(destroyed)
	done := make(chan error, 1)
	go func() { done <- x.undo.run(ctx) }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("destroy %s: %w", x.id, err)
		}
		return nil
	case <-ctx.Done(): // it goes on within its own bound
		return fmt.Errorf("destroy %s: it goes on: %w", x.id, ctx.Err())
	}
}

// writeRate bounds how fast a sandbox can fill its disk, in octets a second: the memory of a large machine is not faster.
const writeRate = 64 << 30

// usageLag is how much an upper may hold beyond the use that its file system tells, in octets: what a sandbox's memory can hold
// of dirty pages is bounded by the kernel to a share of the machine's memory; an upper of less room is asked at every end.
const usageLag = 1 << 30

// probeSize is what must still fit, in octets, but at most a sixteenth of the limit: ext4 refuses a large write while some room
// is left.
const probeSize = 1 << 20

// diskHit reports whether the disk is full now. The kernel keeps no counter of refusals, so room is asked for; and since that takes
// a transaction of the file system, only when the room last seen can have been filled since.
func (x *instance) diskHit() bool {
	now := time.Now()
	if last := x.disk.Load(); last != 0 {
		if could := now.Sub(time.Unix(0, last)).Seconds() * writeRate; could < float64(x.room.Load()) {
			return false
		}
	}
	if x.full() {
		x.disk.Store(0)
		return true
	}
	used, err := x.b.uppers.Usage(string(x.id))
	if err != nil || used < 0 {
		used = x.limit // unknown: look again next time
	}
	// Use is known as of the last transaction; what was written since is in memory and counted here as if it were all of it.
	x.room.Store(max(x.limit-used-usageLag, 0))
	x.disk.Store(now.UnixNano())
	return false
}

// full asks for room: first the file system, which keeps some back from all but the machine's root, then, since a quota does not
// show there, by a file without a name.
func (x *instance) full() bool {
	dir, room := filepath.Dir(x.upper), min(probeSize, x.limit/16)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && int64(st.Bavail)*st.Bsize < room {
		return true
	}
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		err = unix.Fallocate(fd, 0, 0, max(room, 4096))
		unix.Close(fd)
	}
	return errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC)
}
