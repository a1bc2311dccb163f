package host

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// readCalls streams the records of a job's function calls on this host: a stream, or one a day of those without a job.
func (s logService) readCalls(ctx context.Context, m *dsecv1.ReadLogRequest, stream *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	switch {
	case m.GetSandbox() != "":
		return fmt.Errorf("sandbox or key: give one of them: %w", sandbox.ErrInvalid)
	case m.GetFollow():
		return fmt.Errorf("follow: the calls of a job have no end to wait for; read them again from the next from_seq: %w", sandbox.ErrInvalid)
	}
	if err := s.h.wait(ctx); err != nil {
		return err
	}
	var streams []trajectory.ID
	for _, t := range s.h.deps.Log.Trajectories() {
		if t.ID.Project == project(ctx) && t.ID.Job == jobName(m.GetJob()) && isCalls(t.ID) && (m.GetKey() == fncall.Stream || m.GetKey() == t.ID.Key) {
			streams = append(streams, t.ID)
		}
	}
	slices.SortFunc(streams, func(a, b trajectory.ID) int { return cmp.Compare(a.Key, b.Key) })
	if m.GetFromSeq() > 1 && len(streams) > 1 {
		return fmt.Errorf("from_seq: calls without a job have a stream each day; name one, as in %s: %w", streams[len(streams)-1].Key, sandbox.ErrInvalid)
	}
	for _, id := range streams {
		if err := s.readCallStream(ctx, id, m, stream); err != nil {
			return err
		}
	}
	return nil
}

func (s logService) readCallStream(ctx context.Context, id trajectory.ID, m *dsecv1.ReadLogRequest, stream *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	q := trajectory.Query{From: uint64(max(1, m.GetFromSeq())), Limit: batchRecords}
	var teller fncall.Teller
	for {
		recs, next, err := s.h.deps.Log.Read(ctx, id, q)
		r := &dsecv1.ReadLogResponse{}
		size := 0
		for i := range recs {
			p := s.callRecord(ctx, id, &teller, &recs[i], m.GetOutput())
			r.Records = append(r.Records, p)
			if size += len(p.Data) + len(p.RequestJson) + len(p.ResponseJson) + 200; size >= batchOctets {
				if err := stream.Send(r); err != nil {
					return err
				}
				r, size = &dsecv1.ReadLogResponse{}, 0
			}
		}
		moved := next > q.From
		if errors.Is(err, sandbox.ErrLost) && moved {
			r.Records = append(r.Records, &dsecv1.LogRecord{Seq: int64(next - 1), Kind: "lost", RequestJson: strconv.Quote(text(err.Error()))})
			err = nil
		}
		if len(r.Records) > 0 {
			if err := stream.Send(r); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrNotFound): // removed meanwhile
			return nil
		case err != nil:
			return err
		case !moved:
			return nil
		}
		q.From = next
	}
}

// callRecord shows a record of a call. One that can't be read is shown as lost, and is no reason not to show the others.
func (s logService) callRecord(ctx context.Context, id trajectory.ID, teller *fncall.Teller, rec *trajectory.Record, output bool) *dsecv1.LogRecord {
	head := *rec
	head.Payload = nil
	p := logRecord(&head, output)
	told, err := teller.Tell(rec, func() (*trajectory.Record, error) {
		recs, _, err := s.h.deps.Log.Read(ctx, id, trajectory.Query{From: rec.Seq - 1, Limit: 1})
		if err == nil && len(recs) == 0 {
			err = sandbox.ErrLost
		}
		if err != nil {
			return nil, err
		}
		return &recs[0], nil
	})
	if err != nil {
		p.Kind, p.RequestJson = "lost", strconv.Quote(text(err.Error()))
		return p
	}
	if told.Kind != "" {
		p.Kind = told.Kind
	}
	switch {
	case told.Request != nil:
		p.RequestJson = jsonOf(told.Request)
	case told.Hash != nil:
		p.RequestJson = strconv.Quote("sha256:" + hex.EncodeToString(told.Hash))
	}
	if told.Response != nil {
		if !output {
			fncall.Quiet(told.Response)
		}
		p.ResponseJson = jsonOf(told.Response)
	}
	return p
}
