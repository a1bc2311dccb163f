package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

var start = time.Unix(1e9, 0)

func container() []sandbox.Capabilities {
	return []sandbox.Capabilities{{Backend: "container", Networks: []string{"none", "open"}, PauseLevels: []sandbox.PauseLevel{sandbox.Frozen}}}
}

func fleets() *rapid.Generator[*Fleet] {
	return rapid.Custom(func(t *rapid.T) *Fleet {
		ids := rapid.SliceOfNDistinct(rapid.StringMatching(`h[a-z2-7]{8}`), 1, 12, rapid.ID).Draw(t, "ids")
		sort.Strings(ids)
		f := &Fleet{}
		for i, id := range ids {
			h := Host{ID: sandbox.HostID(id), Up: rapid.Bool().Draw(t, "up"), Draining: rapid.IntRange(0, 4).Draw(t, "draining") == 0, At: start,
				Running: rapid.Int64Range(0, 100).Draw(t, "running"), SlotsFree: rapid.Int64Range(0, 100).Draw(t, "free"), MemoryTotal: 1 << 34,
				MemoryAvailable: rapid.Int64Range(0, 1<<34).Draw(t, "memory")}
			if i%5 != 4 {
				h.Backends = container()
			}
			f.Hosts = append(f.Hosts, h)
		}
		return f
	})
}

func request(order string) *Request {
	return &Request{Order: order, Backend: "container", Network: sandbox.NetworkNone, OnIdle: sandbox.EndStop}
}

func TestPickAccountsForEveryHostOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := fleets().Draw(t, "fleet")
		r := request(rapid.SampledFrom([]string{"", "k", "job/1"}).Draw(t, "order"))
		d := Pick(f, r, nil, start, rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)))
		seen := map[sandbox.HostID]bool{}
		for _, id := range d.Hosts {
			h, ok := f.Find(id)
			if !ok || seen[id] || Fit(h, r) != nil {
				t.Fatalf("%s: unknown, twice, or unfit", id)
			}
			seen[id] = true
		}
		if r.Order == "" {
			full := false
			for _, id := range d.Hosts {
				h, _ := f.Find(id)
				if full && h.SlotsFree > 0 {
					t.Fatalf("%s has room and comes after a full host", id)
				}
				full = h.SlotsFree <= 0
			}
		}
		for _, no := range d.Refused {
			if seen[no.Host] || no.Reason == "" || no.Err == nil {
				t.Fatalf("%v", no)
			}
			seen[no.Host] = true
		}
		if len(seen) != len(f.Hosts) {
			t.Fatalf("%d of %d hosts", len(seen), len(f.Hosts))
		}
	})
}

func TestOrderOfAKeyIsFixed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := fleets().Draw(t, "fleet")
		key := rapid.StringMatching(`[a-z/0-9]{1,12}`).Draw(t, "key")
		order := Order(f, key)
		// Load, health, time and seed do not matter.
		moved := &Fleet{Hosts: slices.Clone(f.Hosts)}
		for i := range moved.Hosts {
			moved.Hosts[i].Up, moved.Hosts[i].Running = true, rapid.Int64Range(0, 50).Draw(t, "other load")
			moved.Hosts[i].SlotsFree, moved.Hosts[i].Draining, moved.Hosts[i].Backends = 1, false, container()
		}
		d := Pick(moved, request(key), nil, start.Add(time.Hour), rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)))
		if diff := cmp.Diff(order, d.Hosts); diff != "" {
			t.Fatal(diff)
		}
		// A host that leaves moves no other.
		gone := rapid.IntRange(0, len(f.Hosts)-1).Draw(t, "gone")
		id := f.Hosts[gone].ID
		less := &Fleet{Hosts: slices.Delete(slices.Clone(f.Hosts), gone, gone+1)}
		want := slices.DeleteFunc(slices.Clone(order), func(o sandbox.HostID) bool { return o == id })
		if diff := cmp.Diff(want, Order(less, key)); diff != "" {
			t.Fatal(diff)
		}
	})
}

