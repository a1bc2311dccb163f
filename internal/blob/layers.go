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
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// LayerFiles are the files of a layer's image.
type LayerFiles struct {
	Meta *os.File
	Data *os.File // its contents; nil when Meta has them
	// Direct asks for reads past the page cache that belongs to the files.
	Direct bool
}

// Close closes the files.
func (f LayerFiles) Close() error {
	err := f.Meta.Close()
	if f.Data != nil {
		err = errors.Join(err, f.Data.Close())
	}
	return err
}

// LayersConfig says where layers that are not local go.
type LayersConfig struct {
	Dir    string // whole objects: metadata, and what can't be read on demand; on a disk, of this host alone
	Limit  int64  // of Dir, in octets; 0 is 4 GiB
	Direct bool   // ask for direct reads of the cache's files
	// Seen reads all contents through the daemon, local ones too, so that it can tell what was read.
	Seen bool
}

// Opener opens blobs on demand; *Supervisor does.
type Opener interface {
	Open(ctx context.Context, d Data) (*os.File, error)
	OpenSeen(ctx context.Context, d Data) (*os.File, error)
}

// Layers finds the files of layers: where the store's are files of this machine that the kernel can mount, these; else metadata that was
// fetched whole and contents of the blob daemon.
type Layers struct {
	*layer.Catalogue
	cfg   LayersConfig
	store store.Store
	blobs Opener
	log   *slog.Logger

	mu     sync.Mutex
	tried  map[[2]uint64]bool // pairs of file systems, for metadata and contents: whether EROFS reads files there
	whole  map[string]*wholeFetch
	noFile bool            // this kernel's EROFS reads no files at all
	sure   map[string]bool // copies that were compared with their digests by this process
}

type wholeFetch struct {
	done chan struct{}
	err  error
}

// NewLayers makes one. blobs may be nil: then contents that are not local are fetched whole.
func NewLayers(cfg LayersConfig, c *layer.Catalogue, st store.Store, blobs Opener, log *slog.Logger) (*Layers, error) {
	if cfg.Limit == 0 {
		cfg.Limit = 4 << 30
	}
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("folder of layers %q: want an absolute path: %w", cfg.Dir, sandbox.ErrInvalid)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("folder of layers: %w", err)
	}
	return &Layers{Catalogue: c, cfg: cfg, store: st, blobs: blobs, log: log, tried: map[[2]uint64]bool{}, sure: map[string]bool{}, whole: map[string]*wholeFetch{}}, nil
}

// Files opens a layer's image. The caller closes it.
func (l *Layers) Files(ctx context.Context, id layer.ID) (LayerFiles, error) {
	d, err := l.Descriptor(ctx, id)
	if err != nil {
		return LayerFiles{}, err
	}
	err = nil
	for _, f := range d.Forms {
		if f.Kind != layer.FormEROFS && f.Kind != layer.FormSplit {
			continue
		}
		files, e := l.form(ctx, f)
		if e == nil {
			return files, nil
		}
		err = errors.Join(err, e)
		if ctx.Err() != nil {
			break
		}
	}
	if err == nil {
		err = fmt.Errorf("has no form that can be mounted: %w", sandbox.ErrUnsupported)
	}
	return LayerFiles{}, fmt.Errorf("layer %s: %w", id, err)
}

func (l *Layers) form(ctx context.Context, f layer.Form) (files LayerFiles, err error) {
	defer func() {
		if err != nil && files.Meta != nil {
			files.Close()
		} else if err != nil && files.Data != nil {
			files.Data.Close()
		}
	}()
	if f.Data != nil && (!l.cfg.Seen || l.blobs == nil) {
		if files.Data, err = l.local(f.Data.Digest, f.Data.Size); err != nil {
			return files, fmt.Errorf("its contents: %w", err)
		}
	}
	// Contents that are far are opened, and the fetching of the hot ones begins, while the metadata comes.
	far := func() (*os.File, error) { return l.contents(ctx, *f.Data) }
	if f.Data != nil && files.Data == nil {
		var waitFor func() (*os.File, error)
		waitFor = beside(far)
		far = waitFor
		defer func() {
			if files.Data == nil { // not asked for
				if file, err := waitFor(); err == nil {
					file.Close()
				}
			}
		}()
	}
	var ours bool // the metadata is a copy of ours
	files.Meta, err = l.local(f.Digest, f.Size)
	if files.Meta == nil && err == nil {
		files.Meta, err = l.fetch(ctx, f.Digest, f.Size)
		ours = true
	}
	if err != nil {
		return files, fmt.Errorf("its image: %w", err)
	}
	if f.Data == nil {
		if !ours && !l.mountable(files.Meta, nil) {
			err = l.replace(ctx, &files, f)
		}
		return files, err
	}
	if !ours && !l.mountable(files.Meta, nil) {
		if err = l.replace(ctx, &files, f); err != nil {
			return files, err
		}
	}
	if files.Data != nil && !l.mountable(files.Meta, files.Data) {
		files.Data.Close()
		files.Data = nil
	}
	if files.Data == nil {
		files.Data, err = far()
		files.Direct = l.cfg.Direct
	}
	if err != nil {
		return files, fmt.Errorf("its contents: %w", err)
	}
	return files, nil
}

