package trajectory

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Durability store: what is not yet in a segment of the store is put there in batches, as objects of octets of segments at their places
// under logs/<host>/tail/. An epoch object says whose the place is: whoever takes a lost host's log over writes the next epoch first and
// reads the log then, and the host looks at the epoch after each batch and before it acknowledges. So what it acknowledged is found by
// the one that took over, and a host that was lost and returns acknowledges nothing more.

const (
	shipEvery = 50 * time.Millisecond // that records wait for others
	shipAt    = 1 << 20               // octets that go at once
	shipMost  = 8 << 20               // octets of one object
	tailMagic = "dsectail"
)

// tenure is what this log knows of its place in the store. Fields but owned are under epochMu (epoch, owned) or Log.mu.
type tenure struct {
	gather  time.Duration // that records wait for others
	epochMu semaphore     // one at a time takes the place
	epoch   epoch
	owned   bool
	mine    []epoch // those before that this log wrote, or meant to
	oldest  uint32  // segments before this one are of processes before
	tails   []tail  // objects of the tail, the oldest first
	shipNum uint64  // number of the last object
	listed  bool    // tails of processes before are in the list
}

type tail struct {
	key  string
	last uint32 // segment of which it has octets
}

// epoch names one owner of the place.
type epoch struct {
	N  uint64
	ID [16]byte
}

func (e epoch) encode() []byte {
	return []byte(fmt.Sprintf("dsec-epoch-1 %d %x\n", e.N, e.ID))
}

func decodeEpoch(line string) (e epoch, err error) {
	f := strings.Fields(line)
	if len(f) == 3 && f[0] == "dsec-epoch-1" {
		var id []byte
		e.N, err = strconv.ParseUint(f[1], 10, 64)
		if err == nil {
			id, err = hex.DecodeString(f[2])
		}
		if err == nil && len(id) == len(e.ID) {
			copy(e.ID[:], id)
			return e, nil
		}
	}
	return e, fmt.Errorf("epoch %.80q: %w", line, errFormat)
}

func epochKey(host string) string { return "logs/" + host + "/epoch" }

// readEpoch is that of the store; zero where none was written.
func readEpoch(ctx context.Context, st store.Store, host string) (epoch, error) {
	b, err := store.ReadAll(ctx, st, epochKey(host), 4096)
	if errors.Is(err, sandbox.ErrNotFound) {
		return epoch{}, nil
	}
	if err != nil {
		return epoch{}, fmt.Errorf("read the epoch of %s: %w", host, err)
	}
	return decodeEpoch(string(b))
}

// Fence takes a host's place in the store: its log, should it return, acknowledges nothing more with durability store and does not open.
// What it acknowledged before is there to be read by [Recall].
func Fence(ctx context.Context, st store.Store, host string) error {
	e, err := readEpoch(ctx, st, host)
	if err != nil {
		return err
	}
	return writeEpoch(ctx, st, host, next(e))
}

func next(e epoch) epoch {
	n := epoch{N: e.N + 1}
	rand.Read(n.ID[:])
	return n
}

func writeEpoch(ctx context.Context, st store.Store, host string, e epoch) error {
	if err := store.Put(ctx, st, epochKey(host), strings.NewReader(string(e.encode()))); err != nil {
		return fmt.Errorf("write the epoch of %s: %w", host, err)
	}
	return nil
}

var errFenced = fmt.Errorf("the log's place in the store was taken over: %w", sandbox.ErrState)

const (
	epochFile = "EPOCH"
	epochsOf  = 16 // the latest that the file names
)

// claim reads what the log knew of its place, and refuses a log whose place was taken. A store that does not answer is asked later.
func (l *Log) claim() error {
	if l.cfg.Store == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := l.own(ctx)
	if err != nil && !errors.Is(err, errFenced) {
		l.log.Warn("trajectory log: the store does not answer; it is asked again", "err", err)
		return nil
	}
	return err
}

