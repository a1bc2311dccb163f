package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "keeper" {
		os.Exit(Main(os.Args[2:]))
	}
	os.Exit(m.Run())
}

const longest = 2 * time.Minute // bound of every wait here

// house is a keeper with one layer, and a handler that records.
type house struct {
	t    testing.TB
	dir  string
	cfg  Config
	c    *Client
	rec  *recorder
	next atomic.Uint32
}

var instances atomic.Int32

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for _, p := range []string{"mkfs.erofs", "/bin/busybox"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s", p)
		}
	}
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	t.Cleanup(cancel)
	return ctx
}

// layerFile makes an EROFS of a small busybox tree. extra maps paths to texts.
func layerFile(t testing.TB, extra map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{"bin", "etc", "root", "home/alice", "usr/bin", "proc", "sys"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "bin/busybox"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	applets, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range strings.Fields(string(applets)) {
		os.Symlink("busybox", filepath.Join(tree, "bin", a))
	}
	files := map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"etc/group":  "root:x:0:\nalice:x:1000:\nnogroup:x:65534:\n",
		"etc/hosts":  "127.0.0.1 localhost\n10.1.2.3 mirror\n",
	}
	for k, v := range extra {
		files[k] = v
	}
	for k, v := range files {
		if err := os.MkdirAll(filepath.Join(tree, filepath.Dir(k)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tree, k), []byte(v), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	os.Chown(filepath.Join(tree, "home/alice"), 1000, 1000)
	img := filepath.Join(dir, "layer.erofs")
	if out, err := exec.Command("mkfs.erofs", "--quiet", img, tree).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v %s", err, out)
	}
	return img
}

func open(t testing.TB) *house {
	t.Helper()
	needRoot(t)
	parent := ""
	if _, bench := t.(*testing.B); bench {
		parent = "/dev/shm" // ext4 is slow to give out inodes that were freed a moment ago; the pool of a host is not ext4
	}
	dir, err := os.MkdirTemp(parent, "dsec-keeper")
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, dir: dir, rec: newRecorder(), cfg: Config{Dir: filepath.Join(dir, "run"),
		Instance: fmt.Sprintf("t%dx%d", os.Getpid(), instances.Add(1))}}
	ctx := within(t)
	if err := Spawn(ctx, "/proc/self/exe", []string{"keeper"}, h.cfg); err != nil {
		log, _ := os.ReadFile(filepath.Join(h.cfg.Dir, LogName))
		t.Fatalf("%v\n%s", err, log)
	}
	h.dial()
	t.Cleanup(h.close)
	if err := mountFile(ctx, h.c, "base", layerFile(t, nil)); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Deliver(ctx); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *house) dial() {
	h.t.Helper()
	c, err := Dial(within(h.t), h.cfg.Dir, DialOptions{Host: "test", Handler: h.rec})
	if err != nil {
		h.t.Fatal(err)
	}
	h.c = c
}

func (h *house) close() {
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	if err := h.c.Shutdown(ctx); err != nil && !errors.Is(err, sandbox.ErrLost) {
		h.t.Errorf("shutdown: %v", err)
	}
	h.c.Close()
	for {
		if lock, err := lockDir(h.cfg.Dir); err == nil {
			lock.Close()
			break
		}
		if ctx.Err() != nil {
			h.t.Error("the keeper does not end")
			break
		}
		time.Sleep(time.Millisecond)
	}
	log, _ := os.ReadFile(filepath.Join(h.cfg.Dir, LogName))
	for _, bad := range []string{"DATA RACE", "panic", "level=ERROR"} {
		if strings.Contains(string(log), bad) {
			h.t.Errorf("keeper's log has %q", bad)
		}
	}
	if h.t.Failed() {
		h.t.Logf("keeper's log:\n%s", log)
	}
	for _, g := range leftGroups(h.cfg.Instance) {
		h.t.Errorf("left: cgroup %s", g)
	}
	os.RemoveAll(h.dir)
}

