package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const (
	defaultOutput = 1 << 20
	maxOutput     = 16 << 20
	pieceSize     = 64 << 10 // of a stream that is attached to: a slow reader holds some ten of them on the way
)

var bothStreams = [...]sandbox.StreamName{sandbox.Stdout, sandbox.Stderr}

// total is where a stream of an ended command ends; later octets are late.
func (s *step) total(stream sandbox.StreamName) int64 {
	if stream == sandbox.Stdout {
		return max(s.outcome.Stdout.Total, s.endsAt[stream])
	}
	return max(s.outcome.Stderr.Total, s.endsAt[stream])
}

// head reads up to limit octets from the start of each stream, as far as they are there without a gap.
func (b *box) head(ctx context.Context, s *step, limit int64) (stdout, stderr []byte, err error) {
	if limit <= 0 {
		return nil, nil, nil
	}
	limit = min(limit, maxOutput)
	b.mu.Lock()
	next := s.next
	if s.ended() { // what came late is not part of the result
		next = s.endsAt
	}
	b.mu.Unlock()
	read := func(stream sandbox.StreamName) []byte {
		n := min(limit, next[stream])
		if n == 0 || err != nil {
			return nil
		}
		p := make([]byte, n)
		got, rerr := b.h.deps.Log.ReadOutput(ctx, b.traj, s.stream(), stream, 0, p)
		var gap *trajectory.GapError
		if rerr != nil && rerr != io.EOF && !errors.As(rerr, &gap) {
			err = rerr
		}
		return p[:got]
	}
	return read(sandbox.Stdout), read(sandbox.Stderr), err
}

// readOutput answers octets at an offset, or the gap there.
func (b *box) readOutput(ctx context.Context, s *step, stream sandbox.StreamName, offset, limit int64) (*dsecv1.ReadOutputResponse, error) {
	if offset < 0 {
		return nil, fmt.Errorf("offset %d: must not be negative: %w", offset, sandbox.ErrInvalid)
	}
	if limit <= 0 {
		limit = defaultOutput
	}
	b.mu.Lock()
	ended, total, next := s.ended(), s.total(stream), s.next[stream]
	b.mu.Unlock()
	r := &dsecv1.ReadOutputResponse{}
	p := make([]byte, max(0, min(limit, maxOutput, next-offset)))
	n, err := b.h.deps.Log.ReadOutput(ctx, b.traj, s.stream(), stream, offset, p)
	var gap *trajectory.GapError
	switch {
	case errors.As(err, &gap):
		r.Gap = &dsecv1.Gap{Stream: streamName(stream), From: gap.From, To: gap.To}
		return r, nil
	case err != nil && err != io.EOF:
		return nil, err
	case len(p) == 0 && ended && offset < total: // cut off at the end: no tail was kept
		r.Gap = &dsecv1.Gap{Stream: streamName(stream), From: next, To: total}
		return r, nil
	}
	r.Data = p[:n]
	r.End = ended && offset+int64(n) >= total
	return r, nil
}

// attach streams a command's output from the offsets until it and its streams have ended. It reads from the log at the receiver's
// pace, so that a slow one holds up nobody; nothing is told twice or left out.
func (b *box) attach(ctx context.Context, s *step, stdout, stderr int64, late bool, send func(*dsecv1.AttachResponse) error) (err error) {
	defer func() { err = b.unlessMoved(err) }()
	if stdout < 0 || stderr < 0 {
		return fmt.Errorf("attach: offsets must not be negative: %w", sandbox.ErrInvalid)
	}
	at := [3]int64{sandbox.Stdout: stdout, sandbox.Stderr: stderr}
	told := false
	for {
		b.mu.Lock()
		ended, over, next, open := s.ended(), b.state.Ended() || b.ending, s.next, s.outcome.OutputOpen
		var ends [3]int64
		for _, st := range bothStreams {
			ends[st] = s.total(st)
		}
		err := cmp.Or(b.moved, s.err)
		changed, box := s.changed.wait(), b.changed.wait()
		b.mu.Unlock()
		if err != nil {
			return err
		}
		for _, st := range bothStreams {
			to := next[st]
			if ended && !told {
				to = min(to, ends[st]) // late octets come after the outcome
			}
			if err := b.feed(ctx, s, st, &at[st], to, told, send); err != nil {
				return err
			}
			if ended && !told && at[st] < ends[st] && next[st] < ends[st] {
				if err := send(gapEvent(st, at[st], ends[st])); err != nil {
					return err
				}
				at[st] = ends[st]
			}
		}
		if ended && !told {
			if err := send(&dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Ended{Ended: b.commandProto(s)}}); err != nil {
				return err
			}
			told = true
			if late && open {
				continue
			}
			return nil
		}
		if told && over {
			return nil
		}
		select {
		case <-changed:
		case <-box: // a command of a sandbox that ends is ended too
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func gapEvent(stream sandbox.StreamName, from, to int64) *dsecv1.AttachResponse {
	return &dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Gap{Gap: &dsecv1.Gap{Stream: streamName(stream), From: from, To: to}}}
}

// feed sends what the log has of a stream between *at and to.
func (b *box) feed(ctx context.Context, s *step, stream sandbox.StreamName, at *int64, to int64, late bool, send func(*dsecv1.AttachResponse) error) error {
	for *at < to {
		p := make([]byte, min(pieceSize, to-*at))
		n, err := b.h.deps.Log.ReadOutput(ctx, b.traj, s.stream(), stream, *at, p)
		var gap *trajectory.GapError
		switch {
		case errors.As(err, &gap):
			if err := send(gapEvent(stream, *at, min(gap.To, to))); err != nil {
				return err
			}
			*at = min(gap.To, to)
			continue
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
		c := &dsecv1.Chunk{Stream: streamName(stream), Offset: *at, Data: p[:n], Late: late}
		if err := send(&dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Chunk{Chunk: c}}); err != nil {
			return err
		}
		*at += int64(n)
	}
	return nil
}