// own takes the place in the store, once. The file EPOCH names what the store may say without another having been there: the epoch that
// is to be written and those before, so that neither a crash between the two writes locks the log out, nor a write of a process that was
// killed and whose request the store carries out later, when the next process has written its own.
func (l *Log) own(ctx context.Context) error {
	if err := l.epochMu.lock(ctx); err != nil {
		return err
	}
	defer l.epochMu.unlock()
	if l.owned {
		return nil
	}
	known, err := l.knownEpochs()
	if err != nil {
		return err
	}
	now, err := readEpoch(ctx, l.cfg.Store, l.cfg.Host)
	if err != nil {
		return err
	}
	if now != (epoch{}) && !slices.Contains(known, now) {
		return fmt.Errorf("epoch %d of host %s in the store is not this log's; begin a new host with an empty state folder, or remove %s from the store to give up what it guards: %w",
			now.N, l.cfg.Host, epochKey(l.cfg.Host), errFenced)
	}
	last := now
	for _, k := range known {
		if k.N > last.N {
			last = k
		}
	}
	e := next(last)
	known = append(known, e)
	known = known[max(0, len(known)-epochsOf):]
	if err := l.writeEpochs(known...); err != nil {
		return err
	}
	if err := writeEpoch(ctx, l.cfg.Store, l.cfg.Host, e); err != nil {
		return err
	}
	l.epoch, l.mine = e, known[:len(known)-1]
	if err := l.stillMine(ctx); err != nil {
		return err
	}
	l.owned = true
	return nil
}

// stillMine reads whose the place is. A late write of a process before is written over.
func (l *Log) stillMine(ctx context.Context) error {
	for {
		now, err := readEpoch(ctx, l.cfg.Store, l.cfg.Host)
		if err != nil || now == l.epoch {
			return err
		}
		if !slices.Contains(l.mine, now) {
			return fmt.Errorf("epoch %d of host %s: %w", now.N, l.cfg.Host, errFenced)
		}
		l.log.Warn("trajectory log: an epoch of a process before reached the store late; it is written over", "host", l.cfg.Host, "epoch", now.N)
		if err := writeEpoch(ctx, l.cfg.Store, l.cfg.Host, l.epoch); err != nil {
			return err
		}
	}
}

func (l *Log) knownEpochs() ([]epoch, error) {
	f, err := l.fs.Open(epochFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, 4096)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	var all []epoch
	for line := range strings.Lines(string(b[:n])) {
		e, err := decodeEpoch(line)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", epochFile, err)
		}
		all = append(all, e)
	}
	return all, nil
}

func (l *Log) writeEpochs(all ...epoch) error {
	name := epochFile + ".tmp"
	if err := l.fs.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := l.fs.Create(name)
	if err != nil {
		return err
	}
	var b []byte
	for _, e := range all {
		b = append(b, e.encode()...)
	}
	_, err = f.WriteAt(b, 0)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = l.fs.Rename(name, epochFile)
	}
	if err == nil {
		err = l.fs.SyncDir(".")
	}
	return err
}

