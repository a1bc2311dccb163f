package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// memoryPark is a park in this process.
type memoryPark struct {
	mu    sync.Mutex
	note  string
	files []*os.File
}

func (p *memoryPark) Park(_ context.Context, _, note string, files ...*os.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	closeFiles(p.files)
	p.note, p.files = note, nil
	for _, f := range files {
		d, err := dupFile(f)
		if err != nil {
			return err
		}
		p.files = append(p.files, d)
	}
	return nil
}

func (p *memoryPark) Parked(context.Context, string) (string, []*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.files == nil {
		return "", nil, sandbox.ErrNotFound
	}
	var out []*os.File
	for _, f := range p.files {
		d, err := dupFile(f)
		if err != nil {
			return "", nil, err
		}
		out = append(out, d)
	}
	return p.note, out, nil
}

func (p *memoryPark) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	closeFiles(p.files)
	p.files = nil
}

// dupFile duplicates without Fd, which would change the mode of the descriptor that the daemon uses too.
func dupFile(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	n := -1
	if e := raw.Control(func(fd uintptr) { n, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) }); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(n), f.Name()), nil
}

// house is a supervisor with a daemon in a process of its own, on a store in a folder.
type house struct {
	t     testing.TB
	dir   string
	store *store.Dir
	park  *memoryPark
	cfg   SupervisorConfig
	*Supervisor
	end  context.CancelFunc
	done chan error
}

func newHouse(t testing.TB, delay time.Duration, change func(*SupervisorConfig)) *house {
	t.Helper()
	needFuse(t)
	dir, err := os.MkdirTemp("/var/tmp", "dsec-blob-")
	do(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("DSEC_BLOBD_TEST", dir)
	t.Setenv("DSEC_BLOBD_TEST_DELAY", delay.String())
	h := &house{t: t, dir: dir, park: &memoryPark{}}
	h.store, err = store.NewDir(filepath.Join(dir, "store"))
	do(t, err)
	h.cfg = SupervisorConfig{
		Config:  Config{RunDir: filepath.Join(dir, "run"), CacheDir: filepath.Join(dir, "cache"), Deadline: 20 * time.Second},
		Program: []string{os.Args[0]}, Stores: []string{"the one"}, Group: fmt.Sprintf("dsec-blobtest%d", os.Getpid()),
	}
	if change != nil {
		change(&h.cfg)
	}
	h.start()
	t.Cleanup(func() {
		h.halt()
		h.park.drop()
		if err := h.Stop(context.Background()); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(h.cfg.RunDir, "blobd.log"))
			t.Logf("blobd.log:\n%s", log)
		}
	})
	return h
}

