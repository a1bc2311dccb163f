package blob

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// serve answers requests of the kernel until the connection ends. What needs no fetch is answered here; a read that has to wait
// gets a goroutine of its own.
func (s *Server) serve() error {
	buf := make([]byte, requestBuffer)
	for {
		raw, ok, err := s.conn.next(buf)
		if err != nil || !ok {
			return err
		}
		r, err := parseRequest(raw)
		if err != nil {
			return err
		}
		if err := s.answer(r); err != nil {
			return err
		}
	}
}

func (s *Server) answer(r request) error {
	c := s.conn
	switch r.op {
	case opInit:
		out, resend, err := initReply(r.body)
		if err != nil {
			return errors.Join(c.fail(r.unique, unix.EPROTO), err)
		}
		s.forgetNodes()
		if !resend {
			if err := os.WriteFile(filepath.Join(s.cfg.RunDir, plainName), nil, 0o600); err != nil {
				return err
			}
			s.log.Warn("this kernel can't ask again for reads that a killed daemon had taken (before 6.9): they fail with EIO")
		} else {
			os.Remove(filepath.Join(s.cfg.RunDir, plainName))
		}
		buf, o := body(len(out))
		copy(o, out)
		return c.reply(r.unique, 0, buf)
	case opLookup:
		name, _, _ := bytes.Cut(r.body, []byte{0})
		if len(name) != 2*digestSize || r.node != rootNode {
			return c.fail(r.unique, unix.ENOENT)
		}
		if _, err := hex.DecodeString(string(name)); err != nil {
			return c.fail(r.unique, unix.ENOENT)
		}
		b := s.node(nodeOf(string(name)))
		if b == nil || b.hex != string(name) {
			return c.fail(r.unique, unix.ENOENT)
		}
		buf, o := body(128)
		le.PutUint64(o[0:], b.node)
		le.PutUint64(o[16:], attrSeconds)
		le.PutUint64(o[24:], attrSeconds)
		putAttr(o[40:], b.node, b.data.Size, unix.S_IFREG|0o400)
		return c.reply(r.unique, 0, buf)
	case opGetattr:
		buf, o := body(104)
		le.PutUint64(o[0:], attrSeconds)
		if r.node == rootNode {
			putAttr(o[16:], rootNode, 0, unix.S_IFDIR|0o500)
			return c.reply(r.unique, 0, buf)
		}
		b := s.node(r.node)
		if b == nil {
			return c.fail(r.unique, unix.ESTALE)
		}
		putAttr(o[16:], b.node, b.data.Size, unix.S_IFREG|0o400)
		return c.reply(r.unique, 0, buf)
	case opOpen:
		b := s.node(r.node)
		if b == nil {
			return c.fail(r.unique, unix.ESTALE)
		}
		if len(r.body) < 4 || le.Uint32(r.body)&unix.O_ACCMODE != unix.O_RDONLY {
			return c.fail(r.unique, unix.EROFS)
		}
		b.opens.Add(1)
		s.metrics.opens.Add(1)
		buf, o := body(16)
		// No FLUSH: a process that executes another program closes its files in the middle of that, and would wait there for the daemon
		// that it is about to start.
		flags := uint32(openDirectIO | openNoFlush)
		if s.cfg.Buffered {
			flags = openKeepCache | openNoFlush
		}
		le.PutUint32(o[8:], flags)
		return c.reply(r.unique, 0, buf)
	case opRelease:
		if b := s.node(r.node); b != nil {
			b.opens.Add(-1)
		}
		return c.fail(r.unique, 0)
	case opRead:
		return s.read(r)
	case opStatfs:
		buf, o := body(80)
		le.PutUint32(o[40:], blockSize)
		le.PutUint32(o[44:], 255)
		le.PutUint32(o[48:], blockSize)
		return c.reply(r.unique, 0, buf)
	case opForget, opBatchForget: // have no answer; nodes are numbered by digest
		return nil
	case opInterrupt:
		if len(r.body) >= 8 {
			s.interrupt(le.Uint64(r.body))
		}
		return nil
	case opOpendir, opReleasedir, opDestroy, opAccess:
		if r.op == opOpendir {
			buf, _ := body(16)
			return c.reply(r.unique, 0, buf)
		}
		return c.fail(r.unique, 0)
	case opReaddir: // names are not told
		return c.fail(r.unique, 0)
	}
	return c.fail(r.unique, unix.ENOSYS)
}

