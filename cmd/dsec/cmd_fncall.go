package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/term"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

type fncallCmd struct {
	Run    fncallRunCmd    `cmd:"" default:"withargs" help:"Run a file of source text, or a command behind --, and print its verdict: dsec fncall [FLAGS] FILE [ARGS]."`
	Langs  fncallLangsCmd  `cmd:"" help:"List the languages."`
	Cancel fncallCancelCmd `cmd:"" help:"End the call of a key."`
}

type fncallRunCmd struct {
	Lang   string            `short:"l" help:"Language; else by the file's name." placeholder:"NAME"`
	Env    string            `name:"env" help:"Environment instead of the language's." placeholder:"NAME"`
	CPU    time.Duration     `help:"CPU time of all processes." placeholder:"DUR"`
	Wall   time.Duration     `help:"Wall time from the start of the program." placeholder:"DUR"`
	Memory size              `short:"m" help:"Memory, with the files of the work folder." placeholder:"SIZE"`
	Procs  int32             `help:"Processes and threads." placeholder:"N"`
	Cap    size              `help:"Octets of each output stream; more is the verdict OLE." placeholder:"SIZE"`
	Var    map[string]string `short:"E" help:"Environment variable k=v; repeat." mapsep:"none"`
	File   []string          `short:"f" help:"File to lay beside the program; repeat." type:"existingfile" placeholder:"FILE" sep:"none"`
	Out    []string          `help:"File of the work folder to bring back into the current one; repeat." placeholder:"PATH" sep:"none"`
	Job    string            `help:"Job." placeholder:"NAME"`
	Key    string            `name:"call-key" help:"The same key again gives the recorded answer." placeholder:"KEY"`
	Pooled bool              `help:"Use user namespaces again." xor:"mode"`
	Warm   bool              `help:"Begin in an interpreter that may be up already, for the languages that have it." xor:"mode"`
	GPU    string            `name:"gpu" help:"Device for the run: a place on one (shared), or one that nobody else has (exclusive)." enum:",shared,exclusive" default:"" placeholder:"MODE"`
	Argv   []string          `arg:"" passthrough:"" help:"Source file of a language (by its name, or --lang), or a command behind --. What follows is the program's: flags of dsec stand before it."`
}

var langOfName = map[string]string{".c": "c", ".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp", ".go": "go", ".py": "python", ".js": "javascript", ".sh": "bash", ".java": "java", ".rs": "rust"}

func (x *fncallRunCmd) call() (q client.Call, err error) {
	q = client.Call{Lang: x.Lang, Environment: x.Env, Env: x.Var, Job: x.Job, Key: x.Key, Pooled: x.Pooled, Warm: x.Warm, GPU: x.GPU,
		Limits: &dsecv1.CallLimits{CpuMs: x.CPU.Milliseconds(), WallMs: x.Wall.Milliseconds(), Memory: int64(x.Memory), Processes: x.Procs, Output: int64(x.Cap)}}
	argv := afterDashes(x.Argv)
	if len(argv) == 0 {
		return q, errors.New("name a source file, or a command behind --")
	}
	if q.Lang == "" {
		q.Lang = langOfName[filepath.Ext(argv[0])]
	}
	if q.Lang == "" || q.Lang == "cmd" {
		q.Cmd = argv
	} else {
		b, err := os.ReadFile(argv[0])
		if err != nil {
			return q, err
		}
		q.Code, q.Args = string(b), argv[1:]
	}
	for _, f := range x.File {
		b, err := os.ReadFile(f)
		if err != nil {
			return q, err
		}
		st, err := os.Stat(f)
		if err != nil {
			return q, err
		}
		q.Files = append(q.Files, &dsecv1.CallFile{Path: filepath.Base(f), Data: b, Executable: st.Mode()&0o111 != 0})
	}
	for _, o := range x.Out {
		q.Outputs = append(q.Outputs, &dsecv1.CallOutput{Path: o})
	}
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		if q.Stdin, err = io.ReadAll(os.Stdin); err != nil {
			return q, err
		}
	}
	return q, nil
}

func (x *fncallRunCmd) Run(ctx context.Context, c *cli) error {
	q, err := x.call()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	a, err := cl.FnCall(ctx, q)
	if err != nil {
		return err
	}
	r := a.Result
	if r == nil {
		r = a.Compile
	}
	for _, f := range r.Files {
		mode := os.FileMode(0o644)
		if f.Executable {
			mode = 0o755
		}
		name := filepath.Base(f.Path)
		if err := os.WriteFile(name, f.Data, mode); err != nil {
			return err
		}
	}
	err = c.emit(r.CallResult, func() {
		os.Stdout.Write(r.Stdout)
		os.Stderr.Write(r.Stderr)
		say("%s", verdictLine(a, r))
	})
	if err != nil || r.OK() {
		return err
	}
	if r.Verdict == "SYS" {
		return errors.New(r.Error)
	}
	return exitCode(max(1, int(r.Code)))
}

// verdictLine is a result for people.
func verdictLine(a *client.CallAnswer, r *client.CallResult) string {
	s := r.Verdict
	switch {
	case r.Limit != "":
		s += "(" + r.Limit + ")"
	case r.Verdict == "RE":
		s += fmt.Sprintf("(%d)", r.Code)
	case r.Verdict == "SIG":
		s += fmt.Sprintf("(%d)", r.Signal)
	}
	s += fmt.Sprintf(", CPU %.3f s, wall %.3f s, memory %.1f MiB", float64(r.CpuUs)/1e6, float64(r.WallUs)/1e6, float64(max(0, r.Memory))/(1<<20))
	for _, f := range []struct {
		on   bool
		text string
	}{{r.ProcessesHit, "limit of processes hit"}, {r.Leftover > 0, fmt.Sprintf("%d processes left over", r.Leftover)}, {r.Warm, "warm"}, {a.Recorded, "recorded"}, {r.Error != "", r.Error}} {
		if f.on {
			s += ", " + f.text
		}
	}
	return strings.TrimSpace(s)
}

// Validate refuses an unknown flag, which would else begin the command.
func (x *fncallRunCmd) Validate(k *kong.Context) error { return noFlag(k, x.Argv) }

type fncallLangsCmd struct{}

func (x *fncallLangsCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	langs, err := cl.CallLanguages(ctx)
	if err != nil {
		return err
	}
	return c.emit(&dsecv1.ListCallLanguagesResponse{Languages: langs}, func() {
		for _, l := range langs {
			state := l.Environment
			if l.Missing != "" {
				state += " (missing: " + l.Missing + ")"
			} else if l.Warm {
				state += ", --warm"
			}
			fmt.Printf("%-12s %s\n", l.Name, state)
		}
	})
}

type fncallCancelCmd struct {
	Job string `help:"Job." placeholder:"NAME"`
	Key string `arg:"" help:"Key of the call."`
}

func (x *fncallCancelCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	return cl.CancelCall(ctx, x.Job, x.Key)
}
