package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/layer"
)

type layerCmd struct {
	Build    layerBuildCmd    `cmd:"" help:"Build a layer from a folder, a tar or a Debian suite."`
	Ls       layerListCmd     `cmd:"" help:"List layers by name."`
	Inspect  layerInspectCmd  `cmd:"" help:"Show a layer."`
	Push     layerPushCmd     `cmd:"" help:"Copy a layer, or an environment with its layers, to another store."`
	Pull     layerPullCmd     `cmd:"" help:"Copy one from another store and name it here."`
	Profile  layerProfileCmd  `cmd:"" help:"Tell what sandboxes of this machine read of a layer, and lay it out by that."`
	Rollback layerRollbackCmd `cmd:"" help:"Make an earlier version current."`
	Rm       layerRemoveCmd   `cmd:"" help:"Remove a version (name@version), or all of a name."`
}

type layerBuildCmd struct {
	Name    string   `arg:"" help:"Name to publish it under, such as base/debian-go."`
	Dir     string   `help:"From a folder." xor:"from" placeholder:"FOLDER" type:"existingdir"`
	Tar     string   `help:"From a tar, - for standard input." xor:"from" placeholder:"FILE"`
	Debian  string   `help:"From a Debian suite (needs mmdebstrap), such as bookworm." xor:"from" placeholder:"SUITE"`
	Include []string `help:"Debian packages to install; repeat or separate by commas."`
	Hot     string   `help:"File with paths in the layer, one a line, whose contents are read first: they are laid in front and fetched first." placeholder:"FILE" type:"existingfile"`
	At      string   `help:"Folder in the layer that a --dir goes to." default:"/" placeholder:"PATH"`

	machineFlags
}

func (x *layerBuildCmd) Run(ctx context.Context, c *cli) error {
	// The gateway checks it too, but after minutes of building.
	if err := layer.CheckName("name", x.Name); err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	was := "" // only for what is said in the end
	old, err := getLayer(ctx, cl, x.Name, "")
	if err == nil && old.Name != nil {
		was = fmt.Sprintf("%s@%d", x.Name, old.Name.Current)
	}
	hot, err := x.hotPaths()
	if err != nil {
		return err
	}
	src, source, err := x.open(ctx)
	if err != nil {
		return err
	}
	r, err := cl.ImportLayer(ctx, x.Name, source, newMeter(src, -1), hot...)
	if cerr := src.Close(); err == nil && cerr != nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return c.emit(r, func() {
		note := ""
		switch {
		case r.Existed && was != "" && old.Layer.GetId() == r.Layer.GetId():
			note = fmt.Sprintf(" (the same tree was there already, as %s)", was)
		case r.Existed:
			note = " (the same tree was there already)"
		}
		entries := "1 entry"
		if r.Layer.Entries != 1 {
			entries = fmt.Sprintf("%d entries", r.Layer.Entries)
		}
		fmt.Printf("%s %s %s, %s%s\n", r.Published, short(r.Layer.Id), octetText(r.Layer.Octets), entries, note)
	})
}

// hotPaths reads the list, as `strace`, a profile or a person wrote it.
func (x *layerBuildCmd) hotPaths() ([]string, error) {
	if x.Hot == "" {
		return nil, nil
	}
	b, err := os.ReadFile(x.Hot)
	if err != nil {
		return nil, err
	}
	if len(b) > maxHotList {
		return nil, fmt.Errorf("--hot %s: %d octets, at most %d; leave out what is read late", x.Hot, len(b), maxHotList)
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSuffix(line, "\n"); line != "" {
			out = append(out, line)
		}
	}
	return out, nil
}

// maxHotList is far below what one message may hold, in octets.
const maxHotList = 16 << 20

func (x *layerBuildCmd) open(ctx context.Context) (io.ReadCloser, string, error) {
	switch {
	case x.Dir != "":
		r, w := io.Pipe()
		go func() { w.CloseWithError(tarFolderAt(ctx, w, x.Dir, x.At)) }()
		return r, "folder", nil
	case x.Machine != "" || x.CDROM != "" && x.Tar == "" && x.Debian == "":
		return x.openMachine(ctx)
	case x.Tar == "-":
		return io.NopCloser(os.Stdin), "tar", nil
	case x.Tar != "":
		f, err := os.Open(x.Tar)
		return f, "tar", err
	case x.Debian != "":
		r, err := debian(ctx, x.Debian, x.Include)
		return r, "debian " + x.Debian, err
	}
	return nil, "", errors.New("give one of --dir, --tar, --debian, --machine or --cdrom")
}

