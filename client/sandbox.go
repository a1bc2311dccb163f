package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Options of a new sandbox. Zero values take the environment's defaults, else the platform's (SPECIFICATION.md).
type Options struct {
	Environment string   // name or name@version; or
	Layers      []string // layer references, lowest first; or
	Image       string   // OCI reference, as python:3.12; imported when it is not there
	Pull        string   // of Image: missing (default) | always
	ImageEntry  bool     // start the image's own entrypoint and command as the sandbox's entrypoint
	Job         string
	Key         string // idempotency key; made by the server when empty
	Name        string
	Labels      map[string]string
	Memory      int64 // octets
	Disk        int64 // octets
	Pids        int64
	CPU         float64 // cap in CPUs; 0 is no cap
	CPUWeight   int64
	Idle        time.Duration
	Total       time.Duration
	OnIdle      string // stop | pause
	Network     string // none | open
	User        string
	Cwd         string
	Env         map[string]string
	Hostname    string
	Entrypoint  []string
	BestEffort  bool
	Backend     string // container (default), microvm or vm
	// Runtime of a container: direct (default), crun, runc or gvisor, as far as Capabilities tells them.
	Runtime string
	// AllowDegraded takes a microvm or vm on a host without hardware acceleration, where code runs translated.
	AllowDegraded bool
	NoNewPrivs    bool
	Durability    string            // process (default) | host | store
	Volumes       map[string]string // path -> layer (id, name or name@version) that is seen there, read-only
	Deadline      time.Duration
	Trace         string   // off (default) | light | full: what is recorded of what steps do, beside their outcomes
	Volatile      []string // paths of caches and the like, on top of the environment's: not looked into by Trace, not compared by replay
}

func (o *Options) request() *dsecv1.CreateRequest {
	r := &dsecv1.CreateRequest{
		Environment: o.Environment, Layers: o.Layers, Image: o.Image, Pull: o.Pull, ImageEntrypoint: o.ImageEntry, Backend: cmp.Or(o.Backend, "container"), Runtime: o.Runtime, AllowDegraded: o.AllowDegraded, Job: o.Job, Key: o.Key, Name: o.Name, Labels: o.Labels,
		Network: o.Network, User: o.User, Env: envVars(o.Env, nil), Hostname: o.Hostname, Entrypoint: o.Entrypoint,
		BestEffort: o.BestEffort, NoNewPrivs: o.NoNewPrivs, Durability: o.Durability, DeadlineMs: o.Deadline.Milliseconds(),
		Resources: &dsecv1.Resources{Memory: o.Memory, Disk: o.Disk, Pids: o.Pids, CpuMilli: int64(o.CPU * 1000), CpuWeight: o.CPUWeight},
		Lifetime:  &dsecv1.Lifetime{IdleMs: o.Idle.Milliseconds(), TotalMs: o.Total.Milliseconds(), OnIdle: o.OnIdle},
	}
	r.Cwd, r.CwdRaw = octets(o.Cwd)
	r.Trace, r.VolatilePaths = o.Trace, o.Volatile
	for _, p := range slices.Sorted(maps.Keys(o.Volumes)) {
		r.Volumes = append(r.Volumes, &dsecv1.Volume{Layer: o.Volumes[p], Path: p})
	}
	return r
}

// Sandbox is a handle to one sandbox.
type Sandbox struct {
	ID   string
	c    *Client
	Data *dsecv1.Sandbox // as the server last told it; nil for a handle made from an ID alone
}

// RunContainer makes a container sandbox and returns when it can take commands.
func (c *Client) RunContainer(ctx context.Context, o Options) (*Sandbox, error) {
	r, err := call(ctx, c, c.Sandboxes.Create, o.request())
	if err != nil {
		return nil, err
	}
	return c.handle(r.Sandbox), nil
}

// RunContainers makes n sandboxes from one request (keys K/1 to K/n): all of them, or as many as possible with a reason for each that
// failed.
func (c *Client) RunContainers(ctx context.Context, o Options, n int, all bool) ([]*Sandbox, []*dsecv1.ItemError, error) {
	r, err := call(ctx, c, c.Sandboxes.CreateBatch, &dsecv1.CreateBatchRequest{Request: o.request(), Count: int32(n), All: all})
	if err != nil {
		return nil, nil, err
	}
	var out []*Sandbox
	for _, s := range r.Sandboxes {
		out = append(out, c.handle(s))
	}
	return out, r.Errors, nil
}

func (c *Client) handle(s *dsecv1.Sandbox) *Sandbox { return &Sandbox{ID: s.Id, c: c, Data: s} }

// Sandbox returns a handle by ID or name without asking the server.
func (c *Client) Sandbox(id string) *Sandbox { return &Sandbox{ID: id, c: c} }

// Get asks for a sandbox by ID or name; it does not wake it.
func (c *Client) Get(ctx context.Context, id string) (*Sandbox, error) {
	r, err := call(ctx, c, c.Sandboxes.Get, &dsecv1.GetRequest{Id: id})
	if err != nil {
		return nil, err
	}
	return c.handle(r.Sandbox), nil
}

