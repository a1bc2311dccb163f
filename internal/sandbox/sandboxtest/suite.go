// Package sandboxtest is the conformance suite of sandbox.Backend: what every backend must do, as subtests with prose. A backend's
// own test calls [Run] with an [Env] that says where to find a root file system and how to look at what is left on the host.
//
// What a backend can't do is read from its Capabilities; the subtest then skips with a [Reason], which CI holds against a list.
// A subtest that stands for a fault of research names its number (B02, ...), so that a report finds the test that holds it.
//
// Time is never asserted as the speed of the machine: a test waits up to [Patience] for what must come, and what must not come
// earlier than a limit is compared with that limit alone.
package sandboxtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Patience is how long the suite waits for what must happen.
const Patience = 3 * time.Minute

// Env is what the suite needs to know of a backend under test.
type Env struct {
	Backend sandbox.Backend
	Host    sandbox.HostID
	// Layers are the IDs of a root file system, lowest first, that holds what [Root] lists.
	Layers []string
	// Restart drops the backend as kill -9 of the host daemon would, without any farewell to what lies below, and returns a new
	// one over the same state. nil when the backend can't recover.
	Restart func(t testing.TB) sandbox.Backend
	// Left names everything on the host that belongs to this backend's sandboxes, one line each: processes, mounts, cgroups,
	// namespaces, devices, uppers, uid slots. Pools that are kept ready do not count.
	Left func(t testing.TB) []string
	// More are parts that need what lies above this package, as a client of the files' protocol (internal/backend/backendtest).
	More []Part
	// Few makes the repeated parts shorter, for backends whose sandboxes cost much.
	Few bool
	// Parts are those that are run, by name; none runs all.
	Parts []string
}

// Root says what Env.Layers must hold: a static busybox at /bin/busybox with its applets linked beside it (a shell, coreutils,
// stty, wget, nc among them); users root, alice (1000:1000, /home/alice) and nobody (65534:65534); the files below.
var Root = map[string]string{
	"/etc/hosts":          "127.0.0.1 localhost\n192.0.2.7 extra.test extra\n", // an image's own lines
	"/srv/base/kept":      "kept\n",
	"/srv/base/removed":   "to be removed\n",
	"/srv/base/sub/inner": "inner\n",
	"/opt/plain":          "#!/bin/sh\necho never\n", // mode 0644
	"/opt/badinterp":      "#!/no/interp\n",          // mode 0755
	"/opt/locked/x":       "x\n",                     // the folder is 0700 of root
}

// Reason says why a subtest was skipped.
type Reason string

const (
	NoSessions    Reason = "backend has no sessions"
	NoTerminal    Reason = "backend has no terminals"
	NoSnapshot    Reason = "backend has no snapshots"
	NoPorts       Reason = "backend has no ports"
	NoFreeze      Reason = "backend has no pause level frozen"
	NoNetworkOpen Reason = "backend has no network open"
	NoRestart     Reason = "backend can't recover"
	NoFiles       Reason = "environment has no guest program for files"
	NoLeft        Reason = "environment can't count what is left"
	NoDiskUse     Reason = "backend can't tell disk use"
)

func (e *Env) skipUnless(t *testing.T, has bool, r Reason) {
	t.Helper()
	if !has {
		t.Skipf("skip: %s", r)
	}
}

func (e *Env) times(n int) int {
	if e.Few {
		return max(1, n/20)
	}
	return n
}

// roomy is a time in which a few commands must have room, so it is longer where they cost more.
func (e *Env) roomy(d time.Duration) time.Duration {
	if e.Few {
		return 3 * d
	}
	return d
}

// does reports whether the backend says that it does something otherwise.
func (e *Env) does(feature string) bool { return e.Backend.Capabilities().Features[feature] != "" }

// Part is a part of the suite.
type Part struct {
	Name string
	Run  func(*testing.T, *Env)
}

