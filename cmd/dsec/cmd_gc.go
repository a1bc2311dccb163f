package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/store"
)

type gcCmd struct {
	Store  string        `arg:"" help:"A bucket: s3://BUCKET/PREFIX?endpoint=URL."`
	DryRun bool          `help:"Only tell what would go."`
	Grace  time.Duration `help:"How long nobody must have needed what goes; at least 2h." default:"24h"`
}

// Run collects the chunks of a bucket that no object names. Gateways do the same every few hours for the store that they write.
func (x *gcCmd) Run(ctx context.Context, c *cli) error {
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
