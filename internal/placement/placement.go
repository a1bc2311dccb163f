// Package placement chooses hosts for new sandboxes. It is pure: fleet, request, time and randomness come in, an order of hosts and
// reasons go out; no I/O, no clock.
//
// The order of a request with a key or a name depends on nothing but that text and the identities of the hosts (rendezvous hashing), so
// that a create that is sent again meets the host that may have made it first. A request without either is spread by load. The host
// has the last word: what it refuses is tried on the next of the order.
package placement

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Sample is how many hosts are drawn by chance before the least loaded is taken. With one, a burst meets hosts unevenly; with all, every
// gateway sends its burst to the same host.
const Sample = 3

// Host is what is known of one host at a moment.
type Host struct {
	ID       sandbox.HostID
	Addr     string
	Version  string
	Protocol int
	Up       bool      // it answered lately
	Fault    string    // why it is not up
	At       time.Time // of its last answer
	Draining bool      // it takes no new sandboxes

	Running, Creating int64
	SlotsFree         int64 // sandboxes that it would still take
	MemoryTotal       int64 // octets
	MemoryAvailable   int64
	DiskFree, LogFree int64
	Load              float64 // of the machine, runnable tasks
	Arrivals, Moved   int64   // moves of sandboxes: to here and not settled, and from here
	Backends          []sandbox.Capabilities
	Doctor            map[string]string
}

// Fleet is a snapshot of all hosts, ordered by ID.
type Fleet struct {
	Hosts []Host
	// Nameless are the addresses of configured hosts that never answered, so that their identity is not known.
	Nameless []string
}

// Find returns a host by its identity.
func (f *Fleet) Find(id sandbox.HostID) (*Host, bool) {
	i, ok := slices.BinarySearchFunc(f.Hosts, id, func(h Host, id sandbox.HostID) int { return strings.Compare(string(h.ID), string(id)) })
	if !ok {
		return nil, false
	}
	return &f.Hosts[i], true
}

// Request is what placement must know of a create.
type Request struct {
	Order   string // the name, else the key given by the client; "" lets load decide
	Backend string
	Network sandbox.NetworkMode
	OnIdle  sandbox.EndAction
	Disk    int64 // octets
}

// Refused says why a host does not take a request, and the sentinel of internal/sandbox that it amounts to.
type Refused struct {
	Host   sandbox.HostID
	Reason string
	Err    error
}

// Fit reports whether a host could take a request; the reason otherwise.
func Fit(h *Host, r *Request) *Refused {
	no := func(err error, format string, args ...any) *Refused {
		return &Refused{Host: h.ID, Reason: fmt.Sprintf(format, args...), Err: err}
	}
	if !h.Up {
		return no(sandbox.ErrLost, "does not answer: %s", h.Fault)
	}
	caps := capability(h, r.Backend)
	switch {
	case caps == nil:
		return no(sandbox.ErrUnsupported, "%s", sandbox.NoBackend(r.Backend, h.Backends))
	case !slices.Contains(caps.Networks, string(r.Network)):
		return no(sandbox.ErrUnsupported, "backend %s has no network %q", r.Backend, r.Network)
	case r.OnIdle == sandbox.EndPause && len(caps.PauseLevels) == 0:
		return no(sandbox.ErrUnsupported, "backend %s can't pause", r.Backend)
	case h.Draining:
		return no(sandbox.ErrExhausted, "is draining")
	}
	return nil // whether it is full, it says itself: the snapshot is old
}

func capability(h *Host, backend string) *sandbox.Capabilities {
	for i := range h.Backends {
		if h.Backends[i].Backend == backend {
			return &h.Backends[i]
		}
	}
	return nil
}

// Decision is where a request is tried, in this order, and why not elsewhere.
type Decision struct {
	Hosts   []sandbox.HostID
	Refused []Refused // in the order of Order, or of IDs
}

