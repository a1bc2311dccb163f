package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/keeper"
)

const keeperDir = "/run/keeper"

// machine is this machine.
type machine struct {
	keeper    int           // pid
	keeperUp  chan struct{} // closed when it answers
	keeperErr error

	mu    sync.Mutex
	birth *keeper.Birth
	born  *keeper.Born
	ready bool // disks are mounted
}

// run is process 1.
func run() error {
	if err := mounts(); err != nil {
		return err
	}
	loopbackUp()
	reclaim()
	m := &machine{keeperUp: make(chan struct{})}
	if err := m.startKeeper(); err != nil {
		return err
	}
	go m.reap()
	go func() {
		m.keeperErr = m.awaitKeeper()
		close(m.keeperUp)
	}()
	if port := vsockPort(); port > 0 {
		return m.serveVsock(port)
	}
	at, err := findPort()
	if err != nil {
		return err
	}
	port, err := unix.Open(at, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", at, err)
	}
	return mux.Serve(blocking(port), m.accept, func() error { time.Sleep(5 * time.Millisecond); return nil })
}

// blocking reads and writes a descriptor without the runtime's poller: a port whose host is away is ready all the time.
type blocking int

func (b blocking) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(b), p)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if n < 0 {
			n = 0
		}
		return n, err
	}
}

func (b blocking) Write(p []byte) (done int, err error) {
	for done < len(p) {
		n, err := unix.Write(int(b), p[done:])
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (m *machine) startKeeper() error {
	log, err := os.OpenFile("/dev/console", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		return err
	}
	defer null.Close()
	m.keeper, err = syscall.ForkExec(program, []string{"dsec-keeper", "keeper", "--dir", keeperDir, "--instance", "vm", "--netns-pool", "1"},
		&syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{null.Fd(), log.Fd(), log.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		return fmt.Errorf("start the keeper: %w", err)
	}
	return nil
}

func (m *machine) awaitKeeper() error {
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		c, err := net.Dial("unix", keeperDir+"/"+keeper.SocketName)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(end) {
			return fmt.Errorf("the keeper does not answer: %w", err)
		}
	}
}

// reap takes every child that ends: orphans of all kinds come here. The keeper's end is the machine's.
func (m *machine) reap() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			time.Sleep(10 * time.Millisecond)
		case pid == m.keeper:
			halt(fmt.Errorf("the keeper ended: wait status %#x", uint32(ws)))
		}
	}
}

// accept answers one stream of the host.
func (m *machine) accept(st *mux.Stream, body []byte) {
	var r vmwire.Request
	if err := json.Unmarshal(body, &r); err != nil {
		st.Reset("malformed request")
		return
	}
	switch r.Op {
	case vmwire.OpKeeper:
		m.relay(st)
		return
	case vmwire.OpDial:
		m.dial(st, r.Port)
		return
	case vmwire.OpUpper:
		if err := st.Accept(); err == nil {
			if err := m.sendUpper(st); err != nil {
				st.Reset(err.Error())
				return
			}
			st.CloseWrite()
		}
		return
	}
	st.Accept()
	answer, err := m.call(&r, st)
	if err != nil {
		answer = vmwire.Answer{Error: err.Error()}
		var errno syscall.Errno
		if errors.As(err, &errno) {
			answer.Errno = int(errno)
		}
	}
	b, err := json.Marshal(answer)
	if err != nil {
		st.Reset(err.Error())
		return
	}
	st.Write(b)
	st.CloseWrite()
}

func (m *machine) call(r *vmwire.Request, st io.Reader) (vmwire.Answer, error) {
	switch r.Op {
	case vmwire.OpHello:
		<-m.keeperUp
		m.mu.Lock()
		defer m.mu.Unlock()
		a := vmwire.Answer{Version: vmwire.Version}
		if m.birth != nil && m.born != nil {
			a.Born = string(m.birth.ID)
		}
		return a, m.keeperErr
	case vmwire.OpRenew:
		err := renew(r)
		if err == nil && len(r.Entropy) > 0 {
			m.mu.Lock()
			born := m.born
			m.mu.Unlock()
			if born != nil { // a fork: the sandbox stands still
				err = renewID(born.Pid)
			}
		}
		return vmwire.Answer{}, err
	case vmwire.OpPrepare:
		return vmwire.Answer{}, m.prepare(context.Background(), r.Layer)
	case vmwire.OpBirth:
		// The request is longer than an OPEN may be, so it follows.
		var b vmwire.Birth
		if err := json.NewDecoder(io.LimitReader(st, vmwire.MaxBirth)).Decode(&b); err != nil {
			return vmwire.Answer{}, fmt.Errorf("read the birth: %w", err)
		}
		born, err := m.bear(&b)
		return vmwire.Answer{Laid: born.Laid}, err
	case vmwire.OpSpace:
		var fs unix.Statfs_t
		err := unix.Statfs("/upper", &fs)
		return vmwire.Answer{Free: int64(fs.Bavail) * fs.Bsize, Total: int64(fs.Blocks) * fs.Bsize, Used: int64(fs.Blocks-fs.Bfree) * fs.Bsize}, err
	case vmwire.OpSync:
		unix.Sync()
		return vmwire.Answer{}, nil
	}
	return vmwire.Answer{}, fmt.Errorf("request %q is not known to this guest", r.Op)
}

