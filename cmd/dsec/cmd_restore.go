package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/client"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

type restoreCmd struct {
	ID             string            `arg:"" optional:"" help:"ID of any sandbox of the trajectory; else --create-key."`
	Job            string            `help:"Job of --create-key." placeholder:"JOB"`
	CreateKey      string            `name:"create-key" help:"Create key of the sandbox." placeholder:"KEY"`
	Warn           bool              `help:"Tell what comes to something else and go on; else the restore ends there."`
	Skip           []string          `help:"Step that is not done again; '*' is all that would be asked about. Repeat." placeholder:"STEP"`
	Repeat         []string          `help:"Step that is done again whatever its class; '*' is all that would be asked about. Repeat." placeholder:"STEP"`
	Secret         map[string]string `help:"Value of a secret entry, which the log does not hold. Repeat." placeholder:"NAME=VALUE"`
	AcceptTailLoss bool              `help:"Go on where the end of the record may be missing."`
	LostHost       string            `help:"This host is gone for good: it is shut out of the store and all its sandboxes are over." placeholder:"HOST"`
	Call           string            `help:"ID of this call: the same again joins it." placeholder:"ID"`
}

// Run makes a sandbox that is gone again. The code is 1 when there is none.
func (x *restoreCmd) Run(ctx context.Context, c *cli) error {
	if (x.ID == "") == (x.CreateKey == "") {
		return errors.New("give the ID of a sandbox, or --create-key with --job")
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	o := client.RestoreOptions{Warn: x.Warn, Skip: x.Skip, Repeat: x.Repeat, Secrets: x.Secret, AcceptTailLoss: x.AcceptTailLoss, LostHost: x.LostHost, ID: x.Call}
	if c.Output != "json" {
		last := time.Now()
		o.Progress = func(r *dsecv1.RestoreResponse) {
			if time.Since(last) > 5*time.Second {
				last = time.Now()
				fmt.Fprintf(os.Stderr, "%d of %d steps\n", r.RepeatedSteps+r.SkippedSteps, r.Steps)
			}
		}
	}
	r, err := x.restore(ctx, cl, o)
	if err != nil {
		return err
	}
	if c.Output == "json" {
		b, err := marshal(r.RestoreResponse, false)
		if err != nil {
			return err
		}
		fmt.Println(string(b))
	} else {
		x.print(r)
	}
	if r.Sandbox == nil {
		return exitCode(1)
	}
	return nil
}

func (x *restoreCmd) restore(ctx context.Context, cl *client.Client, o client.RestoreOptions) (*client.Restored, error) {
	if x.ID != "" {
		return cl.Restore(ctx, x.ID, o)
	}
	return cl.RestoreKey(ctx, x.Job, x.CreateKey, o)
}

func (x *restoreCmd) print(r *client.Restored) {
	from := "what the first sandbox was made of"
	if r.Base != "environment" {
		from = "snapshot " + r.Base
	}
	at := ""
	if t := r.LastTime; t != nil {
		at = " of " + t.AsTime().Local().Format(time.DateTime)
	}
	fmt.Printf("from %s; the last record is %d%s\n", from, r.LastSeq, at)
	for _, n := range r.Notes {
		fmt.Println("note:", plain(n))
	}
	list := func(what string, steps []*dsecv1.RestoredStep, all int64) {
		for _, s := range steps {
			fmt.Printf("%-9s %6d  %-10s %-24s %s\n", what, s.Seq, s.Kind, s.Step, plain(s.Why))
		}
		if more := all - int64(len(steps)); more > 0 {
			fmt.Printf("%-9s and %d more\n", what, more)
		}
	}
	list("differs", r.Diverged, r.Differing)
	switch r.State {
	case "restored":
		fmt.Printf("%s: %s done again, %d skipped", r.Sandbox.ID, plural(int(r.RepeatedSteps), "step"), r.SkippedSteps)
		if len(r.Running) > 0 {
			fmt.Printf("; running: %s", strings.Join(r.Running, " "))
		}
		fmt.Println()
	case "asks":
		list("asks", r.Asks, r.Asked)
		for _, s := range r.Secrets {
			fmt.Printf("asks      the value of secret %s: --secret %s=VALUE\n", s, s)
		}
		if r.Asked > 0 {
			fmt.Println("nothing was done; say what becomes of each: --skip STEP or --repeat STEP ('*' for all)")
		}
	default:
		fmt.Println("nothing is left of the attempt; --warn goes on after a difference")
	}
}