func leftGroups(instance string) []string {
	var left []string
	for _, p := range []string{"/sys/fs/cgroup/*/dsec-" + instance, "/sys/fs/cgroup/dsec-" + instance} {
		m, _ := filepath.Glob(p)
		left = append(left, m...)
	}
	return left
}

func (h *house) birth() *Birth {
	h.t.Helper()
	n := h.next.Add(1)
	dir := filepath.Join(h.dir, fmt.Sprintf("u%d", n))
	for _, d := range []string{dir, dir + "/upper", dir + "/work"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			h.t.Fatal(err)
		}
	}
	return &Birth{ID: sandbox.NewID("htest1"), Layers: []string{"base"}, UpperDir: dir + "/upper", WorkDir: dir + "/work",
		UIDBase: 1_000_000_000 + (n%256)*131072, Hostname: "box", Resources: sandbox.Resources{Memory: 256 << 20, Pids: 64},
		Network: sandbox.NetworkNone, Env: []string{"PATH=/bin:/usr/bin"}}
}

func (h *house) create() sandbox.ID {
	h.t.Helper()
	b := h.birth()
	if _, err := h.c.Create(within(h.t), b); err != nil {
		h.t.Fatal(err)
	}
	return b.ID
}

// run starts a command and waits for its end.
func (h *house) run(id sandbox.ID, cmd *sandbox.Command) *result {
	h.t.Helper()
	fill(cmd)
	if err := h.c.Start(within(h.t), id, cmd); err != nil {
		h.t.Fatal(err)
	}
	return h.rec.wait(h.t, id, cmd.ID)
}

var commandIDs atomic.Int64

func fill(cmd *sandbox.Command) {
	if cmd.ID == "" {
		cmd.ID = fmt.Sprintf("c%d", commandIDs.Add(1))
	}
	if cmd.Cwd == "" && cmd.Session == "" {
		cmd.Cwd = "/"
	}
	if cmd.OutputCap == 0 {
		cmd.OutputCap = 1 << 20
	}
}

func sh(text string) *sandbox.Command { return &sandbox.Command{Argv: []string{"/bin/sh", "-c", text}} }

// result is what the recorder has of a command.
type result struct {
	out, err, late []byte
	gaps           bool // octets are missing between head and tail
	early          bool // what is late came before the end
	outcome        *sandbox.Outcome
}

type recorder struct {
	mu       sync.Mutex
	changed  chan struct{}
	cmds     map[string]*result
	sessions map[string]sandbox.Outcome
	ended    map[sandbox.ID]sandbox.Cause
	refuse   func() error
	dup      int
}

func newRecorder() *recorder {
	return &recorder{changed: make(chan struct{}), cmds: map[string]*result{}, sessions: map[string]sandbox.Outcome{}, ended: map[sandbox.ID]sandbox.Cause{}}
}

func (r *recorder) get(id sandbox.ID, cmd string) *result {
	k := string(id) + " " + cmd
	if r.cmds[k] == nil {
		r.cmds[k] = &result{}
	}
	return r.cmds[k]
}

func (r *recorder) note(f func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse != nil {
		if err := r.refuse(); err != nil {
			return err
		}
	}
	err := f()
	close(r.changed)
	r.changed = make(chan struct{})
	return err
}

func (r *recorder) Output(_ context.Context, id sandbox.ID, cmd string, s sandbox.StreamName, off int64, data []byte, late bool) error {
	return r.note(func() error {
		c := r.get(id, cmd)
		p := &c.out
		if s == sandbox.Stderr {
			p = &c.err
		}
		if late {
			c.early = c.early || c.outcome == nil
			c.late = append(c.late, data...)
			return nil
		}
		if off < int64(len(*p)) { // sent again
			r.dup++
			data = data[min(int64(len(data)), int64(len(*p))-off):]
		}
		if off > int64(len(*p)) {
			c.gaps = true
		}
		*p = append(*p, data...)
		return nil
	})
}

