package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// MinGrace is the shortest grace that Collect takes: twice the time in which a publisher may rely on what it has seen.
const MinGrace = 2 * publishLimit

// skew is how much two of the server's times may be apart that mean the same: its clock tells seconds.
const skew = 2 * time.Second

// Report is what Collect found and did. Octets are stored ones.
type Report struct {
	Objects   int   `json:"objects"`   // with a manifest
	Packs     int   `json:"packs"`     // when it began
	Octets    int64 `json:"octets"`    // of them
	Live      int64 `json:"live"`      // octets of chunks that are named, in packs that may be relied on
	Condemned int   `json:"condemned"` // packs that nobody relies on from now on
	Rewritten int   `json:"rewritten"` // of these, packs from which chunks were taken along
	Merged    int   `json:"merged"`    // of these, small packs whose chunks are together in larger ones now
	Copied    int64 `json:"copied"`
	Removed   int   `json:"removed"` // packs condemned earlier, which are gone now
	Freed     int64 `json:"freed"`
	// Damaged lists packs with chunks that are named and broken, or whose index is; they stay as they are.
	Damaged []string `json:"damaged"`
}

// collector is one run.
type collector struct {
	s      *S3
	dry    bool
	grace  time.Duration
	report Report
	now    time.Time // the server's, before anything was listed
	inv    inventory

	live  map[short]bool
	hints map[hint]bool // chunks with packs that manifests name
	holds map[packID][]chunk
	// owner is the pack, of those that stay, from which a live chunk is not taken away.
	owner map[short]packID
	ended map[packID]bool // condemned in this run
}

// Small packs are merged when there are many: each publication adds one, and every process reads the list and all indexes. Few of them are left
// alone, since who reads what was moved has to look for it.
const (
	mergeBelow = packSize / 8 // octets
	mergeFrom  = 16
)

type hint struct {
	short
	packID
}

// Collect removes chunks that no manifest names. A pack that has few or none left is condemned: publishers no longer rely on it. A later
// run removes it, when grace has passed since, so that whoever had relied on it has published by then; what such a one still names is
// copied first. Grace also is the age below which a pack is not touched, and how long a reader of a deleted object can go on. Publishers, readers
// and other collections may work meanwhile, and a run may end anywhere; one that takes half the grace ends itself, since what it has listed is
// too old then. A manifest that can't be read ends it before anything is removed. With dryRun nothing is written.
func (s *S3) Collect(ctx context.Context, grace time.Duration, dryRun bool) (Report, error) {
	if grace < MinGrace {
		return Report{}, fmt.Errorf("collect: grace %v, at least %v: %w", grace, MinGrace, sandbox.ErrInvalid)
	}
	c := &collector{s: s, dry: dryRun, grace: grace, live: map[short]bool{}, hints: map[hint]bool{}, holds: map[packID][]chunk{}, owner: map[short]packID{}, ended: map[packID]bool{}}
	ctx, cancel := context.WithTimeout(ctx, grace/2)
	defer cancel()
	err := c.run(ctx)
	if err != nil {
		err = fmt.Errorf("collect: %w", err)
	}
	slices.Sort(c.report.Damaged)
	return c.report, err
}

func (c *collector) run(ctx context.Context) error {
	var err error
	if c.inv, err = c.s.inventory(ctx); err != nil {
		return err
	}
	// The clock was told with the listing, which began earlier: so much less old is everything taken for.
	c.now = time.Unix(c.s.date.Load(), 0).Add(-skew)
	if c.s.date.Load() == 0 {
		return errors.New("the server tells no time (Date)")
	}
	for _, i := range c.inv.packs {
		c.report.Packs++
		c.report.Octets += i.Size
	}
	// Only now: a manifest that names a pack whose condemnation is grace old was written before this.
	if err := c.mark(ctx); err != nil {
		return err
	}
	if err := c.load(ctx); err != nil {
		return err
	}
	old := func(i Info) bool { return i.Modified.Before(c.now.Add(-c.grace)) }
	c.own()
	for _, p := range order(c.inv.dead) {
		if old(c.inv.dead[p]) {
			if err := c.remove(ctx, p); err != nil {
				return err
			}
		}
	}
	for _, p := range order(c.inv.packs) {
		if _, dead := c.inv.dead[p]; !dead && old(c.inv.packs[p]) {
			if err := c.weigh(ctx, p); err != nil {
				return err
			}
		}
	}
	if err := c.merge(ctx, old); err != nil {
		return err
	}
	for _, p := range order(c.inv.index) {
		// An index without its pack: the pack was lost, as a collection removes the index first.
		if _, there := c.inv.packs[p]; !there && old(c.inv.index[p]) && !c.dry {
			if err := c.s.remove(ctx, indexFolder+p.String()); err != nil {
				return err
			}
		}
	}
	return nil
}

