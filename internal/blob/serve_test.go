package blob

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestServesWhatTheStoreHas(t *testing.T) {
	st := newTrouble()
	for _, size := range []int{1, 4096, UnitSize - 1, UnitSize, UnitSize + 1, 7*UnitSize + 4096} {
		st.add(random(size, uint64(size)))
	}
	r := newRig(t, st, nil)
	for _, size := range []int{1, 4096, UnitSize - 1, UnitSize, UnitSize + 1, 7*UnitSize + 4096} {
		content := random(size, uint64(size))
		d, _ := describe(content)
		f := r.open(d)
		if info, err := f.Stat(); err != nil || info.Size() != d.Size {
			t.Fatalf("size %d, %v; want %d", info.Size(), err, d.Size)
		}
		same(t, f, content)
		same(t, r.open(d), content)
		if total, most := st.count(key(d.Digest)); most != 1 || total != d.count() {
			t.Errorf("size %d: %d reads of the store, one unit %d times; want each of %d once", size, total, most, d.count())
		}
	}
	if s, err := r.client.Stats(context.Background()); err != nil || s.Fetched == 0 || s.Cached+s.Held != s.Fetched || s.Failed != 0 {
		t.Errorf("stats %+v, %v", s, err)
	}
}

func TestFiftyReadersFetchEachUnitOnce(t *testing.T) {
	st := newTrouble()
	st.delay = func(int64, int) time.Duration { return 20 * time.Millisecond }
	content := random(12*UnitSize, 7)
	d := st.add(content)
	r := newRig(t, st, nil)
	var wg sync.WaitGroup
	for i := range 50 {
		f := r.open(d)
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			buf := make([]byte, 9000)
			for range 40 {
				off := rnd.Int64N(d.Size - int64(len(buf)))
				if _, err := f.ReadAt(buf, off); err != nil || string(buf) != string(content[off:off+int64(len(buf))]) {
					t.Errorf("read at %d: %v, or wrong octets", off, err)
					return
				}
			}
		}()
	}
	wg.Wait()
	if _, most := st.count(key(d.Digest)); most != 1 {
		t.Errorf("a unit was fetched %d times", most)
	}
}

func TestWrongOctetsAreNeverServed(t *testing.T) {
	st := newTrouble()
	content := random(4*UnitSize, 3)
	d := st.add(content)
	bad := 3 // the first reads of each unit
	seen := map[int64]int{}
	st.spoil = func(k string, off int64) bool {
		if k != key(d.Digest) {
			return false
		}
		st.mu.Lock()
		defer st.mu.Unlock()
		seen[off]++
		return seen[off] <= bad
	}
	r := newRig(t, st, func(c *Config) { c.Deadline = 10 * time.Second })
	same(t, r.open(d), content)
	s, err := r.client.Stats(context.Background())
	do(t, err)
	if s.Corrupt != int64(bad*4) {
		t.Errorf("%d corrupt reads counted, want %d", s.Corrupt, bad*4)
	}
}

func TestAlwaysWrongIsAnErrorAtTheDeadline(t *testing.T) {
	st := newTrouble()
	d := st.add(random(2*UnitSize, 3))
	st.spoil = func(k string, off int64) bool { return k == key(d.Digest) && off == UnitSize }
	r := newRig(t, st, func(c *Config) { c.Deadline = 2 * time.Second })
	f := r.open(d)
	buf := make([]byte, 4096)
	if _, err := f.ReadAt(buf, 0); err != nil {
		t.Errorf("the unit that is right: %v", err)
	}
	if n, err := f.ReadAt(buf, UnitSize); !errors.Is(err, unix.EIO) {
		t.Errorf("the unit that is wrong: %d octets, %v; want EIO", n, err)
	}
}

func TestStoreDeadForAWhile(t *testing.T) {
	st := newTrouble()
	content := random(3*UnitSize, 9)
	d := st.add(content)
	r := newRig(t, st, func(c *Config) { c.Deadline = 30 * time.Second })
	f := r.open(d)
	for _, kind := range []string{"errors", "hangs"} {
		back := make(chan struct{})
		st.set(func() {
			if kind == "errors" {
				st.fail = func(string, int64) error {
					select {
					case <-back:
						return nil
					default:
						return errDead
					}
				}
			} else {
				st.fail, st.hang = nil, back
			}
		})
		time.AfterFunc(700*time.Millisecond, func() { close(back) })
		buf := make([]byte, 8192)
		off := int64(UnitSize)
		if kind == "hangs" {
			off = 2 * UnitSize
		}
		if _, err := f.ReadAt(buf, off); err != nil || string(buf) != string(content[off:off+8192]) {
			t.Fatalf("%s: %v, or wrong octets", kind, err)
		}
	}
	same(t, f, content)
}

