package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/replay"
)

// traceWait bounds how long a replay waits for the trace of a step that has ended.
const traceWait = 10 * time.Second

// traces are those of the fresh sandbox, as its log tells them.
type traces struct {
	mu   sync.Mutex
	news chan struct{} // closed and made anew when one came
	of   map[string]*dsecv1.StepTrace
}

func (t *traces) put(m *dsecv1.StepTrace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.of[m.GetStep()] = m
	close(t.news)
	t.news = make(chan struct{})
}

// wait returns the trace of a step, nil when it does not come in time.
func (t *traces) wait(ctx context.Context, step string) *dsecv1.StepTrace {
	ctx, cancel := context.WithTimeout(ctx, traceWait)
	defer cancel()
	for {
		t.mu.Lock()
		m, news := t.of[step], t.news
		t.mu.Unlock()
		if m != nil {
			return m
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil
		}
	}
}

// follow reads what the fresh sandbox's steps do, until stop.
func (p *player) follow(ctx context.Context) (stop func()) {
	p.seen = traces{news: make(chan struct{}), of: map[string]*dsecv1.StepTrace{}}
	if !p.hasPaths() {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		// A stream that breaks off costs the comparison of paths, which is told.
		_ = p.cl.Log(ctx, &dsecv1.ReadLogRequest{Sandbox: p.now.ID, FromSeq: 1, Follow: true}, func(r *dsecv1.LogRecord) error {
			if r.Trace.GetRedo() == 0 && r.Trace != nil {
				p.seen.put(r.Trace)
			}
			return nil
		})
	}()
	return func() { cancel(); <-done }
}

// learn keeps what a recorded step changed.
func (p *player) learn(r *dsecv1.LogRecord) {
	if t := r.Trace; t != nil && t.Redo == 0 {
		t.Processes, t.Reads, t.Connections = nil, nil, nil
		p.traces[r.Step] = t
	}
}

func (p *player) hasPaths() bool { return len(p.traces) > 0 }

// addPaths adds to both sides what the step changed, as far as that is known.
func (p *player) addPaths(ctx context.Context, step string, was, now *replay.Done) {
	t := p.traces[step]
	if !p.hasPaths() {
		return
	}
	if was != nil {
		setPaths(was, t, "it was not traced")
	}
	if now != nil && t != nil {
		setPaths(now, p.seen.wait(ctx, step), "done again, it was not traced")
	}
}

func setPaths(d *replay.Done, t *dsecv1.StepTrace, untraced string) {
	switch {
	case t == nil:
		d.Blind = untraced
		return
	case t.GetDeferred() || t.GetSinceStep() > 0:
		d.Blind = "those of several steps were told at once"
	case t.GetShared():
		d.Blind = "other steps ran at the same time"
	case t.GetRaced():
		d.Blind = "the next step had begun before they were looked at"
	case t.GetFilesPartial() || t.GetMoreFiles() > 0:
		d.Blind = "there are too many"
	default:
		d.PathsKnown = true
	}
	d.Volatile = t.GetVolatilePaths()
	for _, f := range t.GetFiles() {
		if f.GetEarlier() {
			continue // by what ran in the background, at a time that can't be met again
		}
		a := f.GetAfter()
		x := replay.Path{Name: octetsOf(f.GetPath(), f.GetPathRaw()), Gone: a == nil}
		if a != nil {
			x.Type, x.Mode, x.Size, x.Link = a.GetType(), uint32(a.GetMode()), a.GetSize(), octetsOf(a.GetLink(), a.GetLinkRaw())
			if len(a.GetSha256()) > 0 {
				x.SHA256 = fmt.Sprintf("%x", a.GetSha256())
			}
		}
		d.Paths = append(d.Paths, x)
	}
}

// whole checks that no record is missing: numbers without gaps, each traced step's word on the one before it, and the count of all.
type whole struct {
	last    int64
	started map[string]int64
	summary int64
	found   []*stepReport
}

func (w *whole) add(r *dsecv1.LogRecord) {
	if w.started == nil {
		w.started, w.summary = map[string]int64{}, -1
	}
	tell := func(step, reason string) {
		if len(w.found) < 100 {
			w.found = append(w.found, &stepReport{Step: step, Seq: r.Seq, Kind: "missing", Report: replay.Report{Verdict: replay.Different, Reason: reason}})
		}
	}
	if r.Kind == "lost" {
		w.last = r.Seq
		return
	}
	if w.last > 0 && r.Seq != w.last+1 {
		tell("", fmt.Sprintf("records %d to %d are missing", w.last+1, r.Seq-1))
	}
	w.last = r.Seq
	switch r.Kind {
	case "command", "write", "append", "makedir", "move", "remove", "upload", "snapshot":
		w.started[r.Step] = r.Seq
	case "void":
		delete(w.started, r.Step)
	case "trace":
		if before := r.Trace.GetPrevious(); before != "" && w.started[before] == 0 {
			tell(before, fmt.Sprintf("its records are missing: the trace of step %s says that it came before", r.Step))
		}
	case "state":
		if r.Summary != nil {
			w.summary = r.Summary.Steps
		}
	}
}

func (w *whole) missing() []*stepReport {
	if n := w.summary - int64(len(w.started)); w.summary >= 0 && n > 0 && len(w.found) == 0 {
		w.found = append(w.found, &stepReport{Seq: w.last, Kind: "missing", Report: replay.Report{Verdict: replay.Different, Reason: fmt.Sprintf("%d steps are missing: the sandbox had %d", n, w.summary)}})
	}
	return w.found
}