func order(m map[packID]Info) []packID {
	out := make([]packID, 0, len(m))
	for p := range m {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b packID) int { return bytes.Compare(a[:], b[:]) })
	return out
}

// mark reads all manifests.
func (c *collector) mark(ctx context.Context) error {
	var mu sync.Mutex
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(16)
	err := c.s.names(ctx, "", func(i Info) bool {
		if i.Size < manifestHead+32 {
			return run.Err() == nil
		}
		g.Go(func() error {
			m, _, err := c.s.manifest(run, i.Key)
			if errors.Is(err, sandbox.ErrNotFound) || err == nil && m == nil {
				return nil
			}
			if err != nil {
				return fmt.Errorf("object %s: %w", i.Key, err)
			}
			mu.Lock()
			defer mu.Unlock()
			c.report.Objects++
			for _, ch := range m.chunks {
				k := short(ch.sum[:16])
				c.live[k] = true
				c.hints[hint{k, ch.pack}] = true
			}
			return nil
		})
		return run.Err() == nil
	})
	if werr := g.Wait(); werr != nil {
		return werr
	}
	return err
}

// load reads the indexes of all packs.
func (c *collector) load(ctx context.Context) error {
	var all []packID
	for p := range c.inv.index {
		if _, ok := c.inv.packs[p]; ok {
			all = append(all, p)
		}
	}
	var mu sync.Mutex
	if err := c.s.eachIndex(ctx, all, func(p packID, chunks []chunk) {
		mu.Lock()
		defer mu.Unlock()
		c.holds[p] = chunks
	}); err != nil {
		return err
	}
	for _, p := range all {
		if c.holds[p] == nil {
			c.report.Damaged = append(c.report.Damaged, p.String())
		}
	}
	return nil
}

// own gives every live chunk an owner among the packs that are not condemned: one that a manifest names, else the first.
func (c *collector) own() {
	for _, p := range order(c.inv.index) {
		if _, dead := c.inv.dead[p]; dead {
			continue
		}
		for _, ch := range c.holds[p] {
			k := short(ch.sum[:16])
			if !c.live[k] {
				continue
			}
			if old, ok := c.owner[k]; !ok {
				c.owner[k] = p
				c.report.Live += int64(ch.stored)
			} else if c.hints[hint{k, p}] && !c.hints[hint{k, old}] {
				c.owner[k] = p
			}
		}
	}
}

// needed are the chunks that must not go with the pack: it is their owner or is named for them, or nothing else has them.
func (c *collector) needed(p packID) (chunks []chunk, octets int64) {
	_, dead := c.inv.dead[p]
	for _, ch := range c.holds[p] {
		k := short(ch.sum[:16])
		owner, owned := c.owner[k]
		if c.live[k] && (!owned || !dead && (owner == p || c.hints[hint{k, p}])) {
			chunks = append(chunks, ch)
			octets += int64(ch.stored)
		}
	}
	return chunks, octets
}

// weigh condemns a pack of which less than half is needed, after that has been copied.
func (c *collector) weigh(ctx context.Context, p packID) error {
	if _, ok := c.inv.index[p]; ok && c.holds[p] == nil {
		return nil // damaged
	}
	chunks, octets := c.needed(p)
	if octets*2 >= c.inv.packs[p].Size {
		return nil
	}
	if ok, err := c.rescue(ctx, p, chunks); !ok || err != nil {
		return err
	}
	return c.condemn(ctx, p)
}

func (c *collector) condemn(ctx context.Context, p packID) error {
	c.report.Condemned++
	c.ended[p] = true
	if c.dry {
		return nil
	}
	if err := c.timely(); err != nil {
		return err
	}
	return c.s.put(ctx, deadFolder+p.String(), nil)
}

