package fncall

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Config is how an engine runs.
type Config struct {
	Dir       string  // of the cache
	Host      string  // identity, for answers
	Places    int     // runs at once; 0: the machine's processors, above which CPU times say little
	Waiting   int     // runs that wait for a place; 0 is 4,096
	Rate      float64 // calls a second of one project; 0 is no bound
	CacheSize int64   // octets; 0 is 2 GiB
	Standbys  int     // interpreters that mode warm keeps ahead; 0: none, and that mode is refused
	GPUs      []Device
}

// Deps are what an engine works with.
type Deps struct {
	Runner    Runner
	Languages Languages
	Log       Log  // nil records nothing and knows no keys
	Jobs      Jobs // nil: every job is there
	Logger    *slog.Logger
	Registry  prometheus.Registerer // nil registers nothing
}

// Jobs knows which jobs take calls.
type Jobs interface {
	// Call notes a call of a job and refuses it with ErrState when the job has expired.
	Call(project, job string) error
}

// Engine runs function calls. It needs no Run: everything it does is done within a call, or ends with one.
type Engine struct {
	cfg     Config
	deps    Deps
	queue   *queue
	rates   *rates
	cache   *Cache
	gpus    *GPUs
	records *records
	m       *metrics

	mu       sync.Mutex
	flights  map[flightKey]*flight
	compiled compiled
}

// Bounds of requests.
const (
	MaxInputs     = 1000
	maxFiles      = 1000
	maxCopies     = 32
	maxCopy       = 16 << 20
	maxAnswer     = 20 << 20 // octets of all results of a request: they are one record
	defaultQueue  = 60 * time.Second
	attempts      = 3
	attemptsPause = 20 * time.Millisecond
)

// New makes an engine.
func New(cfg Config, deps Deps) (*Engine, error) {
	if cfg.Places == 0 {
		cfg.Places = runtime.NumCPU()
	}
	if cfg.Waiting == 0 {
		cfg.Waiting = 4096
	}
	if cfg.CacheSize == 0 {
		cfg.CacheSize = 2 << 30
	}
	if cfg.Places < 1 || cfg.Waiting < 0 || cfg.CacheSize < 0 || cfg.Rate < 0 || cfg.Standbys < 0 || deps.Runner == nil || deps.Logger == nil {
		return nil, fmt.Errorf("function calls: configuration is out of range: %w", sandbox.ErrInvalid)
	}
	cache, err := OpenCache(cfg.Dir, cfg.CacheSize)
	if err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, deps: deps, queue: newQueue(cfg.Places, cfg.Waiting), rates: &rates{rate: cfg.Rate, now: time.Now, by: map[string]*bucket{}},
		cache: cache, gpus: NewGPUs(cfg.GPUs), flights: map[flightKey]*flight{}, compiled: newCompiled()}
	e.records = newRecords(deps.Log)
	e.m = newMetrics(e, deps.Registry)
	return e, nil
}

// Languages are those that the engine knows.
func (e *Engine) Languages() Languages { return e.deps.Languages }

// timing adds up what a call waited.
type timing struct {
	mu     sync.Mutex
	queued time.Duration
}

func (t *timing) add(d time.Duration) {
	t.mu.Lock()
	t.queued += d
	t.mu.Unlock()
}

// job is what all calls have in common.
type job struct {
	project string
	mode    string
	bound   time.Duration // of a wait for a place
	gpu     string
	t       timing
}

func newJob(project, mode, gpu string, queueMs int64) (*job, error) {
	j := &job{project: project, mode: mode, gpu: gpu, bound: defaultQueue}
	if queueMs != 0 {
		d, err := rpc.Milliseconds("queue_ms", queueMs)
		if err != nil {
			return nil, err
		}
		if d > 10*time.Minute {
			return nil, fmt.Errorf("queue_ms %d: at most 600,000: %w", queueMs, sandbox.ErrInvalid)
		}
		j.bound = d
	}
	switch mode {
	case "", "fresh", "pooled", "warm":
		return j, nil
	}
	return nil, fmt.Errorf("mode %.40q: want fresh, pooled or warm: %w", mode, sandbox.ErrInvalid)
}