func TestDeadStoreIsAnErrorAtTheDeadlineAndFineAfterwards(t *testing.T) {
	for _, kind := range []string{"errors", "hangs"} {
		st := newTrouble()
		content := random(3*UnitSize, 11)
		d := st.add(content)
		r := newRig(t, st, func(c *Config) { c.Deadline = 2 * time.Second })
		f := r.open(d)
		back := make(chan struct{})
		st.set(func() {
			if kind == "errors" {
				st.fail = func(string, int64) error { return errDead }
			} else {
				st.hang = back
			}
		})
		buf := make([]byte, 4096)
		if _, err := f.ReadAt(buf, 0); !errors.Is(err, unix.EIO) {
			t.Errorf("%s: %v, want EIO", kind, err)
		}
		st.set(func() { st.fail, st.hang = nil, nil })
		close(back)
		same(t, f, content)
	}
}

func TestMissingObjects(t *testing.T) {
	st := newTrouble()
	content := random(UnitSize, 1)
	d := st.add(content)
	r := newRig(t, st, func(c *Config) { c.Deadline = 2 * time.Second })
	gone := d
	gone.Units = digestOf([]byte("x"))
	if _, err := r.client.Open(context.Background(), r.mount, gone); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("no list of units: %v", err)
	}
	short := d
	short.Size += UnitSize
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := r.client.Open(ctx, r.mount, short); err == nil {
		t.Error("a list of units that is too short was taken")
	}
	r.client.Close()
	r.client = dialWait(t, r.cfg.RunDir)
	f := r.open(d)
	st.set(func() { delete(st.objects, key(d.Digest)) })
	if _, err := f.ReadAt(make([]byte, 1), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("object gone: %v, want EIO", err)
	}
}

func TestEvictionUnderALimit(t *testing.T) {
	st := newTrouble()
	var data []Data
	var contents [][]byte
	for i := range 4 {
		contents = append(contents, random(8*UnitSize, uint64(100+i)))
		data = append(data, st.add(contents[i]))
	}
	r := newRig(t, st, func(c *Config) { c.Limit = 10 * UnitSize; c.Deadline = 20 * time.Second })
	files := make([]*os.File, 4)
	for i := range data {
		files[i] = r.open(data[i])
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(i), 5))
			buf := make([]byte, 5000)
			for range 60 {
				k := rnd.IntN(4)
				off := rnd.Int64N(data[k].Size - int64(len(buf)))
				if _, err := files[k].ReadAt(buf, off); err != nil || string(buf) != string(contents[k][off:off+int64(len(buf))]) {
					t.Errorf("read: %v, or wrong octets", err)
					return
				}
			}
		}()
	}
	wg.Wait()
	s, err := r.client.Stats(context.Background())
	do(t, err)
	if s.Evicted == 0 || s.Cached > s.Limit {
		t.Errorf("evicted %d, cached %d, limit %d", s.Evicted, s.Cached, s.Limit)
	}
	if used := diskUse(t, r.cfg.CacheDir); used > 11*UnitSize {
		t.Errorf("the cache uses %d octets of the disk, its limit is %d", used, 10*UnitSize)
	}
	for i := range data {
		same(t, files[i], contents[i])
	}
}

func diskUse(t testing.TB, dir string) (n int64) {
	entries, err := os.ReadDir(dir)
	do(t, err)
	for _, e := range entries {
		n += blocksOf(filepath.Join(dir, e.Name()))
	}
	return n
}

