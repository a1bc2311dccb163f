package fileserver

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path"
	"sort"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

const (
	maxPending = 2 << 20  // octets of folders whose mode and time wait for the end
	maxMade    = 64 << 10 // links of one upload that are remembered, so that none leads a later entry out of the folder
)

// unpacker lays a tar into one folder. Names are confined to it: ".." and absolute names by cleaning them, links by a check on the
// rare way out. Links that were there before are followed, as a command would follow them.
type unpacker struct {
	call   *call
	root   int
	slash  bool // root is the sandbox's root: nothing lies outside
	fresh  bool // root was made by this upload
	keep   bool // owners of the tar
	made   map[inode]bool
	many   bool // more links were made than made holds
	pend   map[string]*folderEnd
	pended int
	last   string // folder of the previous entry, open as lastFD
	lastFD int
}

// folderEnd is what a folder gets when nothing more comes into it.
type folderEnd struct {
	mode     uint32
	modified time.Time
	setMode  bool
}

// counted counts the octets of the stream that were taken.
type counted struct {
	c *call
	n int64
}

func (r *counted) Read(p []byte) (int, error) {
	n, err := r.c.Read(p)
	r.n += int64(n)
	return n, err
}

func (c *call) upload(r *filewire.Result) error {
	u := &unpacker{call: c, keep: c.req.Flags&filewire.KeepOwner != 0, made: map[inode]bool{}, pend: map[string]*folderEnd{}, lastFD: -1}
	if u.keep && !isRoot() {
		return refuse(filewire.Denied, "keeping owners needs root")
	}
	fd, err := openDir(c.req.Path)
	if err == unix.ENOENT && c.req.Flags&filewire.Parents != 0 {
		if err := makeParents(c.req.Path); err != nil {
			return err
		}
		u.fresh = true
		fd, err = openDir(c.req.Path)
	}
	if err != nil {
		return err
	}
	u.root = fd
	defer unix.Close(fd)
	defer u.leave()
	u.slash = isSlash(fd)
	body := &counted{c: c}
	err = u.all(tar.NewReader(body), r)
	if err == nil { // padding behind the end
		_, err = io.Copy(io.Discard, body)
	}
	r.Applied = body.n
	// Folders made so far get their mode and time after a break-off too.
	if e := u.settle(0); err == nil {
		err = e
	}
	return err
}

func isSlash(fd int) bool {
	var a, b unix.Stat_t
	return unix.Fstat(fd, &a) == nil && unix.Stat("/", &b) == nil && a.Ino == b.Ino && a.Dev == b.Dev
}

func (u *unpacker) all(t *tar.Reader, r *filewire.Result) error {
	for {
		h, err := t.Next()
		switch {
		case err == io.EOF:
			return nil
		case errors.Is(err, errBroken):
			return errBroken
		case errors.Is(err, tar.ErrInsecurePath):
			// The name is cleaned below.
		case err != nil:
			return badTar(err)
		}
		if err := u.call.ctx.Err(); err != nil {
			return errBroken
		}
		if strings.IndexByte(h.Name, 0) >= 0 || strings.IndexByte(h.Linkname, 0) >= 0 {
			return refuse(filewire.Invalid, "entry "+quote(h.Name)+": its name holds a NUL octet")
		}
		if err := u.entry(h, t); err != nil {
			if errors.Is(err, errBroken) {
				return errBroken
			}
			return at("entry "+quote(h.Name), err)
		}
		r.Entries++
	}
}

func badTar(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(filewire.Invalid, "the tar stream ends in the middle")
	case errors.Is(err, tar.ErrHeader):
		return refuse(filewire.Invalid, "the stream is no tar (or a damaged or compressed one)")
	}
	return refuse(filewire.Invalid, "tar: "+err.Error())
}

// confine makes a name relative to the folder.
func confine(name string) string {
	return strings.TrimPrefix(path.Clean("/"+name), "/")
}

func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeRegA, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo, tar.TypeChar, tar.TypeBlock, //nolint:staticcheck // TypeRegA: old tars
		tar.TypeGNUSparse, tar.TypeCont:
	case tar.TypeXGlobalHeader:
		return nil
	default:
		u.call.skips.add(h.Name, "is of the unknown tar type "+quote(string(h.Typeflag)))
		return nil
	}
	name := confine(h.Name)
	if name == "" {
		if h.Typeflag == tar.TypeDir && u.fresh {
			return u.plan("", h, true)
		}
		return nil // a folder that was there before keeps its mode: /tmp would lose its sticky bit
	}
	dir, err := u.parent(name)
	if err != nil {
		return err
	}
	last := base(name)
	switch h.Typeflag {
	case tar.TypeDir:
		return u.folder(dir, last, name, h)
	case tar.TypeSymlink:
		return u.symlink(dir, last, h)
	case tar.TypeLink:
		return u.hardLink(dir, last, h)
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		return u.node(dir, last, h)
	}
	return u.file(dir, last, h, body)
}

