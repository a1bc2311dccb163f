package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/build"
)

type envBuildCmd struct {
	File        string `short:"f" help:"Build file (see docs/images.md)." type:"existingfile" default:"dsec.toml" placeholder:"FILE"`
	Name        string `help:"Name of the environment (default: the file's)." placeholder:"NAME"`
	NoCache     bool   `help:"Execute every step."`
	FailSecrets bool   `help:"Publish nothing when a secret seems to be in it."`
}

func (x *envBuildCmd) Run(ctx context.Context, c *cli) error {
	f, err := build.ReadFile(x.File)
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	// The steps' output is not what was asked for: that is the environment's name.
	r, err := build.Run(ctx, cl, f, build.Options{Name: x.Name, NoCache: x.NoCache, FailSecrets: x.FailSecrets, Output: os.Stderr})
	if err != nil {
		var failed *build.StepError
		if errors.As(err, &failed) {
			// Its output was shown as it came.
			fmt.Fprintf(os.Stderr, "dsec: %s\n", plain(strings.SplitN(failed.Error(), "; its output", 2)[0]))
			return exitCode(1)
		}
		return err
	}
	e := r.Environment
	return c.emit(e, func() {
		fmt.Printf("%s@%d (%s; %s executed, %d found)\n", e.Name, e.Version, plural(len(e.Layers), "layer"), plural(r.Executed, "step"), r.Cached)
	})
}

type envUpgradeCmd struct {
	Name string   `arg:"" help:"Environment (name or name@version)."`
	Kit  []string `required:"" help:"Tool kit that replaces the one of its name; repeat." placeholder:"NAME@N" sep:"none"`
	As   string   `help:"Publish it under this name instead." placeholder:"NAME"`
}

func (x *envUpgradeCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	e, err := environment(ctx, cl, x.Name)
	if err != nil {
		return err
	}
	for _, k := range x.Kit {
		if err := replace(e, k); err != nil {
			return err
		}
	}
	if x.As != "" {
		e.Name = x.As
	}
	return c.republish(ctx, cl, e)
}

// replace puts a kit in the place of the one with its name.
func replace(e *dsecv1.Environment, kit string) error {
	name, _, _ := strings.Cut(kit, "@")
	for i, have := range e.Kits {
		if n, _, _ := strings.Cut(have, "@"); n == name {
			e.Kits[i] = kit
			return nil
		}
	}
	var names []string
	for _, k := range e.Kits {
		if !strings.HasPrefix(k, "sha256:") {
			names = append(names, k)
		}
	}
	return fmt.Errorf("environment %s@%d has no kit %s; it has %s", e.Name, e.Version, name, dash(strings.Join(names, ", ")))
}

type envAliasCmd struct {
	Alias string `arg:"" help:"NAME=ENVIRONMENT@VERSION." placeholder:"NAME=ENV@N"`
}

func (x *envAliasCmd) Run(ctx context.Context, c *cli) error {
	name, target, ok := strings.Cut(x.Alias, "=")
	if !ok || name == "" || target == "" {
		return fmt.Errorf("alias %q: want NAME=ENVIRONMENT@VERSION", x.Alias)
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	e, err := environment(ctx, cl, target)
	if err != nil {
		return err
	}
	e.Name = name
	return c.republish(ctx, cl, e)
}

func environment(ctx context.Context, cl *client.Client, ref string) (*dsecv1.Environment, error) {
	r, err := cl.LayerService.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: ref}))
	if err != nil {
		return nil, client.Wrap(err)
	}
	return r.Msg.Environment, nil
}

// republish publishes an environment that was read: its references carry their versions, so all that was not changed stays the same.
func (c *cli) republish(ctx context.Context, cl *client.Client, e *dsecv1.Environment) error {
	out, err := cl.PublishEnvironment(ctx, e)
	if err != nil {
		return err
	}
	return c.emit(out, func() { fmt.Printf("%s@%d (%s)\n", out.Name, out.Version, plural(len(out.Layers), "layer")) })
}

type envExportCmd struct {
	Env string `arg:"" help:"Environment (name or name@version)."`
	To  string `arg:"" help:"FILE for docker load (- for standard output), or oci:FOLDER."`
	Ref string `help:"Reference that the image carries, such as registry.example/app:v1." placeholder:"REF"`
}

func (x *envExportCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	if dir, ok := strings.CutPrefix(x.To, "oci:"); ok {
		r, w := io.Pipe()
		go func() { w.CloseWithError(cl.ExportImage(ctx, x.Env, x.Ref, w)) }()
		defer r.Close()
		n := &octets{r: r}
		if err := unpackLayout(dir, n); err != nil {
			return err
		}
		return c.exported(x, n.n)
	}
	if x.To == "-" {
		return cl.ExportImage(ctx, x.Env, x.Ref, os.Stdout)
	}
	// Half an image under the name that was asked for would pass for one.
	f, err := os.CreateTemp(filepath.Dir(x.To), "."+filepath.Base(x.To)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if err := cl.ExportImage(ctx, x.Env, x.Ref, f); err != nil {
		f.Close()
		return err
	}
	n, err := f.Seek(0, io.SeekCurrent)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), x.To); err != nil {
		return err
	}
	return c.exported(x, n)
}

// exported says what was written.
func (c *cli) exported(x *envExportCmd, n int64) error {
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(map[string]any{"environment": x.Env, "to": x.To, "octets": n})
	}
	fmt.Printf("exported %s to %s, %s\n", plain(x.Env), plain(x.To), octetText(n))
	return nil
}

// octets counts what is read.
type octets struct {
	r io.Reader
	n int64
}

func (o *octets) Read(b []byte) (int, error) {
	n, err := o.r.Read(b)
	o.n += int64(n)
	return n, err
}

// unpackLayout lays the files of an export into a folder. The index comes into its place last, so that what is there is whole.
func unpackLayout(dir string, r io.Reader) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	var index []byte
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		switch {
		case h.Typeflag == tar.TypeDir:
			if err := root.MkdirAll(name, 0o755); err != nil {
				return err
			}
		case name == "manifest.json": // docker's own
		case name == "index.json":
			if index, err = io.ReadAll(io.LimitReader(tr, 1<<20)); err != nil {
				return err
			}
		case h.Typeflag == tar.TypeReg:
			if err := put(root, name, tr); err != nil {
				return err
			}
		}
	}
	if index == nil || !json.Valid(index) {
		return errors.New("export: the server sent no index")
	}
	return put(root, "index.json", strings.NewReader(string(index)))
}

func put(root *os.Root, name string, r io.Reader) error {
	f, err := root.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, r); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