// debian streams the tar that mmdebstrap makes from the machine's own package sources, so that nothing is unpacked here.
func debian(ctx context.Context, suite string, include []string) (io.ReadCloser, error) {
	bin, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return nil, errors.New("mmdebstrap is not installed: `apt-get install mmdebstrap`, or build the tar elsewhere and use --tar")
	}
	args := []string{"--variant=minbase", "--format=tar", "--skip=output/dev", "--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright"}
	if len(include) > 0 {
		args = append(args, "--include="+strings.Join(include, ","))
	}
	cmd := exec.CommandContext(ctx, bin, append(args, suite, "-")...)
	if b, err := os.ReadFile("/etc/apt/sources.list"); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		cmd.Args = append(cmd.Args, "/etc/apt/sources.list")
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &child{out, cmd}, nil
}

type child struct {
	io.ReadCloser
	cmd *exec.Cmd
}

func (p *child) Read(b []byte) (int, error) {
	n, err := p.ReadCloser.Read(b)
	if err == io.EOF {
		// A tar that ends because its maker failed must not become a layer.
		if werr := p.cmd.Wait(); werr != nil {
			return n, fmt.Errorf("mmdebstrap: %w", werr)
		}
		p.cmd = nil
	}
	return n, err
}

func (p *child) Close() error {
	if p.cmd == nil {
		return nil
	}
	p.ReadCloser.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	return nil
}

type layerListCmd struct {
	Prefix string `arg:"" optional:"" help:"Only names that begin so."`
}

func (x *layerListCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	var names []*dsecv1.LayerName
	for token := ""; ; {
		r, err := cl.LayerService.ListLayers(ctx, connect.NewRequest(&dsecv1.ListLayersRequest{Prefix: x.Prefix, PageSize: 1000, PageToken: token}))
		if err != nil {
			return client.Wrap(err)
		}
		if names, token = append(names, r.Msg.Names...), r.Msg.NextPageToken; token == "" {
			break
		}
	}
	return emitList(c, names, func() {
		var rows [][]string
		for _, n := range names {
			for _, v := range n.Versions {
				mark := ""
				if v.Version == n.Current {
					mark = "*"
				}
				rows = append(rows, []string{fmt.Sprintf("%s@%d%s", n.Name, v.Version, mark), short(v.Layer), ago(v.Created.AsTime())})
			}
		}
		table(os.Stdout, []string{"NAME", "LAYER", "AGE"}, rows)
	})
}

type layerInspectCmd struct {
	Ref string `arg:"" help:"Name, name@version or layer ID."`
}

func (x *layerInspectCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.LayerService.GetLayer(ctx, connect.NewRequest(&dsecv1.GetLayerRequest{Ref: x.Ref}))
	if err != nil {
		return client.Wrap(err)
	}
	return c.show(r.Msg)
}

type layerRollbackCmd struct {
	Name    string `arg:"" help:"Layer name."`
	Version int64  `arg:"" help:"Version to make current."`
}

func (x *layerRollbackCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.LayerService.RollbackLayer(ctx, connect.NewRequest(&dsecv1.RollbackLayerRequest{Name: x.Name, Version: x.Version}))
	if err != nil {
		return client.Wrap(err)
	}
	return c.emit(r.Msg.Name, func() {
		fmt.Printf("%s is now %s@%d; environments keep what they were published with\n", x.Name, x.Name, r.Msg.Name.Current)
	})
}

type layerRemoveCmd struct {
	Ref []string `arg:"" help:"Name or name@version; repeat."`
}

func (x *layerRemoveCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	for _, ref := range x.Ref {
		if _, err := cl.LayerService.RemoveLayer(ctx, connect.NewRequest(&dsecv1.RemoveLayerRequest{Ref: ref})); err != nil {
			return client.Wrap(err)
		}
	}
	return nil
}

type envCmd struct {
	Create   envCreateCmd   `cmd:"" help:"Compose an environment (a new version of its name)."`
	Build    envBuildCmd    `cmd:"" help:"Build an environment from a file of steps, each executed in a sandbox and cached."`
	Upgrade  envUpgradeCmd  `cmd:"" help:"Make a new version with tool kits replaced; all else is used again."`
	Alias    envAliasCmd    `cmd:"" help:"Make a name mean a version of an environment."`
	Export   envExportCmd   `cmd:"" help:"Write an environment as an OCI image: a file for docker load, or an OCI layout folder."`
	Ls       envListCmd     `cmd:"" help:"List environments."`
	Inspect  envInspectCmd  `cmd:"" help:"Show an environment."`
	Rollback envRollbackCmd `cmd:"" help:"Make an earlier version current."`
	Rm       envRemoveCmd   `cmd:"" help:"Remove a version (name@version), or all of a name."`
}

