package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type layerProfileCmd struct {
	Ref    string `arg:"" help:"Name, name@version or ID."`
	Local  string `help:"Store of the services here, as their --store." default:"/var/lib/dsec/store" placeholder:"STORE"`
	RunDir string `name:"run" help:"Run folder of the services here." default:"/run/dsec" type:"path"`
	Layout bool   `help:"Store the layer anew with what was read in front; its ID and names stay. Later mounts fetch that first."`
	Reset  bool   `help:"Forget the reads, to record another run."`
}

// Run tells what sandboxes of this machine read of a layer through the blob daemon, in the order of the first reads.
func (x *layerProfileCmd) Run(ctx context.Context, c *cli) error {
	if err := ownFolder(x.Local); err != nil {
		return err
	}
	st, err := openStores([]string{x.Local}, "")
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	var p layer.Pushed
	if err := pushedLayer(ctx, cl, x.Ref, &p); err != nil {
		return err
	}
	id := p.Layers[0]
	catalogue := layer.New(nil, st)
	d, err := catalogue.Descriptor(ctx, id)
	if err != nil {
		return err
	}
	data, reads, err := x.reads(ctx, d)
	if err != nil {
		return err
	}
	files, err := catalogue.FilesAt(ctx, id, data, reads)
	if err != nil {
		return err
	}
	octets := int64(0)
	for _, r := range reads {
		octets += r.Len
	}
	if x.Layout {
		if _, err := catalogue.RelayoutRead(ctx, id, data, reads); err != nil {
			return err
		}
	}
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(map[string]any{"layer": id, "octets": octets, "files": files, "laid_out": x.Layout})
	}
	for _, f := range files {
		fmt.Println(lines(f))
	}
	note := ""
	if x.Layout {
		note = "; the layer is stored anew with that in front"
	}
	fmt.Fprintf(os.Stderr, "%s of %s were read%s\n", octetText(octets), plural(len(files), "file"), note)
	return nil
}

// reads asks the blob daemons of this machine's hosts for the reads of a layer's contents.
func (x *layerProfileCmd) reads(ctx context.Context, d layer.Descriptor) (data string, out []layer.Range, err error) {
	hosts, err := filepath.Glob(filepath.Join(x.RunDir, "blobd-*"))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range hosts {
		for _, f := range d.Forms {
			if f.Data == nil {
				continue
			}
			reads, err := readsOf(ctx, dir, f.Data.Digest, x.Reset)
			if errors.Is(err, sandbox.ErrNotFound) {
				continue
			}
			if err != nil {
				return "", nil, err
			}
			for _, r := range reads {
				out = append(out, layer.Range(r))
			}
			if len(out) > 0 {
				return f.Data.Digest, out, nil
			}
		}
	}
	return "", nil, fmt.Errorf("layer %s: no sandbox read it through a blob daemon of this machine; layers of a local store are seen with `seen = true` in [blobs] (docs/ops/config.md)", d.ID)
}

func readsOf(ctx context.Context, dir, digest string, reset bool) ([]blob.Range, error) {
	c, err := blob.Dial(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	}
	defer c.Close()
	return c.Reads(ctx, digest, reset)
}
