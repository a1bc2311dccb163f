package trajectory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
	"github.com/dsec-dev/dsec/internal/trajectory/crashfs"
)

// memStore is a store in memory, elsewhere: it survives hosts, and a host may crash in each of its changing calls.
type memStore struct {
	mu   sync.Mutex
	all  map[string][]byte
	fs   *crashfs.FS // of the host that uses it; may be nil
	down error

	crashed func()
}

func (m *memStore) tick(name string, act func()) error {
	if m.down != nil {
		return m.down
	}
	if m.fs != nil {
		if before, err := m.fs.Tick(name); err != nil {
			if before {
				act()
			}
			if m.crashed != nil {
				m.crashed()
			}
			return err
		}
	}
	act()
	return nil
}

type memDraft struct {
	bytes.Buffer
	m *memStore
}

func (d *memDraft) WriteAt([]byte, int64) (int, error) { return 0, errors.ErrUnsupported }
func (d *memDraft) ReadAt([]byte, int64) (int, error)  { return 0, errors.ErrUnsupported }
func (d *memDraft) Truncate(int64) error               { return errors.ErrUnsupported }
func (d *memDraft) Discard() error                     { return nil }
func (d *memDraft) Publish(_ context.Context, key string) error {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	return d.m.tick("put", func() { d.m.all[key] = bytes.Clone(d.Bytes()) })
}

type memReader struct{ *bytes.Reader }

func (memReader) Close() error { return nil }

func (m *memStore) Create(context.Context) (store.Draft, error) { return &memDraft{m: m}, nil }

func (m *memStore) get(key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.all[key]
	if m.down != nil {
		return nil, m.down
	}
	if !ok {
		return nil, fmt.Errorf("object %s: %w", key, sandbox.ErrNotFound)
	}
	return b, nil
}

func (m *memStore) Open(_ context.Context, key string) (store.Reader, error) {
	b, err := m.get(key)
	return memReader{bytes.NewReader(b)}, err
}

func (m *memStore) Stat(_ context.Context, key string) (store.Info, error) {
	b, err := m.get(key)
	return store.Info{Key: key, Size: int64(len(b))}, err
}

func (m *memStore) List(_ context.Context, prefix string, each func(store.Info) bool) error {
	for _, k := range m.keys(prefix) {
		if !each(store.Info{Key: k}) {
			break
		}
	}
	return m.down
}

