package blob

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Config is how a daemon runs.
type Config struct {
	RunDir   string // socket, lock and what nodes are; it may go with the machine's restart
	CacheDir string // cache, kept over restarts; on a disk, of this daemon alone
	Limit    int64  // of the cache, in octets; 0 is 20 GiB
	// Deadline is how long a read waits for the store before it fails with EIO; 0 is 30 s.
	Deadline time.Duration
	Fetches  int // reads of the store at once; 0 is 64
	Prefetch int // of these, how many may fetch ahead for one blob; 0 is 8
	// Buffered lets the kernel keep a second copy of what it read, beside the one that EROFS keeps.
	Buffered bool
	// Mark is what the supervisor compares: a daemon of another mark is replaced.
	Mark string
	// Fuse is the mark of the connection that the daemon serves.
	Fuse string
}

func (c *Config) fill() error {
	if !filepath.IsAbs(c.RunDir) || !filepath.IsAbs(c.CacheDir) {
		return fmt.Errorf("blobd: run folder %q, cache folder %q: want absolute paths: %w", c.RunDir, c.CacheDir, sandbox.ErrInvalid)
	}
	if c.Limit == 0 {
		c.Limit = 20 << 30
	}
	if c.Deadline == 0 {
		c.Deadline = 30 * time.Second
	}
	if c.Fetches == 0 {
		c.Fetches = 64
	}
	if c.Prefetch == 0 {
		c.Prefetch = 8
	}
	if c.Limit < 0 || c.Deadline < 0 || c.Fetches < 1 || c.Fetches > 4096 || c.Prefetch < 1 || c.Prefetch > c.Fetches {
		return fmt.Errorf("blobd: limit %d, deadline %v, fetches %d, prefetch %d: out of range: %w", c.Limit, c.Deadline, c.Fetches, c.Prefetch, sandbox.ErrInvalid)
	}
	return nil
}

const (
	lockName  = "lock"
	nodesName = "nodes" // folder: for each known blob a file HEX with its Data as a line of JSON and its list of units
	plainName = "no-resend"

	lockBound   = 10 * time.Second
	maxWaiting  = 8192 // reads that wait for the store; more wait in the kernel
	lookEvery   = 250 * time.Millisecond
	sourceIdle  = time.Minute
	maxBlobs    = 1 << 16
	readerCount = 4
)

// Server is the daemon's state.
type Server struct {
	cfg     Config
	store   store.Store
	log     *slog.Logger
	started time.Time
	conn    *connection
	ctx     context.Context
	stop    context.CancelFunc
	work    sync.WaitGroup
	slots   chan struct{} // reads of the store under way
	urgent  atomic.Int64  // fetches that a read waits for
	pending chan struct{} // reads that wait

	size      atomic.Int64 // octets in the cache
	fullUntil atomic.Int64 // Unix nanoseconds
	fullAt    atomic.Int64
	patience  time.Duration // fullFor
	told      atomic.Int64
	toldFetch atomic.Int64
	evicting  sync.Mutex
	recent    recent
	held      held
	touched   atomic.Int64 // last read or fetch, Unix nanoseconds
	metrics   metrics

	waitMu  sync.Mutex
	waiting map[uint64]*waiter // by the request's number

	mu      sync.Mutex
	blobs   map[uint64]*blob   // by node
	known   map[uint64]string  // nodes of earlier daemons that were not loaded yet
	orphans map[string]orphan  // cache files of blobs that are not loaded
	busy    map[string]orphan  // of these, such as somebody has open
	opening map[string]*regist // registrations under way
}

type regist struct {
	done chan struct{}
	b    *blob
	err  error
}

// waiter is a read of the kernel that waits for the store.
type waiter struct {
	pid    uint32
	cancel context.CancelCauseFunc
}

var errKilled = errors.New("its process was killed")

// NewServer makes a daemon for a FUSE connection (see [Mount]), which it takes over.
func NewServer(cfg Config, st store.Store, fuse *os.File, log *slog.Logger) (*Server, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	for _, d := range []string{cfg.RunDir, filepath.Join(cfg.RunDir, nodesName), cfg.CacheDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("blobd: make folder: %w", err)
		}
	}
	// The descriptor is shared with the keeper and with no other reader: that it does not block harms nobody.
	fd, err := unix.FcntlInt(fuse.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("blobd: fuse connection: %w", err)
	}
	fuse.Close()
	s := &Server{cfg: cfg, store: st, log: log, started: time.Now(), conn: &connection{fd: fd}, slots: make(chan struct{}, cfg.Fetches), patience: fullFor,
		pending: make(chan struct{}, maxWaiting), recent: recent{limit: recentUnits}, held: held{more: make(chan struct{}, 1)}, waiting: map[uint64]*waiter{}, blobs: map[uint64]*blob{},
		known: map[uint64]string{}, busy: map[string]orphan{}, opening: map[string]*regist{}}
	if s.conn.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("blobd: %w", err)
	}
	return s, nil
}

