package layer

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Attributes by which overlayfs marks what an upper holds.
const (
	overlayPrefix = "trusted.overlay."
	opaqueMark    = "trusted.overlay.opaque"
	redirectMark  = "trusted.overlay.redirect"
	metacopyMark  = "trusted.overlay.metacopy"
	originMark    = "trusted.overlay.origin"
	capability    = "security.capability"
)

const (
	maxSkipped = 100
	maxPath    = 16 << 10 // octets of a path in a tree
)

// tree is a layer that is being built.
type tree struct {
	opt     Options
	limits  Limits
	image   *erofs.Writer
	root    *erofs.Inode
	entries int64
	bytes   int64
	xattrs  int64
	holes   int64
	arch    map[elf.Machine]int
	skipped []string
	exclude map[string]bool
	linked  map[*erofs.Inode]string // inodes that got a second name, later with their first path
}

func newTree(image *erofs.Writer, opt Options) *tree {
	t := &tree{
		opt:     opt,
		limits:  opt.Limits.filled(),
		image:   image,
		root:    newDir(),
		arch:    map[elf.Machine]int{},
		exclude: map[string]bool{},
		linked:  map[*erofs.Inode]string{},
	}
	if opt.Owner != nil {
		t.root.UID, t.root.GID = opt.Owner.UID, opt.Owner.GID
	}
	for _, p := range opt.Exclude {
		t.exclude[strings.Trim(p, "/")] = true
	}
	return t
}

// newDir is a folder that no entry describes.
func newDir() *erofs.Inode {
	return &erofs.Inode{Mode: unix.S_IFDIR | 0o755, Children: map[string]*erofs.Inode{}}
}

func isOpaque(in *erofs.Inode) bool {
	v, ok := in.Get(opaqueMark)
	return ok && string(v) == "y"
}

func newWhiteout() *erofs.Inode { return &erofs.Inode{Mode: unix.S_IFCHR} }

func (t *tree) skip(path, reason string) {
	if len(t.skipped) < maxSkipped {
		t.skipped = append(t.skipped, path+": "+reason)
	}
}

// count takes one more name into account.
func (t *tree) count(path string) error {
	t.entries++
	if t.entries > t.limits.Entries {
		return fmt.Errorf("entry %q: over %d entries: %w", path, t.limits.Entries, sandbox.ErrExhausted)
	}
	return nil
}

// content spools a file's content into the image.
func (t *tree) content(path string, in *erofs.Inode, r io.Reader, size int64) error {
	if size < 0 || size > t.limits.Bytes-t.bytes {
		return fmt.Errorf("entry %q: contents over %d octets: %w", path, t.limits.Bytes, sandbox.ErrExhausted)
	}
	head := &peek{r: r}
	c, holes, err := t.image.AddWithin(head, size, t.limits.Holes-t.holes)
	t.holes += holes
	if errors.Is(err, erofs.ErrHoles) {
		return fmt.Errorf("entry %.200q: holes of over %d octets in all: %w", path, t.limits.Holes, sandbox.ErrExhausted)
	}
	if err != nil {
		return fmt.Errorf("entry %q: %w", path, err)
	}
	in.Data = c
	t.bytes += size
	t.note(in, head.b)
	return nil
}

// note looks at a file's first octets for the machine that it is for.
func (t *tree) note(in *erofs.Inode, head []byte) {
	if in.Mode&0o111 == 0 {
		return
	}
	if m, ok := machine(head); ok {
		t.arch[m]++
	}
}

// peek keeps the first octets that are read through it.
type peek struct {
	r io.Reader
	b []byte
}

func (p *peek) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	if want := 20 - len(p.b); want > 0 {
		p.b = append(p.b, b[:min(n, want)]...)
	}
	return n, err
}

// machine reads the machine from an ELF header.
func machine(b []byte) (elf.Machine, bool) {
	if len(b) < 20 || !bytes.HasPrefix(b, []byte(elf.ELFMAG)) {
		return 0, false
	}
	order := binary.ByteOrder(binary.LittleEndian)
	if elf.Data(b[elf.EI_DATA]) == elf.ELFDATA2MSB {
		order = binary.BigEndian
	}
	if t := elf.Type(order.Uint16(b[16:])); t != elf.ET_EXEC && t != elf.ET_DYN {
		return 0, false
	}
	return elf.Machine(order.Uint16(b[18:])), true
}