// Run runs the suite.
func Run(t *testing.T, e *Env) {
	var before []string
	if e.Left != nil {
		before = e.Left(t)
	}
	for _, part := range append([]Part{
		{"birth", testBirth},
		{"command", testCommands},
		{"outcome", testOutcomes},
		{"output", testOutput},
		{"stdin", testStdin},
		{"surroundings", testSurroundings},
		{"terminal", testTerminals},
		{"session", testSessions},
		{"pause", testPause},
		{"deadline", testDeadlines},
		{"limit", testLimits},
		{"port", testPorts},
		{"snapshot", testSnapshots},
		{"end", testEnds},
		{"recovery", testRecovery},
	}, e.More...) {
		if len(e.Parts) == 0 || slices.Contains(e.Parts, part.Name) {
			t.Run(part.Name, func(t *testing.T) { part.Run(t, e) })
		}
	}
	t.Run("nothing is left when all sandboxes are destroyed", func(t *testing.T) {
		e.nothingLeft(t, before)
	})
}

// nothingLeft waits until the host looks as before. Destroy returned already; what may still end is only what the kernel takes
// apart by itself.
func (e *Env) nothingLeft(t *testing.T, before []string) {
	t.Helper()
	e.skipUnless(t, e.Left != nil, NoLeft)
	var extra []string
	eventually(t, func() bool {
		extra = extra[:0]
		for _, l := range e.Left(t) {
			if !slices.Contains(before, l) {
				extra = append(extra, l)
			}
		}
		return len(extra) == 0
	}, func() string { return "left on the host:\n" + strings.Join(extra, "\n") })
}

// eventually polls until ok or Patience is over.
func eventually(t testing.TB, ok func() bool, otherwise func() string) {
	t.Helper()
	end := time.Now().Add(Patience)
	for wait := time.Millisecond; !ok(); wait = min(2*wait, 100*time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(otherwise())
		}
		time.Sleep(wait)
	}
}

// box is one living sandbox of a test.
type box struct {
	e    *Env
	id   sandbox.ID
	spec *sandbox.Spec
	inst sandbox.Instance
	rec  *recorder
	n    atomic.Int64

	endOnce sync.Once
}

// spec is a small sandbox of the suite's root.
func (e *Env) spec(change ...func(*sandbox.Spec)) *sandbox.Spec {
	s := &sandbox.Spec{
		Layers:    slices.Clone(e.Layers),
		Env:       []string{"HOME=/root", "PATH=/bin:/sbin:/usr/bin:/usr/sbin"},
		Resources: sandbox.Resources{Memory: 256 << 20, Disk: 64 << 20, Pids: 128},
	}
	for _, c := range change {
		c(s)
	}
	s.Fill()
	return s
}

// box makes a sandbox that is destroyed at the test's end.
func (e *Env) box(t *testing.T, change ...func(*sandbox.Spec)) *box {
	t.Helper()
	b := &box{e: e, id: sandbox.NewID(e.Host), spec: e.spec(change...), rec: newRecorder()}
	if err := b.spec.Validate(); err != nil {
		t.Fatalf("the test's own spec: %v", err)
	}
	inst, err := e.Backend.Create(within(t), b.id, b.spec, b.rec)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	b.inst = inst
	t.Cleanup(func() { b.destroy(t) })
	return b
}

func (b *box) destroy(t testing.TB) {
	t.Helper()
	b.endOnce.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := b.inst.Destroy(ctx); err != nil {
			t.Errorf("destroy %s: %v", b.id, err)
		}
		for _, f := range b.rec.broken() {
			t.Errorf("contract of Sink: %s", f)
		}
	})
}

// within is a context that is bounded by Patience and the test.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// command fills and checks a command and gives it an ID if it has none.
func (b *box) command(t testing.TB, c sandbox.Command) *sandbox.Command {
	t.Helper()
	if c.ID == "" {
		c.ID = fmt.Sprintf("c%d", b.n.Add(1))
	}
	c.Fill(b.spec)
	if err := c.Validate(); err != nil {
		t.Fatalf("the test's own command: %v", err)
	}
	return &c
}

// start starts a command and returns its ID.
func (b *box) start(t testing.TB, c sandbox.Command) string {
	t.Helper()
	p := b.command(t, c)
	if err := b.inst.Start(within(t), p); err != nil {
		t.Fatalf("start %q %q: %v", p.Argv, p.Text, err)
	}
	return p.ID
}

