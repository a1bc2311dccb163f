package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// enterOwn moves the calling thread into a mount namespace of its own that shares nothing and holds little: each mount in it is
// copied at every birth. The caller is the only thread that does so and then executes itself, which makes it the whole process's.
// dir is the run folder.
func enterOwn(dir string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare the mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(info)), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		pre, post, _ := strings.Cut(lines[i], " - ")
		a, b := strings.Fields(pre), strings.Fields(post)
		if len(a) < 5 || len(b) < 1 {
			continue
		}
		switch at := a[4]; {
		case strings.HasPrefix(dir+"/", strings.TrimSuffix(unescape(at), "/")+"/"): // the run folder lies on it: we mount there
		case at == "/proc" || at == "/dev" || at == "/sys" || at == "/sys/fs/cgroup":
		case b[0] == "cgroup2" || b[0] == "cgroup":
		default:
			// What can't be detached stays: it costs time at births, nothing else.
			unix.Unmount(unescape(at), unix.MNT_DETACH)
		}
	}
	return nil
}

// unescape undoes mountinfo's octal escapes.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// layers is the mount namespace that holds layers, each at /<id>. One thread lives in it and does what must be done there; the
// keeper's other threads, and so the sandboxes, never carry a copy of these mounts.
type layers struct {
	work chan func()
	ns   int // pins the namespace, also for a host that enters it

	mu      sync.Mutex
	mounted map[string]bool
}

// newLayers makes the namespace. dir is an empty folder of the run folder; it is left as it is outside.
func newLayers(dir string) (*layers, error) {
	l := &layers{work: make(chan func()), ns: -1, mounted: map[string]bool{}}
	ready := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := l.enter(dir)
		ready <- err
		if err != nil {
			return
		}
		for f := range l.work {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("make the layers' namespace: %w", err)
	}
	return l, nil
}

func (l *layers) enter(dir string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("dsec-layers", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=16m"); err != nil {
		return err
	}
	for _, d := range []string{"proc", "dev", "layers", "scratch"} {
		if err := unix.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return err
		}
	}
	for _, d := range []string{"proc", "dev"} { // /proc/self/fd names a layer's file, /dev has the loop devices
		if err := unix.Mount("/"+d, filepath.Join(dir, d), "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	fd, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	l.ns = fd
	return err
}

// do runs f on the namespace's thread.
func (l *layers) do(f func() error) error {
	done := make(chan error, 1)
	l.work <- func() { done <- f() }
	return <-done
}

func checkLayerID(id string) error {
	if id == "" || len(id) > 255 || strings.ContainsAny(id, "/\x00") || id == "." || id == ".." {
		return fmt.Errorf("layer %.80q: want a file name: %w", id, sandbox.ErrInvalid)
	}
	return nil
}

// mount mounts an EROFS image, once: fds are its file and, where its contents lie apart, that of its extra device. Only the attaching is
// done on the namespace's thread, which births wait for: a file of the blob daemon can be opened only while that lives.
func (l *layers) mount(_ context.Context, id string, fds []int, direct bool) error {
	if err := checkLayerID(id); err != nil {
		return err
	}
	l.mu.Lock()
	have := l.mounted[id]
	l.mu.Unlock()
	if have {
		return nil
	}
	m, err := openLayer(fds, direct)
	if err != nil {
		return fmt.Errorf("mount layer %s: %w", id, err)
	}
	defer unix.Close(m)
	return l.do(func() error {
		l.mu.Lock()
		have := l.mounted[id]
		l.mu.Unlock()
		if have {
			return nil
		}
		at := "/layers/" + id
		if err := unix.Mkdir(at, 0o700); err != nil && err != unix.EEXIST {
			return fmt.Errorf("mount layer %s: %w", id, err)
		}
		if err := unix.MoveMount(m, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach layer %s: %w", id, err)
		}
		l.mu.Lock()
		l.mounted[id] = true
		l.mu.Unlock()
		return nil
	})
}

func (l *layers) unmount(id string) error {
	if err := checkLayerID(id); err != nil {
		return err
	}
	return l.do(func() error {
		l.mu.Lock()
		have := l.mounted[id]
		delete(l.mounted, id)
		l.mu.Unlock()
		if !have {
			return nil
		}
		if err := unix.Unmount("/layers/"+id, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount layer %s: %w", id, err)
		}
		return unix.Rmdir("/layers/" + id)
	})
}

func (l *layers) list() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := make([]string, 0, len(l.mounted))
	for id := range l.mounted {
		ids = append(ids, id)
	}
	return ids
}

