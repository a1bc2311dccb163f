package fileserver

import (
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

const (
	maxLinkMemory = 4 << 20 // octets of names remembered for hard links; beyond it a further name becomes a copy, told
	maxExtents    = 2048    // pieces of a sparse file; what follows the last is sent whole
	maxXattrs     = 64 << 10
)

type inode struct{ dev, ino uint64 }

type linked struct {
	name string
	left uint64
}

// packer writes a tree as a tar into the call's data frames.
type packer struct {
	call     *call
	buf      *[]byte
	n        int // octets in buf behind the header
	sent     int64
	links    map[inode]linked
	linkSize int
}

func (c *call) download(r *filewire.Result) error {
	fd, err := openat(unix.AT_FDCWD, c.req.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return err
	}
	c.s.names.refresh()
	p := &packer{call: c, buf: buffers.Get().(*[]byte), links: map[inode]linked{}}
	defer buffers.Put(p.buf)
	defer func() { r.Applied = p.sent }()
	switch kindOf(st.Mode) {
	case filewire.Dir:
		if err := p.folder(fd, &st); err != nil { // closes fd
			return err
		}
	case filewire.File:
		err := p.file(fd, base(c.req.Path), &st)
		unix.Close(fd)
		if err != nil {
			return err
		}
	default:
		unix.Close(fd)
		return refuse(filewire.Invalid, "is a "+string(kindOf(st.Mode))+", not a folder")
	}
	if err := p.write(make([]byte, 2*block)); err != nil {
		return err
	}
	return p.flush()
}

func (p *packer) folder(fd int, st *unix.Stat_t) error {
	e := p.entry("./", '5', st)
	e.xattrs = p.xattrs(attrsOf(fd), ".")
	if err := p.write(e.header()); err != nil {
		unix.Close(fd)
		return err
	}
	w := walker{ctx: p.call.ctx, visit: p.visit}
	w.trouble = func(rel string, err error) error {
		if rel == "" {
			rel = "."
		}
		p.call.skips.add(rel, reason(err))
		return nil
	}
	dev := st.Dev
	w.enter = func(dir int, rel string, st *unix.Stat_t) (bool, error) {
		if st.Dev != dev && virtual(dir) {
			p.call.skips.add(rel, "is one of the kernel's own file systems; what it holds is left out")
			return false, nil
		}
		return true, nil
	}
	return w.dir(fd, "", 1)
}

func (p *packer) excluded(name, rel string) bool {
	for _, x := range p.call.req.Exclude {
		what := rel
		if !strings.Contains(x, "/") {
			what = name
		}
		if ok, _ := path.Match(strings.Trim(x, "/"), what); ok {
			return true
		}
	}
	return false
}

func (p *packer) entry(name string, kind byte, st *unix.Stat_t) *entry {
	return &entry{name: name, kind: kind, mode: st.Mode & 0o7777, uid: st.Uid, gid: st.Gid, modified: time.Unix(st.Mtim.Unix()),
		user: p.call.s.names.user(st.Uid), group: p.call.s.names.group(st.Gid)}
}

// visit writes one entry. What fails for it alone is told and left out; only the call's own end is an error.
func (p *packer) visit(dir int, name, rel string, st *unix.Stat_t, _ int) (bool, error) {
	if p.excluded(name, rel) {
		return false, nil
	}
	kind := kindOf(st.Mode)
	if kind != filewire.Dir && st.Nlink > 1 {
		if done, err := p.again(rel, st); done || err != nil {
			return false, err
		}
	}
	var e *entry
	switch kind {
	case filewire.Dir:
		e = p.entry(rel+"/", '5', st)
	case filewire.File:
		fd, err := openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err == nil {
			var now unix.Stat_t
			if err = unix.Fstat(fd, &now); err == nil && now.Mode&unix.S_IFMT != unix.S_IFREG {
				err = refuse(filewire.State, "changed its kind while it was looked at")
			}
			if err == nil {
				err = p.file(fd, rel, &now)
				unix.Close(fd)
				return false, err
			}
			unix.Close(fd)
		}
		p.forget(st)
		p.call.skips.add(rel, reason(err))
		return false, nil
	case filewire.Link:
		target, err := readlinkat(dir, name)
		if err != nil {
			p.forget(st)
			p.call.skips.add(rel, reason(err))
			return false, nil
		}
		e = p.entry(rel, '2', st)
		e.link = target
	case filewire.Fifo:
		e = p.entry(rel, '6', st)
	case filewire.Char, filewire.Block:
		e = p.entry(rel, '3', st)
		if kind == filewire.Block {
			e.kind = '4'
		}
		e.major, e.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	default:
		p.forget(st)
		p.call.skips.add(rel, "is a "+string(kind)+", which a tar can't hold")
		return false, nil
	}
	e.xattrs = p.xattrs(attrsAt(dir, name), rel)
	return kind == filewire.Dir, p.write(e.header())
}

// again writes a further name of a file that was sent, as a hard link, or remembers the first.
func (p *packer) again(rel string, st *unix.Stat_t) (bool, error) {
	k := inode{st.Dev, st.Ino}
	if l, ok := p.links[k]; ok {
		e := p.entry(rel, '1', st)
		e.link = l.name
		if l.left--; l.left == 0 {
			p.linkSize -= len(l.name) + 64
			delete(p.links, k)
		} else {
			p.links[k] = l
		}
		return true, p.write(e.header())
	}
	if p.linkSize+len(rel)+64 > maxLinkMemory {
		p.call.skips.add(rel, "has further names, which are sent as copies: too many hard links at once")
		return false, nil
	}
	p.links[k] = linked{rel, uint64(st.Nlink) - 1}
	p.linkSize += len(rel) + 64
	return false, nil
}

// forget takes back a first name that could not be sent.
func (p *packer) forget(st *unix.Stat_t) {
	k := inode{st.Dev, st.Ino}
	if l, ok := p.links[k]; ok {
		p.linkSize -= len(l.name) + 64
		delete(p.links, k)
	}
}

type extent struct{ off, n int64 }

// file sends exactly the octets that its header announces: one that grows is cut, one that shrinks is filled with zeros, told.
func (p *packer) file(fd int, rel string, st *unix.Stat_t) error {
	e := p.entry(rel, '0', st)
	e.size = st.Size
	e.xattrs = p.xattrs(attrsOf(fd), rel)
	pieces := []extent{{0, st.Size}}
	var table []byte
	if st.Blocks*512 < st.Size {
		if sparse := extents(fd, st.Size); sparse != nil && sparse[0].n < st.Size {
			pieces = sparse
			table = sparseTable(pieces)
			e.real, e.size = st.Size, int64(len(table))
			for _, x := range pieces {
				e.size += x.n
			}
		}
	}
	if err := p.write(e.header()); err != nil {
		return err
	}
	if err := p.write(table); err != nil {
		return err
	}
	short := error(nil)
	for _, x := range pieces {
		for x.n > 0 {
			room := (*p.buf)[filewire.HeaderSize+p.n:]
			if int64(len(room)) > x.n {
				room = room[:x.n]
			}
			n := 0
			if short == nil {
				err := retry(func() (err error) { n, err = unix.Pread(fd, room, x.off); return err })
				switch {
				case err != nil:
					short = err
				case n == 0:
					short = refuse(filewire.State, "became shorter while it was read; its end is zeros")
				}
				if short != nil {
					p.call.skips.add(rel, reason(short))
				}
			}
			if short != nil {
				clear(room)
				n = len(room)
			}
			x.off += int64(n)
			x.n -= int64(n)
			if err := p.advance(n); err != nil {
				return err
			}
		}
	}
	return p.write(make([]byte, padding(e.size)))
}

// extents are the pieces of a file that hold data, nil where the file system does not say.
func extents(fd int, size int64) []extent {
	list := []extent{}
	for at := int64(0); at < size; {
		data, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if err == unix.ENXIO || err == nil && data >= size {
			break
		}
		if err != nil {
			return nil
		}
		if len(list) == maxExtents {
			list = append(list, extent{data, size - data})
			return list
		}
		hole, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil || hole <= data {
			return nil
		}
		hole = min(hole, size)
		list = append(list, extent{data, hole - data})
		at = hole
	}
	// An end that is a hole is said by an empty piece, as GNU tar does.
	if n := len(list); n == 0 || list[n-1].off+list[n-1].n < size {
		list = append(list, extent{size, 0})
	}
	return list
}

// sparseTable is the map before a sparse file's data (GNU format 1.0): decimal lines in whole blocks.
func sparseTable(pieces []extent) []byte {
	b := strconv.AppendInt(nil, int64(len(pieces)), 10)
	for _, x := range pieces {
		b = append(b, '\n')
		b = strconv.AppendInt(b, x.off, 10)
		b = append(b, '\n')
		b = strconv.AppendInt(b, x.n, 10)
	}
	b = append(b, '\n')
	return append(b, make([]byte, padding(int64(len(b))))...)
}

// attrs reads attributes of one file.
type attrs struct {
	list func([]byte) (int, error)
	get  func(string, []byte) (int, error)
}

func attrsOf(fd int) attrs {
	return attrs{
		func(b []byte) (int, error) { return unix.Flistxattr(fd, b) },
		func(name string, b []byte) (int, error) { return unix.Fgetxattr(fd, name, b) },
	}
}

// attrsAt needs no descriptor of the file, which a folder, link or device need not give; without /proc it finds none.
func attrsAt(dir int, name string) attrs {
	p := "/proc/self/fd/" + strconv.Itoa(dir) + "/" + name
	return attrs{
		func(b []byte) (int, error) { return unix.Llistxattr(p, b) },
		func(name string, b []byte) (int, error) { return unix.Lgetxattr(p, name, b) },
	}
}

// xattrs reads the attributes that a tree carries: the user's own and a program's capabilities.
func (p *packer) xattrs(a attrs, rel string) [][2]string {
	n, err := a.list(nil)
	if err != nil || n == 0 {
		return nil
	}
	b := make([]byte, min(n+256, maxXattrs))
	if n, err = a.list(b); err != nil {
		p.call.skips.add(rel, "its attributes: "+reason(err))
		return nil
	}
	var out [][2]string
	size := 0
	for _, name := range strings.Split(strings.TrimRight(string(b[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") && name != "security.capability" {
			continue
		}
		v := make([]byte, maxXattrs)
		n, err := a.get(name, v)
		if err != nil {
			p.call.skips.add(rel, "its attribute "+quote(name)+": "+reason(err))
			continue
		}
		if size += n + len(name); size > 8*maxXattrs || strings.Contains(name, "=") {
			p.call.skips.add(rel, "its attribute "+quote(name)+": a tar can't hold it")
			continue
		}
		out = append(out, [2]string{name, string(v[:n])})
	}
	return out
}

// advance counts octets that were put into the buffer and sends it when it is full.
func (p *packer) advance(n int) error {
	p.n += n
	if p.n == filewire.MaxData {
		return p.flush()
	}
	return nil
}

func (p *packer) write(b []byte) error {
	for len(b) > 0 {
		n := copy((*p.buf)[filewire.HeaderSize+p.n:], b)
		b = b[n:]
		if err := p.advance(n); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) flush() error {
	if p.n == 0 {
		return nil
	}
	n := p.n
	p.n = 0
	p.sent += int64(n)
	return p.call.send(filewire.GuestData, (*p.buf)[:filewire.HeaderSize+n])
}