// beside calls f at once on a goroutine of its own; what it returns waits for the result, which is given out once.
func beside(f func() (*os.File, error)) func() (*os.File, error) {
	type result struct {
		file *os.File
		err  error
	}
	ch := make(chan result, 1)
	go func() {
		file, err := f()
		ch <- result{file, err}
		close(ch)
	}()
	return func() (*os.File, error) {
		r, ok := <-ch
		if !ok {
			return nil, os.ErrClosed
		}
		return r.file, r.err
	}
}

// replace takes a copy of the metadata, since the kernel mounts no file of the store's file system.
func (l *Layers) replace(ctx context.Context, files *LayerFiles, f layer.Form) error {
	meta, err := l.fetch(ctx, f.Digest, f.Size)
	if err != nil {
		return fmt.Errorf("its image: %w", err)
	}
	files.Meta.Close()
	files.Meta = meta
	return nil
}

func (l *Layers) contents(ctx context.Context, d layer.Data) (*os.File, error) {
	if l.blobs != nil {
		open := l.blobs.Open
		if l.cfg.Seen {
			open = l.blobs.OpenSeen
		}
		f, err := open(ctx, Data(d))
		if !errors.Is(err, sandbox.ErrUnsupported) {
			return f, err
		}
		l.log.Warn("contents are fetched whole", "blob", d.Digest, "err", err)
	}
	return l.fetch(ctx, d.Digest, d.Size)
}

