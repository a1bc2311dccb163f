package fileserver

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// maxWatches bounds the folders of one watch: each costs the kernel about 1 KiB and us a path.
const maxWatches = 16384

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK

type watch struct {
	call  *call
	fd    int
	rec   bool
	root  int32
	paths map[int32]string
}

func (c *call) watch() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		if err == unix.EMFILE {
			return refuse(filewire.Exhausted, "as many watches run as the kernel allows (fs.inotify.max_user_instances)")
		}
		return err
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	// The poller wakes the read below when the call is cancelled; an idle watch costs no CPU.
	stop := context.AfterFunc(c.ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	w := &watch{call: c, fd: fd, rec: c.req.Flags&filewire.Recursive != 0, paths: map[int32]string{}}
	wd, err := unix.InotifyAddWatch(fd, c.req.Path, watchMask)
	if err != nil {
		return watchError(err)
	}
	w.root = int32(wd)
	w.paths[w.root] = ""
	if w.rec {
		if dir, err := openDir(c.req.Path); err == nil {
			if err := w.below(dir, "", false); err != nil {
				return err
			}
		}
	}
	if err := w.tell(filewire.Ready, ""); err != nil {
		return err
	}
	buf := make([]byte, 16<<10)
	for {
		if err := c.flush(); err != nil {
			return err
		}
		n, err := f.Read(buf)
		if c.ctx.Err() != nil {
			return c.ctx.Err()
		}
		if err != nil {
			return err
		}
		over, err := w.events(buf[:n])
		if err != nil {
			return err
		}
		if over {
			return c.flush()
		}
	}
}

func watchError(err error) error {
	if err == unix.ENOSPC {
		return refuse(filewire.Exhausted, "as many folders are watched as the kernel allows (fs.inotify.max_user_watches)")
	}
	return err
}

func (w *watch) tell(k filewire.EventKind, path string) error {
	if len(path) > filewire.MaxRelative {
		k, path = filewire.Overflow, ""
	}
	if w.call.batch.AddEvent(filewire.Event{Kind: k, Path: path}); w.call.batch.Full() {
		return w.call.flush()
	}
	return nil
}

func join(dir, name string) string {
	switch {
	case name == "":
		return dir
	case dir == "":
		return name
	}
	return dir + "/" + name
}

// events handles what the kernel gave; over says that the watched file is gone.
func (w *watch) events(b []byte) (over bool, err error) {
	for len(b) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		n := int(binary.NativeEndian.Uint32(b[12:]))
		if n > len(b)-unix.SizeofInotifyEvent {
			return false, errors.New("inotify gave half an event")
		}
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+n]), "\x00")
		b = b[unix.SizeofInotifyEvent+n:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			if err := w.tell(filewire.Overflow, ""); err != nil {
				return false, err
			}
			continue
		}
		dir, known := w.paths[wd]
		if !known {
			continue // of a folder that moved away
		}
		over, err := w.event(wd, mask, dir, name)
		if over || err != nil {
			return over, err
		}
	}
	return false, nil
}

func (w *watch) event(wd int32, mask uint32, dir, name string) (over bool, err error) {
	path := join(dir, name)
	isDir := mask&unix.IN_ISDIR != 0
	switch {
	case mask&unix.IN_IGNORED != 0:
		delete(w.paths, wd)
		return wd == w.root, nil
	case mask&unix.IN_UNMOUNT != 0:
		return wd == w.root, nil
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		// Of folders below, their parents tell.
		if wd != w.root {
			return false, nil
		}
		return true, w.tell(filewire.Removed, "")
	case mask&unix.IN_CREATE != 0:
		err = w.tell(filewire.Created, path)
	case mask&unix.IN_MOVED_TO != 0:
		err = w.tell(filewire.MovedTo, path)
	case mask&unix.IN_MODIFY != 0:
		return false, w.tell(filewire.Modified, path)
	case mask&unix.IN_DELETE != 0:
		return false, w.tell(filewire.Removed, path)
	case mask&unix.IN_MOVED_FROM != 0:
		if isDir {
			w.forget(path)
		}
		return false, w.tell(filewire.MovedFrom, path)
	case mask&unix.IN_ATTRIB != 0:
		return false, w.tell(filewire.Attrib, path)
	}
	if err != nil || !isDir || !w.rec {
		return false, err
	}
	return false, w.add(path, mask&unix.IN_CREATE != 0)
}

// forget ends the watches of a folder that moved away and of those below it; where it moved to, it is found again.
func (w *watch) forget(path string) {
	for wd, p := range w.paths {
		if p == path || strings.HasPrefix(p, path+"/") {
			unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.paths, wd)
		}
	}
}

func (w *watch) full(rel string) string {
	if rel == "" {
		return w.call.req.Path
	}
	return strings.TrimRight(w.call.req.Path, "/") + "/" + rel
}

// add watches a folder that appeared and what is already below it. fresh tells of what was made before the watch was in place.
func (w *watch) add(rel string, fresh bool) error {
	dir, err := openat(unix.AT_FDCWD, w.full(rel), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return w.cannot(rel, err)
	}
	ok, err := w.mark(rel)
	if err != nil || !ok {
		unix.Close(dir)
		return err
	}
	return w.below(dir, rel, fresh)
}

// cannot tells of a folder whose events will be missing; one that is gone again has none.
func (w *watch) cannot(rel string, err error) error {
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil
	}
	return w.tell(filewire.Overflow, rel)
}

// mark puts the kernel's watch on a folder.
func (w *watch) mark(rel string) (bool, error) {
	p := w.full(rel)
	if len(p) > filewire.MaxPath || len(w.paths) >= maxWatches {
		return false, w.tell(filewire.Overflow, rel)
	}
	wd, err := unix.InotifyAddWatch(w.fd, p, watchMask|unix.IN_ONLYDIR|unix.IN_DONT_FOLLOW)
	if err != nil {
		return false, w.cannot(rel, err)
	}
	w.paths[int32(wd)] = rel
	return true, nil
}

func (w *watch) below(dir int, rel string, fresh bool) error {
	walk := walker{ctx: w.call.ctx}
	walk.trouble = func(rel string, err error) error { return w.cannot(rel, err) }
	walk.visit = func(_ int, _, rel string, st *unix.Stat_t, _ int) (bool, error) {
		if fresh {
			if err := w.tell(filewire.Created, rel); err != nil {
				return false, err
			}
		}
		return st.Mode&unix.S_IFMT == unix.S_IFDIR, nil
	}
	walk.enter = func(dir int, rel string, _ *unix.Stat_t) (bool, error) {
		if virtual(dir) {
			return false, nil
		}
		return w.mark(rel)
	}
	return walk.dir(dir, rel, 1)
}

// virtual says that a folder lies on one of the kernel's own file systems, whose files a tree transfer leaves out.
func virtual(fd int) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil {
		return false
	}
	switch uint32(st.Type) {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC:
		return true
	}
	return false
}