// start begins a host's life.
func (h *house) start() {
	s, err := NewSupervisor(h.cfg, h.park, slog.New(slog.NewTextHandler(io.Discard, nil)))
	do(h.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	h.Supervisor, h.end, h.done = s, cancel, make(chan error, 1)
	go func() { h.done <- s.Run(ctx) }()
}

func (h *house) halt() {
	if h.end != nil {
		h.end()
		do(h.t, <-h.done)
		h.end = nil
	}
}

func (h *house) pid() int {
	h.t.Helper()
	c := dialWait(h.t, h.cfg.RunDir)
	defer c.Close()
	hello, err := c.Hello(context.Background())
	do(h.t, err)
	return hello.Pid
}

func (h *house) kill() {
	h.t.Helper()
	do(h.t, syscall.Kill(h.pid(), syscall.SIGKILL))
}

// image makes a layer of two files from a folder.
func (h *house) image(files map[string][]byte) (meta string, d Data) {
	h.t.Helper()
	tree := filepath.Join(h.dir, "tree")
	for name, content := range files {
		do(h.t, os.MkdirAll(filepath.Dir(filepath.Join(tree, name)), 0o755))
		do(h.t, os.WriteFile(filepath.Join(tree, name), content, 0o644))
	}
	c := layer.New(nil, h.store)
	desc, err := c.ImportDir(context.Background(), "default", tree, layer.Options{Form: layer.FormSplit})
	do(h.t, err)
	f := desc.Forms[0]
	meta, _ = h.store.Path(layer.BlobKey(f.Digest))
	return meta, Data(*f.Data)
}

// mountImage mounts metadata with contents that the file has.
func mountImage(t testing.TB, meta string, data *os.File) string {
	t.Helper()
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	do(t, err)
	defer unix.Close(fs)
	do(t, unix.FsconfigSetString(fs, "source", meta))
	do(t, unix.FsconfigSetString(fs, "device", fmt.Sprintf("/proc/self/fd/%d", data.Fd())))
	if err := unix.FsconfigCreate(fs); errors.Is(err, unix.ENOTBLK) {
		t.Skip("skip: this kernel mounts no EROFS from files")
	} else {
		do(t, err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	do(t, err)
	defer unix.Close(m)
	at := filepath.Join(t.TempDir(), "dsec-mnt")
	do(t, os.Mkdir(at, 0o700))
	do(t, unix.MoveMount(m, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH))
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	return at
}

func TestKilledDaemonIsReplacedWithoutAnError(t *testing.T) {
	h := newHouse(t, 5*time.Millisecond, nil)
	big := random(96<<20, 1)
	meta, d := h.image(map[string][]byte{"big": big, "small": []byte("x")})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	at := mountImage(t, meta, f)
	f.Close()
	done := make(chan error, 1)
	var sum []byte
	go func() {
		r, err := os.Open(filepath.Join(at, "big"))
		if err == nil {
			s := sha256.New()
			_, err = io.Copy(s, r)
			sum = s.Sum(nil)
			r.Close()
		}
		done <- err
	}()
	kills := 0
	for running := true; running; {
		select {
		case err := <-done:
			do(t, err)
			running = false
		case <-time.After(60 * time.Millisecond):
			if kills < 3 {
				h.kill()
				kills++
			}
		}
	}
	if want := sha256.Sum256(big); !bytes.Equal(sum, want[:]) {
		t.Error("wrong octets")
	}
	if kills < 2 {
		t.Errorf("the file was read after %d kills, want 2", kills)
	}
	if _, starts, err := h.Stats(context.Background()); err != nil || starts < kills+1 {
		t.Errorf("%d starts after %d kills, %v", starts, kills, err)
	}
}

func TestHostAndDaemonDeadReadsWait(t *testing.T) {
	h := newHouse(t, 0, nil)
	content := random(4<<20, 2)
	_, d := h.image(map[string][]byte{"f": content})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	defer f.Close()
	first := h.pid()
	h.halt() // the host dies
	buf := make([]byte, 4096)
	if _, err := f.ReadAt(buf, 0); err != nil {
		t.Errorf("while the daemon lives: %v", err)
	}
	do(t, syscall.Kill(first, syscall.SIGKILL))
	read := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(buf, 3<<20)
		read <- err
	}()
	select {
	case err := <-read:
		t.Fatalf("a read without a daemon ended: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	h.start()
	select {
	case err := <-read:
		do(t, err)
	case <-time.After(20 * time.Second):
		t.Fatal("the read does not end")
	}
	second := h.pid()
	h.halt()
	h.start() // takes over the one that lives
	if f2, err := h.Open(context.Background(), d); err != nil {
		t.Error(err)
	} else {
		f2.Close()
	}
	if third := h.pid(); third != second {
		t.Errorf("daemon %d was replaced by %d though it lived", second, third)
	}
	h.halt()
	h.cfg.Limit = 1 << 30 // other settings
	h.start()
	if f2, err := h.Open(context.Background(), d); err != nil {
		t.Error(err)
	} else {
		f2.Close()
	}
	if h.pid() == second {
		t.Error("a daemon of other settings was kept")
	}
	if _, err := f.ReadAt(buf, 2<<20); err != nil {
		t.Error(err)
	}
}

// Host and daemon are both killed, and no host comes back: the daemon's heir takes over, as often as that happens, what waited goes on, and
// nothing is left in the end.
func TestHeirServesWithoutAHost(t *testing.T) {
	h := newHouse(t, 0, nil)
	content := random(6<<20, 5)
	_, d := h.image(map[string][]byte{"f": content})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	defer f.Close()
	h.halt()
	pid := h.pid()
	for i := range int64(2) {
		do(t, syscall.Kill(pid, syscall.SIGKILL))
		buf := make([]byte, 4096)
		read := make(chan error, 1)
		go func() {
			_, err := f.ReadAt(buf, (i+1)<<20)
			read <- err
		}()
		select {
		case err := <-read:
			do(t, err)
		case <-time.After(60 * time.Second):
			t.Fatal("the read hangs")
		}
		next := h.pid()
		if next == pid {
			t.Fatal("the daemon lives")
		}
		pid = next
	}
	h.start() // a host that comes back takes it over
	if f2, err := h.Open(context.Background(), d); err != nil {
		t.Error(err)
	} else {
		f2.Close()
	}
	if now := h.pid(); now != pid {
		t.Errorf("the host replaced daemon %d by %d", pid, now)
	}
}

// heirs are the heirs that wait for a daemon of the run folder.
func heirs(t *testing.T, run string) (n int) {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	do(t, err)
	for _, name := range all {
		text, _ := os.ReadFile(name)
		if bytes.Contains(text, []byte("\x00"+heirFlag+"\x00")) && bytes.Contains(text, []byte("\x00"+run+"\x00")) {
			n++
		}
	}
	return n
}

// Each daemon has one heir; those of daemons that others replaced go, and with the last daemon the last.
func TestHeirsGo(t *testing.T) {
	h := newHouse(t, 0, nil)
	_, d := h.image(map[string][]byte{"f": random(1<<20, 6)})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	f.Close()
	for range 3 {
		pid := h.pid()
		do(t, syscall.Kill(pid, syscall.SIGKILL))
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			f, err := h.Open(context.Background(), d) // by the next one
			do(t, err)
			f.Close()
			if syscall.Kill(pid, 0) == syscall.ESRCH {
				break
			}
		}
	}
	for end := time.Now().Add(heirWait + 20*time.Second); heirs(t, h.cfg.RunDir) != 1; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d heirs of one daemon", heirs(t, h.cfg.RunDir))
		}
	}
	h.halt()
	h.park.drop()
	do(t, h.Stop(context.Background()))
	if n := heirs(t, h.cfg.RunDir); n != 0 {
		t.Errorf("%d heirs are left", n)
	}
}

func TestDaemonOfADeadKeeperIsReplaced(t *testing.T) {
	h := newHouse(t, 0, nil)
	_, d := h.image(map[string][]byte{"f": random(2<<20, 3)})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	f.Close()
	first := h.pid()
	h.halt()
	h.park.drop()
	h.start()
	f, err = h.Open(context.Background(), d)
	do(t, err)
	defer f.Close()
	if _, err := f.ReadAt(make([]byte, 10), 1<<20); err != nil {
		t.Error(err)
	}
	if h.pid() == first {
		t.Error("the daemon of a connection that nobody holds was kept")
	}
}

func TestNothingIsLeft(t *testing.T) {
	before := openFiles(t)
	var pid int
	t.Run("life", func(t *testing.T) {
		h := newHouse(t, 0, nil)
		meta, d := h.image(map[string][]byte{"f": random(3<<20, 4)})
		f, err := h.Open(context.Background(), d)
		do(t, err)
		at := mountImage(t, meta, f)
		f.Close()
		_, err = os.ReadFile(filepath.Join(at, "f"))
		do(t, err)
		text, err := os.ReadFile("/proc/self/mountinfo")
		do(t, err)
		if strings.Contains(string(text), "dsec-blobs") {
			t.Error("the FUSE file system is attached to the tree")
		}
		pid = h.pid()
		if dir, err := groupDir(h.cfg.Group); err == nil {
			if text, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err != nil || !strings.Contains(string(text), fmt.Sprint(pid)) {
				t.Errorf("the daemon's cgroup has %q, %v", text, err)
			}
		}
	})
	for end := time.Now().Add(10 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(5 * time.Millisecond) { // until it is reaped
		if time.Now().After(end) {
			t.Fatalf("daemon %d lives", pid)
		}
	}
	if dir, err := groupDir(fmt.Sprintf("dsec-blobtest%d", os.Getpid())); err == nil {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("cgroup %s is left", dir)
		}
	}
	runtime.GC()
	if after := openFiles(t); after > before+2 { // the runtime's own
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

func openFiles(t testing.TB) int {
	e, err := os.ReadDir("/proc/self/fd")
	do(t, err)
	return len(e)
}

// A process whose read is stuck ends with its SIGKILL at once, though the store hangs.
func TestKillOfAProcessWhoseReadIsStuck(t *testing.T) {
	for _, through := range []string{"fuse", "erofs"} {
		t.Run(through, func(t *testing.T) { // each house ends before the next: they have one group
			h := newHouse(t, 40*time.Second, nil)
			meta, d := h.image(map[string][]byte{"f": random(3<<20, 5)})
			f, err := h.Open(context.Background(), d)
			do(t, err)
			path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
			if through == "erofs" {
				path = filepath.Join(mountImage(t, meta, f), "f")
			}
			cmd := exec.Command("cat", path)
			do(t, cmd.Start())
			time.Sleep(300 * time.Millisecond)
			began := time.Now()
			do(t, cmd.Process.Kill())
			cmd.Wait()
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("%s: the process ended %v after its kill", through, took)
			} else {
				t.Logf("%s: ended after %v", through, took)
			}
			f.Close()
		})
	}
}

// Signals that do not kill leave a read alone: a failed page would be an error of the disk.
func TestSignalsDoNotFailReads(t *testing.T) {
	h := newHouse(t, 600*time.Millisecond, nil)
	meta, d := h.image(map[string][]byte{"f": bytes.Repeat([]byte("line\n"), 1<<19)})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	at := mountImage(t, meta, f)
	f.Close()
	cmd := exec.Command("sh", "-c", `trap : USR1; while read x; do n=$((n+1)); [ $n = 300000 ] && break; done < "$0"; echo $n`, filepath.Join(at, "f"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	do(t, cmd.Start())
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				cmd.Process.Signal(syscall.SIGUSR1)
			}
		}
	}()
	err = cmd.Wait()
	close(stop)
	if err != nil || strings.TrimSpace(out.String()) != "300000" {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestHostileCalls(t *testing.T) {
	st := newTrouble()
	d := st.add(random(UnitSize, 1))
	r := newRig(t, st, nil)
	for name, text := range map[string][]byte{
		"huge":       {0xff, 0xff, 0xff, 0xff, '{'},
		"half":       {10, 0, 0, 0, '{'},
		"no json":    {3, 0, 0, 0, 'a', 'b', 'c'},
		"null":       {4, 0, 0, 0, 'n', 'u', 'l', 'l'},
		"empty":      {0, 0, 0, 0},
		"no header":  {1},
		"wrong type": append([]byte{10, 0, 0, 0}, `{"op": 42}`...),
	} {
		c := dialWait(t, r.cfg.RunDir)
		_, err := c.c.Write(text)
		do(t, err)
		if name == "no json" || name == "null" || name == "wrong type" || name == "empty" {
			c.c.SetReadDeadline(time.Now().Add(10 * time.Second))
			if n, err := c.c.Read(make([]byte, 100)); err != nil || n < 5 {
				t.Errorf("%s: %d octets, %v; want an answer", name, n, err)
			}
		}
		c.Close()
	}
	for name, bad := range map[string]Data{
		"none": {}, "no size": {Digest: d.Digest, Units: d.Units}, "negative": {d.Digest, -1, d.Units, 0}, "huge": {d.Digest, 1 << 62, d.Units, 0},
		"path": {"sha256:../../../../etc/passwd", 1, d.Units, 0}, "hot": {d.Digest, 10, d.Units, 11}, "upper": {strings.ToUpper(d.Digest), 10, d.Units, 0},
		"short": {d.Digest[:20], 10, d.Units, 0}, "units": {d.Digest, 10, "x", 0},
	} {
		if _, err := r.client.Open(context.Background(), r.mount, bad); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	if _, err := r.client.Reads(context.Background(), "sha256:zz", false); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
	if _, _, err := r.client.call(context.Background(), call{Op: "nothing"}); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Error(err)
	}
	for _, name := range []string{"x", "..", strings.Repeat("a", 64), strings.Repeat("0", 63) + "g"} {
		if fd, err := unix.Openat(int(r.mount.Fd()), name, unix.O_RDONLY, 0); err == nil {
			var st unix.Stat_t
			if unix.Fstat(fd, &st); st.Mode&unix.S_IFMT == unix.S_IFREG {
				t.Errorf("file %q exists", name)
			}
			unix.Close(fd)
		}
	}
	same(t, r.open(d), random(UnitSize, 1))
}

func FuzzRequest(f *testing.F) {
	f.Add(make([]byte, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parseRequest(b); err == nil {
			initReply(r.body)
		}
	})
}

// A keeper that died takes what was parked with it; the next one gets it again from the daemon, and a kill costs nothing then either.
func TestParkIsFilledAgain(t *testing.T) {
	h := newHouse(t, 0, nil)
	content := random(3<<20, 6)
	_, d := h.image(map[string][]byte{"f": content})
	f, err := h.Open(context.Background(), d)
	do(t, err)
	defer f.Close()
	h.park.drop()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, files, err := h.park.Parked(context.Background(), parkName); err == nil {
			closeFiles(files)
			break
		}
		if time.Now().After(end) {
			t.Fatal("the connection is not parked again")
		}
	}
	first := h.pid()
	h.kill()
	if _, err := f.ReadAt(make([]byte, 4096), 2<<20); err != nil {
		t.Error(err)
	}
	if h.pid() == first {
		t.Error("the daemon was not replaced")
	}
}