// checkMode refuses mode warm where nothing can be started ahead.
func (e *Engine) checkMode(mode string, l *Language) error {
	switch {
	case mode != "warm":
		return nil
	case !l.Warm:
		return fmt.Errorf("mode warm: not for language %s; its table would have to say warm = true, as that of an interpreter can: %w", l.Name, sandbox.ErrUnsupported)
	case e.cfg.Standbys == 0:
		return fmt.Errorf("mode warm: this host keeps no interpreters ahead (fncall.warm): %w", sandbox.ErrUnsupported)
	}
	return nil
}

// Run does one call.
func (e *Engine) Run(ctx context.Context, project string, q *dsecv1.RunCallRequest) (*dsecv1.RunCallResponse, error) {
	j, err := newJob(project, q.GetMode(), q.GetGpu(), q.GetQueueMs())
	if err != nil {
		return nil, err
	}
	return once(ctx, e, project, asked{kind: kindRun, job: q.GetJob(), key: q.GetKey(), hash: q.GetRequestHash(), hashOnly: q.GetHashOnly(), n: 1, request: q,
		programs: []*dsecv1.CallProgram{q.GetProgram()}}, func(ctx context.Context) (*dsecv1.RunCallResponse, error) {
		p, err := e.resolve(project, q.GetProgram(), q.GetLimits(), q.GetCompileLimits(), q.GetRoots())
		if err == nil {
			err = e.checkMode(q.GetMode(), p.lang)
		}
		if err != nil {
			return nil, err
		}
		in, err := e.input(project, p, q.GetInput(), q.GetOutputs())
		if err != nil {
			return nil, err
		}
		r := &dsecv1.RunCallResponse{Host: e.cfg.Host}
		arts, c, err := e.compile(ctx, j, p)
		r.Compile = c
		if err == nil && (c == nil || c.Verdict == string(OK)) {
			r.Result, err = e.execute(ctx, j, p, arts, in)
		}
		r.Verdict, r.QueueUs = whole(r.Compile, r.Result), j.t.queued.Microseconds()
		return r, err
	}, func(r *dsecv1.RunCallResponse, key string, recorded bool) { r.Key, r.Recorded = key, recorded })
}

func whole(compile, result *dsecv1.CallResult) string {
	if result == nil {
		return compile.GetVerdict()
	}
	return result.GetVerdict()
}

// RunBatch compiles once and runs for each input.
func (e *Engine) RunBatch(ctx context.Context, project string, q *dsecv1.RunCallBatchRequest) (*dsecv1.RunCallBatchResponse, error) {
	j, err := newJob(project, q.GetMode(), q.GetGpu(), q.GetQueueMs())
	if err != nil {
		return nil, err
	}
	if n := len(q.GetInputs()); n == 0 || n > MaxInputs {
		return nil, fmt.Errorf("calls: %d inputs, want 1 to %d: %w", n, MaxInputs, sandbox.ErrInvalid)
	}
	return once(ctx, e, project, asked{kind: kindBatch, job: q.GetJob(), key: q.GetKey(), hash: q.GetRequestHash(), hashOnly: q.GetHashOnly(), n: len(q.GetInputs()),
		request: q, programs: []*dsecv1.CallProgram{q.GetProgram()}}, func(ctx context.Context) (*dsecv1.RunCallBatchResponse, error) {
		p, err := e.resolve(project, q.GetProgram(), q.GetLimits(), q.GetCompileLimits(), q.GetRoots())
		if err == nil {
			err = e.checkMode(q.GetMode(), p.lang)
		}
		if err != nil {
			return nil, err
		}
		ins := make([]*input, len(q.GetInputs()))
		for i, in := range q.GetInputs() {
			if ins[i], err = e.input(project, p, in, q.GetOutputs()); err != nil {
				return nil, fmt.Errorf("inputs[%d]: %w", i, err)
			}
		}
		r := &dsecv1.RunCallBatchResponse{Host: e.cfg.Host}
		arts, c, err := e.compile(ctx, j, p)
		r.Compile, r.Verdict = c, c.GetVerdict()
		if err != nil || c != nil && c.Verdict != string(OK) {
			return r, err
		}
		err = e.each(ctx, j, p, arts, ins, q.GetStopEarly(), r)
		r.QueueUs = j.t.queued.Microseconds()
		return r, err
	}, func(r *dsecv1.RunCallBatchResponse, key string, recorded bool) { r.Key, r.Recorded = key, recorded })
}

