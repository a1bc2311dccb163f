package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

type traceCmd struct {
	Show showTraceCmd `cmd:"" default:"withargs" help:"Show what the steps of a sandbox did: files, processes, I/O."`
}

type showTraceCmd struct {
	ID   string `arg:"" help:"Sandbox ID or name (ended ones too, by ID)."`
	File string `help:"Who changed this file last, and which step read it first; or what lies in this folder." placeholder:"PATH"`
	Step string `help:"All of one step: its key, or its number from 1." placeholder:"N"`
}

func (x *showTraceCmd) Run(ctx context.Context, c *cli) error {
	if x.File != "" && !strings.HasPrefix(x.File, "/") {
		return fmt.Errorf("--file %q: want an absolute path", x.File)
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	o := client.TraceOptions{Step: x.Step, File: x.File}
	if c.Output == "json" {
		return cl.EachTrace(ctx, x.ID, o, func(r *dsecv1.TraceResponse) error {
			b, err := marshal(r, false)
			if err == nil {
				fmt.Println(string(b))
			}
			return err
		})
	}
	t, err := cl.Trace(ctx, x.ID, o)
	if err != nil {
		return err
	}
	slices.SortStableFunc(t.Steps, func(a, b *dsecv1.TraceStep) int { return int(a.Number - b.Number) })
	switch {
	case x.Step != "" && len(t.Steps) == 0:
		return fmt.Errorf("step %s of %s: there is none", x.Step, x.ID)
	case x.Step != "":
		for _, s := range t.Steps {
			printTrace(os.Stdout, s)
		}
	default:
		printTraces(os.Stdout, t.Steps)
	}
	if t.File != nil {
		fmt.Print(historyText(t.File))
	}
	return nil
}

// historyText answers the two questions about a file.
func historyText(f *dsecv1.FileHistory) string {
	var b strings.Builder
	step := func(key string, n int64) string {
		if n == 0 {
			return plain(key)
		}
		return fmt.Sprintf("%s (step %d)", plain(key), n)
	}
	path := plain(octetsOf(f.Path, f.PathRaw))
	switch {
	case f.VolatilePath != "":
		fmt.Fprintf(&b, "%s: lies in %s, which is volatile: who changed it is not traced\n", path, plain(f.VolatilePath))
	case f.ChangedLast != "":
		fmt.Fprintf(&b, "%s: changed last by %s\n", path, step(f.ChangedLast, f.ChangedLastNumber))
	default:
		fmt.Fprintf(&b, "%s: changed by no step that was traced\n", path)
	}
	switch {
	case !f.ReadsTraced:
		fmt.Fprintf(&b, "%s: first read: not traced (make the sandbox with --trace full)\n", path)
	case f.ReadFirst != "":
		fmt.Fprintf(&b, "%s: first read by %s\n", path, step(f.ReadFirst, f.ReadFirstNumber))
	default:
		fmt.Fprintf(&b, "%s: read by no step that was traced\n", path)
	}
	if f.UntracedSteps > 0 {
		fmt.Fprintf(&b, "%s without a trace, or with one that is not whole\n", plural(int(f.UntracedSteps), "step"))
	}
	return b.String()
}

func outcomeOf(j string) *dsecv1.Outcome {
	o := &dsecv1.Outcome{}
	if j == "" || (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(j), o) != nil {
		return nil
	}
	return o
}

// printTraces is a line a step.
func printTraces(out io.Writer, steps []*dsecv1.TraceStep) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "N\tSTEP\tKIND\tFILES\tPROCESSES\tREAD\tWRITTEN\tCPU\tWHAT")
	for _, s := range steps {
		cpu := ""
		if o := outcomeOf(s.OutcomeJson); o != nil {
			cpu = (time.Duration(o.CpuUs) * time.Microsecond).Round(time.Millisecond).String()
		}
		t := s.Trace
		if t == nil {
			fmt.Fprintf(w, "%d\t%s\t%s\t-\t-\t-\t-\t%s\t%s (%s)\n", s.Number, plain(s.Step), s.Kind, cpu, cut(plain(requestText(s.Kind, s.RequestJson)), 60), s.Untraced)
			continue
		}
		read, written, procs := "-", "-", "-"
		if t.ReadBytes >= 0 {
			read, written = octetText(t.ReadBytes), octetText(t.WriteBytes)
			procs = fmt.Sprint(int64(len(t.Processes)) + t.MoreProcesses)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Number, plain(s.Step), s.Kind, filesText(t), procs, read, written, cpu, cut(plain(requestText(s.Kind, s.RequestJson)), 60))
	}
	w.Flush()
}

func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n]) + "..."
	}
	return s
}

// filesText counts: +created ~changed -removed.
func filesText(t *dsecv1.StepTrace) string {
	if t.Deferred {
		return "later"
	}
	var n [3]int
	for _, f := range t.Files {
		n[slices.Index([]string{"created", "changed", "removed"}, f.Kind)]++
	}
	s := fmt.Sprintf("+%d ~%d -%d", n[0], n[1], n[2])
	if t.MoreFiles > 0 {
		s += fmt.Sprintf(" %d more", t.MoreFiles)
	}
	if t.FilesPartial {
		s += " at least"
	}
	return s
}