// local opens an object that is a file of this machine; nil when it is none.
func (l *Layers) local(digest string, size int64) (*os.File, error) {
	path, ok := l.store.Path(layer.BlobKey(digest))
	if !ok {
		return nil, nil
	}
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("object %s: %w", digest, sandbox.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() != size {
		err = fmt.Errorf("object %s has %d octets, want %d: %w", digest, st.Size(), size, sandbox.ErrLost)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// mountable reports whether the kernel's EROFS reads files of these file systems. Where it reads no files at all, the keeper puts loop
// devices on them, which it can anywhere.
func (l *Layers) mountable(meta, data *os.File) bool {
	key := [2]uint64{device(meta), 0}
	if data != nil {
		key[1] = device(data)
	}
	l.mu.Lock()
	ok, known := l.tried[key]
	noFile := l.noFile
	l.mu.Unlock()
	if noFile {
		return true
	}
	if known {
		return ok
	}
	err := tryMount(meta, data)
	ok = !errors.Is(err, unix.ENOTBLK)
	if !ok && data == nil && l.ownFails(meta) {
		l.mu.Lock()
		l.noFile = true
		l.mu.Unlock()
		return true
	}
	if !ok {
		l.log.Warn("EROFS reads no files of the store's file system: layers go through the cache", "file", meta.Name(), "err", err)
	}
	if err == nil || !ok { // another error is this image's
		l.mu.Lock()
		l.tried[key] = ok
		l.mu.Unlock()
	}
	return ok
}

// ownFails reports whether EROFS refuses a copy of the image in the folder of layers too.
func (l *Layers) ownFails(image *os.File) bool {
	f, err := os.CreateTemp(l.cfg.Dir, "probe-")
	if err != nil {
		return false
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := io.Copy(f, io.NewSectionReader(image, 0, 64<<20)); err != nil {
		return false
	}
	return errors.Is(tryMount(f, nil), unix.ENOTBLK)
}

func device(f *os.File) uint64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return 0
	}
	return st.Dev
}

// tryMount mounts an image attached to nothing and lets it go.
func tryMount(meta, data *os.File) error {
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return err
	}
	if err := unix.FsconfigSetString(fs, "source", fmt.Sprintf("/proc/self/fd/%d", meta.Fd())); err != nil {
		return err
	}
	if data != nil {
		if err := unix.FsconfigSetString(fs, "device", fmt.Sprintf("/proc/self/fd/%d", data.Fd())); err != nil {
			return err
		}
	}
	return unix.FsconfigCreate(fs)
}

// fetch returns a copy of an object in the folder of layers, which was compared with its digest when it came.
func (l *Layers) fetch(ctx context.Context, digest string, size int64) (*os.File, error) {
	h, err := hexOf(digest)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(l.cfg.Dir, h)
	for {
		if f, err := os.Open(path); err == nil {
			if st, err := f.Stat(); err == nil && st.Size() == size && l.right(f, h, size) {
				now := time.Now()
				os.Chtimes(path, now, now) // the last use
				return f, nil
			}
			f.Close()
			os.Remove(path)
		}
		l.mu.Lock()
		w := l.whole[h]
		mine := w == nil
		if mine {
			w = &wholeFetch{done: make(chan struct{})}
			l.whole[h] = w
		}
		l.mu.Unlock()
		if mine {
			w.err = l.fetchWhole(ctx, digest, size, path)
			l.mu.Lock()
			delete(l.whole, h)
			l.mu.Unlock()
			close(w.done)
			if w.err != nil {
				return nil, w.err
			}
			continue
		}
		select {
		case <-w.done: // it is there, or the other gave up
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// right says whether a copy has the octets that it was made of. One of at most quickSize is not synced when it is made, since a start waits
// for that; so it is compared at its first use by each process.
func (l *Layers) right(f *os.File, h string, size int64) bool {
	if size > quickSize {
		return true
	}
	l.mu.Lock()
	sure := l.sure[h]
	l.mu.Unlock()
	if sure {
		return true
	}
	sum := sha256.New()
	if n, err := io.Copy(sum, io.NewSectionReader(f, 0, size)); err != nil || n != size || hex.EncodeToString(sum.Sum(nil)) != h {
		l.log.Warn("a copy has other octets than it should: it is fetched again", "file", f.Name(), "err", err)
		return false
	}
	l.setSure(h)
	return true
}

const (
	quickSize = 64 << 20 // octets
	maxSure   = 1 << 16
)

func (l *Layers) setSure(h string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.sure) >= maxSure {
		clear(l.sure)
	}
	l.sure[h] = true
}

func (l *Layers) fetchWhole(ctx context.Context, digest string, size int64, path string) error {
	l.makeRoom(size)
	var last error
	first := true
	for pause := firstPause; ; pause, first = min(2*pause, longestPause), false {
		if last = l.fetchOnce(ctx, digest, size, path, first); last == nil || errors.Is(last, sandbox.ErrNotFound) || errors.Is(last, unix.ENOSPC) {
			return last
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("fetch object %s: %w", digest, last)
		case <-time.After(pause):
		}
	}
}

// fetchPiece is how much of an object is asked for at once, in octets: a store that is far answers several requests in the time of one.
const fetchPiece = 8 << 20

// fetchOnce fetches an object; after the first try the store compares on its own, and looks elsewhere for what is wrong.
func (l *Layers) fetchOnce(ctx context.Context, digest string, size int64, path string, first bool) (err error) {
	r, err := l.store.Open(ctx, layer.BlobKey(digest))
	if err != nil {
		return err
	}
	defer r.Close()
	if r.Size() != size {
		return fmt.Errorf("object %s has %d octets, want %d: %w", digest, r.Size(), size, sandbox.ErrLost)
	}
	f, err := os.CreateTemp(l.cfg.Dir, "new-")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	read := store.ReadAt
	if first { // all of it is compared below
		read = store.ReadAtUnchecked
	}
	sum := sha256.New()
	buf := make([]byte, min(size, fetchPiece))
	for at := int64(0); at < size; {
		part := buf[:min(int64(len(buf)), size-at)]
		if n, err := read(ctx, r, part, at); n < len(part) {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read object %s: %w", digest, err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		sum.Write(part)
		if _, err := f.Write(part); err != nil {
			return err
		}
		at += int64(len(part))
	}
	want, _ := hex.DecodeString(digest[len(prefix):])
	if !bytes.Equal(sum.Sum(nil), want) {
		return fmt.Errorf("object %s has other octets: %w", digest, sandbox.ErrLost)
	}
	if size > quickSize {
		if err := f.Sync(); err != nil { // what a crash leaves under the name is right
			return err
		}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	l.setSure(filepath.Base(path))
	return nil
}

// makeRoom removes copies that were used longest ago. Mounts of them go on: their octets leave with the last.
func (l *Layers) makeRoom(n int64) {
	entries, err := os.ReadDir(l.cfg.Dir)
	if err != nil {
		return
	}
	type copied struct {
		path string
		size int64
		used time.Time
	}
	var all []copied
	total := n
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		if _, err := hexOf(prefix + e.Name()); err != nil {
			if time.Since(info.ModTime()) > time.Hour { // of a process that died
				os.Remove(filepath.Join(l.cfg.Dir, e.Name()))
			}
			continue
		}
		all = append(all, copied{filepath.Join(l.cfg.Dir, e.Name()), info.Size(), info.ModTime()})
		total += info.Size()
	}
	slices.SortFunc(all, func(a, b copied) int { return a.used.Compare(b.used) })
	for _, c := range all {
		if total <= l.cfg.Limit {
			return
		}
		if os.Remove(c.path) == nil {
			total -= c.size
		}
	}
}