// result is how a command ended and what it wrote.
type result struct {
	sandbox.Outcome
	stdout, stderr string // head and tail
}

// run runs a command to its end.
func (b *box) run(t testing.TB, c sandbox.Command) result {
	t.Helper()
	return b.wait(t, b.start(t, c))
}

func (b *box) wait(t testing.TB, cmd string) result {
	t.Helper()
	o, ok := b.rec.waitEnd(cmd, Patience)
	if !ok {
		t.Fatalf("command %s: no end within %v; stdout so far %.200q, stderr %.200q", cmd, Patience, b.rec.text(cmd, sandbox.Stdout), b.rec.text(cmd, sandbox.Stderr))
	}
	return result{o, b.rec.text(cmd, sandbox.Stdout), b.rec.text(cmd, sandbox.Stderr)}
}

// sh is a command that runs a shell with text as its argument.
func sh(text string) sandbox.Command { return sandbox.Command{Argv: []string{"/bin/sh", "-c", text}} }

// out runs a shell text that must exit 0 with nothing on stderr and returns its stdout.
func (b *box) out(t testing.TB, text string) string {
	t.Helper()
	r := b.run(t, sh(text))
	if r.Kind != sandbox.Exited || r.Code != 0 || r.stderr != "" {
		t.Fatalf("%s: %s; stdout %.300q, stderr %.300q", text, describe(r.Outcome), r.stdout, r.stderr)
	}
	return r.stdout
}

func describe(o sandbox.Outcome) string {
	s := string(o.Kind)
	switch o.Kind {
	case sandbox.Exited:
		s += fmt.Sprintf(" %d", o.Code)
	case sandbox.Signalled:
		s += fmt.Sprintf(" by %d", o.Signal)
	}
	if o.Error != "" {
		s += ": " + o.Error
	}
	for name, set := range map[string]bool{"memory hit": o.MemoryHit, "pids hit": o.PidsHit, "disk hit": o.DiskHit, "output open": o.OutputOpen, "session end": o.SessionEnd} {
		if set {
			s += ", " + name
		}
	}
	return s
}

// wantExit checks for an ordinary exit.
func wantExit(t testing.TB, r result, code int, stdout string) {
	t.Helper()
	if r.Kind != sandbox.Exited || r.Code != code || r.stdout != stdout {
		t.Errorf("%s with stdout %.300q (stderr %.300q); want exited %d with %.300q", describe(r.Outcome), r.stdout, r.stderr, code, stdout)
	}
}

// waitText waits until a running command has written the text.
func (b *box) waitText(t testing.TB, cmd string, stream sandbox.StreamName, text string) {
	t.Helper()
	eventually(t, func() bool { return strings.Contains(b.rec.text(cmd, stream), text) }, func() string {
		return fmt.Sprintf("command %s: %q did not come; there is %.300q", cmd, text, b.rec.text(cmd, stream))
	})
}

// Box is a living sandbox for a part of More.
type Box struct{ b *box }

// NewBox makes a sandbox of the suite's root that is destroyed at the test's end.
func NewBox(t *testing.T, e *Env, change ...func(*sandbox.Spec)) *Box {
	return &Box{e.box(t, change...)}
}

// Instance is the sandbox itself.
func (b *Box) Instance() sandbox.Instance { return b.b.inst }

// Out runs a shell text that must exit 0 with nothing on stderr and returns its stdout.
func (b *Box) Out(t testing.TB, text string) string {
	t.Helper()
	return b.b.out(t, text)
}

// As runs a shell text as a user and returns how it ended and its stdout.
func (b *Box) As(t testing.TB, user, text string) (sandbox.Outcome, string) {
	t.Helper()
	c := sh(text)
	c.User = user
	r := b.b.run(t, c)
	return r.Outcome, r.stdout
}

// Eventually polls until ok or Patience is over.
func Eventually(t testing.TB, ok func() bool, otherwise func() string) {
	t.Helper()
	eventually(t, ok, otherwise)
}

// Within is a context that is bounded by Patience and the test.
func Within(t testing.TB) context.Context { return within(t) }