// List returns all sandboxes that match, page by page. When hosts did not answer, what the others have is returned together with an
// error that wraps ErrUnavailable and names them.
func (c *Client) List(ctx context.Context, sel *dsecv1.Selector) ([]*Sandbox, error) {
	var out []*Sandbox
	var missing []error
	q := &dsecv1.ListRequest{Selector: sel, PageSize: 1000}
	for {
		r, err := call(ctx, c, c.Sandboxes.List, q)
		if err != nil {
			return nil, err
		}
		for _, s := range r.Sandboxes {
			out = append(out, c.handle(s))
		}
		for _, e := range r.Errors {
			missing = append(missing, &Error{Code: e.Code, Message: e.Message, kind: ErrUnavailable})
		}
		if r.NextPageToken == "" {
			return out, errors.Join(missing...)
		}
		q = &dsecv1.ListRequest{Selector: sel, PageSize: 1000, PageToken: r.NextPageToken}
	}
}

// StopAll stops every sandbox that the selector matches and returns those it could not stop.
func (c *Client) StopAll(ctx context.Context, sel *dsecv1.Selector) (*dsecv1.SelectorResult, error) {
	return call(ctx, c, c.Sandboxes.Stop, &dsecv1.StopRequest{Selector: sel})
}

// StopKey stops what was or will be created under a key: the way to cancel a create whose answer was lost.
func (c *Client) StopKey(ctx context.Context, job, key, name string) error {
	_, err := call(ctx, c, c.Sandboxes.Stop, &dsecv1.StopRequest{Job: job, Key: key, Name: name})
	return err
}

// Stop ends the sandbox and returns when nothing of it is left but its record and log. It is idempotent.
func (s *Sandbox) Stop(ctx context.Context) error {
	r, err := call(ctx, s.c, s.c.Sandboxes.Stop, &dsecv1.StopRequest{Id: s.ID})
	if err != nil {
		return err
	}
	return firstError(r)
}

// Close stops the sandbox with a deadline of its own, so that a deferred Close works after the caller's context ended.
func (s *Sandbox) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return s.Stop(ctx)
}

// Pause freezes the sandbox; any later request that needs it wakes it.
func (s *Sandbox) Pause(ctx context.Context) error {
	r, err := call(ctx, s.c, s.c.Sandboxes.Pause, &dsecv1.PauseRequest{Id: s.ID})
	if err != nil {
		return err
	}
	return firstError(r)
}

// Resume wakes a paused sandbox.
func (s *Sandbox) Resume(ctx context.Context) error {
	r, err := call(ctx, s.c, s.c.Sandboxes.Resume, &dsecv1.ResumeRequest{Id: s.ID})
	if err != nil {
		return err
	}
	return firstError(r)
}

func firstError(r *dsecv1.SelectorResult) error {
	if len(r.Errors) == 0 {
		return nil
	}
	e := r.Errors[0]
	var code connect.Code
	if code.UnmarshalText([]byte(e.Code)) != nil {
		code = connect.CodeUnknown
	}
	return &Error{Code: e.Code, Message: e.Message, kind: codes[code]}
}

// Refresh asks the server for the sandbox's present state.
func (s *Sandbox) Refresh(ctx context.Context) error {
	n, err := s.c.Get(ctx, s.ID)
	if err != nil {
		return err
	}
	s.ID, s.Data = n.ID, n.Data
	return nil
}

// SetLifetime changes the TTLs; zero leaves one as it is. Total counts from now.
func (s *Sandbox) SetLifetime(ctx context.Context, idle, total time.Duration) error {
	_, err := call(ctx, s.c, s.c.Sandboxes.SetLifetime, &dsecv1.SetLifetimeRequest{Id: s.ID,
		Lifetime: &dsecv1.Lifetime{IdleMs: idle.Milliseconds(), TotalMs: total.Milliseconds()}})
	return err
}

// Snapshot makes the sandbox's changes a new layer; with a name it is published and the answer is name@version, else the layer's ID.
func (s *Sandbox) Snapshot(ctx context.Context, publish string) (ref string, err error) {
	r, err := call(ctx, s.c, s.c.Sandboxes.Snapshot, &dsecv1.SnapshotRequest{Id: s.ID, Publish: publish})
	if err != nil {
		return "", err
	}
	if r.Published != "" {
		return r.Published, nil
	}
	return r.Layer, nil
}

// Stats tells what the sandbox uses now.
func (s *Sandbox) Stats(ctx context.Context) (*dsecv1.StatsResponse, error) {
	return call(ctx, s.c, s.c.Sandboxes.Stats, &dsecv1.StatsRequest{Id: s.ID})
}

func (s *Sandbox) String() string { return fmt.Sprintf("sandbox %s", s.ID) }

// PauseAll freezes every sandbox that the selector matches; level is frozen when empty.
func (c *Client) PauseAll(ctx context.Context, sel *dsecv1.Selector, level string) (*dsecv1.SelectorResult, error) {
	return call(ctx, c, c.Sandboxes.Pause, &dsecv1.PauseRequest{Selector: sel, Level: level})
}

// ResumeAll wakes every sandbox that the selector matches.
func (c *Client) ResumeAll(ctx context.Context, sel *dsecv1.Selector) (*dsecv1.SelectorResult, error) {
	return call(ctx, c, c.Sandboxes.Resume, &dsecv1.ResumeRequest{Selector: sel})
}
