package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/memfile"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Call is a request for a function call: one process tree, run to its end in namespaces of its own.
type Call struct {
	Layers []string // mounted layer IDs of its read-only root, lowest first
	// UIDBase is the first of CallUIDs host ids, which belong to calls alone; each call that runs has one of them.
	UIDBase uint32
	Argv    []string
	Env     []string
	Stdin   []byte // none: /dev/null
	// StdinFD is a descriptor that comes with the request and is read from its beginning; Pipe two that are standard input and output.
	StdinFD bool
	Pipe    bool
	Files   []CallFile
	CPU     time.Duration // of all processes
	Wall    time.Duration // from the exec
	Memory  int64
	Pids    int64
	Output  int64 // of standard output and error, each; at most MaxCallOutput
	FSize   int64
	Disk    int64
	Inodes  int64
	Stack   int64
	NoFile  int64
	Copy    []CallCopy
	Devices []string // paths of character devices of the host, which the call finds in its /dev
	Pooled  bool     // use the user namespace of an earlier call of the same uid
	Filter  []byte   // sock_filter[] with a listener's actions
	// Hold is the file of Files, in the work folder itself, that the call's command opens when it is up, as an interpreter does with its
	// program. Limits of time and times count from there, and what goes before may have been done ahead. Else "".
	Hold string
	// Standbys is how many calls with a Hold may be kept ahead, of all kinds together; 0 keeps none for the like of this one.
	Standbys int
	// Card names what Devices belong to; "": none. One that is Alone waits, before it begins, until no other call that was started ahead has
	// that card, and none is started while it runs.
	Card  string
	Alone bool
}

// CallFile is a file of the work folder.
type CallFile struct {
	Path string // clean, relative
	Data []byte
	FD   bool // a descriptor, in the order of the files, has its octets instead
	Exec bool
}

// CallCopy asks for a file after the call.
type CallCopy struct {
	Path string
	Max  int64
}

// CallCopied is the answer to it. What is longer than a few KiB comes as a descriptor.
type CallCopied struct {
	Data []byte
	Size int64
	Exec bool
	FD   bool
	Err  string
}

// CallEvent is a refused system call.
type CallEvent struct {
	Arch, Call uint32
	Arg0, Arg1 uint64
	Count      int64
}

// CallEnd tells how a call ended.
type CallEnd struct {
	NotBegun             string // why the program could not be executed; Code is 127 or 126
	Code, Signal         int
	Filter               bool // killed for a call that the filter does not let go on
	WallOver, CPUOver    bool
	OutputOver           bool
	OOM, PidsHit         bool
	CPU, Wall            time.Duration
	Memory               int64 // -1: not known
	Leftover             int
	Stdout, Stderr       []byte
	StdoutCut, StderrCut bool
	Files                []CallCopied
	Events               []CallEvent
	EventsTotal          int64
	Ahead                bool // its command was started before the call came
}

const (
	// CallUIDs is how many host ids calls have, and so how many may run at once.
	CallUIDs = 4096
	// MaxCallOutput is the most that is kept of one stream.
	MaxCallOutput = 4 << 20
	maxCallText   = 128 << 10 // argv and env, with the head of the message
	callInline    = 64 << 10  // longer files come as descriptors
	callSlack     = 20 * time.Second
	inside        = 1000 // uid of a program, as it sees itself
)

// Client side.