// The words of Go for the machines.
var machines = map[elf.Machine]string{
	elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64", elf.EM_386: "386", elf.EM_ARM: "arm", elf.EM_RISCV: "riscv64",
	elf.EM_S390: "s390x", elf.EM_PPC64: "ppc64le", elf.EM_LOONGARCH: "loong64",
}

// architecture is that of most of the layer's programs: a tool kit may carry a few files for other machines, as test data.
func (t *tree) architecture() string {
	if t.opt.Arch != "" && len(t.arch) > 0 {
		return t.opt.Arch
	}
	best, n := AnyArch, 0
	for m, k := range t.arch {
		name, ok := machines[m]
		if !ok {
			name = strings.ToLower(strings.TrimPrefix(m.String(), "EM_"))
		}
		if k > n || k == n && name < best {
			best, n = name, k
		}
	}
	return best
}

// setXattr checks an attribute and keeps it; marks of an overlay must have been dealt with.
func (t *tree) setXattr(path string, in *erofs.Inode, name string, value []byte) error {
	if strings.HasPrefix(name, "system.") && !strings.HasPrefix(name, "system.posix_acl_") {
		return nil // made up by the file system it came from
	}
	if err := erofs.CheckXattr(name, value); err != nil {
		return fmt.Errorf("entry %q: %w", path, err)
	}
	t.xattrs += int64(len(name) + len(value))
	if t.xattrs > t.limits.Xattrs {
		return fmt.Errorf("entry %q: attributes over %d octets: %w", path, t.limits.Xattrs, sandbox.ErrExhausted)
	}
	in.Set(name, value)
	return nil
}

// own applies the options to an owner that was found.
func (t *tree) own(path string, in *erofs.Inode) error {
	if m := t.opt.Unshift; m != nil {
		uid, okUID := m.back(in.UID)
		gid, okGID := m.back(in.GID)
		if !okUID || !okGID {
			return fmt.Errorf("entry %q: owner %d:%d is outside of the ids %d to %d of the sandbox: %w", path, in.UID, in.GID, m.Outside,
				uint64(m.Outside)+uint64(m.Count)-1, sandbox.ErrInvalid)
		}
		in.UID, in.GID = uid, gid
		if v, ok := in.Get(capability); ok {
			in.Set(capability, m.backCapability(v))
		}
	}
	if o := t.opt.Owner; o != nil {
		in.UID, in.GID = o.UID, o.GID
	}
	return nil
}

// back maps an id; the host's root, which makes an upper's own folders, is the sandbox's.
func (m *IDMap) back(id uint32) (uint32, bool) {
	if id >= m.Outside && id-m.Outside < m.Count {
		return id - m.Outside + m.Inside, true
	}
	return 0, id == 0
}

// Revisions of a file capability (linux/capability.h); the third names the root user of the namespace it holds in.
const (
	capRevision2 = 0x02000000
	capRevision3 = 0x03000000
	capMask      = 0xff000000
	capSize2     = 20
	capSize3     = 24
)

// backCapability maps the root id of a capability. The tree's own root needs none, so that it holds in any later range.
func (m *IDMap) backCapability(v []byte) []byte {
	if len(v) != capSize3 || binary.LittleEndian.Uint32(v)&capMask != capRevision3 {
		return v
	}
	id, ok := m.back(binary.LittleEndian.Uint32(v[capSize2:]))
	if !ok {
		return v
	}
	v = bytes.Clone(v)
	if id == 0 {
		binary.LittleEndian.PutUint32(v, binary.LittleEndian.Uint32(v)&^uint32(capMask)|capRevision2)
		return v[:capSize2]
	}
	binary.LittleEndian.PutUint32(v[capSize2:], id)
	return v
}

// seal works out what the tree is; nothing may be changed in it afterwards.
func (t *tree) seal() (*Built, error) {
	sum, err := hashTree(t.root, t.linked, t.opt.Parents)
	if err != nil {
		return nil, err
	}
	markFolders(t.root)
	entries, octets := t.measure(t.root)
	return &Built{
		ID:      ID(idPrefix + hex.EncodeToString(sum[:])),
		Arch:    t.architecture(),
		Opaque:  isOpaque(t.root),
		Entries: entries,
		Bytes:   octets,
		Skipped: t.skipped,
	}, nil
}

// write writes the image's metadata.
func (t *tree) write(b *Built) error {
	sum, err := hex.DecodeString(b.ID.Hex())
	if err != nil {
		return err
	}
	b.Size, err = t.image.Finish(t.root, [16]byte(sum[:16]))
	return err
}

