package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// known is what this process has seen of the packs' indexes: where chunks lie that need not be sent again. It may lack what others have
// written since, at the price of a chunk stored twice. About 50 octets a chunk.
type known struct {
	busy chan struct{} // held by who refreshes

	mu     sync.Mutex
	at     time.Time // when the lists were asked for that this shows
	packs  []packID
	number map[packID]uint32 // of those that may be relied on: listed, with an index, not condemned
	where  map[short]spot
	holes  int             // packs that left since the last reset
	gone   map[packID]bool // packs that manifests name and a request did not find
}

// maxGone bounds the packs that are known to be gone; then they are found out anew.
const maxGone = 1 << 14

// lose notes that a pack is gone.
func (k *known) lose(p packID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.gone == nil || len(k.gone) >= maxGone {
		k.gone = map[packID]bool{}
	}
	k.gone[p] = true
}

// moved gives chunks of packs that are gone the places where they are now, as far as that is known.
func (k *known) moved(chunks []chunk) []chunk {
	k.mu.Lock()
	none := len(k.gone) == 0
	k.mu.Unlock()
	if none {
		return chunks
	}
	out := chunks
	for i, c := range chunks {
		k.mu.Lock()
		gone := k.gone[c.pack]
		k.mu.Unlock()
		if !gone {
			continue
		}
		p, ok := k.find(c.sum)
		if !ok || p.stored > c.length {
			continue
		}
		if &out[0] == &chunks[0] {
			out = append([]chunk(nil), chunks...)
		}
		out[i].place = p
	}
	return out
}

// short is the front of a chunk's digest. A clash would need 2^64 tries, and is noticed by who reads.
type short [16]byte

type spot struct{ pack, off, stored uint32 }

func (k *known) reset() {
	k.packs, k.number, k.where, k.holes = nil, map[packID]uint32{}, map[short]spot{}, 0
}

func (k *known) find(d digest) (place, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s, ok := k.where[short(d[:16])]
	if !ok {
		return place{}, false
	}
	p := place{k.packs[s.pack], s.off, s.stored}
	if _, alive := k.number[p.pack]; !alive {
		return place{}, false
	}
	return p, true
}

// add notes a pack; the caller has mu.
func (k *known) add(p packID, chunks []chunk) {
	if _, ok := k.number[p]; ok {
		return
	}
	n := uint32(len(k.packs))
	k.packs = append(k.packs, p)
	k.number[p] = n
	for _, c := range chunks {
		s := short(c.sum[:16])
		if old, ok := k.where[s]; ok {
			if _, alive := k.number[k.packs[old.pack]]; alive {
				continue
			}
		}
		k.where[s] = spot{n, c.off, c.stored}
	}
}

// alive tells whether all packs that the chunks lie in may be relied on, as of when.
func (k *known) alive(chunks []chunk) (bool, time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var last packID
	for _, c := range chunks {
		if c.pack == last {
			continue
		}
		if _, ok := k.number[c.pack]; !ok {
			return false, k.at
		}
		last = c.pack
	}
	return true, k.at
}

// inventory is what lies in the folders of packs.
type inventory struct {
	index, packs, dead map[packID]Info
}

// inventory lists the three folders. A pack is written before its index, so that an index whose pack is not listed has none.
func (s *S3) inventory(ctx context.Context) (inv inventory, err error) {
	for _, f := range []struct {
		folder string
		to     *map[packID]Info
	}{{indexFolder, &inv.index}, {packFolder, &inv.packs}, {deadFolder, &inv.dead}} {
		*f.to = map[packID]Info{}
		if err := s.list(ctx, f.folder, "", func(i Info) bool {
			if p, ok := parsePackID(strings.TrimPrefix(i.Key, f.folder)); ok {
				(*f.to)[p] = i
			}
			return true
		}); err != nil {
			return inv, fmt.Errorf("list %s: %w", f.folder, err)
		}
	}
	return inv, nil
}