// Call runs a function call to its end. files are the descriptors that the request announces: standard input or the pipe's two, then those
// of its files; they stay the caller's. The answered ones are the caller's: those of CallEnd.Files, in order. When ctx ends, the call is
// killed.
func (c *Client) Call(ctx context.Context, r *Call, files ...*os.File) (*CallEnd, []*os.File, error) {
	if len(files) > maxFDs {
		return nil, nil, fmt.Errorf("keeper: call with %d descriptors, at most %d: %w", len(files), maxFDs, sandbox.ErrInvalid)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	limit := r.Wall + callBound
	if r.Hold != "" {
		limit += heldBound
	}
	bound, cancel := context.WithTimeout(ctx, min(limit, 9*time.Minute))
	defer cancel()
	e := &CallEnd{}
	got, err := c.call(bound, opCall, r, e, fds...)
	if err != nil {
		closeAll(got)
		return nil, nil, err
	}
	var out []*os.File
	for _, fd := range got {
		out = append(out, os.NewFile(uintptr(fd), "file of a call"))
	}
	return e, out, nil
}

// calls is what function calls share in the keeper.
type calls struct {
	k        *Keeper
	netns    *netnsPool
	roots    *callRoots
	pool     *callGroups
	standbys *standbys
}

func newCalls(k *Keeper) *calls {
	c := &calls{k: k, netns: newNetnsPool(8), roots: newCallRoots(k), pool: newCallGroups(k)}
	c.standbys = newStandbys(c)
	return c
}

func (r *Call) check() error {
	text := 0
	for _, s := range append(append([]string(nil), r.Argv...), r.Env...) {
		text += len(s) + 1
		if strings.ContainsRune(s, 0) {
			return fmt.Errorf("argument or variable with a NUL: %w", sandbox.ErrInvalid)
		}
	}
	if err := checkDevices(r.Devices); err != nil {
		return err
	}
	switch {
	case len(r.Argv) == 0:
		return fmt.Errorf("no program: %w", sandbox.ErrInvalid)
	case text > maxCallText:
		return fmt.Errorf("arguments and environment have %d octets, at most %d: %w", text, maxCallText, sandbox.ErrInvalid)
	case len(r.Layers) == 0 || len(r.Layers) > 400:
		return fmt.Errorf("%d layers, want 1 to 400: %w", len(r.Layers), sandbox.ErrInvalid)
	case r.UIDBase == 0 || r.UIDBase > 1<<31-2*CallUIDs:
		return fmt.Errorf("uid base %d: %w", r.UIDBase, sandbox.ErrInvalid)
	case r.CPU <= 0 || r.Wall <= 0 || r.Memory <= 0 || r.Pids <= 0 || r.Output <= 0 || r.Output > MaxCallOutput || r.FSize <= 0 ||
		r.Disk <= 0 || r.Inodes <= 0 || r.Stack <= 0 || r.NoFile <= 0:
		return fmt.Errorf("limits: a field is missing or out of range: %w", sandbox.ErrInvalid)
	case r.Pipe && r.StdinFD || (r.Pipe || r.StdinFD) && len(r.Stdin) > 0:
		return fmt.Errorf("more than one standard input: %w", sandbox.ErrInvalid)
	case len(r.Filter)%8 != 0 || len(r.Filter) > 4096*8:
		return fmt.Errorf("filter of %d octets: %w", len(r.Filter), sandbox.ErrInvalid)
	}
	if r.Hold != "" && (r.Pipe || strings.ContainsRune(r.Hold, '/') || !slices.ContainsFunc(r.Files, func(f CallFile) bool { return f.Path == r.Hold })) {
		return fmt.Errorf("hold %.80q: want a file of the call in its work folder itself, and no call of a pair: %w", r.Hold, sandbox.ErrInvalid)
	}
	if r.Alone && r.Card == "" {
		return fmt.Errorf("alone without a card: %w", sandbox.ErrInvalid)
	}
	for _, f := range r.Files {
		if !cleanPath(f.Path) {
			return fmt.Errorf("file %.80q: want a clean relative path: %w", f.Path, sandbox.ErrInvalid)
		}
	}
	for _, f := range r.Copy {
		if !cleanPath(f.Path) {
			return fmt.Errorf("file %.80q: want a clean relative path: %w", f.Path, sandbox.ErrInvalid)
		}
	}
	return nil
}

func cleanPath(p string) bool {
	return p != "" && len(p) <= 4000 && !strings.ContainsRune(p, 0) && path.Clean(p) == p && p != "." && p != ".." && !strings.HasPrefix(p, "/") && !strings.HasPrefix(p, "../")
}

// CallPair is a request for two calls, of which each one's standard output is the other's standard input.
type CallPair struct{ A, B Call }

// CallPairEnd tells how they ended; First is 0 or 1 for the one that ended first. The kernel closes a process's pipes before it tells of its
// end, so of two that end within a moment of each other, as when the one ends at the other's end of input, it may be either.
type CallPairEnd struct {
	A, B  CallEnd
	First int
}

// CallPair runs two calls that are joined. files are the descriptors of A's files, then those of B's; the answered ones those of A's
// copied files, then B's.
func (c *Client) CallPair(ctx context.Context, r *CallPair, files ...*os.File) (*CallPairEnd, []*os.File, error) {
	if len(files) > maxFDs {
		return nil, nil, fmt.Errorf("keeper: calls with %d descriptors, at most %d: %w", len(files), maxFDs, sandbox.ErrInvalid)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	bound, cancel := context.WithTimeout(ctx, min(max(r.A.Wall, r.B.Wall)+callBound, 9*time.Minute))
	defer cancel()
	e := &CallPairEnd{}
	got, err := c.call(bound, opCallPair, r, e, fds...)
	if err != nil {
		closeAll(got)
		return nil, nil, err
	}
	var out []*os.File
	for _, fd := range got {
		out = append(out, os.NewFile(uintptr(fd), "file of a call"))
	}
	return e, out, nil
}

// pair does two calls. It closes the fds that it passes on and sets them to -1.
func (c *calls) pair(ctx context.Context, r *CallPair, fds []int) (*CallPairEnd, []int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var ab, ba [2]int
	if err := unix.Pipe2(ab[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	if err := unix.Pipe2(ba[:], unix.O_CLOEXEC); err != nil {
		closeAll(ab[:])
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	// Both open /dev/stdin and /dev/stdout if they like; nobody else can reach a pipe.
	err := errors.Join(unix.Fchmod(ab[0], 0o666), unix.Fchmod(ba[0], 0o666))
	a := 0
	for _, f := range r.A.Files {
		if f.FD {
			a++
		}
	}
	if err != nil || a > len(fds) || r.A.StdinFD || r.B.StdinFD || len(r.A.Stdin)+len(r.B.Stdin) > 0 {
		closeAll(append(ab[:], ba[:]...))
		return nil, nil, errors.Join(err, fmt.Errorf("pair: descriptors or standard input are not as they should be: %w", sandbox.ErrInvalid))
	}
	r.A.Pipe, r.B.Pipe = true, true
	own := [2][]int{append([]int{ba[0], ab[1]}, fds[:a]...), append([]int{ab[0], ba[1]}, fds[a:]...)}
	var ends [2]*CallEnd
	var outs [2][]int
	var errs [2]error
	var at [2]uint64
	ended := make(chan int, 2)
	for i, q := range []*Call{&r.A, &r.B} {
		go func() {
			ends[i], outs[i], errs[i] = c.run(ctx, q, own[i], &at[i])
			closeAll(only(own[i]))
			if errs[i] != nil {
				cancel()
			}
			ended <- i
		}()
	}
	first := <-ended
	<-ended
	for i := range fds {
		fds[i] = -1
	}
	if err := errors.Join(errs[:]...); err != nil {
		closeAll(append(outs[0], outs[1]...))
		return nil, nil, err
	}
	out := append(outs[0], outs[1]...)
	if len(out) > maxFDs {
		closeAll(out)
		return nil, nil, fmt.Errorf("pair: more than %d longer files were asked for: %w", maxFDs, sandbox.ErrExhausted)
	}
	// Reports may overtake each other; one that did not begin has the earlier end.
	switch {
	case at[0] < at[1]:
		first = 0
	case at[1] < at[0]:
		first = 1
	}
	return &CallPairEnd{A: *ends[0], B: *ends[1], First: first}, out, nil
}

// run does a call. Once the program has them it closes the fds and sets them to -1; before, they stay the caller's. ended, when it is not
// nil, becomes the time of the end, in ns of the monotonic clock.
func (c *calls) run(ctx context.Context, r *Call, fds []int, ended *uint64) (end *CallEnd, out []int, err error) {
	if err := r.check(); err != nil {
		return nil, nil, err
	}
	want := 0
	if r.StdinFD {
		want++
	}
	if r.Pipe {
		want += 2
	}
	for _, f := range r.Files {
		if f.FD {
			want++
		}
	}
	if want != len(fds) {
		return nil, nil, fmt.Errorf("%d descriptors came, %d are announced: %w", len(fds), want, sandbox.ErrInvalid)
	}
	c.standbys.begins(r)
	defer c.standbys.ended(r)
	var x *running
	ahead := false
	if r.Hold == "" {
		x, err = c.begin(ctx, r, fds)
	} else if x, ahead, err = c.standbys.take(ctx, r, fds); err == nil {
		err = x.release(r, fds)
	}
	if x != nil {
		defer x.end()
	}
	if err != nil {
		return nil, nil, err
	}
	for i, fd := range fds { // an end of a pipe that we held would hide that the program closed its own
		unix.Close(fd)
		fds[i] = -1
	}
	end, err = x.wait(ctx)
	if ended != nil {
		*ended = x.ended
	}
	if err != nil {
		return nil, nil, err
	}
	end.Ahead = ahead
	out = x.copyOut(end)
	return end, out, nil
}

// begin starts a call. What it returns without an error is ended by its end.
func (c *calls) begin(ctx context.Context, r *Call, fds []int) (x *running, err error) {
	x = &running{c: c, r: r, disk: -1, in: -1, stdout: -1, stderr: -1, source: -1, input: -1, mark: -1}
	defer func() {
		if err != nil {
			x.end()
			x = nil
		}
	}()
	if x.g, err = c.pool.take(r); err != nil {
		return x, err
	}
	if err = x.prepare(fds); err != nil {
		return x, err
	}
	if x.ns, err = c.netns.take(ctx); err != nil {
		return x, err
	}
	return x, x.start(ctx)
}

// end gives back what a call had.
func (x *running) end() {
	if x.ns != nil && (!x.clean || !x.c.netns.give(x.ns)) { // of one that hangs, something may live on
		x.c.k.discard(append(x.ns.files, x.ns.fd))
	}
	x.close()
	if x.g != nil {
		x.c.pool.give(x.g, x.clean)
	}
}

// running is a call under way.
type running struct {
	c     *calls
	r     *Call
	g     *callGroup
	ns    *netns
	clean bool   // nothing of it runs any more
	ended uint64 // ns of the monotonic clock; 0: it did not begin
	disk  int    // mount of its disk: folders work, tmp and shm
	in    int    // standard input; -1: /dev/null
	ctl   *os.File
	far   int
	// Of one whose program is held: that file and standard input, open to write, the mark on the file, and the report if its command ended
	// before it opened the file.
	source, input, mark int
	early               []byte

	stdout, stderr int // what the program writes to
	out, err       *os.File
	mine           []int
}

func (x *running) close() {
	closeAll(x.mine)
	closeAll(only([]int{x.source, x.input}))
	for _, f := range []*os.File{x.ctl, x.out, x.err} {
		if f != nil {
			f.Close()
		}
	}
	if x.disk >= 0 {
		x.c.k.discard([]int{x.disk})
	}
}

// prepare makes the disk with the files, and the streams.
func (x *running) prepare(fds []int) error {
	r := x.r
	var err error
	if x.disk, err = makeDisk(r.Disk, r.Inodes, int(x.g.uid)); err != nil {
		return fmt.Errorf("make its disk: %w", err)
	}
	rest := fds
	switch {
	case r.Pipe:
		x.in, x.stdout, rest = fds[0], fds[1], fds[2:]
	case r.StdinFD && len(fds) == 0: // it comes with the program
		if x.input, err = newMemory(); err != nil {
			return fmt.Errorf("standard input: %w", err)
		}
		x.in = x.input
	case r.StdinFD:
		// Its own offset, and no way to write to what it names.
		if x.in, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fds[0]), unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open standard input: %w", err)
		}
		x.mine, rest = append(x.mine, x.in), fds[1:]
	case len(r.Stdin) > 0:
		if x.in, err = memory(r.Stdin); err != nil {
			return fmt.Errorf("standard input: %w", err)
		}
		x.mine = append(x.mine, x.in)
	default:
		x.in = x.c.k.tmpl.null
	}
	if r.Hold != "" {
		if err := x.hold(); err != nil {
			return err
		}
	}
	if err := x.lay(rest, func(path string) bool { return path != r.Hold }); err != nil {
		return err
	}
	if x.stdout < 0 {
		if x.out, x.stdout, err = x.pipe(); err != nil {
			return err
		}
	}
	if x.err, x.stderr, err = x.pipe(); err != nil {
		return err
	}
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("%w", err)
	}
	x.ctl, x.far = os.NewFile(uintptr(p[0]), "call"), p[1]
	x.mine = append(x.mine, p[1])
	// Process 1 asks with poll before it reads, and its report fits.
	return nil
}

// pipe is a stream of the program, which owns it: so it can open /dev/stdout.
func (x *running) pipe() (*os.File, int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, fmt.Errorf("pipe: %w", err)
	}
	x.mine = append(x.mine, p[1])
	err := unix.Fchown(p[1], int(x.g.uid), int(x.g.uid))
	if err == nil {
		err = unix.SetNonblock(p[0], true)
	}
	if err != nil {
		unix.Close(p[0])
		return nil, -1, fmt.Errorf("pipe: %w", err)
	}
	return os.NewFile(uintptr(p[0]), "output"), p[1], nil
}

// memory is a sealed memory file with the octets, to be read from its beginning.
func memory(data []byte) (int, error) {
	fd, err := newMemory()
	if err != nil {
		return -1, err
	}
	if err := sealWith(fd, data); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func newMemory() (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("stdin", flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before 6.3
		fd, err = unix.MemfdCreate("stdin", flags)
	}
	return fd, err
}

// sealWith writes the octets and seals the file.
func sealWith(fd int, data []byte) error {
	for at := 0; at < len(data); {
		n, err := unix.Pwrite(fd, data[at:], int64(at))
		if err != nil && err != unix.EINTR {
			return err
		}
		at += max(n, 0)
	}
	return memfile.Seal(uintptr(fd))
}

// callHead is the head of the message to the calls' parent (init/src/call.c).
func (x *running) message() []byte {
	r := x.r
	b := make([]byte, 0, 4096)
	flags := uint32(0)
	if r.Pooled {
		flags |= callPooled
	}
	if x.mark >= 0 {
		flags |= callHeld
	}
	for _, v := range []uint32{flags, x.g.uid, uint32(len(r.Argv)), uint32(len(r.Env)), uint32(len(x.g.tasks)), uint32(r.NoFile)} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, v := range []uint64{uint64(r.CPU), uint64(r.Wall), uint64(r.FSize), uint64(r.Stack), 64 << 10} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	for _, s := range r.Argv {
		b = append(append(b, s...), 0)
	}
	for _, s := range r.Env {
		b = append(append(b, s...), 0)
	}
	return b
}

const (
	callPooled = 1
	callHeld   = 2
)

// start sends the call to the parent of its environment.
func (x *running) start(ctx context.Context) error {
	fds := append([]int{x.far, x.disk, x.ns.fd, x.in, x.stdout, x.stderr, x.g.group, x.g.stat}, x.g.tasks...)
	if x.r.Pooled {
		user, err := x.g.userns()
		if err != nil {
			return err
		}
		fds = append(fds, user)
	}
	if x.mark >= 0 {
		fds = append(fds, x.mark)
	}
	if err := x.c.roots.send(ctx, x.r, x.message(), fds); err != nil {
		return err
	}
	closeAll(x.mine) // process 1 has them
	x.mine = nil
	return nil
}

// report is process 1's (init/src/call.c).
const (
	reportEvents = 8
	reportSize   = 4*4 + 3*8 + 2*4 + reportEvents*32

	reportFlags = 3 * 4 // where they stand
	reportEnded = 4*4 + 2*8

	reportWall   = 1
	reportCPU    = 2
	reportFilter = 4
	reportHeld   = 16
)

var callStages = [...]string{"", "make its processes", "enter its network", "make its mounts", "take its user", "enter its groups", "confine it", "execute"}

// wait waits for the end, after which x.clean tells whether nothing of the call runs any more.
func (x *running) wait(ctx context.Context) (*CallEnd, error) {
	var told sync.Once
	kill := func() { told.Do(func() { x.ctl.Write([]byte{1}) }) }
	stop := context.AfterFunc(ctx, kill)
	defer stop()
	end := &CallEnd{}
	var readers sync.WaitGroup
	var over [2]bool
	if x.out != nil {
		readers.Go(func() { end.Stdout, over[0] = drain(x.out, x.r.Output, kill) })
	}
	readers.Go(func() { end.Stderr, over[1] = drain(x.err, x.r.Output, kill) })
	report, err := x.early, error(nil)
	if report == nil {
		x.ctl.SetReadDeadline(time.Now().Add(x.r.Wall + callSlack))
		report, err = x.hear()
		for err == nil && len(report) == 1 { // that it was ready, which nobody waited for
			report, err = x.hear()
		}
	}
	if err != nil || len(report) != reportSize {
		// Process 1 is gone, or something does not die (a read from a store may be under way). The group is never used again.
		x.c.k.log.Warn("call without a report", "group", x.g.name, "octets", len(report), "err", err)
		x.g.kill()
		x.closeStreams()
		readers.Wait()
		return nil, fmt.Errorf("its process 1 tells nothing (%v): %w", err, sandbox.ErrLost)
	}
	x.clean = true
	at := time.Now().Add(callSlack)
	for _, f := range []*os.File{x.out, x.err} {
		if f != nil {
			f.SetReadDeadline(at) // its writers are gone
		}
	}
	readers.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w", err)
	}
	if x.early == nil && binary.LittleEndian.Uint32(report[reportFlags:])&reportHeld != 0 { // killed from outside while it waited
		return nil, fmt.Errorf("its command ended before its program came: %w", sandbox.ErrLost)
	}
	x.ended = binary.LittleEndian.Uint64(report[reportEnded:])
	if err := end.decode(report); err != nil {
		return nil, err
	}
	end.StdoutCut, end.StderrCut = over[0], over[1]
	end.OutputOver = over[0] || over[1]
	x.g.figures(end)
	return end, nil
}

// hear reads one message of process 1.
func (x *running) hear() ([]byte, error) {
	buf := make([]byte, reportSize+1)
	n, err := x.ctl.Read(buf)
	return buf[:max(n, 0)], err
}

func (x *running) closeStreams() {
	if x.out != nil {
		x.out.SetReadDeadline(time.Unix(1, 0))
	}
	x.err.SetReadDeadline(time.Unix(1, 0))
}

// drain reads a stream to its end, or kills when it is longer than it may be.
func drain(f *os.File, most int64, kill func()) (data []byte, over bool) {
	var first [4096]byte
	for {
		n, err := f.Read(first[:])
		data = append(data, first[:n]...)
		if int64(len(data)) > most {
			kill()
			return data[:most], true
		}
		if err != nil {
			return data, false
		}
		if n == len(first) {
			return drainLong(f, data, most, kill)
		}
	}
}

func drainLong(f *os.File, data []byte, most int64, kill func()) ([]byte, bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		data = append(data, buf[:n]...)
		if int64(len(data)) > most {
			kill()
			return data[:most], true
		}
		if err != nil {
			return data, false
		}
	}
}