// printTrace shows all of one step.
func printTrace(out io.Writer, s *dsecv1.TraceStep) {
	if s.Trace.GetRedo() > 0 {
		fmt.Fprintf(out, "step %d %s: done again by the restore that began epoch %d\n", s.Number, plain(s.Step), s.Trace.Redo)
	} else {
		fmt.Fprintf(out, "step %d %s: %s %s\n", s.Number, plain(s.Step), s.Kind, plain(requestText(s.Kind, s.RequestJson)))
	}
	if o := outcomeOf(s.OutcomeJson); o != nil {
		fmt.Fprintf(out, "  %s\n", plain(outcomeText(o)))
		if o.Shared {
			fmt.Fprintln(out, "  other work ran at the same time: CPU and memory may be partly its")
		}
	}
	for _, d := range s.Denials {
		fmt.Fprintf(out, "  refused: %s\n", plain(denialText(d)))
	}
	t := s.Trace
	if t == nil {
		fmt.Fprintf(out, "  not traced: %s\n", s.Untraced)
		return
	}
	if t.ReadBytes >= 0 {
		fmt.Fprintf(out, "  read %s from storage, wrote %s\n", octetText(t.ReadBytes), octetText(t.WriteBytes))
	}
	if p := t.Pressure; p != nil {
		us := func(n int64) time.Duration {
			return (time.Duration(n) * time.Microsecond).Round(100 * time.Microsecond)
		}
		fmt.Fprintf(out, "  waited: cpu %v, memory %v, I/O %v\n", us(p.CpuUs), us(p.MemoryUs), us(p.IoUs))
	}
	for _, note := range []struct {
		on   bool
		text string
	}{
		{t.Shared, "other steps ran at the same time: some of this may be theirs"},
		{t.Raced, "the next step began before the files were compared: some changes may be its"},
		{t.Deferred, "files: told with a later step, since comparing them takes long in this sandbox"},
		{t.SinceStep > 0, fmt.Sprintf("files: of this step and the %d before it", t.SinceStep)},
		{t.FilesPartial, "files: there are more names than are looked at; there may be other changes"},
		{t.LostEvents > 0, fmt.Sprintf("%d events of processes found no room", t.LostEvents)},
	} {
		if note.on {
			fmt.Fprintf(out, "  %s\n", note.text)
		}
	}
	for _, l := range t.Lacking {
		fmt.Fprintf(out, "  not told: %s\n", plain(l))
	}
	if !t.Deferred {
		fmt.Fprintf(out, "  files: %s", filesText(t))
		if t.SameFiles > 0 {
			fmt.Fprintf(out, ", %d written with what they held", t.SameFiles)
		}
		fmt.Fprintln(out)
		for _, f := range t.Files {
			fmt.Fprintf(out, "    %s\n", changeText(f))
		}
		more(out, t.MoreFiles)
		for _, v := range t.VolatilePaths {
			fmt.Fprintf(out, "    volatile %s\n", plain(v))
		}
	}
	if t.ReadBytes >= 0 {
		fmt.Fprintf(out, "  processes: %d\n", int64(len(t.Processes))+t.MoreProcesses)
		for _, p := range t.Processes {
			fmt.Fprintf(out, "    %s\n", processText(p))
		}
		more(out, t.MoreProcesses)
	}
	if t.Level == "full" {
		fmt.Fprintf(out, "  files read: %d\n", int64(len(t.Reads))+t.MoreReads)
		for _, r := range t.Reads {
			fmt.Fprintf(out, "    %s\n", plain(octetsOf(r.Path, r.PathRaw)))
		}
		more(out, t.MoreReads)
		fmt.Fprintf(out, "  connections asked for: %d\n", int64(len(t.Connections))+t.MoreConnections)
		for _, x := range t.Connections {
			end := "made"
			if x.Error != 0 {
				end = syscall.Errno(x.Error).Error()
			}
			fmt.Fprintf(out, "    %s  (%s)\n", x.Address, end)
		}
		more(out, t.MoreConnections)
	}
}

func more(out io.Writer, n int64) {
	if n > 0 {
		fmt.Fprintf(out, "    %d more\n", n)
	}
}

func denialText(j string) string {
	var d struct {
		Call, Detail string
	}
	if json.Unmarshal([]byte(j), &d) != nil || d.Call == "" {
		return j
	}
	return strings.TrimSpace(d.Call + " " + d.Detail)
}

func changeText(f *dsecv1.FileChange) string {
	sign := map[string]string{"created": "+", "changed": "~", "removed": "-"}[f.Kind]
	text := sign + " " + plain(octetsOf(f.Path, f.PathRaw))
	switch {
	case f.Before != nil && f.After != nil:
		text += "  " + stateText(f.Before) + " => " + stateText(f.After)
	case f.After != nil:
		text += "  " + stateText(f.After)
	case f.Before != nil:
		text += "  was " + stateText(f.Before)
	}
	if f.Replaced {
		text += ", made anew"
	}
	if f.Earlier {
		text += ", before the step began"
	}
	return text
}

func stateText(s *dsecv1.PathState) string {
	text := fmt.Sprintf("%s %04o", s.Type, s.Mode)
	switch {
	case s.Type == "link":
		return "link to " + plain(octetsOf(s.Link, s.LinkRaw))
	case s.Type == "file" && len(s.Sha256) > 0:
		text += fmt.Sprintf(" %d octets %x", s.Size, s.Sha256[:min(6, len(s.Sha256))])
	case s.Type == "file":
		text += fmt.Sprintf(" %d octets", s.Size)
	}
	return text
}

func processText(p *dsecv1.TracedProcess) string {
	text := plain(quoteWords(p.Argv))
	have := int64(0)
	for _, a := range p.Argv {
		have += int64(len(a)) + 1
	}
	if have < p.ArgvOctets {
		text += fmt.Sprintf(" ... (%d octets)", p.ArgvOctets)
	}
	if !p.Ended {
		return text + "  (has not ended)"
	}
	end := fmt.Sprintf("exited %d", p.Code)
	if p.Signal != 0 {
		end = fmt.Sprintf("signal %d", p.Signal)
	}
	return fmt.Sprintf("%s  (%s, cpu %v)", text, end, (time.Duration(p.CpuUs) * time.Microsecond).Round(100*time.Microsecond))
}