// parent opens the folder that an entry goes into and makes what is missing. The one of the entry before stays open.
func (u *unpacker) parent(name string) (int, error) {
	i := strings.LastIndexByte(name, '/')
	if i < 0 {
		return u.root, nil
	}
	rel := name[:i]
	if u.lastFD >= 0 && rel == u.last {
		return u.lastFD, nil
	}
	u.leave()
	fd, err := u.open(rel)
	if err == unix.ENOENT {
		fd, err = u.makeBelow(rel)
	}
	if err != nil {
		return -1, err
	}
	u.last, u.lastFD = rel, fd
	return fd, nil
}

func (u *unpacker) leave() {
	if u.lastFD >= 0 {
		unix.Close(u.lastFD)
		u.lastFD = -1
	}
}

// open opens a folder below root.
func (u *unpacker) open(rel string) (int, error) {
	if len(rel) > filewire.MaxPath {
		return -1, unix.ENAMETOOLONG
	}
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_BENEATH}
	if u.slash {
		how.Resolve = unix.RESOLVE_IN_ROOT
	}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(u.root, rel, &how)
		switch {
		case err == unix.EINTR, err == unix.EAGAIN && try < 32: // a rename meanwhile
			continue
		case err == unix.EXDEV, err == unix.ENOSYS, err == unix.EAGAIN:
			return u.openThrough(rel)
		}
		return fd, err
	}
}

// openThrough opens a folder that a link leads out to: fine where the link was there before, refused where this upload made it.
func (u *unpacker) openThrough(rel string) (int, error) {
	if u.many {
		return -1, refuse(filewire.Denied, "leads out of the folder, in an upload of too many links to tell whose")
	}
	for i := range len(rel) + 1 {
		if i < len(rel) && rel[i] != '/' {
			continue
		}
		var st unix.Stat_t
		if err := lstatat(u.root, rel[:i], &st); err != nil {
			return -1, err
		}
		if u.made[inode{st.Dev, st.Ino}] {
			return -1, refuse(filewire.Denied, "leads out of the folder through the link "+quote(rel[:i])+" of the same upload")
		}
	}
	return openat(u.root, rel, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
}

// makeBelow makes the missing folders of a path as 0755.
func (u *unpacker) makeBelow(rel string) (int, error) {
	dir := u.root
	defer func() {
		if dir != u.root {
			unix.Close(dir)
		}
	}()
	for i := range len(rel) + 1 {
		if i < len(rel) && rel[i] != '/' {
			continue
		}
		fd, err := u.open(rel[:i])
		if err == unix.ENOENT {
			if err = retry(func() error { return unix.Mkdirat(dir, base(rel[:i]), 0o755) }); err == nil || err == unix.EEXIST {
				fd, err = u.open(rel[:i])
			}
		}
		if err != nil {
			return -1, at(quote(rel[:i]), err)
		}
		if dir != u.root {
			unix.Close(dir)
		}
		dir = fd
	}
	fd := dir
	dir = u.root
	return fd, nil
}

// mode is what an entry gets. A tar that another user packed must not make a program that runs as root.
func (u *unpacker) mode(h *tar.Header) uint32 {
	m := uint32(h.Mode) & 0o7777
	if isRoot() && !u.keep {
		if h.Uid != 0 {
			m &^= unix.S_ISUID
		}
		if h.Gid != 0 && h.Typeflag != tar.TypeDir {
			m &^= unix.S_ISGID
		}
	}
	return m
}

func (u *unpacker) folder(dir int, last, name string, h *tar.Header) error {
	mode := u.mode(h)
	// Until its end a folder must be open to us.
	err := retry(func() error { return unix.Mkdirat(dir, last, mode&0o777|0o700) })
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err := lstatat(dir, last, &st); err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			return u.existing(dir, last, name, h, &st)
		case unix.S_IFLNK:
			// A link to a folder stays, as in /lib -> usr/lib; one of this upload's own is replaced.
			var to unix.Stat_t
			if !u.made[inode{st.Dev, st.Ino}] && unix.Fstatat(dir, last, &to, 0) == nil && to.Mode&unix.S_IFMT == unix.S_IFDIR {
				return nil
			}
		}
		if err := unix.Unlinkat(dir, last, 0); err != nil {
			return err
		}
		err = unix.Mkdirat(dir, last, mode&0o777|0o700)
	}
	if err != nil {
		return err
	}
	if u.keep {
		if err := u.own(dir, last, h); err != nil {
			return err
		}
	}
	u.attributes(dir, last, h)
	return u.plan(name, h, true)
}

