package fileserver

import (
	"context"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// walker goes through a tree by descriptors, so that no path grows over the kernel's limit and nothing that moves meanwhile leads
// astray. It holds a few KiB for each level and no list of a folder.
type walker struct {
	ctx context.Context
	// visit gets each entry, and whether to go into it is its answer.
	visit func(dir int, name, rel string, st *unix.Stat_t, level int) (into bool, err error)
	// trouble is told what could not be looked at; the walk goes on unless it returns an error.
	trouble func(rel string, err error) error
	// enter, when set, gets each folder that was opened to go into.
	enter func(dir int, rel string, st *unix.Stat_t) (into bool, err error)
}

// dir walks the folder fd, which it closes. Entries of it have this level.
func (w *walker) dir(fd int, rel string, level int) error {
	defer unix.Close(fd)
	buf := make([]byte, 8<<10)
	names := make([]string, 0, 64)
	for {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		n := 0
		err := retry(func() (err error) { n, err = unix.ReadDirent(fd, buf); return err })
		if err != nil {
			return w.trouble(rel, err)
		}
		if n <= 0 {
			return nil
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if err := w.one(fd, name, rel, level); err != nil {
				return err
			}
		}
	}
}

func (w *walker) one(dir int, name, rel string, level int) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	path := name
	if rel != "" {
		path = rel + "/" + name
	}
	if len(path) > filewire.MaxRelative {
		return w.trouble(rel, refuse(filewire.Invalid, "holds names whose path is too long"))
	}
	var st unix.Stat_t
	if err := lstatat(dir, name, &st); err != nil {
		if err == unix.ENOENT {
			return nil // removed meanwhile
		}
		return w.trouble(path, err)
	}
	into, err := w.visit(dir, name, path, &st, level)
	if err != nil || !into {
		return err
	}
	if level >= filewire.MaxDepth {
		return w.trouble(path, refuse(filewire.Invalid, "lies too deep; what it holds is left out"))
	}
	fd, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		if err == unix.ENOENT {
			return nil
		}
		return w.trouble(path, err)
	}
	if w.enter != nil {
		into, err := w.enter(fd, path, &st)
		if err != nil || !into {
			unix.Close(fd)
			return err
		}
	}
	return w.dir(fd, path, level+1)
}
