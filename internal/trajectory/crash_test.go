package trajectory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
	"github.com/dsec-dev/dsec/internal/trajectory/crashfs"
)

// modelTraj is what a trajectory must and may hold.
type modelTraj struct {
	recs    []trajectory.Record // tried, in order
	inputs  map[int][]byte
	blobs   map[int]sandbox.Durability // a power loss may take a blob of process, the loss of the host those of host too
	written int                        // acknowledged with durability process: survive a kill
	synced  int                        // on the disk: survive a power loss
	shipped int                        // in the store: survive the loss of the host
	removed bool
	maybe   bool // a removal was tried
	moved   bool // its host was lost
	past    bool // one of its name was removed
	ends    map[string]int64
}

type crashRun struct {
	*rapid.T
	fs    *crashfs.FS
	log   *trajectory.Log
	model map[string]*modelTraj
	names []string
	store *memStore // nil: a log without one
	hosts int
}

func (c *crashRun) config() trajectory.Config {
	cfg := trajectory.Default("")
	cfg.FS, cfg.SegmentBytes, cfg.Reserve = c.fs, 128<<10, 20<<10
	if c.store != nil {
		c.store.fs = c.fs
		cfg.Store, cfg.Host, cfg.Local = c.store, fmt.Sprint("h", c.hosts), 300<<10
	}
	return cfg
}

// restart ends the log in some way and opens it again, maybe crashing on the way.
func (c *crashRun) restart() {
	power, lost := false, false
	for {
		if c.store != nil && !lost && rapid.IntRange(0, 3).Draw(c.T, "lost") == 0 {
			lost = true
			c.moveHost()
		} else if rapid.Bool().Draw(c.T, "power") {
			power = true
			c.fs = c.fs.PowerLoss()
		} else {
			c.fs = c.fs.Kill()
		}
		if rapid.IntRange(0, 3).Draw(c.T, "again") == 0 {
			c.fs.CrashIn(rapid.IntRange(1, 12).Draw(c.T, "in"))
		}
		l, err := trajectory.Open(c.config(), quiet)
		if errors.Is(err, crashfs.ErrCrashed) {
			continue
		}
		if err != nil {
			c.Fatalf("open: %v", err)
		}
		c.fs.CrashIn(0)
		c.log = l
		l.Hurry()
		break
	}
	c.check(power, lost)
}

// check compares the log with the model and takes what it has for the model's.
func (c *crashRun) check(power, lost bool) {
	ctx := context.Background()
	least := func(m *modelTraj) int {
		switch {
		case lost:
			return m.shipped
		case power:
			return m.synced
		}
		return m.written
	}
	for _, key := range c.names {
		m := c.model[key]
		if m.removed && len(m.recs) == 0 && !lost {
			continue
		}
		st, err := c.log.Stat(testID(key))
		if errors.Is(err, sandbox.ErrNotFound) {
			if must := least(m); must > 0 && !m.maybe {
				c.Fatalf("%s is gone; %d records were acknowledged", key, must)
			}
			*m = modelTraj{removed: true, past: m.past || m.maybe}
			continue
		}
		if err != nil {
			c.Fatal(err)
		}
		if lost && (m.removed || m.past && m.shipped == 0) { // the store need not know of the removal yet
			if err := c.log.Remove(ctx, testID(key)); err != nil {
				c.Fatal(err)
			}
			*m = modelTraj{removed: true, past: true}
			continue
		}
		if m.removed {
			c.Fatalf("%s came back", key)
		}
		var got []trajectory.Record
		for r, err := range c.log.Follow(ctx, testID(key), trajectory.Query{}) {
			if err != nil {
				c.Fatalf("%s after %d: %v", key, len(got), err)
			}
			got = append(got, r)
			if r.Seq == st.LastSeq {
				break
			}
		}
		if len(got) < least(m) || len(got) > len(m.recs) {
			c.Fatalf("%s has %d records; %d were acknowledged and %d tried", key, len(got), least(m), len(m.recs))
		}
		ends, kept := map[string]int64{}, map[string][]trajectory.Record{}
		for i := range got {
			if got[i].Seq != uint64(i)+1 {
				c.Fatalf("%s: record %d has seq %d", key, i+1, got[i].Seq)
			}
			want := m.recs[i]
			want.Seq, want.Wall, want.Mono = got[i].Seq, got[i].Wall, got[i].Mono
			wi, gi := want.Input, got[i].Input
			want.Input, got[i].Input = nil, nil
			if d := cmp.Diff(want, got[i]); d != "" {
				c.Fatalf("%s: record %d: %s", key, i+1, d)
			}
			if (wi == nil) != (gi == nil) {
				c.Fatalf("%s: record %d: input", key, i+1)
			}
			if wi != nil {
				r, err := c.log.OpenInput(gi)
				var data []byte
				if err == nil {
					data, err = io.ReadAll(r)
				}
				if err == nil && !bytes.Equal(data, m.inputs[i]) || err != nil && !(m.blobs[i] == sandbox.DurabilityProcess || m.blobs[i] == sandbox.DurabilityHost && m.moved) {
					c.Fatalf("%s: record %d: input of %d octets read %d: %v", key, i+1, wi.Size, len(data), err)
				}
			}
			if want.Kind == trajectory.KindOutput {
				ends[want.Step] = want.Offset + int64(len(want.Payload))
				kept[want.Step] = append(kept[want.Step], want)
			}
		}
		for step, recs := range kept {
			c.checkOutput(key, step, recs)
		}
		m.recs, m.ends, m.maybe = m.recs[:len(got)], ends, false
		m.written, m.synced = len(got), len(got)
		if m.shipped = min(m.shipped, len(got)); lost {
			m.shipped = 0 // a host that took over has to ship it anew
			for i := range m.blobs {
				if m.blobs[i] == sandbox.DurabilityStore {
					m.blobs[i] = sandbox.DurabilityHost
				}
			}
		}
	}
}

