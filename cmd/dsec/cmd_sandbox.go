package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// sandboxFlags describe a new sandbox.
type sandboxFlags struct {
	Env        string            `short:"e" help:"Environment (name or name@version)." placeholder:"NAME"`
	Layer      []string          `help:"Layer instead of an environment; repeat, lowest first." placeholder:"REF" sep:"none"`
	Image      string            `short:"I" help:"OCI image instead, such as python:3.12; imported when it is not there." placeholder:"REF"`
	Pull       string            `help:"Of --image: missing (default) or always ask the registry what the tag means now." enum:"missing,always," default:"" placeholder:"WHEN"`
	ImageEntry bool              `name:"image-entrypoint" help:"Start the image's entrypoint and command; their end ends the sandbox."`
	Name       string            `help:"Name, unique among the living sandboxes of the project."`
	Job        string            `help:"Job that the sandbox belongs to."`
	KeyID      string            `name:"create-key" help:"Idempotency key: the same key never makes two." placeholder:"KEY"`
	Label      map[string]string `short:"l" help:"Label k=v; repeat." mapsep:"none"`
	Memory     size              `short:"m" help:"Memory limit (default 2g)." placeholder:"SIZE"`
	Disk       size              `help:"Limit of its own writes (default 10g)." placeholder:"SIZE"`
	Pids       int64             `help:"Process limit (default 4096)." placeholder:"N"`
	CPU        float64           `name:"cpu" help:"CPU cap; none by default." placeholder:"N"`
	Idle       time.Duration     `help:"Stop after this long without activity, such as 90s or 2h (default 30m)." placeholder:"DUR"`
	Total      time.Duration     `help:"Stop after this long (default 24h)." placeholder:"DUR"`
	OnIdle     string            `help:"At the idle limit: stop (default) or pause." enum:"stop,pause," default:"" placeholder:"WHAT"`
	Net        string            `help:"Network: none (default) or open." enum:"none,open," default:"" placeholder:"WHICH"`
	User       string            `short:"u" help:"User of its commands (default: the environment's)."`
	Cwd        string            `short:"w" help:"Working folder of its commands."`
	Var        map[string]string `short:"E" help:"Environment variable k=v; repeat." mapsep:"none"`
	Volume     []string          `short:"v" help:"Layer seen read-only at a path; repeat." placeholder:"LAYER:/PATH" sep:"none"`
	NoNewPrivs bool              `help:"Setuid programs gain nothing."`
	Durability string            `help:"What of its log an answer waits for: process (default; no crash of dsec loses it), host (nor one of the machine) or store (nor the loss of the machine)." enum:"process,host,store," default:"" placeholder:"LEVEL"`
	Trace      string            `help:"What to record of what steps do: off (default), light (files, processes, I/O) or full (also files read, connections)." enum:"off,light,full," default:"" placeholder:"LEVEL"`
	Volatile   []string          `help:"Path of a cache or the like, which traces do not look into and replay does not compare; repeat." placeholder:"PATH" sep:"none"`
	BestEffort bool              `help:"Yield the CPU to other sandboxes."`
	Backend    string            `help:"container (default), microvm or vm." default:"" placeholder:"NAME"`
	Runtime    string            `help:"Of a container: direct (default), crun, runc or gvisor." enum:"direct,crun,runc,gvisor," default:"" placeholder:"NAME"`
	Degraded   bool              `name:"allow-degraded" help:"Of microvm and vm: take a host without hardware acceleration, where code runs translated."`
}

