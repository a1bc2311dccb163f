package keeper

import (
	"container/list"
	"sync"

	"golang.org/x/sys/unix"
)

// kernelFile names a file of a sandbox's groups that is read at the ends of commands.
type kernelFile struct {
	ctrl  string // controller whose folder it is in; "" for the v2 tree
	group string // command group, in the v2 tree
	file  string
}

// kernelFiles are the files of one sandbox that are kept open: reading one that is open costs a fifth of the way to it and an open.
// Those of the sandboxes whose turn was longest ago are closed, so that thousands of idle ones hold none.
type kernelFiles struct {
	recent *recent
	at     *list.Element // in recent, guarded by its lock; nil: in none

	mu   sync.Mutex
	open map[kernelFile]int
}

// recent orders the sandboxes that have files open.
type recent struct {
	mu    sync.Mutex
	order *list.List // of *kernelFiles, the latest first
}

const keptOpen = 256 // sandboxes with open files; each has about five

func newRecent() *recent { return &recent{order: list.New()} }

func (r *recent) files() *kernelFiles { return &kernelFiles{recent: r, open: map[kernelFile]int{}} }

// touch puts f first and returns one whose files are to be closed for it, or nil.
func (r *recent) touch(f *kernelFiles) *kernelFiles {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.at != nil {
		r.order.MoveToFront(f.at)
		return nil
	}
	f.at = r.order.PushFront(f)
	if r.order.Len() <= keptOpen {
		return nil
	}
	last := r.order.Back()
	old := last.Value.(*kernelFiles)
	r.order.Remove(last)
	old.at = nil
	return old
}

// closeAll closes the files; f may be used again.
func (f *kernelFiles) closeAll() {
	f.recent.mu.Lock()
	if f.at != nil {
		f.recent.order.Remove(f.at)
		f.at = nil
	}
	f.recent.mu.Unlock()
	f.closeFiles()
}

func (f *kernelFiles) closeFiles() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, fd := range f.open {
		unix.Close(fd)
		delete(f.open, k)
	}
}

// drop closes the files of a command group that goes.
func (f *kernelFiles) drop(group string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, fd := range f.open {
		if k.group == group && k.ctrl == "" {
			unix.Close(fd)
			delete(f.open, k)
		}
	}
}

// with calls use with the open file. It does not wait.
func (b *group) with(k kernelFile, use func(fd int) error) error {
	if old := b.files.recent.touch(b.files); old != nil {
		old.closeFiles()
	}
	b.files.mu.Lock()
	defer b.files.mu.Unlock()
	fd, ok := b.files.open[k]
	if !ok {
		flags := unix.O_RDONLY | unix.O_CLOEXEC
		var dir int
		var path string
		switch {
		case k.ctrl != "":
			dir, path = b.atOf(k.ctrl, k.file)
		case k.group != "":
			dir, path = b.at("", k.group, k.file)
		default:
			dir, path = b.at("", k.file)
		}
		if k == peakV1 {
			flags = unix.O_RDWR | unix.O_CLOEXEC
		}
		var err error
		if fd, err = unix.Openat(dir, path, flags, 0); err != nil {
			return err
		}
		b.files.open[k] = fd
	}
	err := use(fd)
	for err == unix.EINTR {
		err = use(fd)
	}
	if err != nil { // the group is gone, and another of its name would not be this file
		unix.Close(fd)
		delete(b.files.open, k)
	}
	return err
}

// pread reads the file into buf.
func (b *group) pread(k kernelFile, buf []byte) (text []byte, err error) {
	err = b.with(k, func(fd int) error {
		n, err := unix.Pread(fd, buf, 0)
		text = buf[:max(n, 0)]
		return err
	})
	return text, err
}

// key reads a number from a file of "key value" lines.
func (b *group) key(k kernelFile, key string) (int64, error) {
	var buf [1024]byte
	text, err := b.pread(k, buf[:])
	if err != nil {
		return 0, err
	}
	return findKey(text, key, k.file)
}
