package blob

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	evictSlack  = 16          // a sixteenth of the limit is freed at once
	reserveMax  = 1 << 30     // octets of the cache's file system that stay free, or a twentieth of it when that is less
	fullFor     = time.Minute // how long a full disk is left alone
	recentUnits = 32          // units that could not be stored and stay in memory
)

// clock is the time in seconds since the daemon's start.
func (s *Server) clock() uint32 { return uint32(time.Since(s.started) / time.Second) }

// limit is how much the cache may hold now, in octets.
func (s *Server) limit() int64 {
	if until := s.fullUntil.Load(); until != 0 && time.Now().UnixNano() < until {
		return min(s.cfg.Limit, s.fullAt.Load())
	}
	return s.cfg.Limit
}

// room reserves room for n octets, which count as cached from then on; false when there is none.
func (s *Server) room(n int64) bool {
	var st unix.Statfs_t
	if unix.Statfs(s.cfg.CacheDir, &st) == nil {
		keep := min(reserveMax, int64(st.Blocks)*st.Bsize/20)
		if int64(st.Bavail)*st.Bsize < keep+n {
			s.cacheFull(nil)
		}
	}
	limit := s.limit()
	if n > limit {
		return false
	}
	for range 4 { // others reserve beside
		if s.size.Add(n) <= limit {
			return true
		}
		s.size.Add(-n)
		s.evict(limit - n)
	}
	return false
}

// cacheFull notes that the cache's disk is full: it grows no more for a while.
func (s *Server) cacheFull(err error) {
	if until := s.fullUntil.Load(); until == 0 || time.Now().UnixNano() >= until {
		s.log.Warn("the cache's disk is full: the cache does not grow", "folder", s.cfg.CacheDir, "octets", s.size.Load(), "err", err)
		s.fullAt.Store(s.size.Load())
		s.fullUntil.Store(time.Now().Add(s.patience).UnixNano())
	}
}

// cacheFailed tells of a cache that can't be used; what can't be cached is fetched again.
func (s *Server) cacheFailed(err error) {
	s.metrics.cacheErrors.Add(1)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		s.cacheFull(err)
		return
	}
	now := time.Now().UnixNano()
	if last := s.told.Load(); now-last > int64(time.Minute) && s.told.CompareAndSwap(last, now) {
		s.log.Error("cache", "err", err)
	}
}

// evict frees until at most the target remains, and some more so that it need not come again soon: whole blobs that nobody has
// open and that were used longest ago, then units of the others by their last use.
func (s *Server) evict(target int64) {
	s.evicting.Lock()
	defer s.evicting.Unlock()
	if s.size.Load() <= target {
		return // another did it
	}
	target -= min(target, s.cfg.Limit/evictSlack)
	s.evictOrphans(target)
	all := s.all()
	slices.SortFunc(all, func(a, b *blob) int {
		switch x, y := a.used.Load(), b.used.Load(); {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	for _, b := range all {
		if s.size.Load() <= target {
			return
		}
		if b.opens.Load() <= 0 {
			b.empty()
		}
	}
	// All that is left is open. Units that were used longest ago go, whoever has them.
	type unit struct {
		b    *blob
		i    int
		last uint32
	}
	var units []unit
	for _, b := range all {
		b.mu.RLock()
		if !b.complete && b.file != nil {
			for i, st := range b.state {
				if st != absent {
					units = append(units, unit{b, i, b.last[i].Load()})
				}
			}
		}
		b.mu.RUnlock()
	}
	slices.SortStableFunc(units, func(a, b unit) int { return int(a.last) - int(b.last) })
	for _, u := range units {
		if s.size.Load() <= target {
			return
		}
		u.b.mu.Lock()
		if !u.b.complete && u.b.file != nil && u.b.state[u.i] != absent {
			u.b.drop(u.i)
			s.metrics.evicted.Add(int64(u.b.data.unitLen(u.i)))
		}
		u.b.mu.Unlock()
	}
	for _, b := range all { // complete, and only open here
		if s.size.Load() <= target {
			return
		}
		b.mu.RLock()
		complete := b.complete
		b.mu.RUnlock()
		if complete {
			b.empty()
		}
	}
}

// orphan is a cache file of a blob that nobody has asked for in this life of the daemon.
type orphan struct {
	size int64
	used time.Time
}

// scanCache finds what earlier daemons left in the cache folder.
func (s *Server) scanCache() error {
	entries, err := os.ReadDir(s.cfg.CacheDir)
	if err != nil {
		return err
	}
	s.orphans = map[string]orphan{}
	for _, e := range entries {
		h, ok := strings.CutSuffix(e.Name(), ".data")
		if !ok {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue
		}
		if _, err := hexOf(prefix + h); err != nil {
			continue
		}
		size := blocksOf(filepath.Join(s.cfg.CacheDir, e.Name()))
		s.orphans[h] = orphan{size, info.ModTime()}
		s.size.Add(size)
	}
	return nil
}

func blocksOf(path string) int64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// adopt counts a blob's files by its map instead of by its blocks.
func (s *Server) adopt(b *blob) {
	s.mu.Lock()
	o, ok := s.orphans[b.hex]
	delete(s.orphans, b.hex)
	s.mu.Unlock()
	if ok {
		s.size.Add(-o.size)
	}
	b.mu.Lock()
	b.openFiles()
	for i, st := range b.state {
		if st != absent {
			s.size.Add(int64(b.data.unitLen(i)))
		}
	}
	b.mu.Unlock()
}

func (s *Server) evictOrphans(target int64) {
	for s.size.Load() > target {
		s.mu.Lock()
		oldest := ""
		for h, o := range s.orphans {
			if oldest == "" || o.used.Before(s.orphans[oldest].used) {
				oldest = h
			}
		}
		o := s.orphans[oldest]
		delete(s.orphans, oldest)
		s.mu.Unlock()
		if oldest == "" {
			return
		}
		data := filepath.Join(s.cfg.CacheDir, oldest+".data")
		if f, err := os.OpenFile(data, os.O_RDWR, 0); err == nil {
			busy := usedElsewhere(f)
			f.Close()
			if busy {
				s.mu.Lock()
				o.used = time.Now()
				s.busy[oldest] = o // looked at again by the next daemon
				s.mu.Unlock()
				continue
			}
		}
		os.Remove(filepath.Join(s.cfg.CacheDir, oldest+".map"))
		os.Remove(data)
		s.size.Add(-o.size)
		s.metrics.evicted.Add(o.size)
	}
}

// background runs f on a goroutine that Run waits for.
func (s *Server) background(f func(context.Context)) {
	s.work.Add(1)
	go func() {
		defer s.work.Done()
		f(s.ctx)
	}()
}