func (f *sandboxFlags) options() (client.Options, error) {
	given := 0
	for _, is := range []bool{f.Env != "", len(f.Layer) > 0, f.Image != ""} {
		if is {
			given++
		}
	}
	if given != 1 {
		return client.Options{}, fmt.Errorf("--env, --image or --layer: give one of them (`dsec env ls` lists the environments)")
	}
	volumes := map[string]string{}
	for _, v := range f.Volume {
		i := strings.LastIndex(v, ":/") // an id has a colon of its own
		if i <= 0 {
			return client.Options{}, fmt.Errorf("--volume %q: want LAYER:/PATH, as data/set@2:/data", v)
		}
		if _, twice := volumes[v[i+1:]]; twice {
			return client.Options{}, fmt.Errorf("--volume %q: something is there already", v)
		}
		volumes[v[i+1:]] = v[:i]
	}
	return client.Options{Environment: f.Env, Volumes: volumes, Layers: f.Layer, Image: f.Image, Pull: f.Pull, ImageEntry: f.ImageEntry, Name: f.Name, Job: f.Job, Key: f.KeyID, Labels: f.Label, Memory: int64(f.Memory),
		Disk: int64(f.Disk), Pids: f.Pids, CPU: f.CPU, Idle: f.Idle, Total: f.Total, OnIdle: f.OnIdle, Network: f.Net, User: f.User, Cwd: f.Cwd,
		Env: f.Var, NoNewPrivs: f.NoNewPrivs, Durability: f.Durability, Trace: f.Trace, Volatile: f.Volatile, BestEffort: f.BestEffort, Backend: f.Backend, Runtime: f.Runtime, AllowDegraded: f.Degraded}, nil
}

// fetch imports the image before the create, whose deadline is made for starting sandboxes, and shows how far it is.
func (f *sandboxFlags) fetch(ctx context.Context, cl *client.Client) error {
	if f.Image == "" {
		return nil
	}
	_, err := cl.PullImage(ctx, &dsecv1.PullRequest{Ref: f.Image, Policy: f.Pull}, pullMeter())
	return err
}

type createCmd struct {
	sandboxFlags
	Count int  `short:"n" help:"How many." default:"1"`
	All   bool `help:"All or none."`
}

func (x *createCmd) Run(ctx context.Context, c *cli) error {
	o, err := x.options()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	if err := x.fetch(ctx, cl); err != nil {
		return err
	}
	if x.Count == 1 {
		sb, err := cl.RunContainer(ctx, o)
		if err != nil {
			return err
		}
		return c.emit(sb.Data, func() { fmt.Println(sb.ID) })
	}
	made, failed, err := cl.RunContainers(ctx, o, x.Count, x.All)
	if err != nil {
		return err
	}
	if err := emitList(c, datas(made), func() {
		for _, s := range made {
			fmt.Println(s.ID)
		}
	}); err != nil {
		return err
	}
	return itemErrors(failed)
}

func datas(list []*client.Sandbox) (out []*dsecv1.Sandbox) {
	for _, s := range list {
		out = append(out, s.Data)
	}
	return out
}

func itemErrors(list []*dsecv1.ItemError) error {
	for _, e := range list {
		if strings.Contains(e.Message, e.Id) {
			e.Id = "" // it is named already
		}
		say("%s%s", prefix(e.Id), e.Message)
	}
	if len(list) > 0 {
		return exitCode(1)
	}
	return nil
}

func prefix(id string) string {
	if id == "" {
		return ""
	}
	return id + ": "
}

type psCmd struct {
	Job   string            `help:"Only of this job."`
	Label map[string]string `short:"l" help:"Only with this label k=v; repeat." mapsep:"none"`
	State []string          `help:"Only in this state; repeat."`
	All   bool              `short:"a" help:"Ended ones too."`
	Quiet bool              `short:"q" help:"IDs only."`
}

