package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// passage is what this host remembers of a sandbox that went to another host or comes from one: a file of its own, so that each step of a move
// is one rename. It says who has the sandbox whatever the log says.
type passage struct {
	ID     sandbox.ID `json:"id"`
	Gone   *gone      `json:"gone,omitempty"`
	Coming *coming    `json:"coming,omitempty"`

	since time.Time // when all of it was here, or this host began
}

// gone says that the sandbox was given away: writing it is what gives it away.
type gone struct {
	To    sandbox.HostID `json:"to"`
	Nonce string         `json:"nonce"`
	Traj  trajectory.ID  `json:"trajectory"`
	Name  string         `json:"name,omitempty"`
	At    time.Time      `json:"at"`
	// Before are sandboxes of its trajectory that restores replaced.
	Before []sandbox.ID `json:"before,omitempty"`
}

// coming says that a sandbox arrives. While all of it is not here, what is goes away with this process.
type coming struct {
	From    sandbox.HostID `json:"from"`
	Nonce   string         `json:"nonce"`
	Traj    trajectory.ID  `json:"trajectory"`
	Backend string         `json:"backend"`
	Needs   []byte         `json:"needs"`
	Job     []byte         `json:"job,omitempty"` // its settings, a dsecv1.Job
	Running bool           `json:"running"`
	Here    bool           `json:"here"`
}

// goneFor is how long a host remembers whom it gave a sandbox to. Later it is asked for at all hosts.
const goneFor = 30 * 24 * time.Hour

func (p *passage) traj() trajectory.ID {
	if p.Coming != nil {
		return p.Coming.Traj
	}
	return p.Gone.Traj
}

// arrived says whether the log shows that the sandbox is this host's: a record of its move ends what was copied.
func (p *passage) arrived(move string) bool { return p.Coming != nil && p.Coming.Nonce == move }

// elsewhere is what is answered to who asks for the sandbox here.
func (p *passage) elsewhere(id sandbox.ID) error {
	if p.Gone != nil {
		return fmt.Errorf("sandbox %s went to host %s; nothing was done here, repeat the call: %w", p.ID, p.Gone.To, rpc.ErrMoved)
	}
	return fmt.Errorf("sandbox %s is on its way here from host %s, which alone knows whether it still has it; repeat the call: %w", p.ID, p.Coming.From, rpc.ErrUnavailable)
}

// found is the answer of FindKey.
func (p *passage) found() (*connect.Response[dsecv1.FindKeyResponse], error) {
	if p.Gone == nil {
		return nil, p.elsewhere(p.ID)
	}
	return connect.NewResponse(&dsecv1.FindKeyResponse{Sandbox: &dsecv1.Sandbox{Id: string(p.ID)}, MovedTo: string(p.Gone.To), Move: p.Gone.Nonce}), nil
}

// passageFor finds a passage as FindKey does; mu is held.
func (h *Host) passageFor(project string, m *dsecv1.FindKeyRequest) *passage {
	if p := h.crossed[trajectory.ID{Project: project, Job: jobName(m.GetJob()), Key: m.GetKey()}]; p != nil && m.GetKey() != "" {
		return p
	}
	if p := h.passedID(sandbox.ID(m.GetSandbox())); p != nil && p.traj().Project == project {
		return p
	}
	if m.GetName() == "" {
		return nil
	}
	for _, p := range h.passages {
		if p.Gone != nil && p.Gone.Name == m.GetName() && p.traj().Project == project {
			return p
		}
	}
	return nil
}

// passedID finds the passage of a sandbox, or of one that goes on in its trajectory; mu is held.
func (h *Host) passedID(id sandbox.ID) *passage {
	if p := h.passages[id]; p != nil || id == "" {
		return p
	}
	for _, p := range h.passages {
		if p.Gone != nil && slices.Contains(p.Gone.Before, id) {
			return p
		}
	}
	return nil
}

func (h *Host) passageOf(id trajectory.ID) *passage {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.crossed[id]
}

// countPassages is what a host's status tells; mu is held.
func (h *Host) countPassages() (arrivals, moved int64) {
	for _, p := range h.passages {
		if p.Gone != nil {
			moved++
		}
		if p.Coming != nil && p.Coming.Here {
			arrivals++
		}
	}
	return arrivals, moved
}

