package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/store"
)

type gcCmd struct {
	Store  string        `arg:"" optional:"" help:"A bucket: s3://BUCKET/PREFIX?endpoint=URL, whose chunks are collected. Without: what the server's next sweep of layers will remove (with --dry-run; a gateway sweeps every hour)."`
	DryRun bool          `help:"Only tell what would go."`
	Age    time.Duration `help:"Of layers: how old they must be; at least 1h." default:"6h"`
	Grace  time.Duration `help:"How long nobody must have needed what goes; at least 2h." default:"24h"`
}

// Run collects the chunks of a bucket that no object names. Gateways do the same every few hours for the store that they write.
func (x *gcCmd) Run(ctx context.Context, c *cli) error {
	if x.Store == "" {
		return x.layers(ctx, c)
	}
	if err := existing(x.Store); err != nil {
		return err
	}
	s, err := store.Parse(x.Store, "")
	if err != nil {
		return err
	}
	r, ok, err := store.Collect(ctx, s, x.Grace, x.DryRun)
	if err != nil {
		return err
	}
	if !ok {
		fmt.Println("a folder gives back its space with each deletion: nothing to do")
		return nil
	}
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(r)
	}
	verb := ""
	if x.DryRun {
		verb = "would be "
	}
	fmt.Printf("%s of chunks in %s for %d objects, %s in use\n", octetText(r.Octets), plural(r.Packs, "pack"), r.Objects, octetText(r.Live))
	fmt.Printf("%s %sremoved, %s freed; %s %scondemned, to be removed in %v\n", plural(r.Removed, "pack"), verb, octetText(r.Freed), plural(r.Condemned, "pack"), verb, x.Grace)
	for _, p := range r.Damaged {
		fmt.Fprintf(os.Stderr, "dsec: pack %s is damaged; objects that need it can't be read in whole\n", p)
	}
	return nil
}

// layers tells what the gateway's next sweep removes.
func (x *gcCmd) layers(ctx context.Context, c *cli) error {
	if !x.DryRun {
		return errors.New("gateways remove unused layers on their own, every hour; --dry-run tells which, and gc STORE collects a bucket's chunks")
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	g, err := cl.Unused(ctx, x.Age)
	if err != nil {
		return err
	}
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(g)
	}
	for _, l := range g.Layers {
		note := ""
		if l.Deferred {
			note = ", its octets a day later"
		}
		fmt.Printf("%s %s, made %s from %s%s\n", short(l.ID), octetText(l.Octets), l.Created.Format(time.DateTime), lines(l.Source), note)
	}
	fmt.Printf("%s and %s that none needs (%s) would be removed, %s be dropped\n", plural(len(g.Layers), "layer"), plural(g.Objects, "object"), octetText(g.Octets), plural(g.Forms, "replaced form"))
	return nil
}
