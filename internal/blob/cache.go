package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// States of a unit in the cache file.
const (
	absent   = iota
	present  // the map says it is there; its digest is compared before it is used for the first time
	verified // and was
)

// A blob's cache is two files: HEX.data, sparse, and HEX.map: a header, then a bit for each unit that is in HEX.data. The map is
// no promise: a unit is compared with its digest at its first use in each life of the daemon. Only "complete" is one: it is written
// after HEX.data was synced with all units verified, and HEX.data is never changed from then on.
const (
	mapMagic  = "dsecmap1"
	mapHeader = 8 + digestSize + digestSize // magic, digest of the list of units, mark of completeness
)

func completeMark(d Data) []byte {
	h := sha256.Sum256(fmt.Appendf(nil, "dsec complete %s %s %d", d.Digest, d.Units, d.Size))
	return h[:]
}

// blob is one blob that the daemon knows.
type blob struct {
	s     *Server
	data  Data
	hex   string
	node  uint64
	units []byte // digests, one after the other

	opens atomic.Int64 // as far as this process saw; it may have taken over from one that saw more
	used  atomic.Int64 // last use, Unix nanoseconds

	mu       sync.RWMutex // shared while the cache file is read, so that what is read is not punched
	file     *os.File     // cache file; nil: not opened yet, or can't be
	mapFile  *os.File
	opened   bool      // an attempt to open was made
	again    time.Time // of one that failed: not before this the next one
	state    []uint8
	last     []atomic.Uint32 // last use of each unit, seconds since the daemon's start
	kept     int             // units in the file
	held     map[int][]byte  // units that are to be written; see held.go
	complete bool

	flightMu sync.Mutex
	flights  map[int]*flight
	source   *source // open object of the store, or nil
	ahead    bool    // hot octets are being fetched

	streamMu sync.Mutex
	streams  [streams]stream // the latest first

	log readLog
}

func newBlob(s *Server, d Data, h string, units []byte) *blob {
	b := &blob{s: s, data: d, hex: h, node: nodeOf(h), units: units, state: make([]uint8, d.count()), last: make([]atomic.Uint32, d.count()),
		flights: map[int]*flight{}}
	b.used.Store(time.Now().UnixNano())
	return b
}

func (b *blob) digest(i int) []byte { return b.units[i*digestSize : (i+1)*digestSize] }

func (b *blob) verify(i int, data []byte) bool {
	h := sha256.Sum256(data)
	return bytes.Equal(h[:], b.digest(i))
}

func (b *blob) path(ext string) string { return filepath.Join(b.s.cfg.CacheDir, b.hex+ext) }

// openFiles opens the cache's files, with b.mu held. Without them the blob is served from memory; a disk that was full may have room later.
func (b *blob) openFiles() {
	if b.opened && (b.again.IsZero() || time.Now().Before(b.again)) {
		return
	}
	late := b.opened // adopt has counted what the files hold otherwise
	b.opened, b.again = true, time.Time{}
	err := b.openBoth()
	if err != nil {
		b.again = time.Now().Add(b.s.patience)
		b.s.cacheFailed(err)
		return
	}
	for i, st := range b.state {
		if late && st != absent {
			b.s.size.Add(int64(b.data.unitLen(i)))
		}
	}
}