func (c *crashRun) checkOutput(key, step string, recs []trajectory.Record) {
	ctx, at, p := context.Background(), int64(0), make([]byte, 300)
	for _, r := range recs {
		if r.Offset > at {
			_, err := c.log.ReadOutput(ctx, testID(key), step, sandbox.Stdout, at, p)
			var gap *trajectory.GapError
			if !errors.As(err, &gap) || gap.From != at || gap.To != r.Offset {
				c.Fatalf("%s %s: read at %d: %v, want a gap to %d", key, step, at, err, r.Offset)
			}
			at = r.Offset
		}
		for len(r.Payload) > 0 {
			n, err := c.log.ReadOutput(ctx, testID(key), step, sandbox.Stdout, at, p[:min(len(p), len(r.Payload))])
			if err != nil || !bytes.Equal(p[:n], r.Payload[:n]) {
				c.Fatalf("%s %s: read at %d: %d octets, %v", key, step, at, n, err)
			}
			at += int64(n)
			r.Payload = r.Payload[n:]
		}
	}
	if st, err := c.log.StreamState(testID(key), step, sandbox.Stdout); err != nil || st.End != at {
		c.Fatalf("%s %s: ends at %d, want %d: %v", key, step, st.End, at, err)
	}
}

// append tries records on a trajectory and reports whether the file system crashed.
func (c *crashRun) append(key string) bool {
	ctx := context.Background()
	m := c.model[key]
	if m == nil {
		m = &modelTraj{}
		c.model[key] = m
		c.names = append(c.names, key)
	}
	if m.removed {
		*m = modelTraj{past: true}
	}
	if m.ends == nil {
		m.ends = map[string]int64{}
	}
	if m.inputs == nil {
		m.inputs, m.blobs = map[int][]byte{}, map[int]sandbox.Durability{}
	}
	levels := []sandbox.Durability{sandbox.DurabilityProcess, sandbox.DurabilityProcess, sandbox.DurabilityHost}
	if c.store != nil {
		levels = append(levels, sandbox.DurabilityStore)
	}
	d := rapid.SampledFrom(levels).Draw(c.T, "durability")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if c.store != nil {
		c.store.crashed = cancel // else a store that does not answer is tried on
	}
	var recs []trajectory.Record
	if len(m.recs) == 0 {
		recs = append(recs, trajectory.Record{Kind: trajectory.KindCreate, Payload: []byte("{}")})
	}
	fill := byte(len(m.recs) + 1)
	for range rapid.IntRange(1, 3).Draw(c.T, "records") {
		step := fmt.Sprint("s", rapid.IntRange(0, 3).Draw(c.T, "step"))
		n := rapid.IntRange(1, 6000).Draw(c.T, "size")
		switch rapid.IntRange(0, 5).Draw(c.T, "kind") {
		case 0:
			recs = append(recs, trajectory.Record{Kind: trajectory.KindStepEnd, Step: step, Epoch: 0, Payload: bytes.Repeat([]byte{fill}, n)})
		case 1:
			w := c.log.NewInputWriter()
			data := bytes.Repeat([]byte{fill, byte(n)}, n)
			if n%2 == 0 {
				data = bytes.Repeat(data, trajectory.MaxInline/len(data)+1)
			}
			_, err := w.Write(data)
			var in *trajectory.Input
			if err == nil {
				in, err = w.Finish(d)
			}
			if err != nil {
				if errors.Is(err, crashfs.ErrCrashed) {
					return true
				}
				c.Fatal(err)
			}
			m.inputs[len(m.recs)+len(recs)] = data
			m.blobs[len(m.recs)+len(recs)] = d
			recs = append(recs, trajectory.Record{Kind: trajectory.KindStepStart, Step: step, Input: in, Payload: []byte("{}")})
		default:
			off := m.ends[step] + int64(max(0, rapid.IntRange(-20, 10).Draw(c.T, "gap")))
			recs = append(recs, output(step, off, string(bytes.Repeat([]byte{fill}, n))))
			m.ends[step] = off + int64(n)
		}
	}
	m.recs = append(m.recs, recs...)
	_, err := c.log.Append(ctx, testID(key), recs, d)
	if errors.Is(err, crashfs.ErrCrashed) {
		return true
	}
	if err != nil {
		c.Fatalf("append: %v", err)
	}
	m.written = len(m.recs)
	if d != sandbox.DurabilityProcess {
		c.syncedAll()
	}
	if d == sandbox.DurabilityStore {
		for _, m := range c.model {
			m.shipped = m.written
		}
	}
	return false
}