func (m *memStore) keys(prefix string) (keys []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.all {
		if strings.HasPrefix(k, prefix) {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}

func (m *memStore) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tick("delete", func() { delete(m.all, key) })
}

func (m *memStore) Path(string) (string, bool) { return "", false }

// moveHost loses the host: the next one makes the log again from the store.
func (c *crashRun) moveHost() {
	ctx := context.Background()
	c.fs.Kill()
	c.store.fs = nil
	host := fmt.Sprint("h", c.hosts)
	if err := trajectory.Fence(ctx, c.store, host); err != nil {
		c.Fatal(err)
	}
	fs := crashfs.New(uint64(c.hosts) + 7)
	if err := trajectory.Recall(ctx, c.store, host, fs); err != nil {
		c.Fatalf("recall: %v", err)
	}
	c.hosts++
	c.fs = fs
	for _, m := range c.model {
		m.moved = true
	}
}

func storeConfig(fs trajectory.FS, st store.Store) trajectory.Config {
	c := trajectory.Default("")
	c.FS, c.SegmentBytes, c.Reserve, c.Store, c.Host = fs, 64<<10, 32<<10, st, "h1"
	return c
}

// fill writes so much that many segments are sealed, and returns what reads must give.
func fill(t testing.TB, l *trajectory.Log, keys, n int) map[string][]trajectory.Record {
	t.Helper()
	for k := range keys {
		add(t, l, fmt.Sprint(k), create())
	}
	for i := range n {
		for k := range keys {
			line := fmt.Sprintf("%d: test_%d PASSED in 0.%02ds\n", i, i*7%100, i%100)
			add(t, l, fmt.Sprint(k), output("s", int64(i)*2000, strings.Repeat(line, 2000/len(line))), trajectory.Record{Kind: trajectory.KindStepEnd, Step: fmt.Sprint("e", i), Payload: []byte("{}")})
		}
	}
	want := map[string][]trajectory.Record{}
	for k := range keys {
		want[fmt.Sprint(k)] = readAll(t, l, fmt.Sprint(k))
	}
	return want
}

func same(t testing.TB, l *trajectory.Log, want map[string][]trajectory.Record) {
	t.Helper()
	for k, recs := range want {
		if d := cmp.Diff(recs, readAll(t, l, k)); d != "" {
			t.Fatalf("%s: %s", k, d)
		}
	}
}

func TestSealedSegmentsArePackedAndGoToTheStore(t *testing.T) {
	ctx := context.Background()
	fs, st := crashfs.New(3), &memStore{all: map[string][]byte{}}
	c := storeConfig(fs, st)
	l := open(t, c)
	want := fill(t, l, 2, 100)
	before := l.Space().Segments
	if err := l.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	packed := l.Space().Segments
	if packed > before/2 {
		t.Errorf("%d octets, packed %d", before, packed)
	}
	if n := len(st.keys("logs/h1/0000")); n < 4 {
		t.Fatalf("the store has %d segments", n)
	}
	same(t, l, want)
	l.Close()
	c.Local = 1
	l = open(t, c)
	if err := l.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	same(t, l, want)
	l.Close()
	// It opens without the store and says what it misses.
	st.down = errors.New("down")
	l = open(t, c)
	if got := l.Trajectories(); len(got) != 2 || got[0].LastSeq != uint64(len(want["0"])) {
		t.Fatalf("%v", got)
	}
	if _, _, err := l.Read(ctx, testID("0"), trajectory.Query{}); err == nil || errors.Is(err, sandbox.ErrLost) {
		t.Fatalf("read of a segment in a store that is down: %v", err)
	}
	st.down = nil
	same(t, l, want)
	// What is removed goes from the store too.
	if err := l.Remove(ctx, testID("0"), testID("1")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := l.Maintain(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if left := st.keys("logs/h1/0000"); len(left) > 1 {
		t.Errorf("left in the store: %v", left)
	}
}

// A block that rots costs its records and nothing else.
func TestRotInPackedSegment(t *testing.T) {
	ctx := context.Background()
	fs := crashfs.New(3)
	c := storeConfig(fs, nil)
	l := open(t, c)
	want := fill(t, l, 1, 100)["0"]
	if err := l.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	l.Close()
	f, err := fs.Open("00000002.log")
	if err != nil {
		t.Fatal(err)
	}
	size, _ := f.Size()
	for at := int64(0); at < size; at += 97 {
		var b [1]byte
		f.ReadAt(b[:], at)
		b[0] ^= 0x20
		f.WriteAt(b[:], at)
		l := open(t, c)
		got, lost := 0, 0
		for q := (trajectory.Query{From: 1}); ; {
			recs, next, err := l.Read(ctx, testID("0"), q)
			for _, r := range recs {
				got++
				if d := cmp.Diff(want[r.Seq-1], r); d != "" {
					t.Fatal(d)
				}
			}
			if err != nil && !errors.Is(err, sandbox.ErrLost) {
				t.Fatal(err)
			}
			if err != nil {
				lost++
			}
			if next == q.From {
				break
			}
			q.From = next
		}
		l.Close()
		if got+lost != len(want) || lost == 0 && at > 64 && at < size/2 {
			t.Fatalf("octet %d: %d records and %d lost of %d", at, got, lost, len(want))
		}
		b[0] ^= 0x20
		f.WriteAt(b[:], at)
	}
}

// What rots in a packed segment that the store has, be it header, block, index or footer, costs nothing.
func TestRotInStoredSegment(t *testing.T) {
	ctx := context.Background()
	fs, st := crashfs.New(3), &memStore{all: map[string][]byte{}}
	c := storeConfig(fs, st)
	l := open(t, c)
	want := fill(t, l, 1, 100)["0"]
	if err := l.Maintain(ctx); err != nil {
		t.Fatal(err)
	}
	l.Close()
	const name = "00000002.log"
	f, err := fs.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	size, _ := f.Size()
	f.Close()
	fetched := 0
	for at := int64(0); at < size; at += 97 {
		f, err := fs.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		f.ReadAt(b[:], at)
		b[0] ^= 0x20
		f.WriteAt(b[:], at)
		f.Close()
		l := open(t, c)
		got := readAll(t, l, "0")
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("octet %d: %s", at, d)
		}
		l.Close()
		if err := fs.Remove(name + ".damaged"); err == nil {
			fetched++
			continue
		}
		if f, err = fs.Open(name); err != nil { // a block: it was read through the store
			t.Fatal(err)
		}
		b[0] ^= 0x20
		f.WriteAt(b[:], at)
		f.Close()
	}
	if fetched == 0 {
		t.Fatal("no damage was found at the opening")
	}
}

func TestStoreDurability(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		fs, st := crashfs.New(5), &memStore{all: map[string][]byte{}}
		l := open(t, storeConfig(fs, st))
		ship := func(recs ...trajectory.Record) error {
			_, err := l.Append(ctx, testID("k"), recs, sandbox.DurabilityStore)
			return err
		}
		if err := ship(create()); err != nil {
			t.Fatal(err)
		}
		w := l.NewInputWriter()
		w.Write(bytes.Repeat([]byte("x"), 100<<10))
		in, err := w.Finish(sandbox.DurabilityStore)
		if err != nil {
			t.Fatal(err)
		}
		if err := ship(trajectory.Record{Kind: trajectory.KindStepStart, Step: "a", Input: in}); err != nil {
			t.Fatal(err)
		}
		// Many at once are one batch.
		n := len(st.keys("logs/h1/tail/"))
		var g sync.WaitGroup
		for i := range 50 {
			g.Go(func() {
				if err := ship(trajectory.Record{Kind: trajectory.KindStepEnd, Step: fmt.Sprint(i)}); err != nil {
					t.Error(err)
				}
			})
		}
		g.Wait()
		if more := len(st.keys("logs/h1/tail/")) - n; more > 2 {
			t.Errorf("%d objects for 50 records at once", more)
		}
		// A store that is away holds the acknowledgement up, for as long as the caller waits.
		st.down = errors.New("away")
		short, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err = l.Append(short, testID("k"), []trajectory.Record{{Kind: trajectory.KindStepEnd, Step: "late"}}, sandbox.DurabilityStore)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		st.down = nil
		if err := ship(trajectory.Record{Kind: trajectory.KindStepEnd, Step: "b"}); err != nil {
			t.Fatal(err)
		}
		// Whoever takes over finds all of it, and the host goes on no more.
		if err := trajectory.Fence(ctx, st, "h1"); err != nil {
			t.Fatal(err)
		}
		other := crashfs.New(6)
		if err := trajectory.Recall(ctx, st, "h1", other); err != nil {
			t.Fatal(err)
		}
		if err := ship(trajectory.Record{Kind: trajectory.KindStepEnd, Step: "c"}); !errors.Is(err, sandbox.ErrState) {
			t.Fatalf("acknowledged after another took over: %v", err)
		}
		if _, err := l.Append(ctx, testID("k"), []trajectory.Record{{Kind: trajectory.KindStepEnd, Step: "d"}}, sandbox.DurabilityProcess); err == nil {
			t.Fatal("a fenced log takes records")
		}
		l.Close()
		if _, err := trajectory.Open(storeConfig(fs.PowerLoss(), st), quiet); !errors.Is(err, sandbox.ErrState) {
			t.Fatalf("a fenced log opens: %v", err)
		}
		c := storeConfig(other, st)
		c.Host = "h2"
		l2 := open(t, c)
		recs := readAll(t, l2, "k")
		if len(recs) < 54 || recs[1].Input == nil {
			t.Fatalf("%d records", len(recs))
		}
		r, err := l2.OpenInput(recs[1].Input)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || len(b) != 100<<10 {
			t.Fatal(len(b), err)
		}
	})
}

