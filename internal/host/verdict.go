package host

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Bounds of what graders may attach.
const (
	maxMetadata = 16 << 10 // octets of one verdict's metadata, encoded
	maxVerdicts = 256      // of one trajectory
	statsWait   = 2 * time.Second
)

// verdicts are what graders said of a trajectory. Fields are under the box's lock.
type verdicts struct {
	verdict *dsecv1.Verdict // the latest; never changed
	said    map[string][32]byte
	judging bool // one is being recorded
}

// note takes in a recorded verdict.
func (v *verdicts) note(p *dsecv1.Verdict, seq uint64, at time.Time) {
	if v.said == nil {
		v.said = map[string][32]byte{}
	}
	v.said[p.GetKey()] = verdictSum(p)
	p = proto.CloneOf(p)
	p.Seq, p.Time = int64(seq), rpc.Timestamp(at)
	v.verdict = p
}

func verdictSum(p *dsecv1.Verdict) [32]byte { return sha256.Sum256(encode(tagVerdict, p)) }

// checkVerdict makes the canonical form of what is to be recorded.
func checkVerdict(v *dsecv1.Verdict) (*dsecv1.Verdict, error) {
	if v == nil {
		return nil, fmt.Errorf("verdict: missing: %w", sandbox.ErrInvalid)
	}
	v = &dsecv1.Verdict{Key: v.GetKey(), Reward: v.Reward, Metadata: v.GetMetadata()}
	if v.Key == "" {
		v.Key = "verdict"
	}
	if err := sandbox.CheckKey("verdict.key", v.Key); err != nil {
		return nil, err
	}
	switch n := proto.Size(v.GetMetadata()); {
	case v.Reward != nil && (math.IsNaN(*v.Reward) || math.IsInf(*v.Reward, 0)):
		return nil, fmt.Errorf("verdict.reward %v: want a finite number: %w", *v.Reward, sandbox.ErrInvalid)
	case v.Reward == nil && len(v.GetMetadata().GetFields()) == 0:
		return nil, fmt.Errorf("verdict: give a reward or metadata: %w", sandbox.ErrInvalid)
	case n > maxMetadata:
		return nil, fmt.Errorf("verdict.metadata: %d octets encoded, at most %d: %w", n, maxMetadata, sandbox.ErrInvalid)
	}
	return v, nil
}

// judge records a verdict once under its key. It neither wakes the sandbox nor counts as activity, and works after its end too.
func (b *box) judge(ctx context.Context, v *dsecv1.Verdict) (_ *dsecv1.Verdict, existed bool, err error) {
	v, err = checkVerdict(v)
	if err != nil {
		return nil, false, err
	}
	sum := verdictSum(v)
	b.mu.Lock()
	for b.judging {
		if err := b.waitChange(ctx); err != nil {
			return nil, false, fmt.Errorf("verdict of %s: another is being recorded: %w", b.id, err)
		}
		b.mu.Lock()
	}
	was, known := b.said[v.Key]
	switch {
	case known && was != sum:
		b.mu.Unlock()
		return nil, false, fmt.Errorf("verdict of sandbox %s: key %q was used for another; one with a new key replaces it: %w", b.id, v.Key, sandbox.ErrExists)
	case known:
		last := b.verdict
		b.mu.Unlock()
		if last.GetKey() == v.Key {
			v = last
		}
		return v, true, nil
	case len(b.said) >= maxVerdicts:
		b.mu.Unlock()
		return nil, false, fmt.Errorf("verdict of sandbox %s: has %d, the most that one may have: %w", b.id, maxVerdicts, sandbox.ErrExhausted)
	case b.err != nil:
		err := b.err
		b.mu.Unlock()
		return nil, false, err
	}
	b.judging = true
	b.mu.Unlock()
	seq, err := b.append(trajectory.Record{Kind: trajectory.KindVerdict, Payload: encode(tagVerdict, v)})
	b.mu.Lock()
	defer b.mu.Unlock()
	b.judging = false
	b.changed.ring()
	if err != nil {
		return nil, false, fmt.Errorf("verdict of sandbox %s: record it: %w", b.id, err)
	}
	b.note(v, seq, time.Now())
	return b.verdict, false, nil
}

// lastStats is what the backend says of the sandbox before it goes: background processes count there alone. Nil where nothing ran.
func (b *box) lastStats(inst sandbox.Instance) *sandbox.Stats {
	b.mu.Lock()
	idle := len(b.order) == 0 && len(b.sessions) == 0
	b.mu.Unlock()
	if inst == nil || idle {
		return nil
	}
	ctx, cancel := b.h.bounded(statsWait)
	defer cancel()
	s, err := inst.Stats(ctx)
	if err != nil { // it may be gone already; the steps have figures of their own
		return nil
	}
	return &s
}

// sumUp makes the summary of a sandbox whose steps have all ended.
func (b *box) sumUp(cause sandbox.Cause, used *sandbox.Stats) *dsecv1.Summary {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &dsecv1.Summary{Steps: int64(len(b.steps)), Retries: b.retries, Class: string(cause.Class), MemoryPeak: -1}
	if !b.created.IsZero() {
		s.WallMs = max(0, time.Since(b.created).Milliseconds())
	}
	for _, st := range b.steps {
		o := &st.outcome
		if o.Kind == sandbox.Unknown {
			s.Unknown++
		}
		if st.act != tagCommand {
			continue
		}
		s.Commands++
		s.Stdout += st.total(sandbox.Stdout)
		s.Stderr += st.total(sandbox.Stderr)
		s.CpuUs += o.Usage.CPU.Microseconds()
		s.MemoryPeak = max(s.MemoryPeak, o.Usage.MemoryPeak)
		if o.Kind != sandbox.Exited || o.Code != 0 {
			s.Failed++
		}
	}
	if used != nil {
		s.CpuUs = max(s.CpuUs, used.CPU.Microseconds())
		s.MemoryPeak = max(s.MemoryPeak, used.MemoryPeak)
	}
	b.summary = s
	return s
}

// endOf is the record of a sandbox's end.
func endOf(state sandbox.State, c sandbox.Cause, sum *dsecv1.Summary) trajectory.Record {
	m := &dsecv1.LogRecord{State: string(state), Cause: rpc.CauseProto(c), Summary: sum}
	return trajectory.Record{Kind: trajectory.KindState, Flags: trajectory.Final, Payload: encode(tagState, m)}
}