func (b *blob) openBoth() error {
	file, err := os.OpenFile(b.path(".data"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	m, err := os.OpenFile(b.path(".map"), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = b.load(file, m)
	}
	if err != nil {
		file.Close()
		if m != nil {
			m.Close()
		}
		return err
	}
	b.file, b.mapFile = file, m
	return nil
}

// load takes over what the files hold.
func (b *blob) load(file, m *os.File) error {
	st, err := file.Stat()
	if err != nil {
		return err
	}
	want := mapHeader + (b.data.count()+7)/8
	have := make([]byte, want)
	n, _ := m.ReadAt(have, 0)
	right := n == want && string(have[:8]) == mapMagic && bytes.Equal(have[8:8+digestSize], b.unitsDigest())
	if right && bytes.Equal(have[8+digestSize:mapHeader], completeMark(b.data)) && st.Size() == b.data.Size {
		b.complete = true
		for i := range b.state {
			b.state[i] = verified
		}
		b.kept = len(b.state)
		return nil
	}
	if st.Size() != b.data.Size {
		if err := file.Truncate(b.data.Size); err != nil {
			return err
		}
	}
	if st.Size() == 0 {
		right = false
	}
	if !right {
		// Torn by a crash, or another version's: whatever octets the file has are compared with the digests.
		clear(have[mapHeader:])
		if st.Size() > 0 {
			markData(file, b.data, have[mapHeader:])
		}
		copy(have, mapMagic)
		copy(have[8:], b.unitsDigest())
		clear(have[8+digestSize : mapHeader])
		if err := m.Truncate(0); err != nil {
			return err
		}
		if _, err := m.WriteAt(have, 0); err != nil {
			return err
		}
	}
	for i := range b.state {
		if have[mapHeader+i/8]&(1<<(i%8)) != 0 {
			b.state[i] = present
			b.kept++
		}
	}
	return nil
}

// markData sets the bits of units that are not holes.
func markData(f *os.File, d Data, bits []byte) {
	for off := int64(0); off < d.Size; {
		from, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err != nil {
			return
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return
		}
		for i := from / UnitSize; i <= (to-1)/UnitSize && i < int64(d.count()); i++ {
			bits[i/8] |= 1 << (i % 8)
		}
		off = to
	}
}

func (b *blob) unitsDigest() []byte {
	h := sha256.Sum256(b.units)
	return h[:]
}

// writeBit writes unit i's bit, with b.mu held.
func (b *blob) writeBit(i int) {
	var bits byte
	for j := i &^ 7; j < min(i&^7+8, len(b.state)); j++ {
		if b.state[j] != absent {
			bits |= 1 << (j % 8)
		}
	}
	if _, err := b.mapFile.WriteAt([]byte{bits}, int64(mapHeader+i/8)); err != nil {
		b.s.cacheFailed(err) // the unit is fetched again after the next start, or found bad by its digest
	}
}

// cached reads what is verified from memory or the cache file: false when the unit is not.
func (b *blob) cached(i int, dst []byte, at int64) bool {
	b.mu.RLock()
	if data := b.held[i]; data != nil {
		b.mu.RUnlock()
		copy(dst, data[at:]) // what is held never changes
		return true
	}
	ok := b.state[i] == verified && b.file != nil
	if ok {
		b.last[i].Store(b.s.clock())
		_, err := b.file.ReadAt(dst, int64(i)*UnitSize+at)
		ok = err == nil
		if !ok {
			b.s.cacheFailed(err)
		}
	}
	b.mu.RUnlock()
	return ok
}

// ready reports whether all of a range can be read without a fetch.
func (b *blob) ready(off int64, n int) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for i := off / UnitSize; i <= (off+int64(n)-1)/UnitSize; i++ {
		if b.held[int(i)] == nil && (b.state[i] != verified || b.file == nil) {
			return false
		}
	}
	return true
}

// check reads a unit that the map claims and compares it; nil when it is not there or not right.
func (b *blob) check(i int) []byte {
	b.mu.Lock()
	b.openFiles()
	claimed := b.state[i] != absent && b.file != nil // verified: of a file that is complete, and was opened just now
	b.mu.Unlock()
	if !claimed {
		return nil
	}
	buf := make([]byte, b.data.unitLen(i))
	b.mu.RLock()
	claimed = b.state[i] != absent && b.file != nil
	var err error
	if claimed {
		_, err = b.file.ReadAt(buf, int64(i)*UnitSize)
	}
	b.mu.RUnlock()
	if !claimed {
		return nil
	}
	good := err == nil && b.verify(i, buf)
	b.mu.Lock()
	defer b.mu.Unlock()
	if good {
		if b.state[i] == present {
			b.state[i] = verified
			b.finish()
		}
		return buf
	}
	if b.state[i] == present {
		b.s.metrics.rotten.Add(1)
		b.drop(i)
	} else if b.state[i] == verified {
		b.s.metrics.rotten.Add(1) // of a complete file, which is never changed: EROFS may have it open
	}
	return nil
}

// drop forgets unit i and gives its space back, with b.mu held.
func (b *blob) drop(i int) {
	if b.state[i] == absent {
		return
	}
	b.state[i] = absent
	b.kept--
	b.s.size.Add(-int64(b.data.unitLen(i)))
	b.writeBit(i)
	b.punch(i)
}

func (b *blob) punch(i int) {
	err := unix.Fallocate(int(b.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(i)*UnitSize, int64(b.data.unitLen(i)))
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		b.s.cacheFailed(fmt.Errorf("punch %s: %w", b.file.Name(), err))
	}
}

// store keeps a unit that was verified; false when it can't be kept.
func (b *blob) store(i int, data []byte) bool {
	b.mu.Lock()
	b.openFiles()
	file := b.file
	known := b.state[i] != absent
	b.mu.Unlock()
	if file == nil || known {
		return known
	}
	if !b.s.room(int64(len(data))) {
		return false
	}
	_, err := file.WriteAt(data, int64(i)*UnitSize)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.file != file { // emptied meanwhile
		b.s.size.Add(-int64(len(data)))
		return false
	}
	if err != nil {
		b.s.size.Add(-int64(len(data)))
		b.punch(i)
		b.s.cacheFull(err)
		return false
	}
	b.state[i] = verified
	b.last[i].Store(b.s.clock())
	b.kept++
	b.writeBit(i)
	b.finish()
	return true
}

// finish starts the marking of a blob as complete when the last unit came, with b.mu held.
func (b *blob) finish() {
	if b.complete || b.kept < len(b.state) {
		return
	}
	for _, s := range b.state {
		if s != verified {
			return
		}
	}
	b.s.background(func(context.Context) {
		// Not under the lock: a sync takes long. Units may be evicted meanwhile; then the mark is not written.
		b.mu.RLock()
		file := b.file
		b.mu.RUnlock()
		if file == nil || unix.Fdatasync(int(file.Fd())) != nil {
			return
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.file != file || b.complete || b.kept < len(b.state) {
			return
		}
		if _, err := b.mapFile.WriteAt(completeMark(b.data), 8+digestSize); err != nil {
			b.s.cacheFailed(err)
			return
		}
		b.complete = true
	})
}

// local opens the cache file of a blob that is complete; nil when it is not.
func (b *blob) local() *os.File {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.openFiles()
	if !b.complete || b.file == nil {
		return nil
	}
	f, err := os.Open(b.path(".data"))
	if err != nil {
		b.s.cacheFailed(err)
		return nil
	}
	return f
}

// empty removes the blob's cache files; false when somebody has the data file open, as EROFS has when it was handed out whole.
func (b *blob) empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.held {
		b.unhold(i)
	}
	b.openFiles()
	if b.file == nil {
		return true
	}
	if b.complete && usedElsewhere(b.file) {
		return false
	}
	for i, s := range b.state {
		if s != absent {
			b.s.size.Add(-int64(b.data.unitLen(i)))
			b.s.metrics.evicted.Add(int64(b.data.unitLen(i)))
		}
		b.state[i] = absent
	}
	b.kept, b.complete = 0, false
	os.Remove(b.path(".map")) // first: a map without data is nothing
	os.Remove(b.path(".data"))
	b.closeCache()
	return true
}

// rest closes the cache files of a blob that nobody has open and that was not used since the given time: a host sees more layers than it
// may have descriptors. The next read opens them, and compares what it reads again.
func (b *blob) rest(since time.Time) {
	if b.opens.Load() > 0 || b.used.Load() > since.UnixNano() {
		return
	}
	b.flightMu.Lock()
	busy := len(b.flights) > 0 || b.ahead
	b.flightMu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if busy || b.file == nil || len(b.held) > 0 {
		return
	}
	clear(b.state)
	b.kept, b.complete = 0, false
	b.closeCache()
}

func (b *blob) closeCache() {
	if b.file != nil {
		b.file.Close()
		b.mapFile.Close()
	}
	b.file, b.mapFile, b.opened, b.again = nil, nil, false, time.Time{}
}

// usedElsewhere reports whether anybody has the file open but own: then no write lease on it is granted.
func usedElsewhere(own *os.File) bool {
	_, err := unix.FcntlInt(own.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err != nil {
		return true // or leases do not exist here: then it may be
	}
	unix.FcntlInt(own.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	return false
}
