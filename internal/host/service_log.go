package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// SetVerdict attaches what a grader says.
func (s logService) SetVerdict(ctx context.Context, req *connect.Request[dsecv1.SetVerdictRequest]) (*connect.Response[dsecv1.SetVerdictResponse], error) {
	m := req.Msg
	b, err := s.find(ctx, &dsecv1.ReadLogRequest{Sandbox: m.GetSandbox(), Job: m.GetJob(), Key: m.GetKey()})
	if err != nil {
		return nil, err
	}
	v, existed, err := b.latest().judge(ctx, m.GetVerdict())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SetVerdictResponse{Verdict: v, Existed: existed}), nil
}

// Steps streams what was done in the trajectories that match.
func (s logService) Steps(ctx context.Context, req *connect.Request[dsecv1.StepsRequest], stream *connect.ServerStream[dsecv1.StepsResponse]) error {
	limit, err := outputLimit(req.Msg.GetOutputLimit())
	if err != nil {
		return err
	}
	boxes, _, err := s.h.matching(ctx, req.Msg.GetFilter())
	if err != nil {
		return err
	}
	for _, b := range boxes {
		r := &dsecv1.StepsResponse{Sandbox: b.proto()}
		size := 0
		flush := func() error {
			err := stream.Send(r)
			r, size = &dsecv1.StepsResponse{}, 0
			return err
		}
		err := b.walk(ctx, limit, req.Msg.GetRequests(), func(st *dsecv1.Step) error {
			r.Steps = append(r.Steps, st)
			if size += len(st.Stdout) + len(st.Stderr) + len(st.RequestJson) + 300; size < batchOctets {
				return nil
			}
			return flush()
		})
		if err != nil && !s.h.removed(b, err) {
			return err
		}
		if r.Sandbox != nil || len(r.Steps) > 0 {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// removed tells an error of a trajectory that was removed while it was read.
func (h *Host) removed(b *box, err error) bool {
	if !errors.Is(err, sandbox.ErrNotFound) {
		return false
	}
	_, serr := h.deps.Log.Stat(b.traj)
	if b.unlessMoved(nil) != nil {
		return false // it is told elsewhere
	}
	return errors.Is(serr, sandbox.ErrNotFound)
}

// Export streams rows of JSON.
func (s logService) Export(ctx context.Context, req *connect.Request[dsecv1.ExportRequest], stream *connect.ServerStream[dsecv1.ExportResponse]) error {
	r := &dsecv1.ExportResponse{}
	size := 0
	left, err := s.h.export(ctx, req.Msg, func(line string) error {
		r.Rows = append(r.Rows, line)
		if size += len(line); size < batchOctets {
			return nil
		}
		err := stream.Send(r)
		r, size = &dsecv1.ExportResponse{}, 0
		return err
	})
	if r.LeftOut = left; err != nil || len(r.Rows) == 0 && left == 0 {
		return err
	}
	return stream.Send(r)
}

// ReadInput streams the input octets of one record.
func (s logService) ReadInput(ctx context.Context, req *connect.Request[dsecv1.ReadInputRequest], stream *connect.ServerStream[dsecv1.ReadInputResponse]) error {
	b, err := s.h.get(ctx, req.Msg.GetSandbox())
	if err != nil {
		return err
	}
	if req.Msg.GetSeq() <= 0 {
		return fmt.Errorf("seq %d: want that of a record: %w", req.Msg.GetSeq(), sandbox.ErrInvalid)
	}
	rec, err := b.recordAt(ctx, uint64(req.Msg.GetSeq()))
	if err != nil {
		return err
	}
	if rec.Input == nil {
		return fmt.Errorf("record %d of sandbox %s: has no input: %w", rec.Seq, b.id, sandbox.ErrNotFound)
	}
	in, err := s.h.deps.Log.OpenInput(rec.Input)
	if err != nil {
		return err
	}
	defer in.Close()
	buf := make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(in, buf)
		if n > 0 {
			if err := stream.Send(&dsecv1.ReadInputResponse{Data: buf[:n]}); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// Remove deletes trajectories.
func (s logService) Remove(ctx context.Context, req *connect.Request[dsecv1.RemoveLogsRequest]) (*connect.Response[dsecv1.RemoveLogsResponse], error) {
	older, err := rpc.Milliseconds("older_ms", req.Msg.GetOlderMs())
	if err != nil {
		return nil, err
	}
	n, err := s.h.removeLogs(ctx, req.Msg.GetJob(), older)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.RemoveLogsResponse{Trajectories: int64(n)}), nil
}

// removeLogs deletes the trajectories of a job, or of all jobs whose last sandbox ended longer ago than older. A job goes as a whole: its
// name and keys are used up then, as after its retention. In job "-" each sandbox is a whole.
func (h *Host) removeLogs(ctx context.Context, name string, older time.Duration) (removed int, err error) {
	if err := h.wait(ctx); err != nil {
		return 0, err
	}
	switch {
	case older < 0:
		return 0, fmt.Errorf("older_ms: must not be negative: %w", sandbox.ErrInvalid)
	case name == "" && older == 0:
		return 0, fmt.Errorf("job or older_ms: give one of them, this deletes: %w", sandbox.ErrInvalid)
	}
	p, now := project(ctx), time.Now()
	var over []*job
	var loose []*box
	h.mu.Lock()
	for n, j := range h.jobs {
		if n.project != p || n.name == noJob || name != "" && n.name != name || !j.expired.IsZero() {
			continue
		}
		switch idle := j.living == 0 && j.until.IsZero(); {
		case idle && (older == 0 || now.Sub(j.last) > older):
			j.expired = now
			over = append(over, j)
		case !idle && name != "":
			h.mu.Unlock()
			if j.living == 0 {
				return 0, fmt.Errorf("job %.60q: its lease runs; wait for its end, or stop the job first: %w", name, sandbox.ErrState)
			}
			return 0, fmt.Errorf("job %.60q: %d of its sandboxes live; stop it first: %w", name, j.living, sandbox.ErrState)
		}
	}
	if name == "" || name == noJob {
		for _, b := range h.boxes {
			if b.spec.Project == p && b.spec.Job == noJob && b.next.Load() == nil && b.overFor(now, older) {
				loose = append(loose, b)
			}
		}
	}
	h.mu.Unlock()
	for _, j := range over {
		n := h.trajectoriesOf(trajectory.ID{Project: j.project, Job: j.name})
		if err := h.expireJob(h.life, j, now); err != nil {
			return removed, fmt.Errorf("remove the logs of job %s: %w", j.name, err)
		}
		removed += n
	}
	if err := h.forget(h.life, loose); err != nil {
		return removed, fmt.Errorf("remove logs: %w", err)
	}
	return removed + len(loose), nil
}

// trajectoriesOf counts a job's trajectories, without its own.
func (h *Host) trajectoriesOf(id trajectory.ID) (n int) {
	for _, t := range h.deps.Log.Trajectories() {
		if t.ID.Project == id.Project && t.ID.Job == id.Job && t.ID.Key != "" {
			n++
		}
	}
	return n
}

// overFor says whether the sandbox ended longer ago than d.
func (b *box) overFor(now time.Time, d time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state.Ended() && now.Sub(b.over) >= d
}