// finish does both, for an image of one file.
func (t *tree) finish() (*Built, error) {
	b, err := t.seal()
	if err == nil {
		err = t.write(b)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// markFolders sets trusted.overlay.origin, empty ("copied up, origin unknown"), on folders that hold a whiteout: overlayfs
// lists a folder that only one layer has as it lies on disk, and would show the whiteouts in it as broken devices, unless
// that mark says that there may be some. It is no part of the canonical tree.
func markFolders(dir *erofs.Inode) {
	holds := false
	for _, c := range dir.Children {
		if c.IsDir() {
			markFolders(c)
		}
		holds = holds || c.IsWhiteout()
	}
	if holds {
		dir.Set(originMark, nil)
	}
}

// measure counts names and octets of what is left after replacements, so that equal trees have equal figures.
func (t *tree) measure(dir *erofs.Inode) (entries, octets int64) {
	for _, c := range dir.Children {
		entries++
		if c.IsDir() {
			e, o := t.measure(c)
			entries, octets = entries+e, octets+o
			continue
		}
		if first, many := t.linked[c]; many {
			if first == counted {
				continue
			}
			t.linked[c] = counted
		}
		octets += c.Data.Size
	}
	return entries, octets
}

const counted = "\x00" // no path holds a NUL

// hashTree is the canonical form; docs/format/layer.md describes it.
func hashTree(root *erofs.Inode, linked map[*erofs.Inode]string, parents []ID) ([32]byte, error) {
	c := &canonical{h: sha256.New(), first: linked}
	c.buf = append(c.buf, "dsec-layer-1\n"...)
	for _, p := range parents {
		b, err := hex.DecodeString(p.Hex())
		if err != nil || len(b) != 32 {
			return [32]byte{}, fmt.Errorf("parent %q: %w", p, sandbox.ErrInvalid)
		}
		c.buf = append(c.buf, 'P')
		c.buf = append(c.buf, b...)
	}
	c.walk(root, "")
	c.buf = append(c.buf, 'E')
	c.flush()
	return [32]byte(c.h.Sum(nil)), nil
}

type canonical struct {
	h     hash.Hash
	buf   []byte
	first map[*erofs.Inode]string // first path of each inode that may have several names
}

func (c *canonical) flush() {
	c.h.Write(c.buf)
	c.buf = c.buf[:0]
}

func (c *canonical) str(s string) {
	c.buf = binary.LittleEndian.AppendUint32(c.buf, uint32(len(s)))
	c.buf = append(c.buf, s...)
}

func (c *canonical) u32(n uint32) { c.buf = binary.LittleEndian.AppendUint32(c.buf, n) }
func (c *canonical) u64(n uint64) { c.buf = binary.LittleEndian.AppendUint64(c.buf, n) }

func (c *canonical) walk(in *erofs.Inode, path string) {
	if len(c.buf) > 64<<10 {
		c.flush()
	}
	if f, many := c.first[in]; many && f != "" {
		c.buf = append(c.buf, 'h')
		c.str(path)
		c.str(f)
		return
	} else if many {
		c.first[in] = path
	}
	kind := letter(in.Mode)
	c.buf = append(c.buf, kind)
	c.str(path)
	c.u32(in.Mode & 0o7777)
	c.u32(in.UID)
	c.u32(in.GID)
	c.u64(uint64(in.Sec))
	c.u32(in.Nsec)
	slices.SortFunc(in.Xattrs, func(a, b erofs.Xattr) int { return cmp.Compare(a.Name, b.Name) })
	c.u32(uint32(len(in.Xattrs)))
	for _, x := range in.Xattrs {
		c.str(x.Name)
		c.str(string(x.Value))
	}
	switch kind {
	case 'f':
		c.u64(uint64(in.Data.Size))
		c.buf = append(c.buf, in.Data.Sum[:]...)
	case 'l':
		c.str(in.Target)
	case 'c', 'b':
		c.u32(in.Major)
		c.u32(in.Minor)
	case 'd':
		for _, n := range in.Names() {
			child := n
			if path != "" {
				child = path + "/" + n
			}
			c.walk(in.Children[n], child)
		}
	}
}

func letter(mode uint32) byte {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return 'd'
	case unix.S_IFLNK:
		return 'l'
	case unix.S_IFCHR:
		return 'c'
	case unix.S_IFBLK:
		return 'b'
	case unix.S_IFIFO:
		return 'p'
	}
	return 'f'
}

// broken turns the end of a stream in the middle of something into the sender's fault.
func broken(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	return err
}
