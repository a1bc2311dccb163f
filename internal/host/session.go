package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// session is a living shell, or one that was. Fields are under the box's lock.
type session struct {
	name, shell, user string
	open              bool
	opening           bool // not answered by the backend yet
	closing           bool // its end is being recorded
	opened            time.Time
	end               sandbox.Outcome
}

const (
	closeWait   = 5 * time.Second
	maxSessions = 1 << 14 // in the life of a sandbox
)

func (s *session) proto() *dsecv1.Session {
	p := &dsecv1.Session{Name: s.name, State: "open", Shell: s.shell, User: s.user, Opened: rpc.Timestamp(s.opened)}
	if !s.open {
		p.State, p.End = "ended", rpc.OutcomeProto(s.end)
	}
	return p
}

// openSession opens a shell, or joins the living one of that name.
func (b *box) openSession(ctx context.Context, r *sandbox.Session, secret []string) (p *dsecv1.OpenSessionResponse, err error) {
	if r.Name == "" {
		r.Name = sandbox.NewKey()
	}
	if err := b.checkSession(r); err != nil {
		return nil, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	defer b.done()
	s, before, err := b.claimSession(ctx, r)
	if err != nil || before == s {
		return &dsecv1.OpenSessionResponse{Session: b.sessionProto(s), Joined: true}, err
	}
	if err := b.launchSession(s, r, secret, inst); err != nil {
		b.mu.Lock()
		s.open, s.opening = false, false
		if delete(b.sessions, s.name); before != nil {
			b.sessions[s.name] = before
		}
		b.changed.ring()
		b.mu.Unlock()
		return nil, fmt.Errorf("open session %s: %w", s.name, err)
	}
	return &dsecv1.OpenSessionResponse{Session: b.sessionProto(s), Restarted: before != nil}, nil
}

func (b *box) sessionProto(s *session) *dsecv1.Session {
	if s == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return s.proto()
}

func (b *box) checkSession(r *sandbox.Session) error {
	if !b.h.deps.Backends[b.spec.Backend].Capabilities().Sessions {
		return fmt.Errorf("session %s: backend %s has no sessions: %w", r.Name, b.spec.Backend, sandbox.ErrUnsupported)
	}
	if err := sandbox.CheckKey("session", r.Name); err != nil {
		return err
	}
	r.Cwd, r.User = cmp.Or(r.Cwd, b.spec.Cwd), cmp.Or(r.User, b.spec.User)
	if r.Shell != "" {
		if err := sandbox.CheckPath("shell", r.Shell); err != nil {
			return err
		}
	}
	if err := sandbox.CheckPath("cwd", r.Cwd); err != nil {
		return err
	}
	return sandbox.CheckEnv("env", r.Env)
}

// claimSession finds a living session (before == s), or takes the name; before is then the one that had it.
func (b *box) claimSession(ctx context.Context, r *sandbox.Session) (s, before *session, err error) {
	b.mu.Lock()
	for {
		before = b.sessions[r.Name]
		switch {
		case b.ending || b.state.Ended():
			err := b.gone()
			b.mu.Unlock()
			return nil, nil, err
		case before == nil && len(b.sessions) >= maxSessions:
			b.mu.Unlock()
			return nil, nil, fmt.Errorf("session %s: sandbox %s has had %d sessions, the most that one may have: %w", r.Name, b.id, maxSessions, sandbox.ErrExhausted)
		case before == nil || !before.open:
			s = &session{name: r.Name, shell: r.Shell, user: r.User, open: true, opening: true, opened: time.Now()}
			b.sessions[r.Name] = s
			b.mu.Unlock()
			return s, before, nil
		case !before.opening:
			b.mu.Unlock()
			return before, before, nil
		}
		if err := b.waitChange(ctx); err != nil {
			return nil, nil, fmt.Errorf("session %s is being opened: %w", r.Name, err)
		}
		b.mu.Lock()
	}
}

// launchSession records that a session is asked for, opens it, and records that it is open: a restarted host closes one that was
// not, since its client never heard of it.
func (b *box) launchSession(s *session, r *sandbox.Session, secret []string, inst sandbox.Instance) error {
	req := rpc.OpenSessionRequest(r, secret)
	b.h.hideSecrets(req.Env)
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindSessionOpen, Step: r.Name, Payload: encode(tagSession, req)}); err != nil {
		return fmt.Errorf("record it: %w", err)
	}
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	err := inst.OpenSession(ctx, r)
	if err == nil {
		_, err = b.append(trajectory.Record{Kind: trajectory.KindEvent, Step: r.Name, Payload: encode(tagEvent, &dsecv1.LogRecord{Kind: "session_opened"})})
	}
	if err != nil {
		o := sandbox.Outcome{Kind: sandbox.StartFailed, Error: err.Error(), Ended: time.Now()}
		if _, aerr := b.append(trajectory.Record{Kind: trajectory.KindSessionClose, Step: r.Name, Payload: encode(tagOutcome, rpc.OutcomeProto(o))}); aerr != nil {
			err = errors.Join(err, aerr)
		}
		return err
	}
	b.mu.Lock()
	s.opening = false
	b.changed.ring()
	b.mu.Unlock()
	return nil
}

