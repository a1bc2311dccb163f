package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

type logsCmd struct {
	Show showLogsCmd   `cmd:"" default:"withargs" help:"Show the trajectory of a sandbox."`
	Rm   removeLogsCmd `cmd:"" help:"Remove the trajectories of ended sandboxes."`
}

type removeLogsCmd struct {
	Job   string        `help:"Of this job as a whole; its name and keys are used up then." placeholder:"JOB"`
	Older time.Duration `help:"Of what ended longer ago, as in 72h." placeholder:"DURATION"`
}

func (x *removeLogsCmd) Run(ctx context.Context, c *cli) error {
	switch {
	case x.Older < 0:
		return fmt.Errorf("--older %v: must not be negative", x.Older)
	case x.Job == "" && x.Older == 0:
		return errors.New("--job or --older: give one of them, this deletes")
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	n, err := cl.RemoveLogs(ctx, x.Job, x.Older)
	if err != nil {
		return err
	}
	fmt.Printf("removed %d trajectories\n", n)
	return nil
}

type showLogsCmd struct {
	ID     string `arg:"" optional:"" help:"Sandbox ID or name (ended ones too, by ID)."`
	Calls  bool   `help:"The function calls of a job (--job), instead of a sandbox."`
	Job    string `help:"Job of --calls; without it those that name none." placeholder:"JOB"`
	Follow bool   `short:"f" help:"Go on until the sandbox has ended."`
	From   int64  `help:"First sequence number." default:"1"`
	Quiet  bool   `short:"q" help:"Without the output of the commands."`
	// The machine's, not the trajectory's.
	Console bool `help:"Instead, what the sandbox's machine wrote on its serial console (the last MiB)."`
}

// callStream is the key of a job's function calls.
const callStream = "!fncall"

func (x *showLogsCmd) Run(ctx context.Context, c *cli) error {
	switch {
	case (x.ID == "") != x.Calls:
		return errors.New("give the ID or name of a sandbox, or --calls for the function calls of a job")
	case x.Job != "" && !x.Calls:
		return errors.New("--job: goes with --calls; a sandbox is named by its ID or name")
	case x.Follow && x.Calls:
		return errors.New("--follow: the calls of a job have no end to wait for")
	case x.Console && (x.Calls || x.Follow || x.From != 1 || x.Quiet):
		return errors.New("--console: goes with the ID or name of a sandbox alone")
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	if x.Console {
		return x.console(ctx, c, cl)
	}
	q := &dsecv1.ReadLogRequest{Sandbox: x.ID, FromSeq: x.From, Follow: x.Follow, Output: !x.Quiet}
	if x.Calls {
		q.Job, q.Key = x.Job, callStream
	}
	if c.Output == "json" {
		return cl.Log(ctx, q, func(r *dsecv1.LogRecord) error {
			b, err := marshal(r, false)
			if err == nil {
				fmt.Println(string(b))
			}
			return err
		})
	}
	return cl.Log(ctx, q, func(r *dsecv1.LogRecord) error { return printRecord(r) })
}

// console prints the machine's console; a terminal gets it without what would steer it.
func (x *showLogsCmd) console(ctx context.Context, c *cli, cl *client.Client) error {
	text, err := cl.Sandbox(x.ID).Console(ctx)
	switch {
	case err != nil:
		return err
	case c.Output == "json":
		return json.NewEncoder(os.Stdout).Encode(map[string]string{"console": strings.ToValidUTF8(string(text), "\uFFFD")})
	case !term.IsTerminal(int(os.Stdout.Fd())):
		_, err = os.Stdout.Write(text)
		return err
	}
	for line := range strings.Lines(string(text)) {
		fmt.Println(plain(strings.TrimRight(line, "\r\n")))
	}
	return nil
}

// printRecord writes one line a record: sequence number, time, what happened; output octets follow indented.
func printRecord(r *dsecv1.LogRecord) error {
	head := fmt.Sprintf("%6d  %s  %-11s", r.Seq, r.Time.AsTime().Local().Format("15:04:05.000"), r.Kind)
	switch r.Kind {
	case "output":
		if len(r.Data) == 0 {
			_, err := fmt.Printf("%s %s %s @%d %d octets\n", head, r.Step, r.Stream, r.Offset, r.Length)
			return err
		}
		for line := range strings.Lines(string(r.Data)) {
			fmt.Printf("%s %s %s| %s\n", head, r.Step, r.Stream, plain(strings.TrimRight(line, "\n")))
			head = strings.Repeat(" ", len(head))
		}
		return nil
	case "call":
		_, err := fmt.Printf("%s %s program of %d octets, kept: %s\n", head, r.Step, r.Length, r.Input)
		return err
	case "call_end":
		_, err := fmt.Printf("%s %s %s\n", head, r.Step, plain(answerText(r.ResponseJson)))
		return err
	case "verdict":
		_, err := fmt.Printf("%s %s\n", head, verdictText(r.Verdict))
		return err
	case "end":
		_, err := fmt.Printf("%s %s %s\n", head, r.Step, plain(outcomeText(r.Outcome)))
		return err
	}
	detail := r.State
	if r.Cause != nil && r.Cause.Class != "" {
		detail += " (" + r.Cause.Class + ": " + strings.TrimSpace(r.Cause.Reason+" "+r.Cause.Detail) + ")"
	}
	if r.RequestJson != "" {
		detail += " " + requestText(r.Kind, r.RequestJson)
	}
	_, err := fmt.Fprintln(os.Stdout, strings.TrimRight(head+" "+plain(strings.TrimSpace(r.Step+" "+detail)), " "))
	return err
}

func quoteWords(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		if w == "" || strings.ContainsAny(w, " \t\n'\"\\$`;&|<>*?()[]{}#~!") {
			w = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
		out[i] = w
	}
	return strings.Join(out, " ")
}

func outcomeText(o *dsecv1.Outcome) string {
	if o == nil {
		return ""
	}
	var b strings.Builder
	b.WriteString(o.Kind)
	switch o.Kind {
	case "exited":
		fmt.Fprintf(&b, " %d", o.Code)
	case "signalled", "out_of_memory", "killed":
		fmt.Fprintf(&b, " signal %d", o.Signal)
	}
	if o.Error != "" {
		fmt.Fprintf(&b, ": %s", o.Error)
	}
	for _, f := range []struct {
		on   bool
		text string
	}{{o.OutputOpen, "output open"}, {o.SessionEnd, "session ended"}, {o.MemoryHit, "memory limit hit"}, {o.PidsHit, "process limit hit"}, {o.DiskHit, "disk full"}} {
		if f.on {
			b.WriteString(", " + f.text)
		}
	}
	if o.Stdout != nil && o.Stderr != nil {
		fmt.Fprintf(&b, ", stdout %d, stderr %d octets", o.Stdout.Total, o.Stderr.Total)
	}
	fmt.Fprintf(&b, ", cpu %v", (time.Duration(o.CpuUs) * time.Microsecond).Round(100*time.Microsecond))
	if o.MemoryPeak > 0 {
		fmt.Fprintf(&b, ", peak %s", octetText(o.MemoryPeak))
	}
	return b.String()
}

// answerText shows what a function call came to: its verdict, and the first line of what was printed.
func answerText(j string) string {
	type result struct {
		Verdict, Stdout, Stderr, Error string
	}
	var a struct {
		Verdict, FirstEnded               string
		Compile, Result                   *result
		Results                           []result
		Program, Interactor               *result
		ProgramCompile, InteractorCompile *result
	}
	if json.Unmarshal([]byte(j), &a) != nil {
		return cut(j, 300)
	}
	words := []string{a.Verdict}
	one := func(name string, r *result) {
		if r == nil {
			return
		}
		text := r.Verdict
		for _, s := range []string{r.Error, r.Stdout, r.Stderr} {
			if s != "" {
				text += fmt.Sprintf(" %q", cut(s, 60))
				break
			}
		}
		words = append(words, name+" "+text)
	}
	one("compile", a.Compile)
	one("run", a.Result)
	if len(a.Results) > 0 {
		n := map[string]int{}
		var kinds []string
		for _, r := range a.Results {
			if n[r.Verdict]++; n[r.Verdict] == 1 {
				kinds = append(kinds, r.Verdict)
			}
		}
		for _, k := range kinds {
			words = append(words, fmt.Sprintf("%s %d", k, n[k]))
		}
	}
	one("program", a.Program)
	one("interactor", a.Interactor)
	return strings.TrimSpace(strings.Join(words, ", "))
}
