package client

import (
	"context"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Call is a small program to run to its end, in namespaces of its own and without network; nothing of it stays. Its end is a verdict.
type Call struct {
	Lang        string   // of Languages; empty runs Cmd
	Cmd         []string // argv, looked for in PATH
	Code        string   // source text
	Files       []*dsecv1.CallFile
	Stdin       []byte
	StdinKept   string // SHA-256 of a kept file, instead of Stdin
	Args        []string
	Env         map[string]string
	Secret      []string // names in Env that the log must not hold
	Environment string   // instead of the language's
	CompileArgs []string

	Limits        *dsecv1.CallLimits // nil: the language's
	CompileLimits *dsecv1.CallLimits
	Outputs       []*dsecv1.CallOutput // files of the work folder to bring back

	Job      string
	Key      string // the same key again gives the recorded answer
	HashOnly bool   // the log keeps hashes of program and input
	Pooled   bool   // use user namespaces again
	Warm     bool   // begin in an interpreter that may be up already, for the languages that have it; not with Pooled
	GPU      string // shared | exclusive
	Queue    time.Duration
}

func (q *Call) program() *dsecv1.CallProgram {
	p := &dsecv1.CallProgram{Lang: q.Lang, Files: q.Files, Environment: q.Environment, CompileArgs: q.CompileArgs}
	p.Cmd, p.CmdRaw = octetList(q.Cmd)
	p.Code, p.CodeRaw = octets(q.Code)
	return p
}

func (q *Call) input() *dsecv1.CallInput {
	in := &dsecv1.CallInput{Env: envVars(q.Env, q.Secret), StdinContent: q.StdinKept}
	in.Stdin, in.StdinRaw = octets(string(q.Stdin))
	in.Args, in.ArgsRaw = octetList(q.Args)
	return in
}

func (q *Call) mode() string {
	switch {
	case q.Pooled && q.Warm:
		return "pooled and warm" // which the platform refuses
	case q.Pooled:
		return "pooled"
	case q.Warm:
		return "warm"
	}
	return ""
}

// CallResult is how one run ended.
type CallResult struct {
	*dsecv1.CallResult
	Stdout, Stderr []byte
}

func callResult(r *dsecv1.CallResult) *CallResult {
	if r == nil {
		return nil
	}
	return &CallResult{r, []byte(fromOctets(r.Stdout, r.StdoutRaw)), []byte(fromOctets(r.Stderr, r.StderrRaw))}
}

// OK reports whether the run exited with 0 within its limits.
func (r *CallResult) OK() bool { return r.Verdict == "OK" }

// CallAnswer is what a call came to.
type CallAnswer struct {
	Verdict  string // of the whole: the compiler's when it failed
	Compile  *CallResult
	Result   *CallResult // nil when compiling failed
	Key      string
	Recorded bool // the answer was given before
	Queued   time.Duration
}

// FnCall runs a function call and waits for its verdict.
func (c *Client) FnCall(ctx context.Context, q Call) (*CallAnswer, error) {
	r, err := call(ctx, c, c.Calls.Run, &dsecv1.RunCallRequest{Job: q.Job, Key: q.Key, Program: q.program(), Input: q.input(), Limits: q.Limits,
		CompileLimits: q.CompileLimits, Outputs: q.Outputs, HashOnly: q.HashOnly, Mode: q.mode(), Gpu: q.GPU, QueueMs: q.Queue.Milliseconds()})
	if err != nil {
		return nil, err
	}
	return &CallAnswer{Verdict: r.Verdict, Compile: callResult(r.Compile), Result: callResult(r.Result), Key: r.Key, Recorded: r.Recorded,
		Queued: time.Duration(r.QueueUs) * time.Microsecond}, nil
}

// BatchAnswer is what a batch came to.
type BatchAnswer struct {
	Verdict  string // OK, or that of the first input that is not
	Compile  *CallResult
	Results  []*CallResult // by input; empty when compiling failed
	Key      string
	Recorded bool
}

// FnCallBatch compiles a program once and runs it for each input. Stdin, Args and Env of the call are not used. With stopEarly the first
// result that is not OK cancels what has not begun.
func (c *Client) FnCallBatch(ctx context.Context, q Call, inputs []*dsecv1.CallInput, stopEarly bool) (*BatchAnswer, error) {
	r, err := call(ctx, c, c.Calls.RunBatch, &dsecv1.RunCallBatchRequest{Job: q.Job, Key: q.Key, Program: q.program(), Inputs: inputs, Limits: q.Limits,
		CompileLimits: q.CompileLimits, Outputs: q.Outputs, HashOnly: q.HashOnly, Mode: q.mode(), Gpu: q.GPU, QueueMs: q.Queue.Milliseconds(), StopEarly: stopEarly})
	if err != nil {
		return nil, err
	}
	a := &BatchAnswer{Verdict: r.Verdict, Compile: callResult(r.Compile), Key: r.Key, Recorded: r.Recorded}
	for _, x := range r.Results {
		a.Results = append(a.Results, callResult(x))
	}
	return a, nil
}

// PairAnswer is what a program and its interactor came to.
type PairAnswer struct {
	ProgramCompile, InteractorCompile *CallResult
	Program, Interactor               *CallResult // nil when compiling failed
	FirstEnded                        string      // program | interactor
	Recorded                          bool
}

// FnCallPair runs a program and its interactor, each one's standard output being the other's standard input. Job, Key and the like are
// those of the program.
func (c *Client) FnCallPair(ctx context.Context, program, interactor Call) (*PairAnswer, error) {
	side := func(q Call) *dsecv1.CallSide {
		return &dsecv1.CallSide{Program: q.program(), Input: q.input(), Limits: q.Limits, CompileLimits: q.CompileLimits, Outputs: q.Outputs}
	}
	r, err := call(ctx, c, c.Calls.RunPair, &dsecv1.RunCallPairRequest{Job: program.Job, Key: program.Key, Program: side(program), Interactor: side(interactor),
		HashOnly: program.HashOnly, Mode: program.mode(), QueueMs: program.Queue.Milliseconds()})
	if err != nil {
		return nil, err
	}
	return &PairAnswer{callResult(r.ProgramCompile), callResult(r.InteractorCompile), callResult(r.Program), callResult(r.Interactor), r.FirstEnded, r.Recorded}, nil
}

// CancelCall ends the call of a key, which then answers CANCELLED.
func (c *Client) CancelCall(ctx context.Context, job, key string) error {
	_, err := call(ctx, c, c.Calls.Cancel, &dsecv1.CancelCallRequest{Job: job, Key: key})
	return err
}

// PutCallFile keeps octets for later calls and returns their SHA-256, by which calls name them.
func (c *Client) PutCallFile(ctx context.Context, data []byte) (string, error) {
	r, err := call(ctx, c, c.Calls.PutFile, &dsecv1.PutCallFileRequest{Data: data})
	if err != nil {
		return "", err
	}
	return r.Content, nil
}

// GetCallFile gives the octets of a kept file.
func (c *Client) GetCallFile(ctx context.Context, content string) ([]byte, error) {
	r, err := call(ctx, c, c.Calls.GetFile, &dsecv1.GetCallFileRequest{Content: content})
	if err != nil {
		return nil, err
	}
	return r.Data, nil
}

// CallLanguages are the languages of calls.
func (c *Client) CallLanguages(ctx context.Context) ([]*dsecv1.CallLanguage, error) {
	r, err := call(ctx, c, c.Calls.Languages, &dsecv1.ListCallLanguagesRequest{})
	if err != nil {
		return nil, err
	}
	return r.Languages, nil
}
