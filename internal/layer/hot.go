package layer

import (
	"context"
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
)

const (
	maxHot   = 1 << 17 // paths of a list that are looked at
	maxLinks = 40      // symbolic links on the way to one
)

// moveHot lays the contents out anew, those of the hot files in front, and returns the octets of these.
func (d *formDraft) moveHot(ctx context.Context, t *tree) (int64, error) {
	fresh, err := d.c.store.Create(ctx)
	if err != nil {
		return 0, err
	}
	spool := d.data
	d.data = fresh
	defer spool.Discard()
	image := erofs.NewSplitWriter(d.meta, fresh)
	done := map[*erofs.Inode]bool{}
	move := func(name string, in *erofs.Inode) error {
		if done[in] {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		done[in] = true
		c, err := image.Copy(spool, in.Data)
		if err != nil {
			return fmt.Errorf("entry %.200q: lay out: %w", name, err)
		}
		in.Data = c
		return nil
	}
	for i, name := range t.opt.Hot {
		if i == maxHot {
			break
		}
		if in := resolve(t.root, name); in != nil {
			if err := move(name, in); err != nil {
				return 0, err
			}
		}
	}
	hot := image.Size()
	var rest func(dir *erofs.Inode, at string) error
	rest = func(dir *erofs.Inode, at string) error {
		for _, n := range dir.Names() {
			in := dir.Children[n]
			name := path.Join(at, n)
			var err error
			switch in.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				err = rest(in, name)
			case unix.S_IFREG:
				err = move(name, in)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := rest(t.root, ""); err != nil {
		return 0, err
	}
	d.image, t.image = image, image
	return hot, nil
}

// resolve finds the regular file that a path of the tree means, links followed; nil when there is none.
func resolve(root *erofs.Inode, name string) *erofs.Inode {
	if len(name) > maxPath {
		return nil
	}
	todo := strings.Split(name, "/")
	at := []*erofs.Inode{root}
	links := 0
	for len(todo) > 0 {
		p := todo[0]
		todo = todo[1:]
		switch p {
		case "", ".":
			continue
		case "..":
			at = at[:max(1, len(at)-1)]
			continue
		}
		in := at[len(at)-1].Children[p] // of nil there are none
		switch {
		case in == nil:
			return nil
		case in.Mode&unix.S_IFMT == unix.S_IFLNK:
			if links++; links > maxLinks {
				return nil
			}
			if strings.HasPrefix(in.Target, "/") {
				at = at[:1]
			}
			todo = append(strings.Split(in.Target, "/"), todo...)
			if len(todo) > maxPath {
				return nil
			}
		default:
			at = append(at, in)
		}
	}
	in := at[len(at)-1]
	if in.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	return in
}
