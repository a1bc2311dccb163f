package layer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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
	hot, err := inOrder(t.root, hotFiles(t.root, t.opt.Hot), image.Size, func(name string, in *erofs.Inode) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		c, err := image.Copy(spool, in.Data)
		if err != nil {
			return fmt.Errorf("entry %.200q: lay out: %w", name, err)
		}
		in.Data = c
		return nil
	})
	if err != nil {
		return 0, err
	}
	d.image, t.image = image, image
	return hot, nil
}

// hotFiles finds the regular files that a list names.
func hotFiles(root *erofs.Inode, list []string) []*erofs.Inode {
	var out []*erofs.Inode
	for _, name := range list[:min(len(list), maxHot)] {
		if in := resolve(root, name); in != nil {
			out = append(out, in)
		}
	}
	return out
}

// storedHot finds the files of a layer whose contents lie in the first hot octets, in their order.
func storedHot(root *erofs.Inode, hot int64) []*erofs.Inode {
	var out []*erofs.Inode
	if hot == 0 {
		return nil
	}
	eachFile(root, func(_ string, in *erofs.Inode) error {
		if at, ok := in.Data.Start(); ok && at < hot {
			out = append(out, in)
		}
		return nil
	})
	slices.SortStableFunc(out, func(a, b *erofs.Inode) int {
		at, _ := a.Data.Start()
		bt, _ := b.Data.Start()
		return cmp.Compare(at, bt)
	})
	return out
}

// inOrder visits the regular files of a tree, each inode once: first the hot ones in their order, as far as they are in the tree, then
// the others. It returns what size said in between.
func inOrder(root *erofs.Inode, hot []*erofs.Inode, size func() int64, visit func(name string, in *erofs.Inode) error) (int64, error) {
	names := map[*erofs.Inode]string{}
	for _, in := range hot {
		names[in] = ""
	}
	if len(hot) > 0 {
		eachFile(root, func(path string, in *erofs.Inode) error {
			if _, ok := names[in]; ok {
				names[in] = path
			}
			return nil
		})
	}
	done := map[*erofs.Inode]bool{}
	start := size()
	for _, in := range hot {
		if names[in] == "" || done[in] {
			continue
		}
		done[in] = true
		if err := visit(names[in], in); err != nil {
			return 0, err
		}
	}
	n := size() - start
	return n, eachFile(root, func(path string, in *erofs.Inode) error {
		if done[in] {
			return nil
		}
		return visit(path, in)
	})
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