// existing is a folder that is there already. It gets the entry's mode and time; one with the sticky bit is everybody's (/tmp) and
// keeps its mode. One of ours that is shut is opened until the end.
func (u *unpacker) existing(dir int, last, name string, h *tar.Header, st *unix.Stat_t) error {
	if st.Mode&0o700 != 0o700 && int(st.Uid) == os.Geteuid() {
		if err := unix.Fchmodat(dir, last, st.Mode&0o7777|0o700, 0); err != nil {
			return at("mode", err)
		}
	}
	return u.plan(name, h, st.Mode&unix.S_ISVTX == 0)
}

// plan keeps what a folder gets at the end: entries that come into it would change its time, and its mode might keep them out.
func (u *unpacker) plan(name string, h *tar.Header, setMode bool) error {
	if _, ok := u.pend[name]; !ok {
		u.pended += len(name) + 128
	}
	u.pend[name] = &folderEnd{mode: u.mode(h), modified: h.ModTime, setMode: setMode}
	if u.pended > maxPending {
		return u.settle(maxPending / 2)
	}
	return nil
}

// settle gives folders their mode and time until at most keep octets of them wait: deepest first, in the order of their names,
// but never one that the current folder lies in.
func (u *unpacker) settle(keep int) error {
	list := make([]string, 0, len(u.pend))
	for name := range u.pend {
		if keep == 0 || name != "" && u.last != name && !strings.HasPrefix(u.last, name+"/") {
			list = append(list, name)
		}
	}
	// A name sorts behind the folders that it lies in: backwards, each folder is settled after what it holds.
	sort.Sort(sort.Reverse(sort.StringSlice(list)))
	var first error
	for _, name := range list {
		if u.pended <= keep {
			break
		}
		if err := u.settleOne(name, u.pend[name]); err != nil {
			if errors.Is(err, unix.EPERM) { // another's folder that was there before
				u.call.skips.add(name, "keeps its mode and time: it belongs to another")
			} else if first == nil {
				first = at("folder "+quote(name), err)
			}
		}
		delete(u.pend, name)
		u.pended -= len(name) + 128
	}
	return first
}

func (u *unpacker) settleOne(name string, f *folderEnd) error {
	if name == "" {
		name = "."
	}
	fd, err := u.open(name)
	if err != nil {
		if err == unix.ENOENT || err == unix.ENOTDIR {
			return nil // replaced by a later entry
		}
		return err
	}
	defer unix.Close(fd)
	if f.setMode {
		if err := retry(func() error { return unix.Fchmod(fd, f.mode) }); err != nil {
			return err
		}
	}
	return setTime(fd, f.modified)
}

// clear removes what is in an entry's way: anything but a folder with something inside.
func (u *unpacker) clear(dir int, last string) error {
	err := retry(func() error { return unix.Unlinkat(dir, last, 0) })
	if err == nil || err == unix.ENOENT {
		return nil
	}
	var st unix.Stat_t
	if lstatat(dir, last, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if unix.Unlinkat(dir, last, unix.AT_REMOVEDIR) == nil {
			return nil
		}
		return refuse(filewire.Exists, "a folder is there that is not empty")
	}
	return err
}

func (u *unpacker) own(dir int, last string, h *tar.Header) error {
	if h.Uid < 0 || h.Gid < 0 {
		return refuse(filewire.Invalid, "owner is negative")
	}
	return at("owner", retry(func() error {
		return unix.Fchownat(dir, last, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
	}))
}

// place makes an entry where something may be in the way.
func (u *unpacker) place(dir int, last string, create func() error) error {
	err := retry(create)
	if err != unix.EEXIST {
		return err
	}
	if err := u.clear(dir, last); err != nil {
		return err
	}
	return retry(create)
}

func (u *unpacker) symlink(dir int, last string, h *tar.Header) error {
	if err := u.place(dir, last, func() error { return unix.Symlinkat(h.Linkname, dir, last) }); err != nil {
		return err
	}
	var st unix.Stat_t
	if lstatat(dir, last, &st) == nil {
		if len(u.made) < maxMade {
			u.made[inode{st.Dev, st.Ino}] = true
		} else {
			u.many = true
		}
	}
	if u.keep {
		if err := u.own(dir, last, h); err != nil {
			return err
		}
	}
	return u.time(dir, last, h)
}

func (u *unpacker) hardLink(dir int, last string, h *tar.Header) error {
	target := confine(h.Linkname)
	if target == "" {
		return refuse(filewire.Invalid, "hard link to the folder itself")
	}
	from := u.root
	if i := strings.LastIndexByte(target, '/'); i >= 0 {
		fd, err := u.open(target[:i])
		if err != nil {
			return u.noTarget(h, err)
		}
		defer unix.Close(fd)
		from = fd
	}
	// The same file under both names already: linkat would say that it exists, and clearing the way would remove it.
	var a, b unix.Stat_t
	if err := lstatat(from, base(target), &a); err != nil {
		return u.noTarget(h, err)
	}
	if lstatat(dir, last, &b) == nil && a.Ino == b.Ino && a.Dev == b.Dev {
		return nil
	}
	return u.noTarget(h, u.place(dir, last, func() error { return unix.Linkat(from, base(target), dir, last, 0) }))
}

func (u *unpacker) noTarget(h *tar.Header, err error) error {
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return refuse(filewire.Invalid, "is a hard link to "+quote(h.Linkname)+", which isn't there (it must come first)")
	}
	return err
}