func (x *psCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	list, missing := cl.List(ctx, &dsecv1.Selector{Job: x.Job, Labels: x.Label, States: x.State, IncludeEnded: x.All})
	if missing != nil && len(list) == 0 {
		return missing
	}
	if len(list) == 0 && x.Job != "" {
		sayNone(ctx, cl, x.Job)
	}
	return errors.Join(missing, emitList(c, datas(list), func() {
		if x.Quiet {
			for _, s := range list {
				fmt.Println(s.ID)
			}
			return
		}
		var rows [][]string
		for _, s := range list {
			d := s.Data
			env := d.Environment
			if env == "" && len(d.Layers) > 0 {
				env = short(d.Layers[0])
			}
			state := d.State
			if d.Cause != nil && d.Cause.Class != "" && d.Cause.Class != "none" {
				state += " (" + d.Cause.Class + ": " + d.Cause.Reason + ")"
			}
			rows = append(rows, []string{d.Id, dash(d.Name), state, env, d.Job, ago(d.Created.AsTime()), labelText(d.Labels)})
		}
		table(os.Stdout, []string{"ID", "NAME", "STATE", "ENVIRONMENT", "JOB", "AGE", "LABELS"}, rows)
	}))
}

// sayNone says why nothing of a job is shown: there is no such job, most often a slip of the hand, or nothing of it was asked for.
func sayNone(ctx context.Context, cl *client.Client, job string) {
	all, err := cl.List(ctx, &dsecv1.Selector{Job: job, IncludeEnded: true})
	switch {
	case err != nil: // of hosts that do not answer: then nobody knows
	case len(all) == 0:
		say("no sandboxes of job %s", job)
	default:
		say("nothing to show of job %s; it has %s, with those that ended (`dsec ps -a`)", job, sandboxes(len(all)))
	}
}

func sandboxes(n int) string {
	if n == 1 {
		return "1 sandbox"
	}
	return fmt.Sprintf("%d sandboxes", n)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func labelText(m map[string]string) string {
	var out []string
	for k, v := range m {
		out = append(out, k+"="+v)
	}
	sort.Strings(out)
	return strings.Join(out, ",")
}

type inspectCmd struct {
	ID []string `arg:"" help:"Sandbox IDs or names."`
}

func (x *inspectCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	for _, id := range x.ID {
		s, err := cl.Get(ctx, id)
		if err != nil {
			return err
		}
		if err := c.show(s.Data); err != nil {
			return err
		}
	}
	return nil
}

// group picks the sandboxes of a command that works on many.
type group struct {
	ID    []string          `arg:"" optional:"" help:"Sandbox IDs or names."`
	Job   string            `help:"All of this job."`
	Label map[string]string `short:"l" help:"All with this label k=v; repeat." mapsep:"none"`
}

func (g *group) selector() (*dsecv1.Selector, error) {
	if len(g.ID) == 0 && g.Job == "" && len(g.Label) == 0 {
		return nil, fmt.Errorf("name sandboxes by ID, --job or --label")
	}
	return &dsecv1.Selector{Ids: g.ID, Job: g.Job, Labels: g.Label}, nil
}

func (g *group) report(c *cli, r *dsecv1.SelectorResult) error {
	if err := emitList(c, r.Sandboxes, func() {
		for _, s := range r.Sandboxes {
			fmt.Println(s.Id, s.State)
		}
	}); err != nil {
		return err
	}
	return notFound(r.Errors, itemErrors(r.Errors))
}

// notFound makes of what was told one by one the end that every command has which names a sandbox that is not there.
func notFound(list []*dsecv1.ItemError, err error) error {
	if !slices.ContainsFunc(list, func(e *dsecv1.ItemError) bool { return e.Code == codeNotFound }) {
		return err
	}
	fmt.Fprintln(os.Stderr, noSandbox)
	return exitCode(125)
}

const codeNotFound = "not_found"

type stopCmd struct{ group }

func (x *stopCmd) Run(ctx context.Context, c *cli) error {
	sel, err := x.selector()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.StopAll(ctx, sel)
	if err != nil {
		return err
	}
	// To stop what has ended is fine; a name or ID that never was is a slip of the hand.
	for _, id := range x.ID {
		if !reported(r, id) {
			s, err := cl.Get(ctx, id)
			if errors.Is(err, client.ErrNotFound) {
				r.Errors = append(r.Errors, &dsecv1.ItemError{Code: codeNotFound, Message: err.Error()})
				continue
			}
			if err != nil {
				r.Errors = append(r.Errors, &dsecv1.ItemError{Message: explain(err)})
				continue
			}
			r.Sandboxes = append(r.Sandboxes, s.Data)
		}
	}
	return x.report(c, r)
}

// reported tells whether the answer speaks of what the caller named.
func reported(r *dsecv1.SelectorResult, id string) bool {
	for _, s := range r.Sandboxes {
		if s.Id == id || s.Name == id {
			return true
		}
	}
	for _, e := range r.Errors {
		if e.Id == id {
			return true
		}
	}
	return false
}

type pauseCmd struct{ group }

func (x *pauseCmd) Run(ctx context.Context, c *cli) error {
	sel, err := x.selector()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.PauseAll(ctx, sel, "")
	if err != nil {
		return err
	}
	return x.report(c, r)
}

type resumeCmd struct{ group }

func (x *resumeCmd) Run(ctx context.Context, c *cli) error {
	sel, err := x.selector()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.ResumeAll(ctx, sel)
	if err != nil {
		return err
	}
	return x.report(c, r)
}

type snapshotCmd struct {
	ID string `arg:"" help:"Sandbox ID or name."`
	As string `arg:"" optional:"" help:"Layer name to publish it under, such as work/fixed."`
}

func (x *snapshotCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	ref, err := cl.Sandbox(x.ID).Snapshot(ctx, x.As)
	if err != nil {
		return err
	}
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(map[string]string{"layer": ref})
	}
	fmt.Println(ref)
	return nil
}