func (e *CallEnd) decode(b []byte) error {
	u32 := func() uint32 { v := binary.LittleEndian.Uint32(b); b = b[4:]; return v }
	u64 := func() uint64 { v := binary.LittleEndian.Uint64(b); b = b[8:]; return v }
	stage, errno := u32(), unix.Errno(u32())
	status := unix.WaitStatus(u32())
	flags := u32()
	e.CPU, e.Wall = time.Duration(u64()), time.Duration(u64())
	u64() // when it ended
	e.Leftover, e.EventsTotal = int(u32()), int64(u32())
	for range reportEvents {
		ev := CallEvent{Call: u32(), Arch: u32(), Arg0: u64(), Arg1: u64(), Count: int64(u64())}
		if ev.Count > 0 {
			e.Events = append(e.Events, ev)
		}
	}
	if int(stage) == len(callStages)-1 {
		e.Code = 126
		if errno == unix.ENOENT || errno == unix.ENOTDIR {
			e.Code = 127
		}
		e.NotBegun = errno.Error()
		if errno == unix.ENOMEM || errno == unix.EAGAIN {
			return fmt.Errorf("execute: %w: %w", errno, sandbox.ErrLost)
		}
		return nil
	}
	if stage != 0 {
		what := "begin"
		if int(stage) < len(callStages) {
			what = callStages[stage]
		}
		return fmt.Errorf("%s: %w: %w", what, errno, sandbox.ErrLost)
	}
	if status.Signaled() {
		e.Signal = int(status.Signal())
	} else {
		e.Code = status.ExitStatus()
	}
	e.WallOver, e.CPUOver, e.Filter = flags&reportWall != 0, flags&reportCPU != 0, flags&reportFilter != 0
	return nil
}

var errEscapes = errors.New("leads out of the work folder, or through a link")
