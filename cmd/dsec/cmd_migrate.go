package main

import (
	"context"
	"fmt"
)

type migrateCmd struct {
	ID string `arg:"" help:"ID or name of the sandbox."`
	To string `help:"Host that it goes to; without it one that fits." placeholder:"HOST"`
}

// Run moves a sandbox to another host.
func (x *migrateCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	sb := cl.Sandbox(x.ID)
	from, err := sb.Migrate(ctx, x.To)
	if err != nil {
		return err
	}
	return c.emit(sb.Data, func() {
		if from == sb.Data.Host {
			fmt.Printf("%s is on host %s\n", sb.Data.Id, from)
			return
		}
		fmt.Printf("%s went from host %s to %s\n", sb.Data.Id, from, sb.Data.Host)
	})
}