func TestNoStoreNoDurabilityStore(t *testing.T) {
	l := open(t, small(t.TempDir()))
	if _, err := l.Append(context.Background(), testID("k"), []trajectory.Record{create()}, sandbox.DurabilityStore); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Fatal(err)
	}
}

// At its limit a log with a store makes room by what the store has, and takes more than the limit in all.
func TestPressureMovesSegmentsToTheStore(t *testing.T) {
	fs, st := crashfs.New(9), &memStore{all: map[string][]byte{}}
	c := storeConfig(fs, st)
	c.Limit = 512 << 10
	l := open(t, c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	add(t, l, "k", create())
	var want []trajectory.Record
	noise, random := make([]byte, 4000), rand.NewChaCha8([32]byte{1})
	for i := range 600 { // 2.3 MiB that do not compress
		random.Read(noise)
		r := output("s", int64(i)*4000, string(noise))
		for tries := 0; ; tries++ {
			_, err := l.Append(ctx, testID("k"), []trajectory.Record{r}, sandbox.DurabilityProcess)
			if err == nil {
				break
			}
			if !errors.Is(err, sandbox.ErrExhausted) || tries > 2000 {
				t.Fatalf("record %d: %v (%+v)", i, err, l.Space())
			}
			time.Sleep(5 * time.Millisecond)
		}
		want = append(want, r)
	}
	got := readAll(t, l, "k")[1:]
	if len(got) != len(want) {
		t.Fatalf("%d records", len(got))
	}
	for i := range got {
		if !bytes.Equal(got[i].Payload, want[i].Payload) {
			t.Fatalf("record %d", i)
		}
	}
	if n := l.Space().Segments; n > c.Limit+c.SegmentBytes {
		t.Errorf("%d octets here", n)
	}
	far := 0
	for _, k := range st.keys("logs/h1/0000") {
		f, err := fs.Open(k[len("logs/h1/"):] + ".log")
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := f.Size(); n < int64(len(st.all[k]))/4 {
			far++
		}
	}
	if far < 20 {
		t.Errorf("%d segments lie in the store alone", far)
	}
}

// A store may carry out a killed process's write of its epoch when the next process has long written its own.
func TestLateEpochOfADeadProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		fs, st := crashfs.New(9), &memStore{all: map[string][]byte{}}
		var late [][]byte
		var l *trajectory.Log
		for i := range 5 {
			if i > 0 {
				fs = fs.Kill()
			}
			l = open(t, storeConfig(fs, st))
			for _, old := range late { // also what is older than the one before
				st.all["logs/h1/epoch"] = old
				rec := trajectory.Record{Kind: trajectory.KindStepEnd, Step: fmt.Sprint(i), Payload: []byte("{}")}
				if _, err := l.Append(ctx, testID("k"), []trajectory.Record{rec}, sandbox.DurabilityStore); err != nil {
					t.Fatalf("process %d: %v", i, err)
				}
			}
			if i == 0 {
				if _, err := l.Append(ctx, testID("k"), []trajectory.Record{create()}, sandbox.DurabilityStore); err != nil {
					t.Fatal(err)
				}
			}
			late = append(late, bytes.Clone(st.all["logs/h1/epoch"]))
			if i%2 == 0 && i > 0 {
				st.all["logs/h1/epoch"] = late[0] // and while nobody lives
			}
		}
		// Another's stands.
		if err := trajectory.Fence(ctx, st, "h1"); err != nil {
			t.Fatal(err)
		}
		rec := trajectory.Record{Kind: trajectory.KindStepEnd, Step: "fenced", Payload: []byte("{}")}
		if _, err := l.Append(ctx, testID("k"), []trajectory.Record{rec}, sandbox.DurabilityStore); !errors.Is(err, sandbox.ErrState) {
			t.Fatalf("a fenced log acknowledged: %v", err)
		}
		if _, err := trajectory.Open(storeConfig(fs.Kill(), st), quiet); !errors.Is(err, sandbox.ErrState) {
			t.Fatalf("a fenced log opens: %v", err)
		}
	})
}