// waitComplete waits until the daemon hands out the local file.
func (r *rig) waitComplete(d Data) *os.File {
	r.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		f := r.open(d)
		var st unix.Statfs_t
		do(r.t, unix.Fstatfs(int(f.Fd()), &st))
		if st.Type != unix.FUSE_SUPER_MAGIC {
			return f
		}
		if time.Now().After(end) {
			r.t.Fatal("a blob that was read in whole is not handed out as a local file")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestCompleteBlobIsLocalAndStaysWhileItIsOpen(t *testing.T) {
	st := newTrouble()
	content := random(5*UnitSize+100, 21)
	d := st.add(content)
	others := random(9*UnitSize, 22)
	o := st.add(others)
	r := newRig(t, st, func(c *Config) { c.Limit = 10 * UnitSize; c.Deadline = 20 * time.Second })
	same(t, r.open(d), content)
	local := r.waitComplete(d)
	same(t, r.open(o), others) // wants room
	same(t, local, content)
	if f, err := r.client.OpenSeen(context.Background(), r.mount, d); err != nil {
		t.Error(err)
	} else {
		same(t, f, content)
		f.Close()
	}
	r.restart()
	same(t, r.waitComplete(d), content)
}

func TestCacheIsKeptAndComparedAfterARestart(t *testing.T) {
	st := newTrouble()
	content := random(6*UnitSize, 31)
	d := st.add(content)
	r := newRig(t, st, nil)
	f := r.open(d)
	_, err := f.ReadAt(make([]byte, 2*UnitSize), 0) // so few that nothing more is fetched ahead
	do(t, err)
	before, _ := st.count(key(d.Digest))
	r.stop()
	// A unit rots on the disk, as it may in a crash of the machine.
	file, err := os.OpenFile(filepath.Join(r.cfg.CacheDir, d.Digest[len(prefix):]+".data"), os.O_RDWR, 0)
	do(t, err)
	_, err = file.WriteAt(make([]byte, 4096), UnitSize+4096)
	do(t, err)
	file.Close()
	r.start(dup(t, r.keep))
	same(t, f, content) // the file that was open before
	after, _ := st.count(key(d.Digest))
	if after-before != 5 { // four that were never there, one that rotted
		t.Errorf("%d reads of the store after the restart, want 5", after-before)
	}
	r.stop()
	// A map that is torn: what the file holds is compared.
	do(t, os.Truncate(filepath.Join(r.cfg.CacheDir, d.Digest[len(prefix):]+".map"), 20))
	r.start(dup(t, r.keep))
	same(t, f, content)
	if again, _ := st.count(key(d.Digest)); again != after {
		t.Errorf("%d reads of the store after the map was lost, want none", again-after)
	}
}

func TestFullCacheDisk(t *testing.T) {
	st := newTrouble()
	content := random(24*UnitSize, 41)
	d := st.add(content)
	small := t.TempDir()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	do(t, unix.Mount("dsec-test", small, "tmpfs", 0, "size=6m"))
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	do(t, os.WriteFile(filepath.Join(small, "other"), make([]byte, 3<<20), 0o600))
	r := newRig(t, st, func(c *Config) { c.CacheDir = small; c.Deadline = 20 * time.Second })
	f := r.open(d)
	same(t, f, content)
	same(t, f, content)
	s, err := r.client.Stats(context.Background())
	do(t, err)
	if s.Failed != 0 || s.Cached > 3<<20 {
		t.Errorf("stats %+v", s)
	}
}

// The cache's disk is full to the last octet, then the store dies too: a read is an error at the deadline, not before, no octet is wrong, and when
// both are well again so is the cache.
func TestFullCacheDiskAndADeadStore(t *testing.T) {
	needFuse(t)
	st := newTrouble()
	content := random((recentUnits+16)*UnitSize, 42)
	d := st.add(content)
	small := t.TempDir()
	do(t, unix.Mount("dsec-test", small, "tmpfs", 0, "size=128m"))
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	other := filepath.Join(small, "other")
	fill := func() {
		f, err := os.Create(other)
		do(t, err)
		defer f.Close()
		for {
			if _, err := f.Write(make([]byte, 4096)); err != nil {
				if !errors.Is(err, unix.ENOSPC) {
					t.Fatal(err)
				}
				return
			}
		}
	}
	fill()
	r := newTunedRig(t, st, func(c *Config) { c.CacheDir, c.Deadline = small, 2*time.Second }, func(s *Server) { s.patience = 300 * time.Millisecond })
	f := r.open(d)
	same(t, f, content)
	st.set(func() { st.fail = func(string, int64) error { return errDead } })
	buf := make([]byte, 4096)
	// When nothing waits to be written any more, sixteen have left the memory of the last ones.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		s, err := r.client.Stats(context.Background())
		do(t, err)
		if s.Held == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("units still wait to be written: %+v", s)
		}
	}
	do(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)) // nor is it the kernel's memory that answers
	refused, began := false, time.Now()                        // a read may find one under way that an earlier read caused
	for i := int64(0); i < recentUnits+16 && !refused; i++ {
		_, err := f.ReadAt(buf, i*UnitSize)
		switch refused = err != nil; {
		case !refused && !bytes.Equal(buf, content[i*UnitSize:][:len(buf)]):
			t.Errorf("unit %d has other octets", i)
		case refused && (!errors.Is(err, unix.EIO) || time.Since(began) < 1900*time.Millisecond):
			t.Errorf("after %v: %v, want EIO at the deadline", time.Since(began), err)
		}
	}
	if !refused {
		t.Error("every unit is there although neither disk nor store has it")
	}
	r.restart() // also one that starts in the middle of it
	if _, err := f.ReadAt(buf, 5*UnitSize); !errors.Is(err, unix.EIO) {
		t.Errorf("after a restart: %v, want EIO", err)
	}
	st.set(func() { st.fail = nil })
	same(t, f, content)
	do(t, os.Remove(other))
	for end := time.Now().Add(time.Minute); ; {
		same(t, f, content)
		time.Sleep(3 * heldCalm) // nothing is written while there are reads
		s, err := r.client.Stats(context.Background())
		do(t, err)
		if s.Cached >= 4*UnitSize {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the cache does not grow again: %+v", s)
		}
	}
	same(t, f, content)
}