// arriving tells who asks for a job's sandboxes of those that may begin to live here, though nobody has them now.
func (h *Host) arriving(job scoped) (errs []*dsecv1.ItemError) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, p := range h.passages {
		if c := p.Coming; c != nil && c.Here && (scoped{c.Traj.Project, c.Traj.Job}) == job {
			err := p.elsewhere(id)
			errs = append(errs, &dsecv1.ItemError{Id: string(id), Code: rpc.CodeName(err), Message: err.Error()})
		}
	}
	return errs
}

func (h *Host) passageDir() string { return filepath.Join(h.cfg.Dir, "moves") }

func (h *Host) passageFile(id sandbox.ID) string {
	return filepath.Join(h.passageDir(), string(id)+".json")
}

// putPassage replaces what is remembered of a sandbox, on the disk first. One with neither half is forgotten. The caller has the sandbox's turn.
func (h *Host) putPassage(p *passage) (err error) {
	if p.Gone == nil && p.Coming == nil {
		err = os.Remove(h.passageFile(p.ID))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	} else {
		var text []byte
		if text, err = json.Marshal(p); err == nil {
			err = writeFile(h.passageFile(p.ID), text)
		}
	}
	if err == nil {
		err = syncDir(h.passageDir())
	}
	if err != nil {
		return fmt.Errorf("remember the move of %s: %w", p.ID, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if old := h.passages[p.ID]; old != nil {
		delete(h.passages, p.ID)
		delete(h.crossed, old.traj())
		for _, o := range h.passages { // of a sandbox before it in its trajectory
			if o.traj() == old.traj() {
				h.know(o)
			}
		}
	}
	if p.Gone != nil || p.Coming != nil {
		h.know(p)
	}
	return nil
}

// know makes a passage known; of those of one trajectory what comes counts, which is later than what went. mu is held.
func (h *Host) know(p *passage) {
	h.passages[p.ID] = p
	if o := h.crossed[p.traj()]; o == nil || p.Coming != nil {
		h.crossed[p.traj()] = p
	}
}

// forgetPassages forgets what is remembered of a trajectory whose sandbox lives here. What came is forgotten last: without it, what went before would
// say that the trajectory is elsewhere.
func (h *Host) forgetPassages(traj trajectory.ID) error {
	h.mu.Lock()
	var went, came []sandbox.ID
	for _, p := range h.passages {
		switch {
		case p.traj() != traj:
		case p.Coming == nil:
			went = append(went, p.ID)
		default:
			came = append(came, p.ID)
		}
	}
	h.mu.Unlock()
	for _, id := range append(went, came...) {
		if err := h.putPassage(&passage{ID: id}); err != nil {
			return err
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// passage is a copy of what is remembered of a sandbox, to be changed and put.
func (h *Host) passage(id sandbox.ID) *passage {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.passages[id]; p != nil {
		c := *p
		return &c
	}
	return &passage{ID: id}
}

// rereadPassages reads what the last host remembered.
func (h *Host) rereadPassages() error {
	if err := os.MkdirAll(h.passageDir(), 0o700); err != nil {
		return fmt.Errorf("folder of moves: %w", err)
	}
	list, err := os.ReadDir(h.passageDir())
	if err != nil {
		return fmt.Errorf("folder of moves: %w", err)
	}
	for _, e := range list {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok { // of a write that a kill cut off
			if err := os.Remove(filepath.Join(h.passageDir(), e.Name())); err != nil {
				return fmt.Errorf("folder of moves: %w", err)
			}
			continue
		}
		text, err := os.ReadFile(filepath.Join(h.passageDir(), e.Name()))
		p := &passage{since: time.Now()}
		if err == nil {
			err = json.Unmarshal(text, p)
		}
		if err == nil && (string(p.ID) != name || p.Gone == nil && p.Coming == nil) {
			err = sandbox.ErrInvalid
		}
		if err != nil { // without it who has the sandbox is not known
			return fmt.Errorf("read %s: %w", filepath.Join(h.passageDir(), e.Name()), err)
		}
		h.mu.Lock()
		h.know(p)
		h.mu.Unlock()
	}
	return nil
}

// rereadPassage removes the records of a sandbox that is not this host's.
func (h *Host) rereadPassage(ctx context.Context, id trajectory.ID, p *passage) error {
	if p.Coming != nil && p.Coming.Here {
		h.mu.Lock()
		h.jobOf(scoped{id.Project, id.Job}).living++ // its records stay while its job does
		h.mu.Unlock()
		return nil
	}
	return h.deps.Log.Remove(ctx, id)
}

// tidyPassages ends what the last host had half done. Sandboxes that may come to live here are among the living, which a sweep spares.
func (h *Host) tidyPassages(ctx context.Context, living map[sandbox.ID]bool) {
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.passages))
	h.mu.Unlock()
	for _, p := range all {
		h.mu.Lock()
		here := h.boxes[p.ID] != nil
		h.mu.Unlock()
		next := *p
		switch {
		case here: // taken
			if err := h.forgetPassages(p.traj()); err != nil {
				h.log.Error("forget a move", "sandbox", p.ID, "err", err)
			}
			continue
		case p.Coming == nil:
			continue
		case p.Coming.Here:
			living[p.ID] = true
			continue
		default:
			next.Coming = nil
		}
		if err := h.putPassage(&next); err != nil {
			h.log.Error("forget a move", "sandbox", p.ID, "err", err)
		}
	}
}

// recallPassage clears what is remembered of a sandbox whose records are copied from a lost host: that it came from there and nobody will say whether it
// did, or that it went there. Until end a half copy is known as one. With ok the log tells from then on.
func (h *Host) recallPassage(ctx context.Context, id trajectory.ID, lost sandbox.HostID) (end func(ok bool) error, err error) {
	p := h.passageOf(id)
	if p == nil {
		return func(bool) error { return nil }, nil
	}
	leave, err := h.turns.enter(ctx, p.ID)
	if err != nil {
		return nil, err
	}
	err = h.discard(ctx, p.ID)
	was := h.passage(p.ID)
	if err == nil {
		err = h.putPassage(&passage{ID: p.ID, Gone: was.Gone, Coming: &coming{From: lost, Nonce: "recalled", Traj: id}})
	}
	if err != nil {
		leave()
		return nil, err
	}
	return func(ok bool) error {
		defer leave()
		if ok {
			return h.forgetPassages(id)
		}
		was.Coming = nil
		return h.putPassage(was)
	}, nil
}

// expirePassages forgets where sandboxes went long ago.
func (h *Host) expirePassages(now time.Time) {
	h.mu.Lock()
	var old []*passage
	for _, p := range h.passages {
		if p.Coming == nil && now.Sub(p.Gone.At) > goneFor {
			old = append(old, p)
		}
	}
	h.mu.Unlock()
	for _, p := range old {
		if leave, ok := h.turns.tryEnter(p.ID); ok {
			if err := h.putPassage(&passage{ID: p.ID}); err != nil {
				h.log.Warn("forget a move", "sandbox", p.ID, "err", err)
			}
			leave()
		}
	}
}

// turns lets one act at a time be done with a sandbox.
type turns struct {
	mu   sync.Mutex
	busy map[sandbox.ID]chan struct{} // closed when the turn is over
}

func (t *turns) tryEnter(id sandbox.ID) (leave func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.busy[id] != nil {
		return nil, false
	}
	if t.busy == nil {
		t.busy = map[sandbox.ID]chan struct{}{}
	}
	over := make(chan struct{})
	t.busy[id] = over
	return func() {
		t.mu.Lock()
		delete(t.busy, id)
		t.mu.Unlock()
		close(over)
	}, true
}

func (t *turns) enter(ctx context.Context, id sandbox.ID) (leave func(), err error) {
	for {
		if leave, ok := t.tryEnter(id); ok {
			return leave, nil
		}
		t.mu.Lock()
		over := t.busy[id]
		t.mu.Unlock()
		if over == nil {
			continue
		}
		select {
		case <-over:
		case <-ctx.Done():
			return nil, fmt.Errorf("sandbox %s is being moved: %w", id, ctx.Err())
		}
	}
}