// check fails the log when its place was taken.
func (l *Log) checkEpoch(ctx context.Context) error {
	err := l.stillMine(ctx)
	if !errors.Is(err, errFenced) {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fail("ship", err)
}

// ship returns when the batches up to lsn are on the disk and in the store. A store that does not answer is tried until ctx ends.
func (l *Log) ship(ctx context.Context, lsn uint64) error {
	return l.reach(ctx, &l.shipped, lsn, func() (uint64, error) { return l.shipOnce(ctx) })
}

// shipOnce gathers for a while and ships, again and again until the store has it.
func (l *Log) shipOnce(ctx context.Context) (target uint64, err error) {
	for end := time.Now().Add(l.gather); time.Now().Before(end) && l.unshipped() < shipAt; {
		select {
		case <-time.After(shipEvery / 5):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		target, err = l.shipTail(ctx)
		l.mu.Lock()
		failed := l.err
		l.mu.Unlock()
		switch {
		case err == nil:
			return target, nil
		case failed != nil:
			return 0, failed
		case errors.Is(err, errFenced):
			l.mu.Lock()
			defer l.mu.Unlock()
			return 0, l.fail("own the place in the store", err)
		case ctx.Err() != nil:
			return 0, fmt.Errorf("ship to the store: %w: %w", err, ctx.Err())
		}
		l.log.Warn("trajectory log: the store does not take the log's tail; tried again", "again", pause, "err", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, fmt.Errorf("ship to the store: %w: %w", err, ctx.Err())
		}
	}
}

// toShip are the segments with octets that the store has not; mu is held.
func (l *Log) toShip() []*segment {
	var all []*segment
	for _, s := range l.segs {
		if !s.stored && s.shipped < s.tailEnd() {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *segment) int { return int(int64(a.num) - int64(b.num)) })
	return all
}

// tailEnd is where the octets end that are to be shipped. A sealed segment goes with its footer: one that a crash cut off has no roll,
// and would be taken for the log's end.
func (s *segment) tailEnd() int64 {
	if s.sealed {
		return s.size
	}
	return s.wrote
}

func (l *Log) unshipped() (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.toShip() {
		n += s.tailEnd() - s.shipped
	}
	return n
}

// piece is a run of octets of a segment.
type piece struct {
	seg  uint32
	off  int64
	data []byte
}

// shipTail puts what is written now into the store and looks whose the place is.
func (l *Log) shipTail(ctx context.Context) (target uint64, err error) {
	if err := l.own(ctx); err != nil {
		return 0, err
	}
	type run struct {
		s        *segment
		h        *handle
		from, to int64
	}
	var runs []run
	l.mu.Lock()
	target = l.written
	for _, s := range l.toShip() {
		s.file.refs++
		runs = append(runs, run{s, s.file, s.shipped, s.tailEnd()})
	}
	l.mu.Unlock()
	defer func() {
		for _, r := range runs {
			l.release(r.h)
		}
	}()
	if err := l.sync(ctx, target); err != nil {
		return 0, err
	}
	for len(runs) > 0 {
		var pieces []piece
		size, n := int64(0), 0
		var done []run
		for i := range runs {
			r := &runs[i]
			take := min(r.to-r.from, shipMost-size)
			p := piece{r.s.num, r.from, make([]byte, take)}
			if _, err := r.h.ReadAt(p.data, r.from); err != nil {
				return 0, fmt.Errorf("read what is to be shipped: %w", err)
			}
			pieces, done = append(pieces, p), append(done, run{r.s, nil, 0, r.from + take})
			size += take
			if r.from += take; r.from < r.to {
				break
			}
			n++
		}
		if err := l.putTail(ctx, pieces); err != nil {
			return 0, err
		}
		l.mu.Lock()
		for _, d := range done {
			d.s.shipped = max(d.s.shipped, d.to)
		}
		l.mu.Unlock()
		for _, r := range runs[:n] {
			l.release(r.h)
		}
		runs = runs[n:]
	}
	return target, l.checkEpoch(ctx)
}

func (l *Log) putTail(ctx context.Context, pieces []piece) error {
	ctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	l.mu.Lock()
	l.shipNum++
	n := l.shipNum
	living := slices.Sorted(maps.Keys(l.segs))
	living = slices.DeleteFunc(living, func(num uint32) bool { return l.segs[num].dying })
	l.mu.Unlock()
	b, err := encodeTail(l.epoch.N, n, living, pieces)
	if err != nil {
		return err
	}
	key := fmt.Sprintf("logs/%s/tail/%016x-%016x", l.cfg.Host, l.epoch.N, n)
	if err := store.Put(ctx, l.cfg.Store, key, strings.NewReader(string(b))); err != nil {
		return fmt.Errorf("ship to the store: %w", err)
	}
	l.mu.Lock()
	t := tail{key: key}
	if len(pieces) > 0 {
		t.last = pieces[len(pieces)-1].seg
	}
	l.tails = append(l.tails, t)
	l.mu.Unlock()
	return nil
}

// dropTails removes objects of the tail whose segments are in the store as a whole, or gone.
func (l *Log) dropTails(ctx context.Context) error {
	l.mu.Lock()
	list := !l.listed
	l.mu.Unlock()
	if list {
		mine := fmt.Sprintf("logs/%s/tail/%016x-", l.cfg.Host, l.epoch.N)
		var old []tail
		err := l.cfg.Store.List(ctx, "logs/"+l.cfg.Host+"/tail/", func(in store.Info) bool {
			if !strings.HasPrefix(in.Key, mine) {
				old = append(old, tail{in.Key, l.oldest - 1})
			}
			return true
		})
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.listed, l.tails = true, append(old, l.tails...)
		l.mu.Unlock()
	}
	for {
		l.mu.Lock()
		key := ""
		if len(l.tails) > 0 {
			covered := true
			for _, s := range l.segs {
				if s.num <= l.tails[0].last && !s.stored {
					covered = false
				}
			}
			if covered {
				key = l.tails[0].key
			}
		}
		l.mu.Unlock()
		if key == "" {
			return nil
		}
		if err := l.cfg.Store.Delete(ctx, key); err != nil {
			return err
		}
		l.mu.Lock()
		l.tails = l.tails[1:]
		l.mu.Unlock()
	}
}

// encodeTail makes an object of the tail: docs/format/trajectory.md. living are the segments that the log has: of others, what older
// objects hold is of no use.
func encodeTail(epoch, n uint64, living []uint32, pieces []piece) ([]byte, error) {
	body := binary.AppendUvarint(nil, uint64(len(living)))
	for _, num := range living {
		body = binary.AppendUvarint(body, uint64(num))
	}
	body = binary.AppendUvarint(body, uint64(len(pieces)))
	for _, p := range pieces {
		body = binary.AppendUvarint(body, uint64(p.seg))
		body = binary.AppendUvarint(body, uint64(p.off))
		body = binary.AppendUvarint(body, uint64(len(p.data)))
	}
	for _, p := range pieces {
		body = append(body, p.data...)
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	le := binary.LittleEndian
	b := append([]byte(tailMagic), make([]byte, 28)...)
	le.PutUint64(b[8:], epoch)
	le.PutUint64(b[16:], n)
	le.PutUint64(b[24:], uint64(len(body)))
	b = z.EncodeAll(body, b)
	le.PutUint32(b[32:], crc32.Update(crc32.Checksum(b[:32], castagnoli), castagnoli, b[36:]))
	return b, nil
}

func decodeTail(b []byte) (living []uint32, pieces []piece, err error) {
	le := binary.LittleEndian
	bad := fmt.Errorf("tail: %w", errFormat)
	if len(b) < 36 || string(b[:8]) != tailMagic || le.Uint32(b[32:]) != crc32.Update(crc32.Checksum(b[:32], castagnoli), castagnoli, b[36:]) {
		return nil, nil, bad
	}
	n := le.Uint64(b[24:])
	if n > shipMost+4<<20 {
		return nil, nil, bad
	}
	z, err := newUnpacker()
	if err != nil {
		return nil, nil, err
	}
	defer z.Close()
	body, err := unpackBlock(z, b[36:], int64(n))
	if err != nil {
		return nil, nil, bad
	}
	d := &decoder{b: body}
	for count := d.uvarint(); count > 0 && !d.bad; count-- {
		living = append(living, uint32(d.uvarint()))
	}
	count := d.uvarint()
	if count > 1<<16 {
		return nil, nil, bad
	}
	pieces = make([]piece, count)
	sizes := make([]uint64, count)
	for i := range pieces {
		seg := d.uvarint()
		pieces[i].seg, pieces[i].off, sizes[i] = uint32(seg), int64(d.uvarint()), d.uvarint()
		if d.bad || seg > 1<<32-1 || pieces[i].off < 0 || pieces[i].off > maxSegment {
			return nil, nil, bad
		}
	}
	for i := range pieces {
		pieces[i].data = d.take(sizes[i])
	}
	if d.bad || len(d.b) > 0 {
		return nil, nil, bad
	}
	return living, pieces, nil
}

// Stores says whether the log has a store, and with it durability store.
func (l *Log) Stores() bool { return l.cfg.Store != nil }

func (l *Log) blobKey(sha [32]byte) string { return "logs/" + l.cfg.Host + "/" + blobName(sha) }

// shipBlob puts an input into the store.
func (l *Log) shipBlob(in *Input) error {
	if l.cfg.Store == nil {
		return fmt.Errorf("keep input: durability store: this log has no store: %w", sandbox.ErrUnsupported)
	}
	f, err := l.fs.Open(blobName(in.SHA256))
	if err != nil {
		return fmt.Errorf("ship input to the store: %w", err)
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	if err := store.Put(ctx, l.cfg.Store, l.blobKey(in.SHA256), io.NewSectionReader(f, 0, in.Size)); err != nil {
		return fmt.Errorf("ship input to the store: %w", err)
	}
	return nil
}

func (l *Log) unshipBlob(ctx context.Context, sha [32]byte) error {
	if l.cfg.Store == nil {
		return nil
	}
	if err := l.cfg.Store.Delete(ctx, l.blobKey(sha)); err != nil {
		return fmt.Errorf("remove input from the store: %w", err)
	}
	return nil
}

// Recall makes the log of a lost host again, in an empty file system: its segments and what of its tail is in the store. [Open] it then,
// without a store. Fence the host before.
func Recall(ctx context.Context, st store.Store, host string, to FS) error {
	prefix := "logs/" + host + "/"
	var keys []string
	if err := st.List(ctx, prefix, func(in store.Info) bool { keys = append(keys, in.Key); return true }); err != nil {
		return fmt.Errorf("recall the log of %s: %w", host, err)
	}
	whole := map[uint32]bool{}
	var tails []string
	for _, key := range keys {
		name := strings.TrimPrefix(key, prefix)
		num, err := strconv.ParseUint(name, 16, 32)
		switch {
		case strings.HasPrefix(name, "tail/"):
			tails = append(tails, key) // in order: the list is
			continue
		case strings.HasPrefix(name, "blobs/") && len(name) == len("blobs/")+3+64:
			if err := errors.Join(to.Mkdir("blobs"), to.Mkdir(name[:len("blobs/")+2])); err != nil {
				return err
			}
		case err == nil && fmt.Sprintf("%08x", num) == name:
			whole[uint32(num)] = true
			name += ".log"
		default:
			continue
		}
		err = fetchObject(ctx, st, key, name, to)
		if strings.HasPrefix(name, "blobs/") && err == nil {
			err = errors.Join(to.SyncDir(name[:len("blobs/")+2]), to.SyncDir("blobs"))
		}
		if err != nil {
			return fmt.Errorf("recall the log of %s: %w", host, err)
		}
	}
	ends := map[uint32]int64{}
	var living []uint32
	for _, key := range tails {
		b, err := store.ReadAll(ctx, st, key, 2*shipMost)
		var pieces []piece
		if err == nil {
			living, pieces, err = decodeTail(b)
		}
		if err != nil {
			return fmt.Errorf("recall the log of %s: %s: %w", host, key, err)
		}
		for _, p := range pieces {
			if !whole[p.seg] {
				if err := layPiece(p, ends, to); err != nil {
					return fmt.Errorf("recall the log of %s: %s: %w", host, key, err)
				}
			}
		}
	}
	for num := range ends {
		if !slices.Contains(living, num) {
			if err := to.Remove(segmentName(num)); err != nil {
				return err
			}
		}
	}
	return to.SyncDir(".")
}

// layPiece puts octets at their place in a segment. One that begins anew was made anew, under another nonce.
func layPiece(p piece, ends map[uint32]int64, to FS) error {
	name := segmentName(p.seg)
	var f File
	var err error
	if end, ok := ends[p.seg]; !ok {
		f, err = to.Create(name)
	} else if f, err = to.Open(name); err == nil && p.off == 0 && end > 0 {
		err = f.Truncate(0)
		ends[p.seg] = 0
	}
	if err != nil {
		return err
	}
	if p.off > ends[p.seg] {
		err = fmt.Errorf("segment %s: octets %d to %d are missing: %w", name, ends[p.seg], p.off, sandbox.ErrLost)
	}
	if err == nil {
		_, err = f.WriteAt(p.data, p.off)
		ends[p.seg] = max(ends[p.seg], p.off+int64(len(p.data)))
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func fetchObject(ctx context.Context, st store.Store, key, name string, to FS) error {
	r, err := st.Open(ctx, key)
	if err != nil {
		return err
	}
	defer r.Close()
	f, err := to.Create(name)
	if err != nil {
		return err
	}
	b := make([]byte, 1<<20)
	for off := int64(0); off < r.Size() && err == nil; off += int64(len(b)) {
		b = b[:min(int64(len(b)), r.Size()-off)]
		if _, err = store.ReadAt(ctx, r, b, off); err == io.EOF {
			err = nil
		}
		if err == nil {
			_, err = f.WriteAt(b, off)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// semaphore is a mutex for what does I/O, whose wait ends with a context.
type semaphore struct{ ch chan struct{} }

func newSemaphore() semaphore { return semaphore{make(chan struct{}, 1)} }

func (s semaphore) lock(ctx context.Context) error {
	select {
	case s.ch <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s semaphore) unlock() { <-s.ch }