func (r *recorder) CommandEnded(_ context.Context, id sandbox.ID, cmd string, o sandbox.Outcome) error {
	return r.note(func() error { r.get(id, cmd).outcome = &o; return nil })
}

func (r *recorder) SessionEnded(_ context.Context, id sandbox.ID, session string, o sandbox.Outcome) error {
	return r.note(func() error { r.sessions[string(id)+" "+session] = o; return nil })
}

func (r *recorder) Ended(_ context.Context, id sandbox.ID, c sandbox.Cause) error {
	return r.note(func() error { r.ended[id] = c; return nil })
}

func (r *recorder) Denied(context.Context, sandbox.ID, string, string, string) {}

// until waits for a condition on what was recorded.
func (r *recorder) until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	bound := time.After(longest)
	for {
		r.mu.Lock()
		ok, ch := cond(), r.changed
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-ch:
		case <-bound:
			t.Fatalf("never came: %s", what)
		}
	}
}

func (r *recorder) wait(t testing.TB, id sandbox.ID, cmd string) *result {
	t.Helper()
	var res *result
	r.until(t, "end of "+cmd, func() bool { res = r.get(id, cmd); return res.outcome != nil })
	return res
}

func TestBirthAndCommand(t *testing.T) {
	h := open(t)
	id := h.create()
	r := h.run(id, sh("echo hi; echo err >&2; id -u; exit 7"))
	if string(r.out) != "hi\n0\n" || string(r.err) != "err\n" || r.outcome.Kind != sandbox.Exited || r.outcome.Code != 7 {
		t.Fatalf("%q %q %+v", r.out, r.err, r.outcome)
	}
	if r.outcome.Stdout.Total != 5 || r.outcome.OutputOpen || r.outcome.Stdout.Truncated {
		t.Errorf("%+v", r.outcome)
	}
	groups := ":/\ncpu:/\nmemory:/\npids:/\n"
	if have, _ := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); strings.Contains(string(have), "memory") {
		groups = ":/cmd-0\n" // v2 alone
	}
	for _, c := range []struct{ text, want string }{
		{"cat /etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tbox\n10.1.2.3 mirror\n"},
		{"hostname; cat /etc/hostname", "box\nbox\n"},
		{"stat -c '%a %u' /tmp /dev/shm /etc /root", "1777 0\n1777 0\n755 0\n755 0\n"},
		{"stat -c %u:%g /home/alice", "1000:1000\n"},
		{"cat /proc/self/cgroup | sed 's/^[0-9]*://' | grep -E '^(memory|pids|cpu|)(:|$)' | sort -u", groups},
		{"echo $$ >/dev/null; head -c 4 /dev/zero | wc -c; ls /dev | tr '\\n' ' '", "4\nfd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero "},
		{"touch /dev/x 2>/dev/null || echo ro; echo 1 2>/dev/null >/proc/sys/kernel/shmmni || echo ro; wc -c </proc/interrupts", "ro\nro\n0\n"},
		{"grep -E 'Sig(Blk|Ign)' /proc/self/status | awk '{print $2}'; umask; ls /proc/self/fd | wc -l", "0000000000000000\n0000000000000000\n0022\n4\n"},
		{"ip -o addr show lo | grep -c 'inet '; nc -l -p 80 & sleep 0.2; kill $!;", "1\n"},
		{"readlink /proc/1/exe || echo hidden; kill -9 1; echo $?", "hidden\n0\n"},
	} {
		r := h.run(id, sh(c.text))
		if string(r.out) != c.want {
			t.Errorf("%s: got %q (stderr %q), want %q", c.text, r.out, r.err, c.want)
		}
	}
	if err := h.c.Destroy(within(t), id); err != nil {
		t.Fatal(err)
	}
	if l, err := h.c.List(within(t)); err != nil || len(l) != 0 {
		t.Errorf("after destroy: %v, %v", l, err)
	}
}

func mountFile(ctx context.Context, c *Client, id, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return c.MountLayer(ctx, id, Image{Meta: f})
}