// clones returns detached clones of layers, in the given order. The caller closes them.
func (l *layers) clones(ids []string) ([]int, error) {
	var fds []int
	err := l.do(func() error {
		for _, id := range ids {
			l.mu.Lock()
			have := l.mounted[id]
			l.mu.Unlock()
			if !have {
				return fmt.Errorf("layer %.80q is not mounted: %w", id, sandbox.ErrNotFound)
			}
			fd, err := unix.OpenTree(unix.AT_FDCWD, "/layers/"+id, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
			if err != nil {
				return fmt.Errorf("clone layer %s: %w", id, err)
			}
			fds = append(fds, fd)
		}
		return nil
	})
	if err != nil {
		closeAll(fds)
		return nil, err
	}
	return fds, nil
}

// openLayer makes a detached mount of an image's files, through loop devices where this kernel's EROFS reads no files (before 6.12), or
// not those of this file system. What comes as a folder is such a mount already, see FolderMount.
func openLayer(fds []int, direct bool) (int, error) {
	if isFolder(fds[0]) {
		return unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
	}
	paths := make([]string, len(fds))
	for i, fd := range fds {
		paths[i] = "/proc/self/fd/" + strconv.Itoa(fd)
	}
	m, err := openErofs(paths, direct, inMemory(paths[0]))
	if errors.Is(err, unix.EINVAL) {
		m, err = openErofs(paths, false, false) // the kernel has no such option, or the file can't be read so
	}
	if errors.Is(err, unix.ENOTBLK) {
		return openLoops(fds)
	}
	return m, err
}

func isFolder(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
}

// openErofs makes a detached mount of an EROFS image: a file or block device, and those of its extra devices. ENOTBLK: this kernel wants
// block devices.
func openErofs(sources []string, direct, dax bool) (int, error) {
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("erofs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return -1, fsError(fs, "erofs", err)
	}
	if direct {
		if err := unix.FsconfigSetFlag(fs, "directio"); err != nil {
			return -1, fsError(fs, "erofs", err)
		}
	}
	if dax {
		if err := unix.FsconfigSetString(fs, "dax", "always"); err != nil {
			return -1, fsError(fs, "erofs", err)
		}
	}
	for i, source := range sources {
		key := "device"
		if i == 0 {
			key = "source"
		}
		if err := unix.FsconfigSetString(fs, key, source); err != nil {
			return -1, fsError(fs, "erofs", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "erofs", err)
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
}

// fsError adds what the kernel wrote about a mount.
func fsError(fs int, what string, err error) error {
	var buf [512]byte
	var text []string
	for len(text) < 8 {
		n, e := unix.Read(fs, buf[:])
		if e != nil || n <= 0 {
			break
		}
		text = append(text, strings.TrimSpace(string(buf[:n])))
	}
	if len(text) == 0 {
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w (%s)", what, err, strings.Join(text, "; "))
}

// openLoops mounts through loop devices, which go away with the mount.
func openLoops(files []int) (int, error) {
	var devs []int
	defer func() { closeAll(devs) }()
	var paths []string
	for _, f := range files {
		path, dev, err := openLoop(f)
		if err != nil {
			return -1, err
		}
		devs, paths = append(devs, dev), append(paths, path)
	}
	return openErofs(paths, false, false)
}

// inMemory reports whether an image is a device whose contents are memory already: its pages are used where they are, without a copy in
// the page cache.
func inMemory(source string) bool {
	at, err := os.Readlink(source)
	return err == nil && strings.HasPrefix(at, "/dev/pmem")
}

// openLoop puts a loop device on a file. The device goes away when the descriptor and its mounts are closed.
func openLoop(file int) (path string, dev int, err error) {
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", -1, fmt.Errorf("loop device: %w", err)
	}
	defer unix.Close(ctl)
	for range 64 {
		n, err := unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", -1, fmt.Errorf("free loop device: %w", err)
		}
		path := "/dev/loop" + strconv.Itoa(n)
		dev, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", -1, fmt.Errorf("loop device: %w", err)
		}
		cfg := unix.LoopConfig{Fd: uint32(file), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR}}
		copy(cfg.Info.File_name[:], "dsec-layer")
		err = unix.IoctlLoopConfigure(dev, &cfg)
		if err == unix.EBUSY { // another took it between
			unix.Close(dev)
			continue
		}
		if err != nil {
			unix.Close(dev)
			return "", -1, fmt.Errorf("configure loop device: %w", err)
		}
		return path, dev, nil
	}
	return "", -1, fmt.Errorf("loop device: all taken: %w", sandbox.ErrExhausted)
}