// Run serves until ctx ends, the last descriptor of the file system is closed, or a client says stop. Reads under way are then left to
// the next daemon.
func (s *Server) Run(ctx context.Context) error {
	defer unix.Close(s.conn.stop)
	defer func() { unix.Close(s.conn.fd) }()
	s.ctx, s.stop = context.WithCancel(ctx)
	defer s.stop()
	locks, err := s.lock()
	if err != nil {
		return err
	}
	defer func() {
		for _, l := range locks {
			l.Close()
		}
	}()
	if err := s.scanCache(); err != nil {
		return fmt.Errorf("blobd: cache: %w", err)
	}
	if err := s.scanNodes(); err != nil {
		return fmt.Errorf("blobd: known blobs: %w", err)
	}
	l, err := s.listen()
	if err != nil {
		return err
	}
	if err := s.takeOver(); err != nil {
		l.Close()
		return err
	}
	s.background(func(ctx context.Context) {
		<-ctx.Done()
		l.Close()
		unix.Write(s.conn.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	s.background(func(context.Context) { s.accept(l) })
	s.background(s.look)
	s.background(s.keepHeld)
	var readers sync.WaitGroup
	failed := make(chan error, readerCount)
	for range readerCount {
		readers.Add(1)
		go func() {
			defer readers.Done()
			defer s.stop() // one that ends ends all
			if err := s.serve(); err != nil {
				failed <- err
			}
		}()
	}
	s.log.Info("blobd serves", "pid", os.Getpid(), "cache", s.cfg.CacheDir, "octets", s.size.Load(), "limit", s.cfg.Limit)
	readers.Wait()
	s.work.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// lock takes the folders; the daemon before may take a moment to end.
func (s *Server) lock() (files []*os.File, err error) {
	for _, dir := range []string{s.cfg.RunDir, s.cfg.CacheDir} {
		f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return files, fmt.Errorf("blobd: lock: %w", err)
		}
		files = append(files, f)
		for end := time.Now().Add(lockBound); ; {
			err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			if err == nil {
				break
			}
			if time.Now().After(end) || s.ctx.Err() != nil {
				for _, f := range files {
					f.Close()
				}
				return nil, fmt.Errorf("blobd: another daemon uses %s: %w", dir, sandbox.ErrExists)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
	return files, nil
}

// takeOver makes the connection answer again what a dead daemon had taken. A kernel before 6.9 can't ask again: there each daemon
// reads by a clone of the connection, so that what it had taken fails at its death instead of hanging for ever.
func (s *Server) takeOver() error {
	if _, err := os.Stat(filepath.Join(s.cfg.RunDir, plainName)); err == nil {
		if err := s.useClone(); err != nil {
			return err
		}
	} else if err := s.conn.resend(); err != nil {
		s.log.Debug("nothing was under way", "err", err)
	}
	return unix.SetNonblock(s.conn.fd, true)
}

func (s *Server) useClone() error {
	n, err := clone(s.conn.fd)
	if err != nil {
		return err
	}
	unix.Close(s.conn.fd)
	s.conn.fd = n
	return nil
}

func (s *Server) all() []*blob {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*blob, 0, len(s.blobs))
	for _, b := range s.blobs {
		all = append(all, b)
	}
	return all
}

// failing tells of a store in trouble, not more than once in five seconds.
func (s *Server) failing(err error) {
	now := time.Now().UnixNano()
	if last := s.toldFetch.Load(); now-last > int64(5*time.Second) && s.toldFetch.CompareAndSwap(last, now) {
		s.log.Error("a read fails", "err", err)
	}
}

// node returns a blob by its node, also one that an earlier daemon knew.
func (s *Server) node(n uint64) *blob {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.blobs[n]; b != nil {
		return b
	}
	h, ok := s.known[n]
	if !ok {
		return nil
	}
	delete(s.known, n)
	b, err := s.loadNode(h)
	if err != nil {
		s.log.Error("a blob of an earlier daemon", "digest", h, "err", err)
		return nil
	}
	s.blobs[n] = b
	s.background(func(context.Context) { s.adopt(b) })
	return b
}

func (s *Server) scanNodes() error {
	entries, err := os.ReadDir(filepath.Join(s.cfg.RunDir, nodesName))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := hexOf(prefix + e.Name()); err == nil {
			s.known[nodeOf(e.Name())] = e.Name()
		} else {
			os.Remove(filepath.Join(s.cfg.RunDir, nodesName, e.Name())) // half of one
		}
	}
	return nil
}

func (s *Server) loadNode(h string) (*blob, error) {
	text, err := os.ReadFile(filepath.Join(s.cfg.RunDir, nodesName, h))
	if err != nil {
		return nil, err
	}
	var d Data
	head, _, _ := bytes.Cut(text, []byte{'\n'})
	if err := json.Unmarshal(head, &d); err != nil {
		return nil, err
	}
	if err := d.check(); err != nil {
		return nil, err
	}
	if want := int64(d.count()) * digestSize; d.Digest != prefix+h || int64(len(text)) < want {
		return nil, fmt.Errorf("known blob %s: its file is broken: %w", h, sandbox.ErrInvalid)
	}
	units := text[len(text)-d.count()*digestSize:]
	b := newBlob(s, d, h, units)
	if prefix+hex.EncodeToString(b.unitsDigest()) != d.Units {
		return nil, fmt.Errorf("known blob %s: its list of units is broken: %w", h, sandbox.ErrInvalid)
	}
	return b, nil
}

func (s *Server) saveNode(b *blob) error {
	head, err := json.Marshal(b.data)
	if err != nil {
		return err
	}
	file := filepath.Join(s.cfg.RunDir, nodesName, b.hex)
	if err := os.WriteFile(file+".new", append(append(head, '\n'), b.units...), 0o600); err != nil {
		os.Remove(file + ".new")
		return fmt.Errorf("note blob %s: %w", b.data.Digest, err)
	}
	return os.Rename(file+".new", file)
}

// forgetNodes drops what a connection that is gone knew: a new one has no nodes.
func (s *Server) forgetNodes() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, h := range s.known {
		os.Remove(filepath.Join(s.cfg.RunDir, nodesName, h))
		delete(s.known, n)
	}
}

// register makes a blob known, so that it can be opened; its list of units is fetched and checked.
func (s *Server) register(ctx context.Context, d Data) (*blob, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	h, _ := hexOf(d.Digest)
	for {
		if b := s.node(nodeOf(h)); b != nil {
			if b.hex != h || b.data.Size != d.Size || b.data.Units != d.Units {
				return nil, fmt.Errorf("blob %s: it is known with size %d and list of units %s: %w", d.Digest, b.data.Size, b.data.Units, sandbox.ErrInvalid)
			}
			return b, nil
		}
		s.mu.Lock()
		r := s.opening[h]
		if r == nil {
			if len(s.blobs)+len(s.opening) >= maxBlobs {
				s.mu.Unlock()
				return nil, fmt.Errorf("blob %s: %d blobs are known already: %w", d.Digest, maxBlobs, sandbox.ErrExhausted)
			}
			r = &regist{done: make(chan struct{})}
			s.opening[h] = r
			s.mu.Unlock()
			r.b, r.err = s.registerNew(ctx, d, h)
			s.mu.Lock()
			delete(s.opening, h)
			if r.err == nil {
				s.blobs[r.b.node] = r.b
			}
			s.mu.Unlock()
			close(r.done)
			return r.b, r.err
		}
		s.mu.Unlock()
		select {
		case <-r.done:
			if r.err != nil && (ctx.Err() != nil || errors.Is(r.err, sandbox.ErrNotFound)) {
				return nil, r.err
			}
			// It is known now, or the other asked for something else or gave up sooner.
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *Server) registerNew(ctx context.Context, d Data, h string) (*blob, error) {
	units, err := s.fetchUnits(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("blob %s: list of units: %w", d.Digest, err)
	}
	b := newBlob(s, d, h, units)
	if err := s.saveNode(b); err != nil {
		return nil, err
	}
	s.adopt(b)
	return b, nil
}

func (s *Server) fetchUnits(ctx context.Context, d Data) ([]byte, error) {
	want := int64(d.count()) * digestSize
	var last error
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		type result struct {
			text []byte
			err  error
		}
		ch := make(chan result, 1)
		go func() {
			text, err := store.ReadAll(ctx, s.store, key(d.Units), want)
			ch <- result{text, err}
		}()
		select {
		case r := <-ch:
			last = r.err
			if last == nil {
				b := &blob{data: d, units: r.text}
				if int64(len(r.text)) == want && prefix+hex.EncodeToString(b.unitsDigest()) == d.Units {
					return r.text, nil
				}
				last = errCorrupt
			}
			if errors.Is(last, sandbox.ErrNotFound) {
				return nil, last
			}
		case <-ctx.Done():
		}
		select {
		case <-ctx.Done():
			if last == nil {
				last = ctx.Err()
			}
			return nil, fmt.Errorf("given up: %w", last)
		case <-time.After(pause):
		}
	}
}

// look gives up reads whose process was killed, and closes objects that nobody reads.
func (s *Server) look(ctx context.Context) {
	t := time.NewTicker(lookEvery)
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			for _, b := range s.all() {
				b.closeIdle(time.Now())
			}
			return
		case <-t.C:
		}
		s.waitMu.Lock()
		list := make([]*waiter, 0, len(s.waiting))
		for _, w := range s.waiting {
			list = append(list, w)
		}
		s.waitMu.Unlock()
		for _, w := range list {
			if killed(w.pid) {
				w.cancel(errKilled)
			}
		}
		if n%240 == 0 {
			for _, b := range s.all() {
				b.closeIdle(time.Now().Add(-sourceIdle))
				b.rest(time.Now().Add(-sourceIdle))
			}
		}
	}
}
