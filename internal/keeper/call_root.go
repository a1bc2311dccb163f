package keeper

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	initproc "github.com/dsec-dev/dsec/internal/keeper/init"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// callRoot is an environment for calls: a process in a mount namespace that is the environment's read-only root, which clones each call.
type callRoot struct {
	layers []string
	ready  chan struct{} // closed when it is there, or err is
	err    error
	fd     int // stream of messages
	pid    int
	used   time.Time
	users  int
	gone   bool // not in the map any more: ended with its last user
}

// callRoots keeps environments by their layers, devices and filter.
type callRoots struct {
	k       *Keeper
	program struct {
		sync.Once
		f   *os.File
		err error
	}
	mu    sync.Mutex
	byKey map[[32]byte]*callRoot
}

const (
	keptCallRoots = 32
	rootBound     = 10 * time.Second
)

func newCallRoots(k *Keeper) *callRoots { return &callRoots{k: k, byKey: map[[32]byte]*callRoot{}} }

func rootKey(r *Call) (key [32]byte) {
	h := sha256.New()
	for _, l := range r.Layers {
		h.Write([]byte(l))
		h.Write([]byte{0})
	}
	h.Write([]byte{0})
	for _, d := range r.Devices {
		h.Write([]byte(d))
		h.Write([]byte{0})
	}
	h.Write([]byte{0})
	h.Write(r.Filter)
	h.Sum(key[:0])
	return key
}

