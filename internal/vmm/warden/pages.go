package warden

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/uffd"
)

// sharedMemory is a memory file that faults of any number of machines are answered from.
type sharedMemory struct {
	*uffd.Memory
	key   [2]uint64
	users int
}

// maxServed bounds the machines whose faults are answered.
const maxServed = 1024

// pages answers for the memory of a monitor that is about to start. The files are taken.
func (w *warden) pages(ctx context.Context, id string, files []*os.File) error {
	if !namePattern.MatchString(id) || len(files) != 2 {
		return fmt.Errorf("pages of %q with %d files: %w", id, len(files), sandbox.ErrInvalid)
	}
	listener, err := net.FileListener(files[0])
	if err != nil {
		return fmt.Errorf("pages of %s: %w", id, err)
	}
	l, ok := listener.(*net.UnixListener)
	if !ok {
		listener.Close()
		return fmt.Errorf("pages of %s: no socket of this machine: %w", id, sandbox.ErrInvalid)
	}
	l.SetUnlinkOnClose(false)
	m, err := w.takeMemory(files[1])
	if err != nil {
		l.Close()
		return fmt.Errorf("pages of %s: %w", id, err)
	}
	for _, f := range files {
		f.Close()
	}
	go func() {
		defer w.leaveMemory(m)
		l.SetDeadline(time.Now().Add(2 * time.Minute))
		c, err := l.AcceptUnix()
		l.Close()
		if err != nil {
			w.log.Warn("a monitor never asked for its memory", "monitor", id, "err", err)
			return
		}
		stats, err := m.Serve(ctx, c)
		if err != nil && ctx.Err() == nil {
			// Its guest would stand still for ever.
			w.log.Error("memory of a machine: its monitor is ended", "monitor", id, "err", err)
			if err := w.kill(id, "its memory could not be served: "+err.Error()); err != nil {
				w.log.Error("end", "monitor", id, "err", err)
			}
		}
		w.log.Info("memory of a machine", "monitor", id, "faults", stats.Faults, "ahead", stats.Ahead, "removed", stats.Removed)
	}()
	return nil
}

// takeMemory maps a memory file, once for all machines that are started from it.
func (w *warden) takeMemory(f *os.File) (*sharedMemory, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	key := [2]uint64{st.Dev, st.Ino}
	w.mu.Lock()
	defer w.mu.Unlock()
	users := 0
	for _, m := range w.memories {
		users += m.users
	}
	if users >= maxServed {
		return nil, fmt.Errorf("the memory of %d machines is served: %w", users, sandbox.ErrExhausted)
	}
	m := w.memories[key]
	if m == nil {
		opened, err := uffd.Open(f)
		if err != nil {
			return nil, err
		}
		m = &sharedMemory{Memory: opened, key: key}
		w.memories[key] = m
	}
	m.users++
	return m, nil
}

func (w *warden) leaveMemory(m *sharedMemory) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m.users--
	w.tidyMemoriesLocked()
}

// tidyMemoriesLocked unmaps what no machine needs, but for what is held: the next machine of it gets what was learnt.
func (w *warden) tidyMemoriesLocked() {
	held := map[[2]uint64]bool{}
	for _, f := range w.held {
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil {
			held[[2]uint64{st.Dev, st.Ino}] = true
		}
	}
	for key, m := range w.memories {
		if m.users > 0 || held[key] {
			continue
		}
		delete(w.memories, key)
		if err := m.Close(); err != nil {
			w.log.Error("unmap a memory", "err", err)
		}
	}
}