// refresh learns which packs there are now.
func (s *S3) refresh(ctx context.Context) error {
	return s.refreshAfter(ctx, s.now())
}

// refreshAfter does so unless what is known is younger than the time.
func (s *S3) refreshAfter(ctx context.Context, than time.Time) error {
	k := &s.known
	select {
	case k.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-k.busy }()
	k.mu.Lock()
	fresh := !k.at.Before(than) && !k.at.IsZero()
	k.mu.Unlock()
	if fresh {
		return nil // another did it while this one waited
	}
	at := s.now()
	inv, err := s.inventory(ctx)
	if err != nil {
		return err
	}
	k.mu.Lock()
	for p := range k.number {
		if !inv.relied(p) {
			delete(k.number, p)
			k.holes++
		}
	}
	if k.holes > 0 {
		// Another pack may hold what the lost ones held; which was not kept.
		k.reset()
	}
	var missing []packID
	for p := range inv.index {
		if _, ok := k.number[p]; !ok && inv.relied(p) {
			missing = append(missing, p)
		}
	}
	k.mu.Unlock()
	if err := s.eachIndex(ctx, missing, func(p packID, chunks []chunk) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.add(p, chunks)
	}); err != nil {
		return err
	}
	k.mu.Lock()
	k.at = at
	k.mu.Unlock()
	s.pruneIndexes(inv)
	return nil
}

func (inv *inventory) relied(p packID) bool {
	_, pack := inv.packs[p]
	_, index := inv.index[p]
	_, dead := inv.dead[p]
	return pack && index && !dead
}

// eachIndex reads indexes, some at once; one that is gone or damaged is left out.
func (s *S3) eachIndex(ctx context.Context, packs []packID, each func(packID, []chunk)) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for _, p := range packs {
		g.Go(func() error {
			_, chunks, err := s.index(ctx, p)
			if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrLost) {
				return nil
			}
			if err == nil {
				each(p, chunks)
			}
			return err
		})
	}
	return g.Wait()
}

// index reads a pack's index, from the folder of copies if it is there.
func (s *S3) index(ctx context.Context, p packID) (int64, []chunk, error) {
	local := ""
	if s.cfg.IndexDir != "" {
		local = filepath.Join(s.cfg.IndexDir, p.String())
		if b, err := os.ReadFile(local); err == nil {
			if size, chunks, err := decodeIndex(b, p); err == nil {
				return size, chunks, nil
			}
		}
	}
	for again := false; ; again = true {
		o, err := s.get(ctx, indexFolder+p.String(), 0, -1, maxManifest)
		if err != nil {
			return 0, nil, fmt.Errorf("index of pack %s: %w", p, err)
		}
		size, chunks, err := decodeIndex(o.body, p)
		if err == nil {
			s.keepIndex(p, o.body)
		}
		if err == nil || again {
			return size, chunks, err
		}
	}
}

// keepIndex copies an index; what fails only costs a request later.
func (s *S3) keepIndex(p packID, b []byte) {
	if s.cfg.IndexDir == "" {
		return
	}
	f, err := os.CreateTemp(s.cfg.IndexDir, ".new-*")
	if err != nil {
		return
	}
	_, err = f.Write(b)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(s.cfg.IndexDir, p.String()))
	}
	if err != nil {
		os.Remove(f.Name())
	}
}

// pruneIndexes removes copies of indexes that are no more.
func (s *S3) pruneIndexes(inv inventory) {
	if s.cfg.IndexDir == "" {
		return
	}
	entries, _ := os.ReadDir(s.cfg.IndexDir)
	for _, e := range entries {
		p, ok := parsePackID(e.Name())
		_, there := inv.index[p]
		if !ok { // a copy that a process left half done
			info, err := e.Info()
			ok = err == nil && time.Since(info.ModTime()) > time.Hour
		}
		if ok && !there {
			os.Remove(filepath.Join(s.cfg.IndexDir, e.Name()))
		}
	}
}