type topCmd struct {
	Once bool `help:"Print once and end."`
}

func (x *topCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	for {
		list, err := cl.List(ctx, &dsecv1.Selector{States: []string{"running", "paused"}})
		if err != nil {
			return err
		}
		if c.Output == "json" {
			if err := topJSON(ctx, list); err != nil {
				return err
			}
			if x.Once {
				return nil
			}
			if !pause(ctx, topEvery) {
				return nil
			}
			continue
		}
		var rows [][]string
		for _, s := range list {
			st, err := s.Stats(ctx)
			if err != nil {
				continue // it ended meanwhile
			}
			rows = append(rows, []string{s.ID, s.Data.State, (time.Duration(st.CpuUs) * time.Microsecond).Round(10 * time.Millisecond).String(),
				octetText(st.Memory), octetText(st.MemoryPeak), fmt.Sprint(st.Pids), octetText(st.Disk), fmt.Sprint(st.OomKills), hostMemory(st)})
		}
		if !x.Once && isTerminal(os.Stdout) {
			fmt.Print("\x1b[H\x1b[2J")
		}
		table(os.Stdout, []string{"ID", "STATE", "CPU", "MEMORY", "PEAK", "PIDS", "DISK", "OOM", "HOST"}, rows)
		if x.Once {
			return nil
		}
		if !pause(ctx, topEvery) {
			return nil
		}
	}
}

const topEvery = 2 * time.Second

// pause reports false when ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// hostMemory is what a machine holds of its host's memory; other sandboxes hold what they use.
func hostMemory(st *dsecv1.StatsResponse) string {
	if st.HostMemory == 0 {
		return "-"
	}
	return octetText(st.HostMemory)
}

// topJSON writes one look as one line: a list of sandboxes with their figures.
func topJSON(ctx context.Context, list []*client.Sandbox) error {
	type usage struct {
		ID    string          `json:"id"`
		State string          `json:"state"`
		Stats json.RawMessage `json:"stats"`
	}
	out := []usage{}
	for _, s := range list {
		st, err := s.Stats(ctx)
		if err != nil {
			continue // it ended meanwhile
		}
		b, err := marshal(st, true)
		if err != nil {
			return err
		}
		out = append(out, usage{s.ID, s.Data.State, b})
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}
