package fileserver

import (
	"bytes"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// names knows the sandbox's users and groups by its own files. They are the workload's to write, so what is read of them is
// bounded; a file that is no ordinary file, or too large, names nobody beyond its first octets.
type names struct {
	mu     sync.Mutex
	users  table
	groups table
}

const (
	maxNamesFile = 256 << 10
	maxNames     = 4096
)

type table struct {
	path string
	seen unix.Stat_t
	ids  map[uint32]string
}

func newNames(passwd, group string) *names {
	return &names{users: table{path: passwd}, groups: table{path: group}}
}

func (n *names) user(id uint32) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.users.ids[id]
}

func (n *names) group(id uint32) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.groups.ids[id]
}

// refresh reads the files again where they changed; once for a call.
func (n *names) refresh() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.users.refresh()
	n.groups.refresh()
}

func (t *table) refresh() {
	var st unix.Stat_t
	if unix.Stat(t.path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		t.ids, t.seen = nil, unix.Stat_t{}
		return
	}
	if t.ids != nil && st.Ino == t.seen.Ino && st.Dev == t.seen.Dev && st.Size == t.seen.Size && st.Mtim == t.seen.Mtim {
		return
	}
	t.ids, t.seen = map[uint32]string{}, st
	fd, err := openat(unix.AT_FDCWD, t.path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	b := make([]byte, min(max(st.Size, 1), maxNamesFile))
	n := 0
	for n < len(b) {
		k, err := unix.Read(fd, b[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || k <= 0 {
			break
		}
		n += k
	}
	parseNames(b[:n], t.ids)
}

// parseNames reads name:password:id lines; the first name of an id counts, as for the C library.
func parseNames(b []byte, ids map[uint32]string) {
	for len(b) > 0 && len(ids) < maxNames {
		var line []byte
		line, b, _ = bytes.Cut(b, []byte{'\n'})
		f := bytes.SplitN(line, []byte{':'}, 4)
		if len(f) < 3 || len(f[0]) == 0 || len(f[0]) > 64 || !plain(f[0]) {
			continue
		}
		id, err := strconv.ParseUint(string(f[2]), 10, 32)
		if err != nil {
			continue
		}
		if _, ok := ids[uint32(id)]; !ok {
			ids[uint32(id)] = string(f[0])
		}
	}
}

// plain keeps names that print: an answer carries them as text.
func plain(b []byte) bool {
	for _, c := range b {
		if c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return true
}