type envCreateCmd struct {
	Name      string            `arg:"" help:"Name, such as chi-fix."`
	Base      string            `required:"" help:"Base layer." placeholder:"REF"`
	Workspace string            `help:"Workspace layer." placeholder:"REF"`
	Kit       []string          `help:"Tool-kit layer; repeat." placeholder:"REF" sep:"none"`
	Var       map[string]string `short:"E" help:"Environment variable k=v; repeat." mapsep:"none"`
	User      string            `short:"u" help:"User of commands."`
	Cwd       string            `short:"w" help:"Working folder of commands."`
	Memory    size              `short:"m" help:"Memory limit." placeholder:"SIZE"`
	Disk      size              `help:"Disk limit." placeholder:"SIZE"`
	Pids      int64             `help:"Process limit." placeholder:"N"`
	Volatile  []string          `help:"Path of a cache or the like, which replay does not compare; repeat." placeholder:"PATH" sep:"none"`
}

func (x *envCreateCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	e := &dsecv1.Environment{Name: x.Name, Base: x.Base, Workspace: x.Workspace, Kits: x.Kit, User: x.User, Cwd: x.Cwd, VolatilePaths: x.Volatile,
		Resources: &dsecv1.Resources{Memory: int64(x.Memory), Disk: int64(x.Disk), Pids: x.Pids}}
	for k, v := range x.Var {
		e.Env = append(e.Env, &dsecv1.EnvVar{Name: k, Value: v})
	}
	e, err = cl.PublishEnvironment(ctx, e)
	if err != nil {
		return err
	}
	return c.emit(e, func() { fmt.Printf("%s@%d (%s)\n", e.Name, e.Version, plural(len(e.Layers), "layer")) })
}

type envListCmd struct {
	Prefix string `arg:"" optional:"" help:"Only names that begin so."`
}

func (x *envListCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	var list []*dsecv1.Environment
	for token := ""; ; {
		r, err := cl.LayerService.ListEnvironments(ctx, connect.NewRequest(&dsecv1.ListEnvironmentsRequest{Prefix: x.Prefix, PageSize: 1000, PageToken: token}))
		if err != nil {
			return client.Wrap(err)
		}
		if list, token = append(list, r.Msg.Environments...), r.Msg.NextPageToken; token == "" {
			break
		}
	}
	return emitList(c, list, func() {
		var rows [][]string
		for _, e := range list {
			mark := ""
			if e.Current {
				mark = "*"
			}
			kits := make([]string, len(e.Kits))
			for i, k := range e.Kits {
				kits[i] = short(k)
			}
			rows = append(rows, []string{fmt.Sprintf("%s@%d%s", e.Name, e.Version, mark), short(e.Base), dash(short(e.Workspace)), dash(strings.Join(kits, ",")), ago(e.Created.AsTime())})
		}
		table(os.Stdout, []string{"NAME", "BASE", "WORKSPACE", "KITS", "AGE"}, rows)
	})
}

type envInspectCmd struct {
	Ref string `arg:"" help:"Name or name@version."`
}

func (x *envInspectCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.LayerService.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: x.Ref}))
	if err != nil {
		return client.Wrap(err)
	}
	return c.show(r.Msg)
}

type envRollbackCmd struct {
	Name    string `arg:"" help:"Environment name."`
	Version int64  `arg:"" help:"Version to make current."`
}

func (x *envRollbackCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.LayerService.RollbackEnvironment(ctx, connect.NewRequest(&dsecv1.RollbackEnvironmentRequest{Name: x.Name, Version: x.Version}))
	if err != nil {
		return client.Wrap(err)
	}
	return c.emit(r.Msg.Environment, func() { fmt.Printf("%s is now %s@%d\n", x.Name, x.Name, r.Msg.Environment.Version) })
}

type envRemoveCmd struct {
	Ref []string `arg:"" help:"Name or name@version; repeat."`
}

func (x *envRemoveCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	for _, ref := range x.Ref {
		if _, err := cl.LayerService.RemoveEnvironment(ctx, connect.NewRequest(&dsecv1.RemoveEnvironmentRequest{Ref: ref})); err != nil {
			return client.Wrap(err)
		}
	}
	return nil
}
