package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// NoErofs says why this kernel can't mount layers as EROFS; nil when it can, or when only a mount will tell. To ask is to have the kernel look
// for the module.
func NoErofs() error {
	fd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	switch {
	case err == nil:
		unix.Close(fd)
		return nil
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("this kernel has no EROFS, also not as a module: %w", err)
	}
	return nil
}

// whyUnpack says why layers are unpacked; nil where they are mounted as EROFS.
func whyUnpack(asked bool) error {
	err := NoErofs()
	if err == nil && asked {
		err = errors.New("host.unpack_layers is set")
	}
	return err
}

// unpacked keeps layers as folders of the host's disk, for a kernel that mounts no EROFS. Each is made once, however many wait for it, and
// stays until room is needed or the store has the layer no more.
//
//	DIR/<layer>/tree    what is mounted; the folders above it are root's alone
//	DIR/<layer>/octets  what it takes, about
//	DIR/new-*, gone-*   half made, half removed: of no use after the process that did it
type unpacked struct {
	dir    string
	limit  int64 // of all, octets; 0: nothing is made any more, and what nobody uses goes
	spare  int64 // octets of the disk that stay free
	layers Layers
	log    *slog.Logger
	inUse  func() map[string]bool // layers that are mounted, about to be, or of a living sandbox
	step   func(what string)      // for tests: before each step

	ctx   context.Context // of all that is made
	stop  context.CancelFunc
	wg    sync.WaitGroup
	turns chan struct{}

	mu      sync.Mutex
	ended   bool
	byID    map[string]*unpackedLayer
	left    []string  // names of what earlier processes left half-done; of sweep alone
	checked time.Time // when the store was last asked what it still has
}

type unpackedLayer struct {
	octets int64
	used   time.Time
	busy   chan struct{} // closed when what makes or removes it is done; nil: it is there
	err    error         // why it could not be made; read when busy is closed
}

const (
	unpackLimit   = 20 << 30  // octets, the default
	unpackSpare   = 256 << 20 // octets of the disk that stay free
	unpackBound   = time.Hour // for one layer, its fetching too
	unpacksAtOnce = 4         // more would only share the disk
	unpackedCheck = time.Hour // how often the store is asked
	unpackedDraft = "new-"
	unpackedTrash = "gone-"
	unpackedTree  = "tree"
	unpackedSize  = "octets"
)

// newUnpacked looks at what earlier processes left; it starts nothing.
func newUnpacked(dir string, limit int64, layers Layers, inUse func() map[string]bool, log *slog.Logger) (*unpacked, error) {
	u := &unpacked{dir: dir, limit: limit, spare: unpackSpare, layers: layers, log: log, inUse: inUse, step: func(string) {},
		turns: make(chan struct{}, unpacksAtOnce), byID: map[string]*unpackedLayer{}}
	u.ctx, u.stop = context.WithCancel(context.Background())
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("unpacked layers: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		if _, err := layer.ParseID(name); err == nil {
			if l := found(filepath.Join(dir, name)); l != nil {
				u.byID[name] = l
				continue
			}
			trash, err := u.discard(name)
			if err != nil {
				return nil, fmt.Errorf("unpacked layers: %w", err)
			}
			name = filepath.Base(trash)
		}
		if strings.HasPrefix(name, unpackedDraft) || strings.HasPrefix(name, unpackedTrash) {
			u.left = append(u.left, name)
		}
	}
	return u, nil
}

// found reads what is known of a layer's folder; nil when it is not one that was finished.
func found(dir string) *unpackedLayer {
	text, err := os.ReadFile(filepath.Join(dir, unpackedSize))
	if err != nil {
		return nil
	}
	octets, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	st, e := os.Stat(dir)
	if err != nil || e != nil || octets < 0 {
		return nil
	}
	return &unpackedLayer{octets: octets, used: st.ModTime()}
}

// Files gives a layer's folder as a mount that is attached nowhere. A layer that is not there yet is unpacked; the context ends the wait alone.
func (u *unpacked) Files(ctx context.Context, id layer.ID) (blob.LayerFiles, error) {
	for {
		l, busy, err := u.get(string(id))
		if err != nil {
			return blob.LayerFiles{}, err
		}
		if busy == nil {
			at := filepath.Join(u.dir, string(id))
			now := time.Now()
			_ = os.Chtimes(at, now, now) // the last use, for the next start: a wrong one costs an unpacking
			tree, err := keeper.FolderMount(filepath.Join(at, unpackedTree))
			if errors.Is(err, os.ErrNotExist) && u.claim(string(id), l, true) { // somebody took it away
				if err := u.remove(string(id), l); err != nil {
					return blob.LayerFiles{}, err
				}
				continue
			}
			return blob.LayerFiles{Meta: tree}, err
		}
		select {
		case <-busy:
			if l.err != nil {
				return blob.LayerFiles{}, l.err
			}
		case <-ctx.Done():
			return blob.LayerFiles{}, fmt.Errorf("layer %s is being unpacked, which goes on: create again later: %w", id, ctx.Err())
		}
	}
}