// syncedAll notes that the log up to here is on the disk: a host acknowledgement covers all before it.
func (c *crashRun) syncedAll() {
	for _, m := range c.model {
		m.synced = m.written
	}
}

// TestCrash holds the promises of Append over kills and power losses at every write and sync.
func TestCrash(t *testing.T) {
	testCrash(t, false)
}

// TestCrashStore is TestCrash with a store, from which the log comes back when the host is lost.
func TestCrashStore(t *testing.T) {
	testCrash(t, true)
}

func testCrash(t *testing.T, stored bool) {
	rapid.Check(t, func(rt *rapid.T) {
		crashOnce(rt, stored)
	})
}

func crashOnce(rt *rapid.T, stored bool) {
	c := &crashRun{T: rt, fs: crashfs.New(rapid.Uint64().Draw(rt, "seed")), model: map[string]*modelTraj{}}
	if stored {
		c.store = &memStore{all: map[string][]byte{}}
	}
	c.restart()
	for range rapid.IntRange(1, 60).Draw(rt, "steps") {
		if rapid.IntRange(0, 9).Draw(rt, "arm") == 0 {
			c.fs.CrashIn(rapid.IntRange(1, 25).Draw(rt, "in"))
		}
		crashed := false
		key := fmt.Sprint("k", rapid.IntRange(0, 4).Draw(rt, "key"))
		switch rapid.IntRange(0, 11).Draw(rt, "act") {
		case 0:
			crashed = true
		case 1:
			if m := c.model[key]; m != nil && !m.removed {
				m.maybe = true
				switch err := c.log.Remove(context.Background(), testID(key)); {
				case errors.Is(err, crashfs.ErrCrashed):
					crashed = true
				case err != nil:
					rt.Fatal(err)
				default:
					m.removed, m.recs = true, nil
					c.syncedAll()
				}
			}
		case 2, 3:
			err := c.log.Maintain(context.Background())
			crashed = errors.Is(err, crashfs.ErrCrashed)
			if err != nil && !crashed {
				rt.Fatal(err)
			}
		default:
			crashed = c.append(key)
		}
		if crashed {
			c.restart()
		}
	}
	c.restart()
}

// A power loss may leave a segment of any length; wherever its file ends, the log opens, with what was whole before it.
func TestOpenWhereverTheFileEnds(t *testing.T) {
	fs := crashfs.New(1)
	c := &crashRun{fs: fs}
	log := func() *trajectory.Log {
		l, err := trajectory.Open(c.config(), quiet)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := log()
	add(t, l, "k", create())
	add(t, l, "k", output("a", 0, "some octets"))
	for end := int64(0); end < 700; end++ {
		c.fs = fs.Kill()
		f, err := c.fs.Open("00000001.log")
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(end); err != nil {
			t.Fatal(err)
		}
		if st, err := log().Stat(testID("k")); err == nil && st.LastSeq > 2 || err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.Fatalf("end %d: %v %v", end, st, err)
		}
	}
}
