package fileserver

import (
	"strconv"
	"strings"
	"time"
)

// entry is a tar header to write. The standard library's writer can't write sparse files, and this one is small.
type entry struct {
	name, link  string
	kind        byte // type flag of ustar
	mode        uint32
	uid, gid    uint32
	user, group string
	size        int64 // octets that follow
	real        int64 // size of a sparse file, else 0
	modified    time.Time
	major       uint32
	minor       uint32
	xattrs      [][2]string
}

const block = 512

// record is one line of a PAX header: its own length in decimal, key and value.
func record(b []byte, key, value string) []byte {
	n := len(key) + len(value) + 3 // space, =, newline
	size := n + len(strconv.Itoa(n))
	if s := n + len(strconv.Itoa(size)); s != size {
		size = s
	}
	b = strconv.AppendInt(b, int64(size), 10)
	b = append(b, ' ')
	b = append(b, key...)
	b = append(b, '=')
	b = append(b, value...)
	return append(b, '\n')
}

func octal(field []byte, v int64) bool {
	s := strconv.FormatInt(v, 8)
	if v < 0 || len(s) > len(field)-1 {
		for i := range field[:len(field)-1] {
			field[i] = '0'
		}
		return false
	}
	for i := range field[:len(field)-1] {
		field[i] = '0'
	}
	copy(field[len(field)-1-len(s):], s)
	return true
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// header gives the octets of an entry's header, with a PAX header before it where ustar can't say it.
func (e *entry) header() []byte {
	var h [block]byte
	var pax []byte
	name := e.name
	if e.real > 0 {
		pax = record(pax, "GNU.sparse.major", "1")
		pax = record(pax, "GNU.sparse.minor", "0")
		pax = record(pax, "GNU.sparse.name", e.name)
		pax = record(pax, "GNU.sparse.realsize", strconv.FormatInt(e.real, 10))
		// A reader that knows no sparse files makes this file of its raw form instead of a damaged one.
		name = "GNUSparseFile.0/" + base(e.name)
	}
	if len(name) > 100 || !ascii(name) {
		pax = record(pax, "path", name)
	}
	if len(e.link) > 100 || !ascii(e.link) {
		pax = record(pax, "linkpath", e.link)
	}
	copy(h[0:100], name)
	octal(h[100:108], int64(e.mode&0o7777))
	if !octal(h[108:116], int64(e.uid)) {
		pax = record(pax, "uid", strconv.FormatUint(uint64(e.uid), 10))
	}
	if !octal(h[116:124], int64(e.gid)) {
		pax = record(pax, "gid", strconv.FormatUint(uint64(e.gid), 10))
	}
	if !octal(h[124:136], e.size) {
		pax = record(pax, "size", strconv.FormatInt(e.size, 10))
	}
	if !octal(h[136:148], e.modified.Unix()) || e.modified.Nanosecond() != 0 {
		pax = record(pax, "mtime", stamp(e.modified))
	}
	h[156] = e.kind
	copy(h[157:257], e.link)
	copy(h[257:265], "ustar\x0000")
	copy(h[265:296], clipName(e.user))
	copy(h[297:328], clipName(e.group))
	octal(h[329:337], int64(e.major))
	octal(h[337:345], int64(e.minor))
	for _, x := range e.xattrs {
		pax = record(pax, "SCHILY.xattr."+x[0], x[1])
	}
	seal(&h)
	if pax == nil {
		return h[:]
	}
	x := entryOf("PaxHeaders/"+base(e.name), 'x', len(pax))
	out := append(x[:], pax...)
	out = append(out, make([]byte, padding(int64(len(pax))))...)
	return append(out, h[:]...)
}

func entryOf(name string, kind byte, size int) (h [block]byte) {
	if len(name) > 99 {
		name = name[:99]
	}
	copy(h[0:100], name)
	octal(h[100:108], 0o644)
	octal(h[108:116], 0)
	octal(h[116:124], 0)
	octal(h[124:136], int64(size))
	octal(h[136:148], 0)
	h[156] = kind
	copy(h[257:265], "ustar\x0000")
	seal(&h)
	return h
}

func seal(h *[block]byte) {
	copy(h[148:156], "        ")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	octal(h[148:155], int64(sum))
	h[155] = ' '
}

func padding(n int64) int64 { return -n & (block - 1) }

func base(name string) string {
	name = strings.TrimRight(name, "/")
	return name[strings.LastIndexByte(name, '/')+1:]
}

// clipName leaves out a name that the field can't hold: half a name would be another one.
func clipName(s string) string {
	if len(s) > 31 {
		return ""
	}
	return s
}

// stamp is a PAX time: decimal seconds with a fraction.
func stamp(t time.Time) string {
	sec, nsec := t.Unix(), int64(t.Nanosecond())
	sign := ""
	if sec < 0 { // -1.25 is two seconds before minus 1 and 0.75 after
		sign = "-"
		sec = -sec
		if nsec > 0 {
			sec--
			nsec = 1e9 - nsec
		}
	}
	s := sign + strconv.FormatInt(sec, 10)
	if nsec == 0 {
		return s
	}
	f := strconv.FormatInt(nsec+1e9, 10)[1:]
	return s + "." + strings.TrimRight(f, "0")
}