// far gives the keeper's relay the streams of a session.
type far struct{ *mux.Stream }

func (f far) Offer() (uint32, keeper.Half, error) {
	st, err := f.Session().Offer()
	if err != nil {
		return 0, nil, err
	}
	return st.ID(), st, nil
}

func (f far) Take(uint32) (keeper.Half, error) { return nil, errors.New("the host offers no streams") }

func (m *machine) relay(st *mux.Stream) {
	<-m.keeperUp
	c, err := net.Dial("unix", keeperDir+"/"+keeper.SocketName)
	if err != nil {
		st.Reset(err.Error())
		return
	}
	if st.Accept() == nil {
		keeper.RelayInside(c.(*net.UnixConn), far{st})
	}
}

// bear mounts what the sandbox is made of and has the keeper make it.
func (m *machine) bear(r *vmwire.Birth) (*keeper.Born, error) {
	none := &keeper.Born{}
	var b keeper.Birth
	if err := json.Unmarshal(r.Birth, &b); err != nil {
		return none, fmt.Errorf("read the birth: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.born != nil {
		if m.birth.ID == b.ID {
			return m.born, nil
		}
		return none, fmt.Errorf("this machine has the sandbox %s", m.birth.ID)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c, err := m.client(ctx)
	if err != nil {
		return none, err
	}
	defer c.Close()
	for _, l := range append([]string{r.Layer}, volumes(&b)...) {
		if err := mountLayer(ctx, c, l); err != nil {
			return none, err
		}
	}
	if !m.ready {
		if err := mountUpper(); err != nil {
			return none, err
		}
		m.ready = true
	}
	b.Layers, b.UpperDir, b.WorkDir = []string{r.Layer}, "/upper/upper", "/upper/work"
	born, err := c.Create(ctx, &b)
	if err != nil {
		return none, err
	}
	m.birth, m.born = &b, born
	if err := giveScreen(born.Pid, int(b.UIDBase)); err != nil {
		return none, err
	}
	if r.Network != nil {
		if err := enterNetwork(born.Pid, r.Network); err != nil {
			return none, err
		}
	}
	return born, nil
}

// prepare does before a template is saved what each birth needs, so that its clones find it done and its pages warm: the layer is mounted,
// and a sandbox is born on a disk of memory, runs a program and goes.
func (m *machine) prepare(ctx context.Context, layer string) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	c, err := m.client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := mountLayer(ctx, c, layer); err != nil {
		return err
	}
	return warm(ctx, c, layer)
}

func (m *machine) client(ctx context.Context) (*keeper.Client, error) {
	<-m.keeperUp
	if m.keeperErr != nil {
		return nil, m.keeperErr
	}
	self, err := os.Open(program)
	if err != nil {
		return nil, err
	}
	defer self.Close()
	return keeper.Dial(ctx, keeperDir, keeper.DialOptions{Host: "process 1", Guest: self})
}

func volumes(b *keeper.Birth) (ids []string) {
	for _, v := range b.Volumes {
		ids = append(ids, v.Layer)
	}
	return ids
}

// mountLayer mounts a layer from the one or two disks that bear its name.
func mountLayer(ctx context.Context, c *keeper.Client, layer string) error {
	meta, err := disk(vmwire.Serial(layer, false))
	if err != nil {
		return err
	}
	i := keeper.Image{}
	if i.Meta, err = os.Open(meta); err != nil {
		return err
	}
	defer i.Meta.Close()
	if data, ok := contentDisk(layer); ok {
		if i.Data, err = os.Open(data); err != nil {
			return err
		}
		defer i.Data.Close()
	}
	return c.MountLayer(ctx, layer, i)
}

// contentDisk is the disk with a layer's contents where they lie apart. It came with the first one, so there is nothing to wait for.
func contentDisk(layer string) (string, bool) {
	name := vmwire.Serial(layer, true)
	if list, ok := argument("dsec.disks="); ok {
		mapped, _ := argument("dsec.mapped=")
		if !slices.Contains(strings.Split(list+","+mapped, ","), name) {
			return "", false
		}
		at, err := disk(name)
		return at, err == nil
	}
	list, _ := os.ReadDir("/sys/block")
	for _, e := range list {
		text, err := os.ReadFile("/sys/block/" + e.Name() + "/serial")
		if err == nil && strings.TrimSpace(string(text)) == name {
			return "/dev/" + e.Name(), true
		}
	}
	return "", false
}

func mountUpper() error {
	dev, err := disk("upper")
	if err != nil {
		return err
	}
	if err := unix.Mount(dev, "/upper", "ext4", unix.MS_NOATIME|unix.MS_NODEV, "errors=continue,discard"); err != nil {
		return fmt.Errorf("mount the writable disk: %w", err)
	}
	for _, d := range []string{"/upper/upper", "/upper/work"} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return os.Chmod("/upper", 0o700)
}