// The order is part of what gateways of different versions agree on: this fails when the hash changes.
func TestOrderNeverChanges(t *testing.T) {
	f := &Fleet{Hosts: []Host{{ID: "haaaaaaaa"}, {ID: "hbbbbbbbb"}, {ID: "hcccccccc"}, {ID: "hdddddddd"}}}
	got := map[string][]sandbox.HostID{}
	for _, k := range []string{"k", "job/1", "name"} {
		got[k] = Order(f, k)
	}
	want := map[string][]sandbox.HostID{
		"job/1": {"hdddddddd", "hbbbbbbbb", "hcccccccc", "haaaaaaaa"},
		"k":     {"hdddddddd", "hcccccccc", "haaaaaaaa", "hbbbbbbbb"},
		"name":  {"hdddddddd", "haaaaaaaa", "hbbbbbbbb", "hcccccccc"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestKeysSpreadEvenly(t *testing.T) {
	f := &Fleet{}
	for i := range 8 {
		f.Hosts = append(f.Hosts, Host{ID: sandbox.HostID(fmt.Sprintf("haaaaaa%d", i))})
	}
	n := map[sandbox.HostID]int{}
	for i := range 8000 {
		n[Order(f, fmt.Sprintf("rollout-%d", i))[0]]++
	}
	for id, c := range n {
		if c < 850 || c > 1150 {
			t.Errorf("%s gets %d of 8000 keys", id, c)
		}
	}
}

func TestKeylessBurstIsSpread(t *testing.T) {
	f := &Fleet{}
	for i := range 4 {
		f.Hosts = append(f.Hosts, Host{ID: sandbox.HostID(fmt.Sprintf("haaaaaa%d", i)), Up: true, At: start, SlotsFree: 1000, Backends: container()})
	}
	random := rand.New(rand.NewPCG(1, 2))
	var recent Recent
	n := map[sandbox.HostID]int{}
	for i := range 1000 {
		now := start.Add(time.Duration(i+1) * time.Millisecond)
		id := Pick(f, request(""), &recent, now, random).Hosts[0]
		recent.Add(id, now)
		n[id]++
	}
	for id, c := range n {
		if c < 240 || c > 260 {
			t.Errorf("%s gets %d of 1000", id, c)
		}
	}
	if c := recent.Since("haaaaaa0", start.Add(time.Hour), start.Add(time.Hour)); c != 0 {
		t.Errorf("%d placements are still counted after the host told of them", c)
	}
}

func TestReasons(t *testing.T) {
	up := Host{ID: "haaaaaaaa", Up: true, SlotsFree: 1, Backends: container()}
	for _, tc := range []struct {
		name string
		host func(h *Host)
		req  func(r *Request)
		want error
	}{
		{"fits", nil, nil, nil},
		{"down", func(h *Host) { h.Up = false }, nil, sandbox.ErrLost},
		{"full by the last answer", func(h *Host) { h.SlotsFree = 0 }, nil, nil},
		{"draining", func(h *Host) { h.Draining = true }, nil, sandbox.ErrExhausted},
		{"backend", nil, func(r *Request) { r.Backend = "vm" }, sandbox.ErrUnsupported},
		{"network", nil, func(r *Request) { r.Network = "mesh" }, sandbox.ErrUnsupported},
		{"pause", func(h *Host) { h.Backends[0].PauseLevels = nil }, func(r *Request) { r.OnIdle = sandbox.EndPause }, sandbox.ErrUnsupported},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, r := up, request("")
			h.Backends = container()
			if tc.host != nil {
				tc.host(&h)
			}
			if tc.req != nil {
				tc.req(r)
			}
			no := Fit(&h, r)
			if (no == nil) != (tc.want == nil) || no != nil && !errors.Is(no.Err, tc.want) {
				t.Errorf("%v, want %v", no, tc.want)
			}
		})
	}
}
