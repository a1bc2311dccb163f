package layer

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// maxMerged bounds the names of a merged tree: marks that point elsewhere can show one folder many times.
const maxMerged = 4 << 20

// Merge makes one layer of neighbouring ones, lowest first, that can stand in their place on any layers: what removes or hides
// something below keeps doing so. A snapshot must come after all the layers that it was taken on, and what it refers to in these is
// taken over. Nobody holds the new layer yet: call Hold.
func (c *Catalogue) Merge(ctx context.Context, ids []ID) (Descriptor, error) {
	return c.merge(ctx, ids, true)
}

// Flatten makes one layer that shows what a sandbox on these layers, lowest first, would see. It has no marks for layers below it.
func (c *Catalogue) Flatten(ctx context.Context, ids []ID) (Descriptor, error) {
	return c.merge(ctx, ids, false)
}

func (c *Catalogue) merge(ctx context.Context, ids []ID, keep bool) (Descriptor, error) {
	what := "merge"
	if !keep {
		what = "flatten"
	}
	d, err := c.mergeLayers(ctx, ids, keep)
	if err != nil {
		return Descriptor{}, fmt.Errorf("%s %d layers: %w", what, len(ids), err)
	}
	return d, nil
}

// archOf is the machine that all of the layers are for, or that have programs; empty when they differ.
func (c *Catalogue) archOf(ctx context.Context, ids []ID) (string, error) {
	arch := ""
	for _, id := range ids {
		d, err := c.Descriptor(ctx, id)
		if err != nil {
			return "", err
		}
		switch {
		case d.Arch == AnyArch || d.Arch == arch:
		case arch == "":
			arch = d.Arch
		default:
			return "", nil
		}
	}
	return arch, nil
}

func (c *Catalogue) mergeLayers(ctx context.Context, ids []ID, keep bool) (Descriptor, error) {
	list, err := c.sources(ctx, ids)
	defer func() {
		for _, s := range list {
			s.close()
		}
	}()
	if err != nil {
		return Descriptor{}, err
	}
	root, err := mergeTrees(list, keep)
	if err != nil {
		return Descriptor{}, err
	}
	var hot []*erofs.Inode
	for _, s := range list {
		hot = append(hot, storedHot(s.root, s.hot)...)
	}
	arch, err := c.archOf(ctx, ids)
	if err != nil {
		return Descriptor{}, err
	}
	opt := Options{Limits: noLimits, Arch: arch, Source: fmt.Sprintf("%d layers as one", len(ids))}
	draft, err := c.newDraft(ctx, "")
	if err != nil {
		return Descriptor{}, err
	}
	defer draft.discard()
	t := newTree(draft.image, opt)
	front, err := t.adopt(ctx, root, wholeFiles(hot))
	if err != nil {
		return Descriptor{}, err
	}
	built, form, err := draft.finishOrdered(ctx, t, front)
	if err != nil {
		return Descriptor{}, err
	}
	return c.keep(ctx, "", draft, built, form, opt)
}

// sources opens layers that lie on each other. What it has opened is the caller's, also with an error.
func (c *Catalogue) sources(ctx context.Context, ids []ID) ([]*source, error) {
	if len(ids) == 0 || len(ids) > MaxStack {
		return nil, fmt.Errorf("%d given, want 1 to %d: %w", len(ids), MaxStack, sandbox.ErrInvalid)
	}
	var list []*source
	for i, id := range ids {
		s, err := c.source(ctx, id)
		if err != nil {
			return list, err
		}
		list = append(list, s)
		if len(s.d.Parents) > 0 && !slices.Equal(ids[:i], s.d.Parents) {
			return list, fmt.Errorf("layer %s: is a snapshot and needs all the layers that it was taken on, and no others, below it: %w", id, sandbox.ErrInvalid)
		}
	}
	return list, nil
}

// mergeTrees puts trees over each other as overlayfs does.
func mergeTrees(list []*source, keep bool) (*erofs.Inode, error) {
	m := &merging{keep: keep}
	for _, s := range list {
		m.roots = append(m.roots, s.root)
	}
	dirs, hidden := m.rootsBelow(len(m.roots))
	return m.folder(dirs, hidden, "", 0)
}

// place is an inode of one of the layers.
type place struct {
	layer int
	in    *erofs.Inode
}

type merging struct {
	roots []*erofs.Inode // the lowest first
	keep  bool           // whiteouts and opaque folders
	names int
}