func (s *Server) read(r request) error {
	if len(r.body) < 24 {
		return s.conn.fail(r.unique, unix.EINVAL)
	}
	off, size := int64(le.Uint64(r.body[8:])), int64(le.Uint32(r.body[16:]))
	b := s.node(r.node)
	switch {
	case b == nil:
		return s.conn.fail(r.unique, unix.ESTALE)
	case off < 0 || size > maxRead:
		return s.conn.fail(r.unique, unix.EINVAL)
	}
	n := int(max(0, min(size, b.data.Size-off)))
	s.metrics.reads.Add(1)
	s.metrics.asked.Add(int64(n))
	now := time.Now().UnixNano()
	b.used.Store(now)
	s.touched.Store(now)
	if n == 0 {
		return s.conn.fail(r.unique, 0)
	}
	b.log.note(b.data.Size, off, int64(n))
	s.ahead(b, off, int64(n))
	if b.ready(off, n) {
		if done, err := s.answerCached(b, r.unique, off, n); done {
			return err
		}
	}
	// It waits for the store. The kernel's queue holds what is more than the bound.
	select {
	case s.pending <- struct{}{}:
	case <-s.ctx.Done():
		return nil // left to the next daemon
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	ctx, end := context.WithTimeout(ctx, s.cfg.Deadline)
	s.waitMu.Lock()
	s.waiting[r.unique] = &waiter{r.pid, cancel}
	s.waitMu.Unlock()
	s.background(func(context.Context) {
		err := s.answerRead(ctx, b, r.unique, off, n)
		s.waitMu.Lock()
		delete(s.waiting, r.unique)
		s.waitMu.Unlock()
		end()
		cancel(nil)
		<-s.pending
		if err != nil {
			s.log.Error("answer a read", "err", err)
		}
	})
	return nil
}

// answerCached answers a read from the cache alone; not done when a part was evicted just now.
func (s *Server) answerCached(b *blob, unique uint64, off int64, n int) (done bool, err error) {
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	buf := (*p)[:headerOut+n]
	out := buf[headerOut:]
	for at := 0; at < n; {
		i := int((off + int64(at)) / UnitSize)
		in := (off + int64(at)) % UnitSize
		part := min(n-at, UnitSize-int(in))
		if !b.cached(i, out[at:at+part], in) {
			return false, nil
		}
		at += part
	}
	s.metrics.hit.Add(int64(n))
	return true, s.conn.reply(unique, 0, buf)
}

func (s *Server) answerRead(ctx context.Context, b *blob, unique uint64, off int64, n int) error {
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	buf := (*p)[:headerOut+n]
	out := buf[headerOut:]
	for at := 0; at < n; {
		i := int((off + int64(at)) / UnitSize)
		in := (off + int64(at)) % UnitSize
		part := min(n-at, UnitSize-int(in))
		if err := b.unit(ctx, i, out[at:at+part], in, false); err != nil {
			switch {
			case errors.Is(err, errKilled):
				s.metrics.killed.Add(1)
				return s.conn.fail(unique, unix.EINTR)
			case s.ctx.Err() != nil:
				return nil // this daemon ends: the next one is asked again
			}
			s.failing(err)
			return s.conn.fail(unique, unix.EIO)
		}
		at += part
	}
	return s.conn.reply(unique, 0, buf)
}

// interrupt is called when a signal came to the process of a read. Only a process that is killed may see its read fail: to another one
// a failed page is an error of its disk.
func (s *Server) interrupt(unique uint64) {
	s.waitMu.Lock()
	w := s.waiting[unique]
	s.waitMu.Unlock()
	if w != nil && killed(w.pid) {
		w.cancel(errKilled)
	}
}

// killed reports whether a thread has a SIGKILL pending, or is gone.
func killed(pid uint32) bool {
	if pid == 0 {
		return false // the kernel's own read
	}
	text, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)
	}
	for line := range bytes.Lines(text) {
		rest, ok := bytes.CutPrefix(line, []byte("SigPnd:"))
		if !ok {
			if rest, ok = bytes.CutPrefix(line, []byte("ShdPnd:")); !ok {
				continue
			}
		}
		set, err := strconv.ParseUint(string(bytes.TrimSpace(rest)), 16, 64)
		if err == nil && set&(1<<(syscall.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
}
