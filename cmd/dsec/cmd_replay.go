package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/replay"
)

// replayLabel marks the sandboxes that replays make; its value is the ID of the one that is replayed.
const replayLabel = "dsec-replay"

type replayCmd struct {
	ID         string            `arg:"" help:"Sandbox ID or name (ended ones too, by ID)."`
	Secret     map[string]string `help:"Value of a secret environment entry, which the log does not hold; repeat." placeholder:"NAME=VALUE"`
	Normaliser []string          `help:"Only these: time, date, duration, pid, address, temporary name; none for exact equality." placeholder:"NAME"`
	Timeout    time.Duration     `help:"Of a step that took less; else ten times what it took." default:"1m"`
	Keep       bool              `help:"Leave the fresh sandbox running."`
	Diff       bool              `help:"Show what differs." default:"true" negatable:""`
}

// Run replays a trajectory. The code is 1 when a step came to something different.
func (x *replayCmd) Run(ctx context.Context, c *cli) (err error) {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	p := &player{cl: cl, x: x, secrets: x.Secret, compare: replay.New(x.Normaliser...), open: map[string]*playing{}, fate: map[int64]string{}}
	p.report = func(s *stepReport) { x.print(c, s) }
	if p.was, err = cl.Get(ctx, x.ID); err != nil {
		return err
	}
	if err := p.lookAhead(ctx); err != nil {
		return err
	}
	if p.now, err = cl.RunContainer(ctx, p.options); err != nil {
		return fmt.Errorf("make a fresh sandbox: %w", err)
	}
	defer func() {
		if !x.Keep {
			err = errors.Join(err, p.now.Close())
		}
	}()
	stop := p.follow(ctx)
	err = p.play(ctx)
	stop()
	if err != nil {
		return err
	}
	if c.Output != "json" {
		fmt.Printf("%s: %d equal, %d equal after normalisers, %d different, %d not comparable (replayed in %s)\n", plural(p.total(), "step"),
			p.counts[replay.Equal], p.counts[replay.EqualAfter], p.counts[replay.Different], p.counts[replay.NotComparable], p.now.ID)
		switch {
		case !p.hasPaths():
			fmt.Println("changed paths were not compared: the sandbox was made without --trace")
		default:
			fmt.Printf("%s compared", plural(p.paths, "changed path"))
			if len(p.volatile) > 0 {
				fmt.Printf("; volatile, not compared: %s", plain(strings.Join(slices.Sorted(maps.Keys(p.volatile)), ", ")))
			}
			fmt.Println()
		}
	}
	if p.counts[replay.Different] > 0 {
		return exitCode(1)
	}
	return nil
}

// stepReport is what a person or a program reads of one step.
type stepReport struct {
	Step string `json:"step"`
	Seq  int64  `json:"seq"`
	Kind string `json:"kind"`
	What string `json:"what,omitempty"`
	replay.Report
}

func (x *replayCmd) print(c *cli, s *stepReport) {
	if c.Output == "json" {
		b, err := json.Marshal(s)
		if err == nil {
			fmt.Println(string(b))
		}
		return
	}
	fmt.Printf("%6d  %-10s %-24s %s\n", s.Seq, s.Kind, s.Step, plain(s.Report.String()))
	if s.Verdict == replay.Different {
		fmt.Printf("        %s\n", plain(s.What))
		if x.Diff {
			for l := range strings.Lines(s.Diff) {
				fmt.Printf("        %s\n", plain(strings.TrimSuffix(l, "\n")))
			}
		}
	}
}

// player does the recorded steps again, in the order of the log: a step starts when all have ended that had ended before it started.
type player struct {
	cl      *client.Client
	x       *replayCmd
	secrets map[string]string
	compare *replay.Comparer
	report  func(*stepReport)

	was, now *client.Sandbox
	options  client.Options
	fate     map[int64]string // by seq of a step's start: "void" (never ran), "ended", or nothing
	signals  map[string]bool  // commands that were sent signals
	open     map[string]*playing
	counts   map[replay.Verdict]int

	traces   map[string]*dsecv1.StepTrace // what recorded steps did
	paths    int                          // that were compared
	volatile map[string]bool              // that were met
	seen     traces                       // what steps did now
}