// rootsBelow are the roots of the layers below number n, the highest first, and whether one hides what is below all of them.
func (m *merging) rootsBelow(n int) (list []place, hidden bool) {
	for i := n - 1; i >= 0; i-- {
		list = append(list, place{i, m.roots[i]})
		if isOpaque(m.roots[i]) {
			return list, true
		}
	}
	return list, false
}

// merged is what a name means in a merged folder.
type merged struct {
	list     []place // the inode that shows; if it is a folder, with those below it that show through. Empty: no such name
	whiteout bool    // the name is removed
	hidden   bool    // what layers below may have under the name does not show
}

// find looks a name up in a folder that is merged of dirs.
func (m *merging) find(dirs []place, name string) merged {
	var e merged
	for _, d := range dirs {
		in := d.in.Children[name]
		switch {
		case in == nil:
			continue
		case in.IsWhiteout():
			e.whiteout = len(e.list) == 0
			e.hidden = true
			return e
		case !in.IsDir():
			if len(e.list) == 0 {
				e.list = []place{{d.layer, in}}
			}
			e.hidden = true
			return e
		}
		e.list = append(e.list, place{d.layer, in})
		if isOpaque(in) {
			e.hidden = true
			return e
		}
		redirect, ok := in.Get(redirectMark)
		if !ok {
			continue
		}
		// The folder was renamed: what shows through comes from its old place.
		e.hidden = true
		if strings.HasPrefix(string(redirect), "/") {
			below, _ := m.rootsBelow(d.layer)
			e.list = append(e.list, m.walk(below, string(redirect))...)
			return e
		}
		name = string(redirect)
	}
	return e
}

// walk finds the folder that a path from the root means.
func (m *merging) walk(dirs []place, path string) []place {
	for p := range strings.SplitSeq(path, "/") {
		if p == "" {
			continue
		}
		e := m.find(dirs, p)
		if len(e.list) == 0 || !e.list[0].in.IsDir() {
			return nil
		}
		dirs = e.list
	}
	return dirs
}

// folder merges folders that lie on each other, the highest first.
func (m *merging) folder(dirs []place, hidden bool, path string, depth int) (*erofs.Inode, error) {
	if depth > defaultLimits.Depth {
		return nil, fmt.Errorf("%.200q: deeper than %d folders: %w", path, defaultLimits.Depth, sandbox.ErrInvalid)
	}
	out := copyDir(dirs[0].in)
	if m.keep && hidden {
		out.Set(opaqueMark, []byte("y"))
	}
	seen := map[string]bool{}
	for _, d := range dirs {
		for name := range d.in.Children {
			seen[name] = true
		}
	}
	for name := range seen {
		if m.names++; m.names > maxMerged {
			return nil, fmt.Errorf("over %d names: %w", maxMerged, sandbox.ErrExhausted)
		}
		e := m.find(dirs, name)
		switch {
		case e.whiteout:
			if m.keep {
				out.Children[name] = newWhiteout()
			}
		case len(e.list) == 0:
		case !e.list[0].in.IsDir():
			out.Children[name] = e.list[0].in
		default:
			sub, err := m.folder(e.list, e.hidden, path+"/"+name, depth+1)
			if err != nil {
				return nil, err
			}
			out.Children[name] = sub
		}
	}
	return out, nil
}

// copyDir is the folder alone, without the marks of an overlay.
func copyDir(in *erofs.Inode) *erofs.Inode {
	out := &erofs.Inode{Mode: in.Mode, UID: in.UID, GID: in.GID, Sec: in.Sec, Nsec: in.Nsec, Children: map[string]*erofs.Inode{}}
	for _, x := range in.Xattrs {
		if !strings.HasPrefix(x.Name, overlayPrefix) {
			out.Xattrs = append(out.Xattrs, x)
		}
	}
	return out
}

