package main

import (
	"context"
	"fmt"
	"os"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

type keyCmd struct {
	Create keyCreateCmd `cmd:"" help:"Make a key and print it; it is shown once."`
	Ls     keyListCmd   `cmd:"" help:"List keys."`
	Revoke keyRevokeCmd `cmd:"" help:"Revoke a key by its ID."`
}

type keyCreateCmd struct {
	Project string        `help:"Project, the caller's or one below it."`
	Note    string        `help:"What it is for."`
	TTL     time.Duration `name:"ttl" help:"Expire after this long (default: never)."`
}

func (x *keyCreateCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.CreateKey(ctx, &dsecv1.CreateKeyRequest{Project: x.Project, Note: x.Note, TtlMs: x.TTL.Milliseconds()})
	if err != nil {
		return err
	}
	return c.emit(r, func() { fmt.Println(r.Key) })
}

type keyListCmd struct{}

func (x *keyListCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	keys, err := cl.ListKeys(ctx)
	if err != nil {
		return err
	}
	return emitList(c, keys, func() {
		var rows [][]string
		for _, k := range keys {
			expires := "never"
			if k.Expires != nil {
				expires = k.Expires.AsTime().Local().Format(time.DateTime)
			}
			rows = append(rows, []string{k.Id, k.Project, dash(k.Note), ago(k.Created.AsTime()), expires})
		}
		table(os.Stdout, []string{"ID", "PROJECT", "NOTE", "AGE", "EXPIRES"}, rows)
	})
}

type keyRevokeCmd struct {
	ID string `arg:"" help:"The key's ID (not its text)."`
}

func (x *keyRevokeCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	return cl.RevokeKey(ctx, x.ID)
}
