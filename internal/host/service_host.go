package host

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

type hostService struct{ h *Host }

func (s hostService) Create(ctx context.Context, req *connect.Request[dsecv1.HostCreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	b, existed, err := s.h.create(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CreateResponse{Sandbox: b.proto(), Existed: existed}), nil
}

func (s hostService) Status(ctx context.Context, req *connect.Request[dsecv1.HostStatusRequest]) (*connect.Response[dsecv1.HostStatusResponse], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	st := s.h.status()
	r := &dsecv1.HostStatusResponse{
		Host: string(s.h.cfg.ID), Version: s.h.cfg.Version, Protocol: rpc.Protocol, Running: st.Running, Creating: st.Creating,
		MemoryTotal: st.MemoryTotal, MemoryAvailable: st.MemoryAvailable, DiskFree: st.DiskFree, LogFree: st.LogFree, Load: st.Load,
		Arrivals: st.Arrivals, Moved: st.Moved, Draining: st.Draining, SlotsFree: st.Slots, Backends: s.h.capabilities(),
	}
	if req.Msg.GetRecent() && s.h.deps.Doctor != nil {
		r.Doctor = s.h.deps.Doctor(ctx)
	}
	return connect.NewResponse(r), nil
}

func (h *Host) capabilities() []*dsecv1.Capabilities {
	var all []*dsecv1.Capabilities
	for _, name := range slices.Sorted(maps.Keys(h.deps.Backends)) {
		c := rpc.CapabilitiesProto(h.deps.Backends[name].Capabilities(), h.cfg.ID)
		c.Backend = name
		all = append(all, c)
	}
	return all
}

func (s hostService) FindKey(ctx context.Context, req *connect.Request[dsecv1.FindKeyRequest]) (*connect.Response[dsecv1.FindKeyResponse], error) {
	m, h := req.Msg, s.h
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	if h.fenced.Load() {
		return nil, fmt.Errorf("host %s was taken for lost, another answers for its keys: %w", h.cfg.ID, sandbox.ErrNotFound)
	}
	p := project(ctx)
	h.mu.Lock()
	var b *box
	if m.GetKey() != "" {
		b = h.keys[trajectory.ID{Project: p, Job: jobName(m.GetJob()), Key: m.GetKey()}]
	}
	if b == nil && m.GetSandbox() != "" {
		if b = h.boxes[sandbox.ID(m.GetSandbox())]; b != nil && b.spec.Project != p {
			b = nil
		}
	}
	if b == nil && m.GetName() != "" {
		b = h.names[scoped{p, m.GetName()}]
	}
	var away *passage
	if b == nil {
		away = h.passageFor(p, m)
	}
	j := h.jobs[scoped{p, jobName(m.GetJob())}]
	expired := j != nil && !j.expired.IsZero()
	h.mu.Unlock()
	switch {
	case b != nil:
		return connect.NewResponse(&dsecv1.FindKeyResponse{Sandbox: b.proto()}), nil
	case away != nil:
		return away.found()
	case expired && m.GetKey() != "":
		return nil, fmt.Errorf("key %.60q: job %s has expired: %w", m.GetKey(), m.GetJob(), sandbox.ErrState)
	}
	return nil, fmt.Errorf("key %.60q or name %.60q: %w", m.GetKey(), m.GetName(), sandbox.ErrNotFound)
}

func jobName(s string) string {
	if s == "" {
		return noJob
	}
	return s
}

func (s hostService) PutJob(ctx context.Context, req *connect.Request[dsecv1.PutJobRequest]) (*connect.Response[dsecv1.PutJobResponse], error) {
	return jobService{s.h}.Put(ctx, req)
}

type infoService struct{ h *Host }

func (s infoService) GetInfo(context.Context, *connect.Request[dsecv1.GetInfoRequest]) (*connect.Response[dsecv1.GetInfoResponse], error) {
	return connect.NewResponse(&dsecv1.GetInfoResponse{Version: s.h.cfg.Version, Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Role: "host"}), nil
}

type jobService struct{ h *Host }

func (s jobService) Put(ctx context.Context, req *connect.Request[dsecv1.PutJobRequest]) (*connect.Response[dsecv1.PutJobResponse], error) {
	j, err := s.h.putJob(ctx, req.Msg.GetJob())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PutJobResponse{Job: j}), nil
}

func (s jobService) Renew(ctx context.Context, req *connect.Request[dsecv1.RenewJobRequest]) (*connect.Response[dsecv1.RenewJobResponse], error) {
	j, err := s.h.renew(ctx, scoped{project(ctx), req.Msg.GetName()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.RenewJobResponse{Job: j}), nil
}

func (s jobService) Get(ctx context.Context, req *connect.Request[dsecv1.GetJobRequest]) (*connect.Response[dsecv1.GetJobResponse], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	j, err := s.h.jobProto(scoped{project(ctx), req.Msg.GetName()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetJobResponse{Job: j}), nil
}

func (s jobService) List(ctx context.Context, _ *connect.Request[dsecv1.ListJobsRequest]) (*connect.Response[dsecv1.ListJobsResponse], error) {
	jobs, err := s.h.listJobs(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ListJobsResponse{Jobs: jobs}), nil
}

func (s jobService) group(ctx context.Context, name string, act func(*box) error) (*connect.Response[dsecv1.SelectorResult], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	if err := sandbox.CheckKey("name", name); err != nil {
		return nil, err
	}
	job := scoped{project(ctx), name}
	coming := s.h.arriving(job)
	if _, err := s.h.jobProto(job); err != nil && len(coming) == 0 {
		return nil, err
	}
	r := each(s.h.selected(ctx, &dsecv1.Selector{Job: name}), act)
	r.Errors = append(r.Errors, coming...)
	return connect.NewResponse(r), nil
}

func (s jobService) Pause(ctx context.Context, req *connect.Request[dsecv1.PauseJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	level := pauseLevel(req.Msg.GetLevel())
	return s.group(ctx, req.Msg.GetName(), func(b *box) error { return b.pause(ctx, level, "asked", false) })
}

func (s jobService) Resume(ctx context.Context, req *connect.Request[dsecv1.ResumeJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.group(ctx, req.Msg.GetName(), func(b *box) error { return b.resume(ctx, "asked") })
}

func (s jobService) Stop(ctx context.Context, req *connect.Request[dsecv1.StopJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.group(ctx, req.Msg.GetName(), func(b *box) error { return s.h.stop(ctx, b, cancelled) })
}

func pauseLevel(s string) sandbox.PauseLevel {
	if s == "" {
		return sandbox.Frozen
	}
	return sandbox.PauseLevel(s)
}