// own is what the highest of several folders that lie on each other brings itself. A folder that was renamed is brought whole.
func (m *merging) own(dirs []place, path string, depth int) (*erofs.Inode, error) {
	if depth > defaultLimits.Depth {
		return nil, fmt.Errorf("%.200q: deeper than %d folders: %w", path, defaultLimits.Depth, sandbox.ErrInvalid)
	}
	top := dirs[0]
	out := copyDir(top.in)
	if isOpaque(top.in) {
		out.Set(opaqueMark, []byte("y"))
	}
	for name, in := range top.in.Children {
		if !in.IsDir() {
			out.Children[name] = in
			continue
		}
		e := m.find(dirs, name)
		var err error
		if _, renamed := in.Get(redirectMark); renamed && !isOpaque(in) {
			out.Children[name], err = m.folder(e.list, true, path+"/"+name, depth+1)
		} else {
			out.Children[name], err = m.own(e.list, path+"/"+name, depth+1)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// hasRedirects says whether a folder was renamed in the layer.
func hasRedirects(dir *erofs.Inode) bool {
	if _, ok := dir.Get(redirectMark); ok {
		return true
	}
	for _, c := range dir.Children {
		if c.IsDir() && hasRedirects(c) {
			return true
		}
	}
	return false
}

// alone is a layer's tree in a form that needs no other: references of a snapshot are resolved. Of the sources, which are the
// caller's to close, the last is the layer.
func (c *Catalogue) alone(ctx context.Context, id ID) (root *erofs.Inode, list []*source, err error) {
	s, err := c.source(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	if !hasRedirects(s.root) {
		return s.root, []*source{s}, nil
	}
	if len(s.d.Parents) == 0 {
		return nil, []*source{s}, fmt.Errorf("layer %s: refers to layers below it, and names none: %w", id, sandbox.ErrInvalid)
	}
	list, err = c.sources(ctx, s.d.Parents)
	list = append(list, s)
	if err != nil {
		return nil, list, fmt.Errorf("layers below the snapshot: %w", err)
	}
	m := &merging{keep: true}
	for _, s := range list {
		m.roots = append(m.roots, s.root)
	}
	dirs, _ := m.rootsBelow(len(m.roots))
	root, err = m.own(dirs, "", 0)
	return root, list, err
}

// Relayout stores a layer anew with the contents of the hot files in front, in this order, and as two files in any case. Its ID and
// what refers to it stay. Who has the earlier form open can go on: Sweep removes it after its age.
func (c *Catalogue) Relayout(ctx context.Context, id ID, hot []string) (Descriptor, error) {
	d, err := c.relayout(ctx, id, "", func(root *erofs.Inode) []part { return wholeFiles(hotFiles(root, hot)) })
	if err != nil {
		return Descriptor{}, fmt.Errorf("lay out layer %s: %w", id, err)
	}
	return d, nil
}

func (c *Catalogue) relayout(ctx context.Context, id ID, data string, hot func(root *erofs.Inode) []part) (Descriptor, error) {
	s, err := c.sourceOf(ctx, id, data)
	if err != nil {
		return Descriptor{}, err
	}
	defer s.close()
	draft, err := c.newDraft(ctx, FormSplit)
	if err != nil {
		return Descriptor{}, err
	}
	defer draft.discard()
	t := newTree(draft.image, Options{Parents: s.d.Parents, Limits: noLimits})
	front, err := t.adopt(ctx, s.root, hot(s.root))
	if err != nil {
		return Descriptor{}, err
	}
	built, form, err := draft.finishOrdered(ctx, t, front)
	if err != nil {
		return Descriptor{}, err
	}
	if built.ID != id {
		return Descriptor{}, fmt.Errorf("what is stored is layer %s: %w", built.ID, sandbox.ErrLost)
	}

	d, err := c.putForm(ctx, id, draft, form)
	if err != nil {
		return Descriptor{}, err
	}
	return c.settle(ctx, d, form)
}

// putForm publishes a form and puts it in front of those that the layer has, unless it is there.
func (c *Catalogue) putForm(ctx context.Context, id ID, draft *formDraft, form Form) (Descriptor, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return Descriptor{}, err // removed meanwhile
	}
	if now := d.Forms[0]; now.Digest == form.Digest && now.Superseded == nil && c.whole(ctx, now) == nil && sameHot(now, form) {
		return d, nil
	}
	if err := draft.publish(ctx); err != nil {
		return Descriptor{}, err
	}
	// That took long: what others did to the descriptor meanwhile is not lost.
	if d, err = c.Descriptor(ctx, id); err != nil {
		return Descriptor{}, err
	}
	d.Forms = inFront(form, d.Forms, c.now())
	return d, c.describe(ctx, d)
}

func sameHot(a, b Form) bool {
	return a.Data == nil || b.Data == nil || a.Data.Hot == b.Data.Hot
}
