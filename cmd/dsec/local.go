package main

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func inode(info fs.FileInfo) (id [2]uint64, links uint64) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return id, 0
	}
	return [2]uint64{st.Dev, st.Ino}, st.Nlink
}

// capability puts a file's capabilities into the header, so that a layer built from a folder keeps them.
func capability(p string, h *tar.Header) error {
	buf := make([]byte, 64)
	n, err := unix.Lgetxattr(p, "security.capability", buf)
	if err != nil || n <= 0 {
		return nil
	}
	h.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": string(buf[:n])}
	return nil
}

// meter shows on a terminal how far a long transfer has come.
type meter struct {
	r     io.Reader
	total int64 // -1 unknown
	done  int64
	start time.Time
	next  time.Time
	on    bool
}

func newMeter(r io.Reader, total int64) io.Reader {
	now := time.Now()
	return &meter{r: r, total: total, start: now, next: now.Add(time.Second), on: isTerminal(os.Stderr)}
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.done += int64(n)
	if now := time.Now(); m.on && (now.After(m.next) || err != nil && now.Sub(m.start) > time.Second) {
		m.next = now.Add(200 * time.Millisecond)
		rate := float64(m.done) / now.Sub(m.start).Seconds()
		fmt.Fprintf(os.Stderr, "\r%s %s/s ", octetText(m.done), octetText(int64(rate)))
		if m.total > 0 {
			fmt.Fprintf(os.Stderr, "%d%% ", m.done*100/m.total)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr)
		}
	}
	return n, err
}