// merge copies what is needed of small packs into as few as will do, and condemns them.
func (c *collector) merge(ctx context.Context, old func(Info) bool) error {
	var small []packID
	for _, p := range order(c.inv.packs) {
		_, dead := c.inv.dead[p]
		if i := c.inv.packs[p]; dead || c.ended[p] || c.holds[p] == nil || i.Size >= mergeBelow || !old(i) {
			continue
		}
		small = append(small, p)
	}
	if len(small) < mergeFrom {
		return nil
	}
	pk := newPacker(ctx, c.s)
	taken := map[packID][]chunk{}
	var failed error
	for _, p := range small {
		chunks, _ := c.needed(p)
		if failed = c.copy(ctx, pk, chunks); errors.Is(failed, sandbox.ErrLost) {
			// What was copied of it already is there twice, until a later run finds that nobody names it.
			c.report.Damaged, failed = append(c.report.Damaged, p.String()), nil
			continue
		}
		if failed != nil {
			break
		}
		taken[p] = chunks
	}
	// Only when all copies have arrived is anything condemned.
	if err := pk.close(); err != nil {
		failed = err
	}
	if failed != nil {
		return fmt.Errorf("merge small packs: %w", failed)
	}
	for _, p := range small {
		chunks, ok := taken[p]
		if !ok {
			continue
		}
		c.report.Merged++
		c.moved(pk, chunks)
		if err := c.condemn(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// moved notes where chunks are that were copied: another condemned pack need not copy them again.
func (c *collector) moved(pk *packer, chunks []chunk) {
	for _, ch := range chunks {
		c.report.Copied += int64(ch.stored)
		k := short(ch.sum[:16])
		if at, ok := pk.mine[k]; ok {
			c.owner[k] = at.pack
		}
	}
}

// remove ends a pack that was condemned long ago. The index goes first: without it, nobody finds chunks in the pack.
func (c *collector) remove(ctx context.Context, p packID) error {
	if _, ok := c.inv.index[p]; ok && c.holds[p] == nil && c.inv.packs[p].Size > 0 {
		return nil // damaged; a manifest may name what is in it
	}
	chunks, _ := c.needed(p)
	if ok, err := c.rescue(ctx, p, chunks); !ok || err != nil {
		return err
	}
	if _, ok := c.inv.packs[p]; ok {
		c.report.Removed++
		c.report.Freed += c.inv.packs[p].Size
	}
	if c.dry {
		return nil
	}
	if err := c.timely(); err != nil {
		return err
	}
	for _, folder := range []string{indexFolder, packFolder, deadFolder} {
		if err := c.s.remove(ctx, folder+p.String()); err != nil {
			return fmt.Errorf("remove %s%s: %w", folder, p, err)
		}
	}
	return nil
}

// timely fails when what was listed is too old to act on, by the server's clock.
func (c *collector) timely() error {
	if took := time.Unix(c.s.date.Load(), 0).Sub(c.now); took > c.grace/2 {
		return fmt.Errorf("it took %v, more than half the grace: %w", took, sandbox.ErrState)
	}
	return nil
}

// rescue copies chunks to new packs, each checked; false when one is broken.
func (c *collector) rescue(ctx context.Context, p packID, chunks []chunk) (bool, error) {
	if len(chunks) == 0 {
		return true, nil
	}
	pk := newPacker(ctx, c.s)
	err := c.copy(ctx, pk, chunks)
	if cerr := pk.close(); cerr != nil && !errors.Is(err, sandbox.ErrLost) {
		err = cerr
	}
	if errors.Is(err, sandbox.ErrLost) {
		c.report.Damaged = append(c.report.Damaged, p.String())
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("copy from pack %s: %w", p, err)
	}
	c.report.Rewritten++
	c.moved(pk, chunks)
	return true, nil
}

func (c *collector) copy(ctx context.Context, pk *packer, chunks []chunk) error {
	slices.SortFunc(chunks, func(a, b chunk) int { return int(int64(a.off) - int64(b.off)) })
	for _, ch := range chunks {
		if c.dry {
			continue
		}
		o, err := c.s.get(ctx, packFolder+ch.pack.String(), int64(ch.off), int64(ch.stored), 0)
		if err != nil && (errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, errRange)) || err == nil && len(o.body) != int(ch.stored) {
			return broken("pack "+ch.pack.String(), "it is gone or cut short")
		}
		if err != nil {
			return err
		}
		if _, err := c.s.decode(ch, o.body); err != nil {
			return err
		}
		if err := pk.add(&ch, o.body); err != nil {
			return err
		}
	}
	return nil
}