// get returns what is known of a layer; nil for busy when its folder is there. It begins to make one that is not known.
func (u *unpacked) get(id string) (*unpackedLayer, chan struct{}, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended {
		return nil, nil, fmt.Errorf("unpack layer %s: the driver has ended: %w", id, sandbox.ErrState)
	}
	l := u.byID[id]
	if l == nil {
		l = &unpackedLayer{busy: make(chan struct{})}
		u.byID[id] = l
		u.wg.Add(1)
		go func() {
			defer u.wg.Done()
			u.made(id, l, u.make(id, l))
		}()
	}
	l.used = time.Now()
	return l, l.busy, nil
}

func (u *unpacked) made(id string, l *unpackedLayer, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil {
		l.err = fmt.Errorf("unpack layer %s: %w", id, err)
		delete(u.byID, id)
	}
	close(l.busy)
	l.busy = nil
}

// make unpacks a layer. The folder has its name when all in it is on the disk.
func (u *unpacked) make(id string, l *unpackedLayer) (err error) {
	ctx, cancel := context.WithTimeout(u.ctx, unpackBound)
	defer cancel()
	files, err := u.layers.Files(ctx, layer.ID(id))
	if err != nil {
		return err
	}
	defer files.Close()
	select {
	case u.turns <- struct{}{}:
		defer func() { <-u.turns }()
	case <-ctx.Done():
		return fmt.Errorf("wait for its turn: %w", ctx.Err())
	}
	im, err := openImage(files)
	if err != nil {
		return err
	}
	octets, inodes := im.Unpacked()
	if err := os.MkdirAll(u.dir, 0o700); err != nil {
		return err
	}
	if err := u.reserve(l, octets, inodes); err != nil {
		return err
	}
	u.step("draft")
	draft, err := os.MkdirTemp(u.dir, unpackedDraft)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(draft))
		}
	}()
	going := func() error {
		u.step("unpack")
		return ctx.Err()
	}
	if err := u.fill(draft, im, octets, going); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("it takes about %d MiB in %s, whose disk became full: %w: %w", octets>>20+1, u.dir, err, sandbox.ErrExhausted)
		}
		return err
	}
	u.step("rename")
	if err := os.Rename(draft, filepath.Join(u.dir, id)); err != nil {
		return err
	}
	u.step("renamed")
	return syncFolder(u.dir, unix.Fsync)
}

// fill writes a draft, which is then on the disk.
func (u *unpacked) fill(draft string, im *erofs.Image, octets int64, going func() error) error {
	tree := filepath.Join(draft, unpackedTree)
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	f, err := os.Open(tree)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := im.Unpack(f, going); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(draft, unpackedSize), []byte(strconv.FormatInt(octets, 10)+"\n"), 0o600); err != nil {
		return err
	}
	u.step("sync")
	return syncFolder(draft, unix.Syncfs) // one call for thousands of files
}

