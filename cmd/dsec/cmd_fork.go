package main

import (
	"context"
	"fmt"
	"time"

	"github.com/dsec-dev/dsec/client"
)

type forkCmd struct {
	ID    string            `arg:"" help:"ID or name of the sandbox that is forked."`
	Count int               `short:"n" default:"1" help:"How many, 1 to 1,000."`
	KeyID string            `name:"create-key" help:"Idempotency key: the same key again answers the same sandboxes." placeholder:"KEY"`
	Job   string            `help:"Job of the forks, instead of its own." placeholder:"NAME"`
	Label map[string]string `short:"l" help:"Label k=v on top of its labels; repeat." mapsep:"none"`
	Idle  time.Duration     `help:"Idle time to live, instead of its own." placeholder:"5m"`
	Total time.Duration     `help:"Total time to live, instead of its own." placeholder:"1h"`
}

func (x *forkCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	made, failed, err := cl.Sandbox(x.ID).Fork(ctx, x.Count, client.ForkOptions{Key: x.KeyID, Job: x.Job, Labels: x.Label, Idle: x.Idle, Total: x.Total})
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
