package guest

import (
	"context"
	"fmt"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Stat describes a path. With follow a link at its end is followed: a dangling one is then ErrNotFound and a loop ErrInvalid.
func (f *Files) Stat(ctx context.Context, path string, follow bool) (Info, error) {
	act := fmt.Sprintf("stat %q", path)
	if err := checkPath(act, path); err != nil {
		return Info{}, err
	}
	r, err := f.simple(ctx, act, &filewire.Request{Op: filewire.OpStat, Path: path, Flags: flag(follow, filewire.Follow)})
	return infoOf(r), err
}

// infoOf is the info of a result, empty where there is none.
func infoOf(r *filewire.Result) Info {
	if r == nil || r.Info == nil {
		return Info{}
	}
	return *r.Info
}

// List walks a folder depth levels deep (at least 1) and gives entries to each as they come, in no order; a folder comes before
// what it holds. Paths are relative to it. An entry that can't be read carries Error and the listing goes on. An error of each
// ends the listing and is returned.
func (f *Files) List(ctx context.Context, path string, depth int, each func([]Info) error) error {
	act := fmt.Sprintf("list %q", path)
	if err := checkPath(act, path); err != nil {
		return err
	}
	depth = min(max(depth, 1), filewire.MaxDepth)
	c, err := f.start(ctx, act, &filewire.Request{Op: filewire.OpList, Path: path, Depth: uint32(depth)})
	if err != nil {
		return err
	}
	for {
		it, err := c.item()
		if err != nil {
			return err
		}
		if it == nil {
			_, err := c.finish()
			return err
		}
		if len(it.Entries) == 0 {
			continue
		}
		if err := each(it.Entries); err != nil {
			c.abandon()
			return err
		}
	}
}

// MakeDir makes a folder of exactly this mode (0: 0755) and, with parents, those above it as 0755. A folder that is there already
// is fine with parents and ErrExists without.
func (f *Files) MakeDir(ctx context.Context, path string, mode uint32, parents bool) (Info, error) {
	act := fmt.Sprintf("make folder %q", path)
	if err := checkPath(act, path); err != nil {
		return Info{}, err
	}
	if err := CheckMode(mode, true); err != nil {
		return Info{}, fmt.Errorf("%s: %w", act, err)
	}
	r, err := f.simple(ctx, act, &filewire.Request{Op: filewire.OpMakeDir, Path: path, Mode: mode, Flags: flag(parents, filewire.Parents)})
	return infoOf(r), err
}

// Move renames from to exactly to (never into a folder of that name). What is there is ErrExists unless replace. It is one
// rename: between file systems it is ErrUnsupported.
func (f *Files) Move(ctx context.Context, from, to string, replace bool) error {
	act := fmt.Sprintf("move %q to %q", from, to)
	if err := checkPath(act, from); err != nil {
		return err
	}
	if err := sandbox.CheckPath("new path", to); err != nil {
		return fmt.Errorf("%s: %w", act, err)
	}
	_, err := f.simple(ctx, act, &filewire.Request{Op: filewire.OpMove, Path: from, To: to, Flags: flag(replace, filewire.Replace)})
	return err
}

// Remove removes a file, a link itself, or a folder: an empty one, or with recursive all of it.
func (f *Files) Remove(ctx context.Context, path string, recursive, missingOK bool) error {
	act := fmt.Sprintf("remove %q", path)
	if err := checkPath(act, path); err != nil {
		return err
	}
	_, err := f.simple(ctx, act, &filewire.Request{Op: filewire.OpRemove, Path: path,
		Flags: flag(recursive, filewire.Recursive) | flag(missingOK, filewire.MissingOK)})
	return err
}

// Watch reports changes of a file or folder until ctx ends or each returns an error; recursive takes in the folders below, also
// those made later (what is made in such a folder may be told twice). The first event is Ready. It returns nil when what was
// watched is removed. A reader that is too slow loses events and is told by Overflow.
func (f *Files) Watch(ctx context.Context, path string, recursive bool, each func(Event) error) error {
	act := fmt.Sprintf("watch %q", path)
	if err := checkPath(act, path); err != nil {
		return err
	}
	c, err := f.start(ctx, act, &filewire.Request{Op: filewire.OpWatch, Path: path, Flags: flag(recursive, filewire.Recursive)})
	if err != nil {
		return err
	}
	for {
		it, err := c.item()
		if err != nil {
			return err
		}
		if it == nil {
			_, err := c.finish()
			return err
		}
		for _, ev := range it.Events {
			if err := each(ev); err != nil {
				c.abandon()
				return err
			}
		}
	}
}
