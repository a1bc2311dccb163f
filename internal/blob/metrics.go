package blob

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// latencyBounds are the upper bounds of the histogram's buckets, in seconds.
var latencyBounds = [...]float64{.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

type histogram struct {
	counts [len(latencyBounds) + 1]atomic.Int64
	micros atomic.Int64
}

func (h *histogram) observe(d time.Duration) {
	s := d.Seconds()
	i := 0
	for i < len(latencyBounds) && s > latencyBounds[i] {
		i++
	}
	h.counts[i].Add(1)
	h.micros.Add(d.Microseconds())
}

type metrics struct {
	asked, hit, fetched, evicted      atomic.Int64
	failed, retries, corrupt, rotten  atomic.Int64
	killed, cacheErrors, reads, opens atomic.Int64
	latency                           histogram
}

// Stats are the daemon's counts since its start and what it holds now.
type Stats struct {
	Asked      int64 `json:"asked"`       // octets that reads asked for
	FromCache  int64 `json:"from_cache"`  // of these, octets that needed no fetch
	Fetched    int64 `json:"fetched"`     // octets that came from the store and were right
	Evicted    int64 `json:"evicted"`     // octets that left the cache
	Reads      int64 `json:"reads"`       // requests of the kernel
	Failed     int64 `json:"failed"`      // units that could not be had within the deadline
	Retries    int64 `json:"retries"`     // reads of the store that failed and were done again
	Corrupt    int64 `json:"corrupt"`     // of these, such as gave wrong octets
	Rotten     int64 `json:"rotten"`      // units of the cache that were found wrong
	Killed     int64 `json:"killed"`      // reads given up since their process was killed
	CacheFails int64 `json:"cache_fails"` // reads and writes of the cache that failed
	Opens      int64 `json:"opens"`

	Cached  int64 `json:"cached"` // octets in the cache
	Held    int64 `json:"held"`   // octets in memory that are to be written to it
	Limit   int64 `json:"limit"`  // octets
	Blobs   int64 `json:"blobs"`
	Waiting int64 `json:"waiting"` // reads that wait for the store
	CPU     int64 `json:"cpu"`     // nanoseconds that the daemon has run

	// LatencyCounts are fetches by how long the store took: up to each of LatencyBounds (seconds), and longer.
	LatencyBounds []float64 `json:"latency_bounds"`
	LatencyCounts []int64   `json:"latency_counts"`
	LatencySum    float64   `json:"latency_sum"` // seconds
}

func (s *Server) stats() Stats {
	m := &s.metrics
	st := Stats{
		Asked: m.asked.Load(), FromCache: m.hit.Load(), Fetched: m.fetched.Load(), Evicted: m.evicted.Load(), Reads: m.reads.Load(),
		Failed: m.failed.Load(), Retries: m.retries.Load(), Corrupt: m.corrupt.Load(), Rotten: m.rotten.Load(), Killed: m.killed.Load(),
		CacheFails: m.cacheErrors.Load(), Opens: m.opens.Load(), Cached: s.size.Load(), Limit: s.limit(),
		LatencyBounds: latencyBounds[:], LatencySum: float64(m.latency.micros.Load()) / 1e6,
	}
	for i := range m.latency.counts {
		st.LatencyCounts = append(st.LatencyCounts, m.latency.counts[i].Load())
	}
	s.held.mu.Lock()
	st.Held = s.held.octets
	s.held.mu.Unlock()
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &used) == nil {
		st.CPU = used.Utime.Nano() + used.Stime.Nano()
	}
	s.mu.Lock()
	st.Blobs = int64(len(s.blobs))
	s.mu.Unlock()
	s.waitMu.Lock()
	st.Waiting = int64(len(s.waiting))
	s.waitMu.Unlock()
	return st
}

const (
	readBlock = 4096
	maxRanges = 1 << 16
)

// Range is a part of a blob, in octets.
type Range struct {
	Off int64 `json:"off"`
	Len int64 `json:"len"`
}

// readLog remembers which blocks were read, in the order of their first reads.
type readLog struct {
	mu     sync.Mutex
	seen   []uint64 // a bit for each block
	ranges []Range
}

func (l *readLog) note(size, off, n int64) {
	if n <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seen == nil {
		l.seen = make([]uint64, (size/readBlock+64)/64)
	}
	for i := off / readBlock; i <= (off+n-1)/readBlock; i++ {
		if l.seen[i/64]&(1<<(i%64)) != 0 {
			continue
		}
		at := i * readBlock
		length := min(readBlock, size-at)
		if k := len(l.ranges) - 1; k >= 0 && l.ranges[k].Off+l.ranges[k].Len == at {
			l.ranges[k].Len += length
		} else if len(l.ranges) < maxRanges {
			l.ranges = append(l.ranges, Range{at, length})
		} else {
			return
		}
		l.seen[i/64] |= 1 << (i % 64)
	}
}

func (l *readLog) take(reset bool) []Range {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := append([]Range(nil), l.ranges...)
	if reset {
		l.seen, l.ranges = nil, nil
	}
	return out
}

// recent holds units in memory that could not be kept in the cache, the last ones that came.
type recent struct {
	mu    sync.Mutex
	limit int
	order []recentUnit // the latest last
}

type recentUnit struct {
	b    *blob
	i    int
	data []byte
}

func (r *recent) get(b *blob, i int) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := len(r.order) - 1; k >= 0; k-- {
		if u := r.order[k]; u.b == b && u.i == i {
			r.order = append(append(r.order[:k:k], r.order[k+1:]...), u)
			return u.data
		}
	}
	return nil
}

func (r *recent) put(b *blob, i int, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.order) >= r.limit {
		r.order = append([]recentUnit(nil), r.order[1:]...)
	}
	r.order = append(r.order, recentUnit{b, i, data})
}