// Pick decides. recent are this gateway's own placements that the snapshot can't know of yet.
func Pick(f *Fleet, r *Request, recent *Recent, now time.Time, random *rand.Rand) Decision {
	var d Decision
	var fit []*Host
	for _, h := range inOrder(f, r.Order) {
		if no := Fit(h, r); no != nil {
			d.Refused = append(d.Refused, *no)
		} else {
			fit = append(fit, h)
		}
	}
	if r.Order == "" {
		random.Shuffle(len(fit), func(i, j int) { fit[i], fit[j] = fit[j], fit[i] })
		// Those that were full come last: they may have room by now, but are not worth a try before the others.
		sort.SliceStable(fit, func(i, j int) bool { return fit[i].SlotsFree > 0 && fit[j].SlotsFree <= 0 })
		free := sort.Search(len(fit), func(i int) bool { return fit[i].SlotsFree <= 0 })
		sampled := fit[:min(Sample, free)]
		sort.SliceStable(sampled, func(i, j int) bool {
			return load(sampled[i], recent, now) < load(sampled[j], recent, now)
		})
	}
	for _, h := range fit {
		d.Hosts = append(d.Hosts, h.ID)
	}
	return d
}

// Order is the order in which hosts are asked for a key or a name: by rendezvous hashing, so that a host that joins or leaves moves no
// other.
func Order(f *Fleet, text string) []sandbox.HostID {
	out := make([]sandbox.HostID, 0, len(f.Hosts))
	for _, h := range inOrder(f, text) {
		out = append(out, h.ID)
	}
	return out
}

func inOrder(f *Fleet, text string) []*Host {
	out := make([]*Host, len(f.Hosts))
	for i := range f.Hosts {
		out[i] = &f.Hosts[i]
	}
	if text == "" || len(out) < 2 {
		return out
	}
	weight := make(map[sandbox.HostID]uint64, len(out))
	for _, h := range out {
		weight[h.ID] = rank(text, h.ID)
	}
	sort.Slice(out, func(i, j int) bool {
		if a, b := weight[out[i].ID], weight[out[j].ID]; a != b {
			return a > b
		}
		return out[i].ID < out[j].ID
	})
	return out
}

// rank is part of the protocol between gateways: all must order alike.
func rank(text string, host sandbox.HostID) uint64 {
	h := fnv.New64a()
	var n [4]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(text)))
	h.Write(n[:])
	h.Write([]byte(text))
	h.Write([]byte(host))
	// FNV alone leaves the high bits of short inputs alike; mix them (the finaliser of splitmix64).
	x := h.Sum64()
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// guess is the memory that a sandbox takes soon after its birth, until the host's own figure includes it.
const guess = 64 << 20

// load is between 0 (empty) and 1 (full), over 1 when own placements exceed what the host has.
func load(h *Host, recent *Recent, now time.Time) float64 {
	own := float64(recent.Since(h.ID, h.At, now))
	slots := 1.0
	if all := float64(h.Running + h.Creating + h.SlotsFree); all > 0 {
		slots = (float64(h.Running+h.Creating) + own) / all
	}
	memory := 0.0
	if h.MemoryTotal > 0 {
		memory = (float64(h.MemoryTotal-h.MemoryAvailable) + own*guess) / float64(h.MemoryTotal)
	}
	return max(slots, memory)
}

// Recent remembers placements for a short time. It is not safe for concurrent use.
type Recent struct {
	at map[sandbox.HostID][]time.Time
}

// Remembered bounds Recent in time and, for a host, in number.
const (
	Remembered     = 10 * time.Second
	mostRemembered = 10000
)

// Add notes a placement.
func (r *Recent) Add(id sandbox.HostID, now time.Time) {
	if r.at == nil {
		r.at = map[sandbox.HostID][]time.Time{}
	}
	list := r.at[id]
	for len(list) > 0 && (now.Sub(list[0]) > Remembered || len(list) >= mostRemembered) {
		list = list[1:]
	}
	r.at[id] = append(list, now)
}

// Since counts the placements on a host after its last answer.
func (r *Recent) Since(id sandbox.HostID, answered, now time.Time) int {
	if r == nil {
		return 0
	}
	n := 0
	for _, t := range r.at[id] {
		if t.After(answered) && now.Sub(t) <= Remembered {
			n++
		}
	}
	return n
}