func (u *unpacker) node(dir int, last string, h *tar.Header) error {
	kind := uint32(unix.S_IFIFO)
	switch h.Typeflag {
	case tar.TypeChar:
		kind = unix.S_IFCHR
	case tar.TypeBlock:
		kind = unix.S_IFBLK
	}
	dev := 0
	if kind != unix.S_IFIFO {
		dev = int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	}
	err := u.place(dir, last, func() error { return unix.Mknodat(dir, last, kind|0o600, dev) })
	if err == unix.EPERM && kind != unix.S_IFIFO {
		u.call.skips.add(h.Name, "is a device node, which can't be made here")
		return nil
	}
	if err != nil {
		return err
	}
	if u.keep {
		if err := u.own(dir, last, h); err != nil {
			return err
		}
	}
	// What was made just now is no link, so this follows none.
	if err := unix.Fchmodat(dir, last, u.mode(h), 0); err != nil {
		return at("mode", err)
	}
	return u.time(dir, last, h)
}

// file makes a fresh file: what is there under the name is unlinked first, so other names of it keep their content and a running
// program its text.
func (u *unpacker) file(dir int, last string, h *tar.Header, body io.Reader) error {
	fd := -1
	err := u.place(dir, last, func() (err error) {
		fd, err = openat(dir, last, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), last)
	defer f.Close()
	if err := u.content(f, h, body); err != nil {
		return err
	}
	if u.keep {
		if err := u.own(dir, last, h); err != nil {
			return err
		}
	}
	u.attributesOf(fd, h)
	if err := retry(func() error { return unix.Fchmod(fd, u.mode(h)) }); err != nil {
		return at("mode", err)
	}
	return at("time", setTime(fd, h.ModTime))
}

// content copies a body. A sparse file's holes stay holes, or a small tar would fill a disk.
func (u *unpacker) content(f *os.File, h *tar.Header, body io.Reader) error {
	sparse := h.Typeflag == tar.TypeGNUSparse
	for k := range h.PAXRecords {
		sparse = sparse || strings.HasPrefix(k, "GNU.sparse.")
	}
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	b := (*p)[:filewire.MaxData]
	var size int64
	for {
		n, err := io.ReadFull(body, b)
		if n > 0 {
			if sparse && zero(b[:n]) {
				size += int64(n)
			} else {
				k, werr := f.WriteAt(b[:n], size)
				size += int64(k)
				if werr != nil {
					return unwrapped(werr)
				}
			}
		}
		if u.call.ctx.Err() != nil {
			return errBroken
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, errBroken):
			return errBroken
		case err != io.EOF && (err != io.ErrUnexpectedEOF || size < h.Size):
			return badTar(err)
		}
		if sparse {
			return unwrapped(f.Truncate(size))
		}
		return nil
	}
}

// unwrapped takes the kernel's error out of the standard library's, whose path says nothing here.
func unwrapped(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

var zeros [4096]byte

func zero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

func (u *unpacker) time(dir int, last string, h *tar.Header) error {
	ts, err := timespec(h.ModTime)
	if err != nil {
		return at("time", err)
	}
	return at("time", retry(func() error {
		return unix.UtimesNanoAt(dir, last, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}))
}

// attributes sets the extended ones of a folder.
func (u *unpacker) attributes(dir int, last string, h *tar.Header) {
	if !hasXattrs(h) {
		return
	}
	fd, err := openat(dir, last, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		u.call.skips.add(h.Name, "its attributes: "+reason(err))
		return
	}
	u.attributesOf(fd, h)
	unix.Close(fd)
}

const xattrPrefix = "SCHILY.xattr."

func hasXattrs(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, xattrPrefix) {
			return true
		}
	}
	return false
}

// attributesOf sets them after the owner, which clears a program's capabilities, and tells what the file system or the user's
// rights refuse.
func (u *unpacker) attributesOf(fd int, h *tar.Header) {
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok {
			continue
		}
		if !strings.HasPrefix(name, "user.") && name != "security.capability" {
			u.call.skips.add(h.Name, "its attribute "+quote(name)+": not one that a tree carries")
			continue
		}
		if err := retry(func() error { return unix.Fsetxattr(fd, name, []byte(v), 0) }); err != nil {
			u.call.skips.add(h.Name, "its attribute "+quote(name)+": "+reason(err))
		}
	}
}