func syncFolder(dir string, sync func(fd int) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := sync(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

func openImage(f blob.LayerFiles) (*erofs.Image, error) {
	var data io.ReaderAt
	if f.Data != nil {
		data = f.Data
	}
	return erofs.Open(f.Meta, data)
}

// reserve takes room for a layer, from those that were used longest ago where there is none.
func (u *unpacked) reserve(l *unpackedLayer, octets, inodes int64) error {
	for {
		none := u.fits(l, octets, inodes)
		if none == nil {
			return nil
		}
		id, old := u.oldest()
		if old == nil {
			return none
		}
		if err := u.remove(id, old); err != nil {
			return errors.Join(none, err)
		}
	}
}

// fits takes the room if it is there, else it says what is missing.
func (u *unpacked) fits(l *unpackedLayer, octets, inodes int64) error {
	var disk unix.Statfs_t
	if err := unix.Statfs(u.dir, &disk); err != nil {
		return fmt.Errorf("free space of %s: %w", u.dir, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	var total, coming int64 // coming may be on the disk in part already
	for _, o := range u.byID {
		total += o.octets
		if o.busy != nil {
			coming += o.octets
		}
	}
	free := int64(disk.Bavail)*disk.Bsize - coming - u.spare
	switch {
	case total+octets > u.limit:
		return fmt.Errorf("it takes about %d MiB, and unpacked layers in use take %d of the %d MiB that they may (host.unpack_limit): %w",
			octets>>20+1, total>>20, u.limit>>20, sandbox.ErrExhausted)
	case octets > free:
		return fmt.Errorf("it takes about %d MiB, and the disk of %s has %d MiB but for %d that stay free: %w: %w",
			octets>>20+1, u.dir, max(0, free>>20), u.spare>>20, unix.ENOSPC, sandbox.ErrExhausted)
	case disk.Files > 0 && inodes > int64(disk.Ffree):
		return fmt.Errorf("it takes %d files, and the disk of %s has room for %d: %w: %w", inodes, u.dir, disk.Ffree, unix.ENOSPC, sandbox.ErrExhausted)
	}
	l.octets = octets
	return nil
}

// oldest claims the layer that was used longest ago, of those that nobody uses; nil where there is none. To ask who uses them under the lock
// leaves nobody a moment to begin.
func (u *unpacked) oldest() (id string, l *unpackedLayer) {
	u.mu.Lock()
	defer u.mu.Unlock()
	used := u.inUse()
	for i, o := range u.byID {
		if o.busy == nil && !used[i] && (l == nil || o.used.Before(l.used)) {
			id, l = i, o
		}
	}
	if l != nil {
		l.busy = make(chan struct{})
	}
	return id, l
}

// claim marks a layer as being removed, unless somebody uses it, or did so before.
func (u *unpacked) claim(id string, l *unpackedLayer, used bool) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byID[id] != l || l.busy != nil || !used && u.inUse()[id] {
		return false
	}
	l.busy = make(chan struct{})
	return true
}

// remove removes a layer that was claimed. Under its name it is whole or not there.
func (u *unpacked) remove(id string, l *unpackedLayer) error {
	trash, err := u.discard(id)
	if errors.Is(err, os.ErrNotExist) { // somebody took it away
		trash, err = "", nil
	}
	u.mu.Lock()
	if err == nil {
		delete(u.byID, id)
	}
	close(l.busy)
	l.busy = nil
	u.mu.Unlock()
	if err == nil && trash != "" {
		err = os.RemoveAll(trash)
	}
	if err != nil {
		return fmt.Errorf("remove unpacked layer %s: %w", id, err)
	}
	return nil
}

// discard takes a folder's name away.
func (u *unpacked) discard(id string) (trash string, err error) {
	if trash, err = os.MkdirTemp(u.dir, unpackedTrash); err != nil {
		return "", err
	}
	if err = unix.Rename(filepath.Join(u.dir, id), trash); err != nil { // package os does not put a folder in an empty one's place
		err = errors.Join(fmt.Errorf("rename %s: %w", filepath.Join(u.dir, id), err), os.Remove(trash))
	}
	return trash, err
}

// sweep removes what earlier processes left half-done.
func (u *unpacked) sweep() error {
	var errs []error
	for _, name := range u.left {
		if u.ctx.Err() != nil {
			break
		}
		errs = append(errs, os.RemoveAll(filepath.Join(u.dir, name)))
	}
	u.left = nil
	return errors.Join(errs...)
}

// tidy removes what nobody uses and the store has no more; all that nobody uses where layers are mounted as EROFS again.
func (u *unpacked) tidy(ctx context.Context, now time.Time) error {
	all := map[string]*unpackedLayer{}
	u.mu.Lock()
	if off := u.limit == 0; off || now.Sub(u.checked) >= unpackedCheck {
		u.checked = now
		maps.Copy(all, u.byID)
	}
	u.mu.Unlock()
	var errs []error
	for id, l := range all {
		if u.limit > 0 {
			if _, err := u.layers.Descriptor(ctx, layer.ID(id)); !errors.Is(err, sandbox.ErrNotFound) {
				continue
			}
		}
		if u.claim(id, l, false) {
			errs = append(errs, u.remove(id, l))
		}
	}
	return errors.Join(errs...)
}

// close ends what is being made, and returns when that is gone.
func (u *unpacked) close() {
	u.mu.Lock()
	u.ended = true
	u.mu.Unlock()
	u.stop()
	u.wg.Wait()
}