// send gives a call to its environment, which is made at its first use and again when it died.
func (s *callRoots) send(ctx context.Context, r *Call, message []byte, fds []int) error {
	key := rootKey(r)
	for again := true; ; again = false {
		root, err := s.get(ctx, key, r)
		if err != nil {
			return err
		}
		for {
			err = unix.Sendmsg(root.fd, message, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
			if err != unix.EINTR {
				break
			}
		}
		if err != nil {
			s.drop(func(have *callRoot) bool { return have == root })
		}
		s.release(root)
		if err == nil {
			return nil
		}
		if !again {
			return fmt.Errorf("tell its environment's parent: %w: %w", err, sandbox.ErrLost)
		}
		s.k.log.Warn("call: the parent of an environment died", "err", err)
	}
}

func (s *callRoots) get(ctx context.Context, key [32]byte, r *Call) (*callRoot, error) {
	s.mu.Lock()
	root := s.byKey[key]
	if root == nil {
		root = &callRoot{layers: r.Layers, ready: make(chan struct{}), fd: -1}
		s.byKey[key] = root
		filter, devices := r.Filter, r.Devices
		go func() {
			root.err = s.open(root, filter, devices)
			close(root.ready)
			if root.err != nil {
				s.drop(func(have *callRoot) bool { return have == root })
			}
		}()
	}
	root.users++
	root.used = time.Now()
	s.mu.Unlock()
	s.evict()
	select {
	case <-root.ready:
	case <-ctx.Done():
		s.release(root)
		return nil, fmt.Errorf("wait for its environment: %w", ctx.Err())
	}
	if root.err != nil {
		err := root.err
		s.release(root)
		return nil, err
	}
	return root, nil
}

func (s *callRoots) release(root *callRoot) {
	s.mu.Lock()
	root.users--
	end := root.gone && root.users == 0
	s.mu.Unlock()
	if end {
		root.end()
	}
}

// evict ends the environment that was used least lately when there are too many.
func (s *callRoots) evict() {
	s.mu.Lock()
	var old *callRoot
	if len(s.byKey) > keptCallRoots {
		for _, r := range s.byKey {
			if r.users == 0 && (old == nil || r.used.Before(old.used)) {
				old = r
			}
		}
	}
	s.mu.Unlock()
	if old != nil {
		s.drop(func(r *callRoot) bool { return r == old })
	}
}

// drop forgets environments; those that nobody uses end at once. What runs in them goes on.
func (s *callRoots) drop(match func(*callRoot) bool) {
	var end []*callRoot
	s.mu.Lock()
	for key, r := range s.byKey {
		if match(r) && !r.gone {
			delete(s.byKey, key)
			r.gone = true
			if r.users == 0 {
				end = append(end, r)
			}
		}
	}
	s.mu.Unlock()
	for _, r := range end {
		r.end()
	}
}

// dropLayer forgets the environments that have a layer, which is to be unmounted.
func (s *callRoots) dropLayer(id string) {
	s.drop(func(r *callRoot) bool { return slices.Contains(r.layers, id) })
}

func (s *callRoots) close() { s.drop(func(*callRoot) bool { return true }) }

func (r *callRoot) end() {
	<-r.ready
	if r.fd < 0 {
		return
	}
	unix.Close(r.fd) // it ends with its stream
	r.fd = -1
	reap(r.pid)
}

// open makes an environment.
func (s *callRoots) open(root *callRoot, filter []byte, devices []string) (err error) {
	s.program.Do(func() { s.program.f, s.program.err = initproc.OpenCalls() })
	if s.program.err != nil {
		return fmt.Errorf("%w", s.program.err)
	}
	mnt, err := s.k.composeCall(root.layers)
	if err != nil {
		return fmt.Errorf("compose the environment: %w", err)
	}
	defer unix.Close(mnt)
	var dev int
	if len(devices) > 0 {
		dev, err = deviceDev(devices)
	} else {
		dev, err = clonePlain(s.k.tmpl.dev)
	}
	if err != nil {
		return fmt.Errorf("/dev: %w", err)
	}
	defer unix.Close(dev)
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%w", err)
	}
	unix.SetsockoptInt(p[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	null := uintptr(s.k.tmpl.null)
	pid, err := syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(int(s.program.f.Fd())), []string{"dsec-calls"},
		&syscall.ProcAttr{Files: []uintptr{null, null, null, uintptr(p[1])}, Sys: &syscall.SysProcAttr{Setsid: true}})
	unix.Close(p[1])
	if err != nil {
		unix.Close(p[0])
		return fmt.Errorf("start the environment's parent: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(p[0])
			unix.Kill(pid, unix.SIGKILL)
			reap(pid)
		}
	}()
	tv := unix.NsecToTimeval(int64(rootBound))
	unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	// An octet stands before the filter, so that the message is never empty.
	if err := unix.Sendmsg(p[0], append([]byte{0}, filter...), unix.UnixRights(mnt, dev), nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("tell the environment's parent: %w", err)
	}
	var buf [reportSize + 1]byte
	n, err := unix.Read(p[0], buf[:])
	for err == unix.EINTR {
		n, err = unix.Read(p[0], buf[:])
	}
	if err != nil || n != reportSize {
		return fmt.Errorf("the environment's parent says %d octets: %w", n, errors.Join(err, sandbox.ErrLost))
	}
	if stage := binary.LittleEndian.Uint32(buf[:]); stage != 0 {
		return fmt.Errorf("enter the environment: %w", unix.Errno(binary.LittleEndian.Uint32(buf[4:])))
	}
	root.fd, root.pid = p[0], pid
	return nil
}

// callFolders are the places that a call's mounts need in any environment, which lie above its layers.
var callFolders = []string{"dev", "proc", "tmp", "box"}

// composeCall makes a detached read-only mount of layers below the folders that a call needs.
func (k *Keeper) composeCall(layers []string) (fd int, err error) {
	err = k.layers.do(func() error {
		for _, d := range append([]string{""}, callFolders...) {
			if err := unix.Mkdir("/furniture/"+d, 0o755); err != nil && err != unix.EEXIST {
				return err
			}
		}
		paths := []string{"/furniture"}
		for _, id := range slices.Backward(layers) {
			if err := checkLayerID(id); err != nil {
				return err
			}
			k.layers.mu.Lock()
			have := k.layers.mounted[id]
			k.layers.mu.Unlock()
			if !have {
				return fmt.Errorf("layer %.80q is not mounted: %w", id, sandbox.ErrNotFound)
			}
			paths = append(paths, "/layers/"+id)
		}
		if k.overlayByPath {
			fd, err = readOnlyOverlayByPath(paths)
		} else {
			fd, err = readOnlyOverlay(paths)
		}
		return err
	})
	return fd, err
}

const callAttr = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID

func readOnlyOverlay(paths []string) (int, error) {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", "dsec"); err != nil {
		return -1, fsError(fs, "overlay", err)
	}
	for _, p := range paths {
		lower, err := unix.Open(p, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		err = unix.FsconfigSetFd(fs, "lowerdir+", lower)
		unix.Close(lower)
		if err != nil {
			return -1, fsError(fs, "overlay lower", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "overlay", err)
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, callAttr)
}

// readOnlyOverlayByPath is for kernels that take lowers by name alone. A colon, as in an ID, would part names.
func readOnlyOverlayByPath(paths []string) (int, error) {
	const at = "/scratch"
	lowers := make([]string, len(paths))
	for i, p := range paths {
		lowers[i] = strings.ReplaceAll(p, ":", `\:`)
	}
	if err := unix.Mount("dsec", at, "overlay", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, "lowerdir="+strings.Join(lowers, ":")); err != nil {
		return -1, fmt.Errorf("overlay of %d layers by name: %w", len(paths), err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	return unix.OpenTree(unix.AT_FDCWD, at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
}
