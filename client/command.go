package client

import (
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Cmd is a command to run. Argv, or Text in a session (see [Session]).
type Cmd struct {
	Argv      []string
	ID        string // step key: the same ID never runs twice; after [Job.Resume] its recorded result is answered at once
	Env       map[string]string
	Secret    []string // names in Env that the log must not hold
	Cwd       string
	User      string
	Stdin     []byte
	StdinOpen bool // more comes by Process.Write
	Terminal  *dsecv1.Terminal
	Timeout   time.Duration
	OutputCap int64    // octets a stream
	Restore   string   // what a restore of its sandbox does with it: repeat, verify or never; see docs/trainer.md
	Check     []string // of verify: exit code 0 says that it need not be done again, 1 that it must
}

func (s *Sandbox) startRequest(c Cmd) *dsecv1.StartRequest {
	r := &dsecv1.StartRequest{Sandbox: s.ID, Id: c.ID, Env: envVars(c.Env, c.Secret), User: c.User, Stdin: c.Stdin,
		StdinOpen: c.StdinOpen || c.Terminal != nil, // a terminal without input would end its shell at once
		Terminal:  c.Terminal, TimeoutMs: c.Timeout.Milliseconds(), OutputCap: c.OutputCap, Restore: c.Restore, Check: c.Check}
	r.Argv, r.ArgvRaw = octetList(c.Argv)
	r.Cwd, r.CwdRaw = octets(c.Cwd)
	return r
}

// Result is how a command ended, with its output (the first octets of each stream up to the limit asked for).
type Result struct {
	ID      string
	Stdout  []byte
	Stderr  []byte
	Outcome *dsecv1.Outcome
}

// Code is the exit code as a shell would tell it: 128+n for signal n, 124 for a timeout, 127 or 126 for a program that could not start.
func (r *Result) Code() int {
	o := r.Outcome
	switch o.Kind {
	case "exited":
		return int(o.Code)
	case "signalled", "out_of_memory", "killed":
		return 128 + int(o.Signal)
	case "timed_out":
		return 124
	case "start_failed":
		return 127
	}
	return 125
}

// OK reports whether the command exited with code 0.
func (r *Result) OK() bool { return r.Outcome.Kind == "exited" && r.Outcome.Code == 0 }

const maxWait = 60 * time.Second

// Exec runs a command and waits for its end, however long that takes within ctx.
func (s *Sandbox) Exec(ctx context.Context, argv ...string) (*Result, error) {
	return s.Run(ctx, Cmd{Argv: argv})
}

// Run runs a command and waits for its end. Output beyond 16 MiB a stream is not in the result; read it by [Process.Stream].
func (s *Sandbox) Run(ctx context.Context, cmd Cmd) (*Result, error) {
	return s.run(ctx, s.startRequest(cmd))
}

func (s *Sandbox) run(ctx context.Context, q *dsecv1.StartRequest) (*Result, error) {
	if r := s.c.recorded.answer(q); r != nil {
		return r, nil
	}
	q.WaitMs, q.OutputLimit = waitFor(ctx), 16<<20
	r, err := call(ctx, s.c, s.c.Commands.Start, q)
	if err != nil {
		return nil, err
	}
	if r.Command.State != "running" {
		return &Result{ID: r.Command.Id, Stdout: r.Stdout, Stderr: r.Stderr, Outcome: r.Command.Outcome}, nil
	}
	return (&Process{ID: r.Command.Id, s: s}).Wait(ctx)
}

// waitFor leaves the server some time to answer before the caller's own deadline.
func waitFor(ctx context.Context) int64 {
	w := maxWait
	if d, ok := ctx.Deadline(); ok {
		if left := time.Until(d) - 50*time.Millisecond; left < w {
			w = max(left, time.Millisecond)
		}
	}
	return w.Milliseconds()
}

// Process is a running command; it outlives its client.
type Process struct {
	ID    string
	s     *Sandbox
	taken int64
}

// Start begins a command and returns when it runs. A program that can't be started is told by Wait.
func (s *Sandbox) Start(ctx context.Context, cmd Cmd) (*Process, error) {
	r, err := call(ctx, s.c, s.c.Commands.Start, s.startRequest(cmd))
	if err != nil {
		return nil, err
	}
	return &Process{ID: r.Command.Id, s: s}, nil
}

// Process returns a handle to a command by its ID.
func (s *Sandbox) Process(id string) *Process { return &Process{ID: id, s: s} }

// Wait waits for the end by long polls and returns up to 16 MiB of each stream.
func (p *Process) Wait(ctx context.Context) (*Result, error) {
	for {
		poll, cancel := context.WithTimeout(ctx, maxWait+30*time.Second)
		r, err := call(poll, p.s.c, p.s.c.Commands.Wait, &dsecv1.WaitRequest{Sandbox: p.s.ID, Id: p.ID, WaitMs: waitFor(ctx), OutputLimit: 16 << 20})
		cancel()
		if err != nil {
			return nil, err
		}
		if r.Command.State != "running" {
			return &Result{ID: p.ID, Stdout: r.Stdout, Stderr: r.Stderr, Outcome: r.Command.Outcome}, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

// Stream copies the output from its first octet to the writers until the command ends, and returns the outcome. A connection that
// breaks is taken up again at the offsets reached.
func (p *Process) Stream(ctx context.Context, stdout, stderr io.Writer) (*dsecv1.Outcome, error) {
	q := &dsecv1.AttachRequest{Sandbox: p.s.ID, Id: p.ID}
	for attempt := 0; ; attempt++ {
		before := q.StdoutOffset + q.StderrOffset
		o, err := p.attach(ctx, q, stdout, stderr)
		if err == nil {
			return o, nil
		}
		var w *writeError
		if code := codeOf(err); ctx.Err() != nil || asWriteError(err, &w) || (code != connect.CodeUnavailable && code != connect.CodeUnknown) {
			return nil, wrap(err)
		}
		if q.StdoutOffset+q.StderrOffset > before {
			attempt = 0
		}
		if attempt >= 20 {
			return nil, wrap(err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(250 * time.Millisecond):
		}
	}
}

type writeError struct{ err error }

func (w *writeError) Error() string { return w.err.Error() }
func (w *writeError) Unwrap() error { return w.err }

func asWriteError(err error, to **writeError) bool {
	w, ok := err.(*writeError)
	if ok {
		*to = w
	}
	return ok
}

func (p *Process) attach(ctx context.Context, q *dsecv1.AttachRequest, stdout, stderr io.Writer) (*dsecv1.Outcome, error) {
	st, err := p.s.c.Commands.Attach(ctx, connect.NewRequest(q))
	if err != nil {
		return nil, err
	}
	defer st.Close()
	for st.Receive() {
		switch e := st.Msg().Event.(type) {
		case *dsecv1.AttachResponse_Chunk:
			w, off := stdout, &q.StdoutOffset
			if e.Chunk.Stream == "stderr" {
				w, off = stderr, &q.StderrOffset
			}
			if _, err := w.Write(e.Chunk.Data); err != nil {
				return nil, &writeError{err}
			}
			*off = e.Chunk.Offset + int64(len(e.Chunk.Data))
		case *dsecv1.AttachResponse_Gap:
			w, off := stdout, &q.StdoutOffset
			if e.Gap.Stream == "stderr" {
				w, off = stderr, &q.StderrOffset
			}
			fmt.Fprintf(w, "\n[... %d octets of %s not kept ...]\n", e.Gap.To-e.Gap.From, e.Gap.Stream)
			*off = e.Gap.To
		case *dsecv1.AttachResponse_Ended:
			return e.Ended.Outcome, nil
		}
	}
	if err := st.Err(); err != nil {
		return nil, err
	}
	return nil, connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF)
}

// Write sends standard input at the offset reached, so that a resend is taken once.
func (p *Process) Write(ctx context.Context, data []byte) error {
	for first := true; first || len(data) > 0; first = false {
		part := data[:min(len(data), 256<<10)]
		r, err := call(ctx, p.s.c, p.s.c.Commands.WriteStdin, &dsecv1.WriteStdinRequest{Sandbox: p.s.ID, Id: p.ID, Offset: p.taken, Data: part})
		if err != nil {
			return err
		}
		data = data[min(int64(len(data)), max(0, r.Taken-p.taken)):]
		p.taken = r.Taken
	}
	return nil
}

// CloseStdin sends end of file.
func (p *Process) CloseStdin(ctx context.Context) error {
	_, err := call(ctx, p.s.c, p.s.c.Commands.WriteStdin, &dsecv1.WriteStdinRequest{Sandbox: p.s.ID, Id: p.ID, Offset: p.taken, Eof: true})
	return err
}

// Signal sends a signal by number to the command's process group.
func (p *Process) Signal(ctx context.Context, signal int) error {
	_, err := call(ctx, p.s.c, p.s.c.Commands.Signal, &dsecv1.SignalRequest{Sandbox: p.s.ID, Id: p.ID, Signal: int32(signal)})
	return err
}

// Resize changes the terminal's size.
func (p *Process) Resize(ctx context.Context, rows, cols int) error {
	_, err := call(ctx, p.s.c, p.s.c.Commands.Resize, &dsecv1.ResizeRequest{Sandbox: p.s.ID, Id: p.ID, Size: &dsecv1.Terminal{Rows: uint32(rows), Cols: uint32(cols)}})
	return err
}

// ListCommands returns the commands of the sandbox in the order of their starts.
func (s *Sandbox) ListCommands(ctx context.Context) ([]*dsecv1.Command, error) {
	var out []*dsecv1.Command
	for token := ""; ; {
		r, err := call(ctx, s.c, s.c.Commands.List, &dsecv1.ListCommandsRequest{Sandbox: s.ID, PageSize: 1000, PageToken: token})
		if err != nil {
			return nil, err
		}
		if out, token = append(out, r.Commands...), r.NextPageToken; token == "" {
			return out, nil
		}
	}
}

// Session is one living shell: its directory, variables, functions, options and jobs stay from command to command.
type Session struct {
	Name string
	s    *Sandbox
}

// SessionOptions of a new session; a living session of the same name is joined.
type SessionOptions struct {
	Name  string
	Shell string
	Env   map[string]string
	Cwd   string
	User  string
}

// Session opens a session.
func (s *Sandbox) Session(ctx context.Context, o SessionOptions) (*Session, error) {
	q := &dsecv1.OpenSessionRequest{Sandbox: s.ID, Name: o.Name, Shell: o.Shell, Env: envVars(o.Env, nil), User: o.User}
	q.Cwd, q.CwdRaw = octets(o.Cwd)
	r, err := call(ctx, s.c, s.c.Commands.OpenSession, q)
	if err != nil {
		return nil, err
	}
	return &Session{Name: r.Session.Name, s: s}, nil
}

// Run hands text to the shell and waits for its end.
func (t *Session) Run(ctx context.Context, text string) (*Result, error) {
	return t.RunCmd(ctx, text, Cmd{})
}

// RunCmd is Run with the ID, Stdin, Timeout and OutputCap of cmd.
func (t *Session) RunCmd(ctx context.Context, text string, cmd Cmd) (*Result, error) {
	q := t.s.startRequest(cmd)
	q.Session = t.Name
	q.Text, q.TextRaw = octets(text)
	return t.s.run(ctx, q)
}

// Close ends the shell and all that it started.
func (t *Session) Close(ctx context.Context) error {
	_, err := call(ctx, t.s.c, t.s.c.Commands.CloseSession, &dsecv1.CloseSessionRequest{Sandbox: t.s.ID, Name: t.Name})
	return err
}