func TestPrefetchFetchesTheHotFront(t *testing.T) {
	st := newTrouble()
	content := random(20*UnitSize, 51)
	d := st.add(content)
	d.Hot = 9*UnitSize + 1
	r := newRig(t, st, nil)
	r.open(d)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if n, _ := st.count(key(d.Digest)); n == 10 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d units fetched ahead, want 10", n)
		}
	}
}

func TestReadsAreTold(t *testing.T) {
	st := newTrouble()
	content := random(4*UnitSize, 61)
	d := st.add(content)
	r := newRig(t, st, nil)
	f := r.open(d)
	for _, off := range []int64{2 * UnitSize, 2*UnitSize + 4096, 100, 2 * UnitSize} {
		_, err := f.ReadAt(make([]byte, 10), off)
		do(t, err)
	}
	got, err := r.client.Reads(context.Background(), d.Digest, true)
	do(t, err)
	want := []Range{{2 * UnitSize, 8192}, {0, 4096}}
	if len(got) != len(want) || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("reads %v, want %v", got, want)
	}
	if got, err := r.client.Reads(context.Background(), d.Digest, false); err != nil || len(got) != 0 {
		t.Errorf("after a reset: %v, %v", got, err)
	}
}

// All troubles at once: a store that errs, lies and is slow, a cache that is too small, daemons that end. Every octet is right.
func TestReadsAreRightUnderAllTroubles(t *testing.T) {
	st := newTrouble()
	var data []Data
	var contents [][]byte
	for i := range 3 {
		contents = append(contents, random((5+i)*UnitSize+i*4096, uint64(200+i)))
		data = append(data, st.add(contents[i]))
	}
	chance := func(n uint64) bool { return rand.Uint64N(n) == 0 }
	st.fail = func(string, int64) error {
		if chance(8) {
			return errDead
		}
		return nil
	}
	st.spoil = func(string, int64) bool { return chance(8) }
	st.delay = func(int64, int) time.Duration { return time.Duration(rand.Uint64N(4)) * time.Millisecond }
	r := newRig(t, st, func(c *Config) { c.Limit = 9 * UnitSize; c.Deadline = 30 * time.Second })
	var files []*os.File
	for i := range data {
		files = append(files, r.open(data[i]))
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	for i := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(i), 9))
			buf := make([]byte, 2*UnitSize)
			for range 80 {
				k := rnd.IntN(3)
				off := rnd.Int64N(data[k].Size)
				n := min(rnd.Int64N(int64(len(buf)))+1, data[k].Size-off)
				if _, err := files[k].ReadAt(buf[:n], off); err != nil || string(buf[:n]) != string(contents[k][off:off+n]) {
					t.Errorf("read of %d at %d: %v, or wrong octets", n, off, err)
					return
				}
			}
		}()
	}
	go func() { wg.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(150 * time.Millisecond):
			r.restart()
		}
	}
	for i := range data {
		same(t, files[i], contents[i])
	}
}

// Blobs that nobody uses have no files open, however many a host has seen; what the cache has of them is served again without a fetch.
func TestThousandsOfBlobs(t *testing.T) {
	st := newTrouble()
	const count = 1500
	var data []Data
	content := func(i int) []byte { return random(8192+i, uint64(1000+i)) }
	for i := range count {
		data = append(data, st.add(content(i)))
	}
	r := newRig(t, st, func(c *Config) { c.Deadline = 20 * time.Second })
	use := func(i int) {
		f, err := r.client.OpenSeen(t.Context(), r.mount, data[i])
		do(t, err)
		defer f.Close()
		same(t, f, content(i))
	}
	files := func() (n int) {
		entries, err := os.ReadDir("/proc/self/fd")
		do(t, err)
		for _, e := range entries {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, r.cfg.CacheDir) {
				n++
			}
		}
		return n
	}
	for i := range count {
		use(i)
	}
	before, err := r.client.Stats(t.Context())
	do(t, err)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		for _, b := range r.server.all() {
			b.closeIdle(time.Now())
			b.rest(time.Now())
		}
		if n := files(); n <= 1 { // the lock
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d files of the cache are open", n)
		}
	}
	for i := range count {
		use(i)
	}
	after, err := r.client.Stats(t.Context())
	do(t, err)
	if after.Fetched != before.Fetched || after.Failed+after.CacheFails != 0 || after.Cached != before.Cached+before.Held {
		t.Errorf("before %+v, after %+v", before, after)
	}
}