// each runs all inputs, as many at once as there are places.
func (e *Engine) each(ctx context.Context, j *job, p *program, arts []artifact, ins []*input, stop bool, r *dsecv1.RunCallBatchResponse) error {
	r.Results = make([]*dsecv1.CallResult, len(ins))
	var mu sync.Mutex
	var size int
	stopped := false
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(e.cfg.Places)
	for i, in := range ins {
		g.Go(func() error {
			mu.Lock()
			skip := stopped
			mu.Unlock()
			if skip {
				r.Results[i] = &dsecv1.CallResult{Verdict: string(Cancelled), Error: "an earlier input failed", Memory: -1, Id: in.id}
				return nil
			}
			res, err := e.execute(run, j, p, arts, in)
			if err != nil {
				return fmt.Errorf("inputs[%d]: %w", i, err)
			}
			r.Results[i] = res
			mu.Lock()
			defer mu.Unlock()
			stopped = stopped || stop && res.Verdict != string(OK)
			if size += sizeOf(res); size > maxAnswer {
				return fmt.Errorf("results have more than %d octets; ask for fewer inputs at once or less output: %w", maxAnswer, sandbox.ErrExhausted)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	r.Verdict = string(OK)
	for _, x := range r.Results { // one that an earlier failure kept from running tells nothing where another does
		if x.Verdict != string(OK) && (r.Verdict == string(OK) || r.Verdict == string(Cancelled)) {
			r.Verdict = x.Verdict
		}
	}
	return nil
}

// RunPair runs a program with its interactor.
func (e *Engine) RunPair(ctx context.Context, project string, q *dsecv1.RunCallPairRequest) (*dsecv1.RunCallPairResponse, error) {
	j, err := newJob(project, q.GetMode(), "", q.GetQueueMs())
	if err != nil {
		return nil, err
	}
	if q.GetMode() == "warm" {
		return nil, fmt.Errorf("mode warm: the streams of a pair belong to both, so its programs begin fresh: %w", sandbox.ErrUnsupported)
	}
	sides := []*dsecv1.CallSide{q.GetProgram(), q.GetInteractor()}
	return once(ctx, e, project, asked{kind: kindPair, job: q.GetJob(), key: q.GetKey(), hash: q.GetRequestHash(), hashOnly: q.GetHashOnly(), n: 2, request: q,
		programs: []*dsecv1.CallProgram{sides[0].GetProgram(), sides[1].GetProgram()}}, func(ctx context.Context) (*dsecv1.RunCallPairResponse, error) {
		r := &dsecv1.RunCallPairResponse{Host: e.cfg.Host}
		var progs [2]*program
		var ins [2]*input
		var arts [2][]artifact
		compiles := [2]**dsecv1.CallResult{&r.ProgramCompile, &r.InteractorCompile}
		for i, s := range sides {
			name := [2]string{"program", "interactor"}[i]
			if s.GetInput().GetStdin() != "" || len(s.GetInput().GetStdinRaw()) > 0 || s.GetInput().GetStdinContent() != "" {
				return nil, fmt.Errorf("%s: its standard input is the other's output: %w", name, sandbox.ErrInvalid)
			}
			if progs[i], err = e.resolve(project, s.GetProgram(), s.GetLimits(), s.GetCompileLimits(), q.GetRoots()); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			if ins[i], err = e.input(project, progs[i], s.GetInput(), s.GetOutputs()); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
		for i := range sides {
			if arts[i], *compiles[i], err = e.compile(ctx, j, progs[i]); err != nil {
				return r, err
			}
			if c := *compiles[i]; c != nil && c.Verdict != string(OK) {
				return r, nil
			}
		}
		var first int
		r.Program, r.Interactor, first, err = e.executePair(ctx, j, progs, arts, ins)
		r.FirstEnded = [2]string{"program", "interactor"}[first]
		r.QueueUs = j.t.queued.Microseconds()
		return r, err
	}, func(r *dsecv1.RunCallPairResponse, key string, recorded bool) { r.Key, r.Recorded = key, recorded })
}

// place waits for room to run, and for a device where one is asked for. The device comes first: who waits for one must not keep others from
// running.
func (e *Engine) place(ctx context.Context, j *job, n int, gpu string) (dev Device, give func(), err error) {
	start := time.Now()
	back := func() {}
	if gpu != "" {
		bound, cancel := context.WithTimeout(ctx, j.bound)
		defer cancel()
		if dev, back, err = e.gpus.Take(bound, gpu); err != nil {
			return Device{}, nil, err
		}
	}
	release, err := e.queue.take(ctx, j.project, n, max(j.bound-time.Since(start), 0))
	waited := time.Since(start)
	j.t.add(waited)
	e.m.queued.Observe(waited.Seconds())
	if err != nil {
		back()
		return Device{}, nil, err
	}
	return dev, func() { release(); back() }, nil
}

// execute runs a program on an input. Its files are opened when it has a place: thousands may wait.
func (e *Engine) execute(ctx context.Context, j *job, p *program, arts []artifact, in *input) (*dsecv1.CallResult, error) {
	if j.gpu != "" && len(e.gpus.devices) == 0 {
		_, _, err := e.gpus.Take(ctx, j.gpu)
		return nil, err
	}
	dev, release, err := e.place(ctx, j, 1, j.gpu)
	if err != nil {
		return e.gaveUp(ctx, err, in.id)
	}
	defer release()
	x, done, err := e.prepare(j, p, arts, in)
	if err != nil {
		return nil, err
	}
	defer done()
	x.Devices, x.Env = dev.Nodes, sandbox.MergeEnv(x.Env, dev.Env)
	x.Card, x.Alone = dev.Name, j.gpu == "exclusive"
	exit, err := e.again(ctx, func() (*Exit, error) { return e.deps.Runner.Exec(ctx, x) })
	if err != nil {
		return nil, err
	}
	e.m.begun(j, exit)
	return e.result(exit, x.Limits, in, j.project, maxAnswer)
}

// gaveUp makes the result of a call whose client gave it up while it waited.
func (e *Engine) gaveUp(ctx context.Context, err error, id string) (*dsecv1.CallResult, error) {
	if ctx.Err() == nil {
		return nil, err
	}
	return &dsecv1.CallResult{Verdict: string(Cancelled), Error: "given up before it began", Memory: -1, Id: id}, nil
}

// again runs until the platform does not fail, a few times; the last failure becomes a result with the verdict SYS.
func (e *Engine) again(ctx context.Context, run func() (*Exit, error)) (*Exit, error) {
	for n := 1; ; n++ {
		exit, err := run()
		switch {
		case err == nil && exit.Failure == "":
			return exit, nil
		case ctx.Err() != nil:
			return &Exit{Facts: Facts{Cancelled: true, Memory: -1}}, nil
		case err != nil && (errors.Is(err, sandbox.ErrInvalid) || errors.Is(err, sandbox.ErrUnsupported) || errors.Is(err, sandbox.ErrDenied)):
			return nil, err
		case n == attempts:
			if err != nil {
				exit = &Exit{Facts: Facts{Failure: err.Error(), Memory: -1}}
			}
			e.deps.Logger.Error("function call", "err", exit.Failure, "attempts", n)
			return exit, nil
		}
		e.m.retries.Inc()
		select {
		case <-time.After(attemptsPause * time.Duration(n)):
		case <-ctx.Done():
		}
	}
}

func (e *Engine) executePair(ctx context.Context, j *job, p [2]*program, arts [2][]artifact, in [2]*input) (a, b *dsecv1.CallResult, first int, err error) {
	_, release, err := e.place(ctx, j, 2, "")
	if err != nil {
		if a, err = e.gaveUp(ctx, err, in[0].id); err != nil {
			return nil, nil, 0, err
		}
		b, err = e.gaveUp(ctx, err, in[1].id)
		return a, b, 0, err
	}
	defer release()
	var x [2]*Exec
	for i := range x {
		var done func()
		if x[i], done, err = e.prepare(j, p[i], arts[i], in[i]); err != nil {
			return nil, nil, 0, err
		}
		defer done()
	}
	var second *Exit
	exit, err := e.again(ctx, func() (exit *Exit, err error) {
		exit, second, first, err = e.deps.Runner.Pair(ctx, x[0], x[1])
		return exit, err
	})
	if err != nil {
		return nil, nil, 0, err
	}
	if second == nil { // what is to be said of the one holds for both
		second = exit
	}
	if a, err = e.result(exit, x[0].Limits, in[0], j.project, maxAnswer/2); err != nil {
		return nil, nil, 0, err
	}
	b, err = e.result(second, x[1].Limits, in[1], j.project, maxAnswer/2)
	return a, b, first, err
}
