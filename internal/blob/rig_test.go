package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("DSEC_BLOBD_TEST"); dir != "" {
		os.Exit(daemonMain(dir))
	}
	os.Exit(m.Run())
}

// daemonMain is the daemon as a process of its own, on a store in a folder that is slow to read contents.
func daemonMain(dir string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	return Main(os.Args[1:], func([]string) (store.Store, error) {
		d, err := store.NewDir(filepath.Join(dir, "store"))
		if err != nil {
			return nil, err
		}
		delay, _ := time.ParseDuration(os.Getenv("DSEC_BLOBD_TEST_DELAY"))
		return &slowDir{d, delay}, nil
	}, log)
}

type slowDir struct {
	store.Store
	delay time.Duration
}

type slowReader struct {
	store.Reader
	delay time.Duration
}

func (s *slowDir) Open(ctx context.Context, k string) (store.Reader, error) {
	r, err := s.Store.Open(ctx, k)
	if err != nil {
		return nil, err
	}
	return &slowReader{r, s.delay}, nil
}

func (r *slowReader) ReadAt(p []byte, off int64) (int, error) {
	if r.Size() > 1<<20 { // contents, not lists of units
		time.Sleep(r.delay)
	}
	return r.Reader.ReadAt(p, off)
}

// trouble is a store in memory that fails as it is told.
type trouble struct {
	store.Store // nil: what is not overridden is not used

	mu      sync.Mutex
	objects map[string][]byte
	fail    func(key string, off int64) error // before a read
	spoil   func(key string, off int64) bool  // a wrong octet
	hang    chan struct{}                     // reads wait until it is closed
	reads   map[string]map[int64]int          // how often each offset was read
	now     atomic.Int64                      // reads under way
	delay   func(off int64, n int) time.Duration
}

func newTrouble() *trouble {
	return &trouble{objects: map[string][]byte{}, reads: map[string]map[int64]int{}}
}

func (s *trouble) set(f func()) { s.mu.Lock(); defer s.mu.Unlock(); f() }

func (s *trouble) count(k string) (total, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.reads[k] {
		total += n
		most = max(most, n)
	}
	return total, most
}

func (s *trouble) Open(_ context.Context, k string) (store.Reader, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.objects[k]
	if !ok {
		return nil, fmt.Errorf("object %s: %w", k, sandbox.ErrNotFound)
	}
	return &troubleReader{s, k, b}, nil
}

type troubleReader struct {
	s *trouble
	k string
	b []byte
}

func (r *troubleReader) Close() error { return nil }
func (r *troubleReader) Size() int64  { return int64(len(r.b)) }

func (r *troubleReader) ReadAt(p []byte, off int64) (int, error) {
	s := r.s
	s.now.Add(1)
	defer s.now.Add(-1)
	s.mu.Lock()
	if s.reads[r.k] == nil {
		s.reads[r.k] = map[int64]int{}
	}
	s.reads[r.k][off]++
	hang, fail, spoil, delay := s.hang, s.fail, s.spoil, s.delay
	s.mu.Unlock()
	if delay != nil {
		time.Sleep(delay(off, len(p)))
	}
	if hang != nil {
		<-hang
	}
	if fail != nil {
		if err := fail(r.k, off); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.b[off:])
	if spoil != nil && spoil(r.k, off) {
		p[n/2] ^= 1
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func random(size int, seed uint64) []byte {
	b := make([]byte, size)
	var s [32]byte
	le.PutUint64(s[:], seed)
	rand.NewChaCha8(s).Read(b)
	return b
}

func digestOf(b []byte) string {
	h := sha256.Sum256(b)
	return prefix + hex.EncodeToString(h[:])
}

// describe makes the list of units.
func describe(content []byte) (Data, []byte) {
	var units []byte
	for at := 0; at < len(content); at += UnitSize {
		h := sha256.Sum256(content[at:min(at+UnitSize, len(content))])
		units = append(units, h[:]...)
	}
	return Data{Digest: digestOf(content), Size: int64(len(content)), Units: digestOf(units)}, units
}

func (s *trouble) add(content []byte) Data {
	d, units := describe(content)
	s.set(func() { s.objects[key(d.Digest)], s.objects[key(d.Units)] = content, units })
	return d
}

// rig is a daemon in this process.
type rig struct {
	t      testing.TB
	cfg    Config
	store  *trouble
	server *Server
	mount  *os.File
	keep   *os.File // the connection, as the keeper holds it
	client *Client
	tune   func(*Server) // before it runs
	end    context.CancelFunc
	done   chan error
}

func needFuse(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		t.Skipf("skip: needs /dev/fuse: %v", err)
	} else {
		f.Close()
	}
}

func newRig(t testing.TB, st *trouble, change func(*Config)) *rig {
	t.Helper()
	return newTunedRig(t, st, change, func(*Server) {})
}

func newTunedRig(t testing.TB, st *trouble, change func(*Config), tune func(*Server)) *rig {
	t.Helper()
	needFuse(t)
	// /tmp may be a memory file system.
	dir, err := os.MkdirTemp("/var/tmp", "dsec-blob-")
	do(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, store: st, tune: tune, cfg: Config{RunDir: filepath.Join(dir, "run"), CacheDir: filepath.Join(dir, "cache"), Limit: 1 << 30, Deadline: 20 * time.Second}}
	if change != nil {
		change(&r.cfg)
	}
	fuse, mount, err := Mount()
	do(t, err)
	r.mount = mount
	r.keep = dup(t, fuse)
	r.start(fuse)
	t.Cleanup(func() {
		r.stop()
		r.mount.Close()
		r.keep.Close()
	})
	return r
}

func dup(t testing.TB, f *os.File) *os.File {
	t.Helper()
	d, err := dupFile(f)
	do(t, err)
	return d
}

func (r *rig) start(fuse *os.File) {
	r.t.Helper()
	s, err := NewServer(r.cfg, r.store, fuse, slog.New(slog.NewTextHandler(io.Discard, nil)))
	do(r.t, err)
	r.tune(s)
	ctx, cancel := context.WithCancel(context.Background())
	r.server, r.end, r.done = s, cancel, make(chan error, 1)
	go func() { r.done <- s.Run(ctx) }()
	r.client = dialWait(r.t, r.cfg.RunDir)
}

func dialWait(t testing.TB, dir string) *Client {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		c, err := Dial(context.Background(), dir)
		if err == nil {
			return c
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func (r *rig) stop() {
	if r.end == nil {
		return
	}
	r.client.Close()
	r.end()
	select {
	case err := <-r.done:
		if err != nil {
			r.t.Errorf("daemon: %v", err)
		}
	case <-time.After(20 * time.Second):
		r.t.Error("daemon does not end")
	}
	r.end = nil
}

// restart ends the daemon and starts another one on the same connection.
func (r *rig) restart() {
	r.stop()
	r.start(dup(r.t, r.keep))
}

func (r *rig) open(d Data) *os.File {
	r.t.Helper()
	f, err := r.client.Open(context.Background(), r.mount, d)
	do(r.t, err)
	r.t.Cleanup(func() { f.Close() })
	return f
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func same(t testing.TB, f *os.File, content []byte) {
	t.Helper()
	got, err := io.ReadAll(io.NewSectionReader(f, 0, int64(len(content))+1))
	do(t, err)
	if !bytes.Equal(got, content) {
		t.Fatal("other octets than the store has")
	}
}

var errDead = errors.New("the store is dead")