// closeSession ends a shell and all that it started.
func (b *box) closeSession(ctx context.Context, name string) (*dsecv1.Session, error) {
	hist, err := b.load(ctx)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	s := hist.sessions[name]
	open := s != nil && s.open
	b.mu.Unlock()
	if s == nil {
		return nil, fmt.Errorf("session %.80q of sandbox %s: %w", name, b.id, sandbox.ErrNotFound)
	}
	if !open {
		return b.sessionProto(s), nil
	}
	inst, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	defer b.done()
	actx, cancel := b.h.bounded(actWait)
	defer cancel()
	err = inst.CloseSession(actx, name)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = (*sink)(b).SessionEnded(actx, name, sandbox.Outcome{Kind: sandbox.Killed})
	}
	if err != nil {
		return nil, fmt.Errorf("close session %s: %w", name, err)
	}
	// Its end comes as an event; the answer waits for it for a while.
	wait, stop := context.WithTimeout(ctx, closeWait)
	defer stop()
	b.mu.Lock()
	for s.open {
		if b.waitChange(wait) != nil {
			return b.sessionProto(s), nil
		}
		b.mu.Lock()
	}
	defer b.mu.Unlock()
	return s.proto(), nil
}

func (b *box) listSessions(ctx context.Context) ([]*dsecv1.Session, error) {
	hist, err := b.load(ctx)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]*dsecv1.Session, 0, len(hist.sessions))
	for _, s := range hist.sessions {
		out = append(out, s.proto())
	}
	slices.SortFunc(out, func(a, b *dsecv1.Session) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// snapshot captures the sandbox's own changes as a layer, once under its key.
func (b *box) snapshot(ctx context.Context, key string) (layer string, existed bool, err error) {
	if !b.h.deps.Backends[b.spec.Backend].Capabilities().Snapshot {
		return "", false, fmt.Errorf("snapshot of %s: backend %s has none: %w", b.id, b.spec.Backend, sandbox.ErrUnsupported)
	}
	if key == "" {
		key = sandbox.NewKey()
	}
	r, existed, err := b.once(ctx, key, tagSnapshot, &dsecv1.SnapshotRequest{Step: key}, snapshotWait, nil, func(ctx context.Context, inst sandbox.Instance) (*dsecv1.LogRecord, error) {
		layer, err := inst.Snapshot(ctx)
		return &dsecv1.LogRecord{Step: layer}, err
	})
	if err != nil {
		return "", false, err
	}
	return r.GetStep(), existed, nil
}

const snapshotWait = 10 * time.Minute
