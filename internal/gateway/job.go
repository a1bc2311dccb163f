package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// jobs is JobService. A job has no place of its own: every host holds its lease and its share of the sandboxes, so that a lease also
// ends while no gateway is there.
type jobs struct{ g *Gateway }

var _ dsecv1connect.JobServiceHandler = jobs{}

// Put tells all hosts. One that can't be told makes it fail, since its share would have no lease; a repeat completes it.
func (s jobs) Put(ctx context.Context, r *connect.Request[dsecv1.PutJobRequest]) (*connect.Response[dsecv1.PutJobResponse], error) {
	j := r.Msg.GetJob()
	if j == nil {
		return nil, fmt.Errorf("job: missing: %w", sandbox.ErrInvalid)
	}
	if err := checkJob(j); err != nil {
		return nil, err
	}
	j.Project = rpc.Project(ctx)
	answers, errs, err := everywhere(ctx, s.g, s.g.askTime, func(ctx context.Context, p *rpc.Peer) (*dsecv1.Job, error) {
		resp, err := p.Host.PutJob(ctx, connect.NewRequest(&dsecv1.PutJobRequest{Job: j}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetJob(), nil
	})
	if err == nil && len(errs) > 0 {
		err = fmt.Errorf("put job %s: %w", j.Name, rpc.FromCode(errs[0].Code, errs[0].Message))
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PutJobResponse{Job: sum(answers)}), nil
}

func checkJob(j *dsecv1.Job) error {
	if err := sandbox.CheckKey("job", j.Name); err != nil {
		return err
	}
	switch {
	case j.Name == "-":
		return fmt.Errorf("job \"-\": is of sandboxes without a job and has no lease: %w", sandbox.ErrInvalid)
	case j.LeaseMs < 0 || j.LeaseMs > sandbox.MaxLease.Milliseconds():
		return fmt.Errorf("lease_ms %d: 0 for none, else at most %d: %w", j.LeaseMs, sandbox.MaxLease.Milliseconds(), sandbox.ErrInvalid)
	case j.RetentionMs < 0 || j.RetentionMs > (365*24*time.Hour).Milliseconds():
		return fmt.Errorf("retention_ms %d: 0 for 24 h, else at most a year: %w", j.RetentionMs, sandbox.ErrInvalid)
	case !slices.Contains([]string{"", "repeat", "never"}, j.Restore):
		return fmt.Errorf("restore %.40q: want repeat or never: %w", j.Restore, sandbox.ErrInvalid)
	case !slices.Contains([]string{"", "stop", "pause", "keep"}, j.OnLeaseEnd):
		return fmt.Errorf("on_lease_end %q: want stop, pause or keep: %w", j.OnLeaseEnd, sandbox.ErrInvalid)
	}
	return nil
}

// Renew renews on every host that knows the job, and tells the job to one that does not, as after joining the cluster.
func (s jobs) Renew(ctx context.Context, r *connect.Request[dsecv1.RenewJobRequest]) (*connect.Response[dsecv1.RenewJobResponse], error) {
	type share struct {
		peer *rpc.Peer
		job  *dsecv1.Job
	}
	answers, errs, err := everywhere(ctx, s.g, s.g.askTime, func(ctx context.Context, p *rpc.Peer) (share, error) {
		resp, err := p.Jobs.Renew(ctx, connect.NewRequest(r.Msg))
		if errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
			return share{peer: p}, nil
		}
		if err != nil {
			return share{}, err
		}
		return share{p, resp.Msg.GetJob()}, nil
	})
	if err != nil {
		return nil, err
	}
	var known []*dsecv1.Job
	for _, a := range answers {
		if a.job != nil {
			known = append(known, a.job)
		}
	}
	if len(known) == 0 {
		if len(errs) > 0 {
			return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
		}
		return nil, fmt.Errorf("job %s: no host knows it; put it first: %w", r.Msg.GetName(), sandbox.ErrNotFound)
	}
	for _, a := range answers {
		if a.job != nil || known[0].LeaseMs == 0 {
			continue
		}
		j := &dsecv1.Job{Name: known[0].Name, Project: rpc.Project(ctx), LeaseMs: known[0].LeaseMs, OnLeaseEnd: known[0].OnLeaseEnd, RetentionMs: known[0].RetentionMs, Restore: known[0].Restore}
		if _, err := a.peer.Host.PutJob(ctx, connect.NewRequest(&dsecv1.PutJobRequest{Job: j})); err != nil {
			return nil, fmt.Errorf("renew job %s: tell host at %s: %w", j.Name, a.peer.Addr, rpc.FromError(err))
		}
	}
	// A host that is away can't be renewed, and its share ends by its lease; those that answered are renewed.
	return connect.NewResponse(&dsecv1.RenewJobResponse{Job: sum(known)}), nil
}

func (s jobs) Get(ctx context.Context, r *connect.Request[dsecv1.GetJobRequest]) (*connect.Response[dsecv1.GetJobResponse], error) {
	answers, errs, err := everywhere(ctx, s.g, s.g.askTime, func(ctx context.Context, p *rpc.Peer) (*dsecv1.Job, error) {
		resp, err := p.Jobs.Get(ctx, connect.NewRequest(r.Msg))
		if errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetJob(), nil
	})
	if err != nil {
		return nil, err
	}
	answers = slices.DeleteFunc(answers, func(j *dsecv1.Job) bool { return j == nil })
	if len(answers) == 0 {
		if len(errs) > 0 {
			return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
		}
		return nil, fmt.Errorf("job %s: no host knows it: %w", r.Msg.GetName(), sandbox.ErrNotFound)
	}
	return connect.NewResponse(&dsecv1.GetJobResponse{Job: sum(answers)}), nil
}

func (s jobs) List(ctx context.Context, r *connect.Request[dsecv1.ListJobsRequest]) (*connect.Response[dsecv1.ListJobsResponse], error) {
	answers, errs, err := everywhere(ctx, s.g, s.g.askTime, func(ctx context.Context, p *rpc.Peer) ([]*dsecv1.Job, error) {
		resp, err := p.Jobs.List(ctx, connect.NewRequest(r.Msg))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetJobs(), nil
	})
	if err != nil {
		return nil, err
	}
	if len(answers) == 0 && len(errs) > 0 {
		return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
	}
	shares := map[string][]*dsecv1.Job{}
	for _, list := range answers {
		for _, j := range list {
			shares[j.GetName()] = append(shares[j.GetName()], j)
		}
	}
	out := &dsecv1.ListJobsResponse{Errors: errs}
	for _, list := range shares {
		out.Jobs = append(out.Jobs, sum(list))
	}
	slices.SortFunc(out.Jobs, func(a, b *dsecv1.Job) int { return strings.Compare(a.GetName(), b.GetName()) })
	return connect.NewResponse(out), nil
}

// sum adds up the shares of a job: counts are added, the lease is the one that ends first.
func sum(shares []*dsecv1.Job) *dsecv1.Job {
	out := proto.Clone(shares[0]).(*dsecv1.Job)
	for _, s := range shares[1:] {
		out.Running += s.GetRunning()
		out.Paused += s.GetPaused()
		out.Ended += s.GetEnded()
		if out.LeaseMs == 0 {
			out.LeaseMs, out.OnLeaseEnd = s.GetLeaseMs(), s.GetOnLeaseEnd()
		}
		if out.RetentionMs == 0 {
			out.RetentionMs = s.GetRetentionMs()
		}
		if t := s.GetLeaseUntil(); t != nil && (out.LeaseUntil == nil || t.AsTime().Before(out.LeaseUntil.AsTime())) {
			out.LeaseUntil = t
		}
	}
	return out
}

func (s jobs) Pause(ctx context.Context, r *connect.Request[dsecv1.PauseJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.group(ctx, r.Msg.GetName(), func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Jobs.Pause(ctx, connect.NewRequest(r.Msg))
	})
}

func (s jobs) Resume(ctx context.Context, r *connect.Request[dsecv1.ResumeJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.group(ctx, r.Msg.GetName(), func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Jobs.Resume(ctx, connect.NewRequest(r.Msg))
	})
}

func (s jobs) Stop(ctx context.Context, r *connect.Request[dsecv1.StopJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.group(ctx, r.Msg.GetName(), func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Jobs.Stop(ctx, connect.NewRequest(r.Msg))
	})
}

// group makes a call about a job on all hosts; one that does not know the job has no part in it.
func (s jobs) group(ctx context.Context, name string, call func(context.Context, *rpc.Peer) (*connect.Response[dsecv1.SelectorResult], error)) (*connect.Response[dsecv1.SelectorResult], error) {
	if err := sandbox.CheckKey("job", name); err != nil {
		return nil, err
	}
	answers, errs, err := everywhere(ctx, s.g, 0, func(ctx context.Context, p *rpc.Peer) (*dsecv1.SelectorResult, error) {
		resp, err := call(ctx, p)
		if errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	answers = slices.DeleteFunc(answers, func(a *dsecv1.SelectorResult) bool { return a == nil })
	if len(answers) == 0 && len(errs) == 0 {
		return nil, fmt.Errorf("job %s: no host knows it: %w", name, sandbox.ErrNotFound)
	}
	return response(merge(answers, errs, len(answers) == 0))
}