// playing is a step that was started and whose recorded end has not been met.
type playing struct {
	start   *dsecv1.LogRecord
	command *dsecv1.StartRequest // nil for other steps
	proc    *client.Process
	skip    string // why it was not done, or can't be compared
	stdout  bytes.Buffer
	stderr  bytes.Buffer
}

func (p *player) total() (n int) {
	for _, v := range p.counts {
		n += v
	}
	return n
}

// lookAhead reads what must be known before the first step: how the sandbox was made, and which steps never ran.
func (p *player) lookAhead(ctx context.Context) error {
	p.signals, p.counts = map[string]bool{}, map[replay.Verdict]int{}
	p.traces, p.volatile = map[string]*dsecv1.StepTrace{}, map[string]bool{}
	var whole whole
	var spec *dsecv1.Spec
	last := map[string]int64{}
	var restored restores
	err := p.cl.Log(ctx, &dsecv1.ReadLogRequest{Sandbox: p.was.ID, FromSeq: 1}, func(r *dsecv1.LogRecord) error {
		whole.add(r)
		if restored.part(r) {
			return nil
		}
		switch r.Kind {
		case "trace":
			p.learn(r)
		case "create":
			q := &dsecv1.HostCreateRequest{}
			if err := fromJSON(r.RequestJson, q); err != nil {
				return fmt.Errorf("read how it was made: %w", err)
			}
			spec = q.Spec
		case "void":
			p.fate[last[r.Step]] = "void"
		case "end":
			p.fate[last[r.Step]] = "ended"
		case "signal":
			p.signals[r.Step] = true
		case "stdin", "resize", "session", "lifetime":
		default:
			if r.RequestJson != "" {
				last[r.Step] = r.Seq
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range whole.missing() {
		p.counts[s.Verdict]++
		p.report(s)
	}
	if spec == nil {
		return errors.New("the record of its creation is lost")
	}
	p.options = client.Options{Layers: spec.Layers, Network: spec.Network, User: spec.User, Cwd: octetsOf(spec.Cwd, spec.CwdRaw), Hostname: spec.Hostname,
		Entrypoint: spec.Entrypoint, NoNewPrivs: spec.NoNewPrivs, BestEffort: spec.BestEffort, Backend: spec.Backend, AllowDegraded: spec.AllowDegraded, Env: map[string]string{},
		Labels: map[string]string{replayLabel: p.was.ID}}
	if r := spec.Resources; r != nil {
		p.options.Memory, p.options.Disk, p.options.Pids, p.options.CPU, p.options.CPUWeight = r.Memory, r.Disk, r.Pids, float64(r.CpuMilli)/1000, r.CpuWeight
	}
	if p.hasPaths() {
		p.options.Trace = "light"
	}
	p.options.Volatile = spec.VolatilePaths
	for _, v := range spec.Env {
		name := octetsOf(v.Name, v.NameRaw)
		value, given := p.secrets[name]
		switch {
		case !v.Secret:
			value = octetsOf(v.Value, v.ValueRaw)
		case !given:
			return fmt.Errorf("the sandbox had a secret %s, of which the log holds a hash alone: give --secret %s=VALUE", name, name)
		}
		p.options.Env[name] = value
	}
	return nil
}

func fromJSON(text string, m proto.Message) error {
	return (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(text), m)
}

func octetsOf(text string, raw []byte) string {
	if len(raw) > 0 {
		return string(raw)
	}
	return text
}

// restores leaves out what restores wrote into a log: a replay does the original steps, in one sandbox.
type restores struct{ seen, under bool }

func (x *restores) part(r *dsecv1.LogRecord) bool {
	switch r.Kind {
	case "redo", "restored", "recalled":
		return true
	case "create":
		x.under = x.seen && r.Epoch > 0
		x.seen = true
		return x.under
	case "state":
		if x.under && r.State == "running" {
			x.under = false
		}
		return x.under
	case "void":
		was := x.under
		x.under = false
		return was
	}
	return x.under
}

// play goes through the log once more and does what it says.
func (p *player) play(ctx context.Context) error {
	stopped := false
	var restored restores
	err := p.cl.Log(ctx, &dsecv1.ReadLogRequest{Sandbox: p.was.ID, FromSeq: 1, Output: true}, func(r *dsecv1.LogRecord) error {
		if restored.part(r) {
			return nil
		}
		switch r.Kind {
		case "state":
			stopped = r.State != "running" && stopped || r.State == "stopping" || r.State == "stopped" || r.State == "failed"
		case "create", "trace", "lifetime", "verdict", "denied", "session_opened", "resize", "signal", "void", "lost", "create_failed":
		case "output":
			if o := p.open[r.Step]; o != nil && !r.Late {
				o.take(r)
			}
		case "stdin":
			return p.stdin(ctx, r)
		case "session":
			return p.session(ctx, r)
		case "session_end":
			if !stopped {
				_, err := p.cl.Commands.CloseSession(ctx, connect.NewRequest(&dsecv1.CloseSessionRequest{Sandbox: p.now.ID, Name: r.Step}))
				if code := connect.CodeOf(err); err != nil && code != connect.CodeNotFound && code != connect.CodeFailedPrecondition {
					return fmt.Errorf("close session %s: %w", r.Step, err)
				}
			}
		case "end":
			return p.end(ctx, r)
		case "command":
			return p.start(ctx, r)
		default:
			if p.fate[r.Seq] != "void" && r.RequestJson != "" {
				p.open[r.Step] = &playing{start: r}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, o := range p.open {
		p.tell(o, replay.Report{Verdict: replay.NotComparable, Reason: "it has no recorded end"})
	}
	return nil
}

// take collects recorded output, of which no more than is looked at is kept.
func (o *playing) take(r *dsecv1.LogRecord) {
	b := &o.stdout
	if r.Stream == "stderr" {
		b = &o.stderr
	}
	if int64(b.Len()) != r.Offset || b.Len() >= replay.Most {
		return // behind a gap, or long enough: the hash decides
	}
	b.Write(r.Data[:min(len(r.Data), replay.Most-b.Len())])
}

func (p *player) tell(o *playing, r replay.Report) {
	p.paths += r.Paths
	for _, v := range r.Volatile {
		p.volatile[v] = true
	}
	s := &stepReport{Step: o.start.Step, Seq: o.start.Seq, Kind: o.start.Kind, What: requestText(o.start.Kind, o.start.RequestJson), Report: r}
	p.counts[r.Verdict]++
	p.report(s)
}

// input is the octets that a record names.
func (p *player) input(ctx context.Context, r *dsecv1.LogRecord) (data []byte, ok bool, err error) {
	switch r.Input {
	case "":
		return nil, true, nil
	case "inline":
		return r.Data, true, nil
	case "hash":
		return nil, false, nil
	}
	st, err := p.cl.Logs.ReadInput(ctx, connect.NewRequest(&dsecv1.ReadInputRequest{Sandbox: p.was.ID, Seq: r.Seq}))
	if err != nil {
		return nil, false, err
	}
	defer st.Close()
	for st.Receive() {
		data = append(data, st.Msg().Data...)
	}
	return data, true, st.Err()
}

// start starts a command.
func (p *player) start(ctx context.Context, r *dsecv1.LogRecord) error {
	if p.fate[r.Seq] == "void" {
		return nil
	}
	q := &dsecv1.StartRequest{}
	if err := fromJSON(r.RequestJson, q); err != nil {
		return fmt.Errorf("step %s: read its request: %w", r.Step, err)
	}
	o := &playing{start: r, command: q}
	p.open[r.Step] = o
	switch {
	case q.Terminal != nil:
		o.skip = "it had a terminal: what was typed and when is not recorded"
	case p.signals[r.Step]:
		o.skip = "it was sent a signal, at a time that can't be met again"
	}
	if r.Step == "entrypoint" && len(p.options.Entrypoint) > 0 {
		o.proc = p.now.Process(r.Step)
		return nil
	}
	for _, v := range q.Env {
		name := octetsOf(v.Name, v.NameRaw)
		if value, given := p.secrets[name]; v.Secret && given {
			v.Value, v.ValueRaw = value, nil
		} else if v.Secret {
			o.skip = fmt.Sprintf("it had a secret: give --secret %s=VALUE", name)
			return nil
		}
	}
	data, ok, err := p.input(ctx, r)
	if err != nil {
		return fmt.Errorf("step %s: read its standard input: %w", r.Step, err)
	}
	if !ok {
		o.skip = "its standard input was not kept"
		return nil
	}
	q.Sandbox, q.Id, q.Stdin = p.now.ID, r.Step, data
	if _, err := p.cl.Commands.Start(ctx, connect.NewRequest(q)); err != nil {
		return fmt.Errorf("step %s: %w", r.Step, err)
	}
	o.proc = p.now.Process(r.Step)
	return nil
}

func (p *player) stdin(ctx context.Context, r *dsecv1.LogRecord) error {
	o := p.open[r.Step]
	if o == nil || o.proc == nil {
		return nil
	}
	data, ok, err := p.input(ctx, r)
	if err != nil {
		return fmt.Errorf("step %s: read its standard input: %w", r.Step, err)
	}
	if !ok {
		o.skip = "its standard input was not kept"
		return nil
	}
	q := &dsecv1.WriteStdinRequest{}
	if err := fromJSON(r.RequestJson, q); err != nil {
		return fmt.Errorf("step %s: read its standard input: %w", r.Step, err)
	}
	q.Sandbox, q.Id, q.Offset, q.Data = p.now.ID, r.Step, r.Offset, data
	if _, err := p.cl.Commands.WriteStdin(ctx, connect.NewRequest(q)); err != nil && connect.CodeOf(err) != connect.CodeFailedPrecondition {
		return fmt.Errorf("step %s: write its standard input: %w", r.Step, err)
	}
	return nil
}

func (p *player) session(ctx context.Context, r *dsecv1.LogRecord) error {
	q := &dsecv1.OpenSessionRequest{}
	if err := fromJSON(r.RequestJson, q); err != nil {
		return fmt.Errorf("session %s: read its request: %w", r.Step, err)
	}
	for _, v := range q.Env {
		name := octetsOf(v.Name, v.NameRaw)
		if value, given := p.secrets[name]; v.Secret && given {
			v.Value, v.ValueRaw = value, nil
		} else if v.Secret {
			return fmt.Errorf("session %s had a secret %s: give --secret %s=VALUE", r.Step, name, name)
		}
	}
	q.Sandbox, q.Name = p.now.ID, r.Step
	if _, err := p.cl.Commands.OpenSession(ctx, connect.NewRequest(q)); err != nil {
		return fmt.Errorf("session %s: %w", r.Step, err)
	}
	return nil
}

// end waits for the step's end and compares.
func (p *player) end(ctx context.Context, r *dsecv1.LogRecord) error {
	o := p.open[r.Step]
	if o == nil {
		return nil
	}
	delete(p.open, r.Step)
	if o.command == nil {
		return p.again(ctx, o, r)
	}
	was := doneOf(r.Outcome, o.stdout.Bytes(), o.stderr.Bytes())
	switch kind := r.Outcome.GetKind(); {
	case o.proc == nil:
		p.tell(o, replay.Report{Verdict: replay.NotComparable, Reason: o.skip})
		return nil
	case kind == "killed" || kind == "unknown": // by what ended its sandbox: it may go on here
		p.tell(o, p.compare.Compare(was, replay.Done{}))
		return nil
	}
	limit := max(p.x.Timeout, 10*r.Outcome.GetEnded().AsTime().Sub(r.Outcome.GetStarted().AsTime()))
	bound, cancel := context.WithTimeout(ctx, limit)
	res, err := o.proc.Wait(bound)
	cancel()
	switch {
	case err != nil && ctx.Err() == nil && bound.Err() != nil:
		_ = o.proc.Signal(ctx, 9)
		p.tell(o, replay.Report{Verdict: replay.Different, Reason: fmt.Sprintf("did not end within %v", limit)})
		return nil
	case err != nil:
		return fmt.Errorf("step %s: %w", r.Step, err)
	case o.skip != "":
		p.tell(o, replay.Report{Verdict: replay.NotComparable, Reason: o.skip})
		return nil
	}
	p.addPaths(ctx, r.Step, &was, nil)
	now := doneOf(res.Outcome, res.Stdout[:min(len(res.Stdout), replay.Most)], res.Stderr[:min(len(res.Stderr), replay.Most)])
	p.addPaths(ctx, r.Step, nil, &now)
	p.tell(o, p.compare.Compare(was, now))
	return nil
}

func doneOf(o *dsecv1.Outcome, stdout, stderr []byte) replay.Done {
	s := func(e *dsecv1.StreamEnd, data []byte) replay.Stream {
		return replay.Stream{Data: data, Total: e.GetTotal(), Truncated: e.GetTruncated(), SHA256: e.GetSha256()}
	}
	return replay.Done{Kind: o.GetKind(), Code: int(o.GetCode()), Signal: int(o.GetSignal()), Error: o.GetError(), Stdout: s(o.GetStdout(), stdout), Stderr: s(o.GetStderr(), stderr)}
}

// again does a step that is no command: at its recorded end, where its octets are.
func (p *player) again(ctx context.Context, o *playing, r *dsecv1.LogRecord) error {
	was := replay.Done{Kind: r.Outcome.GetKind(), Code: int(r.Outcome.GetCode()), Error: r.Outcome.GetError()}
	data, ok, err := p.input(ctx, r)
	switch {
	case err != nil:
		return fmt.Errorf("step %s: read its octets: %w", r.Step, err)
	case !ok:
		p.tell(o, replay.Report{Verdict: replay.NotComparable, Reason: "its octets were not kept"})
		return nil
	}
	err = p.act(ctx, o.start, data)
	if errors.Is(err, errSkipped) {
		p.tell(o, replay.Report{Verdict: replay.NotComparable, Reason: err.Error()})
		return nil
	}
	now := replay.Done{Kind: "exited"}
	if err != nil {
		if code := connect.CodeOf(err); code == connect.CodeUnavailable || code == connect.CodeDeadlineExceeded || code == connect.CodeCanceled {
			return fmt.Errorf("step %s: %w", r.Step, err)
		}
		now.Code, now.Error = 1, err.Error()
	}
	p.addPaths(ctx, r.Step, &was, &now)
	p.tell(o, p.compare.Compare(was, now))
	return nil
}

var errSkipped = errors.New("of a kind that is not replayed")

func (p *player) act(ctx context.Context, r *dsecv1.LogRecord, data []byte) error {
	fs := p.cl.FileService
	switch r.Kind {
	case "write", "append":
		q := &dsecv1.WriteRequest{}
		if err := fromJSON(r.RequestJson, q); err != nil {
			return err
		}
		q.At.Sandbox, q.Step = p.now.ID, r.Step
		st := fs.Write(ctx)
		for first := true; first || len(data) > 0; first = false {
			n := min(len(data), 256<<10)
			q.Data, data = data[:n], data[n:]
			if st.Send(q) != nil {
				break // the answer tells why
			}
			q = &dsecv1.WriteRequest{}
		}
		_, err := st.CloseAndReceive()
		return err
	case "upload":
		q := &dsecv1.UploadRequest{}
		if err := fromJSON(r.RequestJson, q); err != nil {
			return err
		}
		q.At.Sandbox, q.Step = p.now.ID, r.Step
		st := fs.Upload(ctx)
		for first := true; first || len(data) > 0; first = false {
			n := min(len(data), 256<<10)
			q.Data, data = data[:n], data[n:]
			if st.Send(q) != nil {
				break
			}
			q = &dsecv1.UploadRequest{}
		}
		_, err := st.CloseAndReceive()
		return err
	case "makedir":
		q := &dsecv1.MakeDirRequest{}
		if err := fromJSON(r.RequestJson, q); err != nil {
			return err
		}
		q.At.Sandbox, q.Step = p.now.ID, r.Step
		_, err := fs.MakeDir(ctx, connect.NewRequest(q))
		return err
	case "move":
		q := &dsecv1.MoveRequest{}
		if err := fromJSON(r.RequestJson, q); err != nil {
			return err
		}
		q.From.Sandbox, q.Step = p.now.ID, r.Step
		_, err := fs.Move(ctx, connect.NewRequest(q))
		return err
	case "remove":
		q := &dsecv1.RemoveRequest{}
		if err := fromJSON(r.RequestJson, q); err != nil {
			return err
		}
		q.At.Sandbox, q.Step = p.now.ID, r.Step
		_, err := fs.Remove(ctx, connect.NewRequest(q))
		return err
	}
	return fmt.Errorf("%s: %w", r.Kind, errSkipped)
}
