package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/oci"
)

type imageCmd struct {
	Import  imageImportCmd  `cmd:"" help:"Import images of a registry, an OCI layout folder or a docker save archive."`
	Ls      imageListCmd    `cmd:"" help:"List imported images."`
	Inspect imageInspectCmd `cmd:"" help:"Show an imported image."`
	Rm      imageRemoveCmd  `cmd:"" help:"Remove an image's environment and the layers that nothing else uses."`
	Login   imageLoginCmd   `cmd:"" help:"Keep what the project shows to a registry."`
	Logout  imageLogoutCmd  `cmd:"" help:"Forget it."`
	Logins  imageLoginsCmd  `cmd:"" help:"List for which registries the project has a credential."`
}

type imageImportCmd struct {
	Ref          []string `arg:"" optional:"" help:"REF, oci:FOLDER[:tag] or docker-archive:FILE[:ref] (- for standard input)."`
	Name         string   `help:"Reference to keep a local image under (default: the one it carries)." placeholder:"REF"`
	Pull         string   `help:"missing: leave alone what is there (default); always: ask the registry." enum:"missing,always," default:"" placeholder:"WHEN"`
	From         string   `help:"File with references, one a line; - for standard input." placeholder:"FILE"`
	Report       string   `help:"File that gets a line of JSON for each reference; those that it says are done are skipped." placeholder:"FILE"`
	Parallel     int      `short:"p" help:"Images at once." default:"4"`
	Retries      int      `help:"Times that an import is tried again when a registry fails." default:"2"`
	DockerConfig string   `help:"Take credentials from this docker config.json." type:"existingfile" placeholder:"FILE"`
	Arch         string   `hidden:"" default:""`
}

// outcome is a line of the report.
type outcome struct {
	Ref         string  `json:"ref"`
	Status      string  `json:"status"` // done or failed
	Environment string  `json:"environment,omitempty"`
	Digest      string  `json:"digest,omitempty"`
	Octets      int64   `json:"octets,omitempty"`
	Seconds     float64 `json:"seconds"`
	Code        string  `json:"code,omitempty"`
	Error       string  `json:"error,omitempty"`
}

func (x *imageImportCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	refs, err := x.references()
	if err != nil {
		return err
	}
	if x.Parallel < 1 || x.Parallel > 256 {
		return fmt.Errorf("--parallel %d: want 1 to 256", x.Parallel)
	}
	if x.Name != "" && len(refs) != 1 {
		return errors.New("--name: is for one image")
	}
	creds := map[string]oci.Credential{}
	if x.DockerConfig != "" {
		if creds, err = oci.ReadDockerConfig(x.DockerConfig); err != nil {
			return err
		}
	}
	bulk := x.From != "" || len(refs) > 1
	if !bulk {
		i, err := x.one(ctx, cl, refs[0], creds, pullMeter())
		if err != nil {
			return err
		}
		return c.emit(i, func() {
			fmt.Printf("%s %s (%s, %s)\n", i.Environment, i.Ref, plural(len(i.Layers), "layer"), octetText(i.Octets))
		})
	}
	return x.bulk(ctx, c, cl, refs, creds)
}

func (x *imageImportCmd) references() ([]string, error) {
	refs := x.Ref
	if x.From != "" {
		in := os.Stdin
		if x.From != "-" {
			f, err := os.Open(x.From)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			in = f
		}
		for s := bufio.NewScanner(in); s.Scan(); {
			if line := strings.TrimSpace(s.Text()); line != "" && !strings.HasPrefix(line, "#") {
				refs = append(refs, line)
			}
		}
	}
	if len(refs) == 0 {
		return nil, errors.New("name an image, or --from a file of them")
	}
	return refs, nil
}

// one imports one image, wherever it lies.
func (x *imageImportCmd) one(ctx context.Context, cl *client.Client, ref string, creds map[string]oci.Credential, progress func([]*dsecv1.PullProgress)) (*dsecv1.Image, error) {
	if kind, file, tag, local := oci.ParseLocal(ref); local {
		return x.push(ctx, cl, kind, file, tag)
	}
	r, err := oci.ParseRef(ref)
	if ferr := fileNotRef(ref, err == nil); ferr != nil {
		return nil, ferr
	}
	if err != nil {
		return nil, err
	}
	cred := creds[r.Host]
	return cl.PullImage(ctx, &dsecv1.PullRequest{Ref: ref, Policy: x.Pull, Username: cred.Username, Secret: cred.Secret}, progress)
}

// fileNotRef tells a file or folder that was meant from a reference. What could be either is a reference, but for an archive by its name.
func fileNotRef(ref string, parses bool) error {
	info, err := os.Stat(ref)
	switch {
	case err != nil:
		return nil
	case info.IsDir() && (!parses || strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, ".")):
		return fmt.Errorf("image %q: is a folder here; of an OCI layout give oci:%s", ref, ref)
	case info.IsDir():
		return nil
	case !parses || strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, ".") || strings.HasSuffix(ref, ".tar") || strings.HasSuffix(ref, ".tar.gz") || strings.HasSuffix(ref, ".tgz"):
		return fmt.Errorf("image %q: is a file here; of what docker save writes give docker-archive:%s", ref, ref)
	}
	return nil
}

// push sends an image of this machine: the layers that are not there, then its config.
func (x *imageImportCmd) push(ctx context.Context, cl *client.Client, kind, file, tag string) (*dsecv1.Image, error) {
	arch := x.Arch
	if arch == "" {
		arch = runtime.GOARCH
	}
	l, err := oci.OpenLocal(ctx, kind, file, tag, arch)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	name := x.Name
	if name == "" {
		name = l.Name
	}
	if name == "" {
		return nil, fmt.Errorf("%s: carries no reference; give one with --name", file)
	}
	missing, err := cl.MissingLayers(ctx, l.DiffIDs)
	if err != nil {
		return nil, err
	}
	want := map[string]bool{}
	for _, d := range missing {
		want[d] = true
	}
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for i, d := range l.DiffIDs {
		if !want[d] {
			continue
		}
		delete(want, d) // a layer may come twice
		g.Go(func() error {
			in, err := l.Layer(run, i)
			if err != nil {
				return err
			}
			defer in.Close()
			return cl.PushImageLayer(run, d, in)
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return cl.PutImage(ctx, name, l.Config, l.Digest)
}

// bulk imports many images, some at a time. With a report it can be interrupted and begun again.
func (x *imageImportCmd) bulk(ctx context.Context, c *cli, cl *client.Client, refs []string, creds map[string]oci.Credential) error {
	done, err := finished(x.Report)
	if err != nil {
		return err
	}
	var report io.Writer = io.Discard
	if x.Report != "" {
		f, err := os.OpenFile(x.Report, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		report = f
	} else if c.Output == "json" {
		report = os.Stdout
	}
	var mu sync.Mutex
	count := map[string]int{}
	total, began := len(refs), time.Now()
	tell := func(o outcome) error {
		mu.Lock()
		defer mu.Unlock()
		count[o.Status]++
		line, err := json.Marshal(o)
		if err != nil {
			return err
		}
		if o.Status == "failed" {
			fmt.Fprintf(os.Stderr, "dsec: %s: %s\n", plain(o.Ref), plain(o.Error))
		}
		n := count["done"] + count["failed"] + count["skipped"]
		fmt.Fprintf(os.Stderr, "%d of %d images, %d failed, %v\n", n, total, count["failed"], time.Since(began).Round(time.Second))
		_, err = report.Write(append(line, '\n'))
		return err
	}
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(x.Parallel)
	seen := map[string]bool{}
	for _, ref := range refs {
		if seen[ref] || done[ref] {
			mu.Lock()
			count["skipped"]++
			mu.Unlock()
			continue
		}
		seen[ref] = true
		if run.Err() != nil {
			break
		}
		g.Go(func() error {
			start := time.Now()
			i, err := x.patiently(run, cl, ref, creds)
			if run.Err() != nil {
				return run.Err() // interrupted: not done, and no failure of the image
			}
			o := outcome{Ref: ref, Seconds: time.Since(start).Seconds()}
			if err != nil {
				o.Status, o.Error = "failed", err.Error()
				var ce *client.Error
				if errors.As(err, &ce) {
					o.Code = ce.Code
				}
			} else {
				o.Status, o.Environment, o.Digest, o.Octets = "done", i.Environment, i.Digest, i.Octets
			}
			return tell(o)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%d imported, %d there before, %d failed, in %v\n", count["done"], count["skipped"], count["failed"], time.Since(began).Round(time.Second))
	if count["failed"] > 0 {
		return exitCode(1)
	}
	return nil
}

// patiently tries again what a registry or the way to it failed at.
func (x *imageImportCmd) patiently(ctx context.Context, cl *client.Client, ref string, creds map[string]oci.Credential) (*dsecv1.Image, error) {
	for try := 0; ; try++ {
		i, err := x.one(ctx, cl, ref, creds, nil)
		if err == nil || try >= x.Retries || !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrExhausted) {
			return i, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Duration(try+1) * 5 * time.Second):
		}
	}
}

// finished reads which references an earlier run has done. A line that was cut off by its end is none.
func finished(file string) (map[string]bool, error) {
	out := map[string]bool{}
	if file == "" {
		return out, nil
	}
	b, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	for _, line := range bytes.Split(b, []byte("\n")) {
		var o outcome
		if json.Unmarshal(line, &o) == nil && o.Status == "done" {
			out[o.Ref] = true
		}
	}
	if n := len(b); n > 0 && b[n-1] != '\n' {
		f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		_, err = f.WriteString("\n")
		return out, err
	}
	return out, nil
}

// pullMeter shows on a terminal how far the layers are.
func pullMeter() func([]*dsecv1.PullProgress) {
	if !isTerminal(os.Stderr) {
		return nil
	}
	layers := map[string]*dsecv1.PullProgress{}
	return func(list []*dsecv1.PullProgress) {
		for _, p := range list {
			layers[p.Layer] = p
		}
		var done, total int64
		ready := 0
		for _, p := range layers {
			total += p.Total
			if p.State == "there" || p.State == "done" {
				ready++
				done += p.Total
			} else {
				done += p.Done
			}
		}
		end := ""
		if ready == len(layers) {
			end = "\n"
		}
		fmt.Fprintf(os.Stderr, "\r%d of %s, %s of %s%s", ready, plural(len(layers), "layer"), octetText(done), octetText(total), end)
	}
}

type imageListCmd struct {
	Prefix string `arg:"" optional:"" help:"Only references that begin so, in full (docker.io/library/...)."`
}

func (x *imageListCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	var list []*dsecv1.Image
	for token := ""; ; {
		r, err := cl.ImageService.ListImages(ctx, connect.NewRequest(&dsecv1.ListImagesRequest{Prefix: x.Prefix, PageSize: 1000, PageToken: token}))
		if err != nil {
			return client.Wrap(err)
		}
		if list, token = append(list, r.Msg.Images...), r.Msg.NextPageToken; token == "" {
			break
		}
	}
	return emitList(c, list, func() {
		var rows [][]string
		for _, i := range list {
			rows = append(rows, []string{i.Ref, short(i.Digest), i.Environment, octetText(i.Octets), ago(i.Checked.AsTime())})
		}
		table(os.Stdout, []string{"REF", "DIGEST", "ENVIRONMENT", "SIZE", "CHECKED"}, rows)
	})
}

type imageInspectCmd struct {
	Ref string `arg:"" help:"Reference."`
}

func (x *imageInspectCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.ImageService.GetImage(ctx, connect.NewRequest(&dsecv1.GetImageRequest{Ref: x.Ref}))
	if err != nil {
		return client.Wrap(err)
	}
	return c.show(r.Msg.Image)
}

type imageRemoveCmd struct {
	Ref []string `arg:"" help:"References."`
}

func (x *imageRemoveCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	for _, ref := range x.Ref {
		if _, err := cl.ImageService.RemoveImage(ctx, connect.NewRequest(&dsecv1.RemoveImageRequest{Ref: ref})); err != nil {
			return client.Wrap(err)
		}
	}
	return nil
}

type imageLoginCmd struct {
	Host         string `arg:"" help:"Registry, such as ghcr.io or docker.io."`
	User         string `short:"u" required:"" help:"User name."`
	PasswordFile string `help:"File with the password or token; else it is asked for, or read from standard input." type:"existingfile" placeholder:"FILE"`
}

func (x *imageLoginCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	var secret []byte
	switch {
	case x.PasswordFile != "":
		secret, err = os.ReadFile(x.PasswordFile)
	case isTerminal(os.Stdin):
		fmt.Fprint(os.Stderr, "Password or token: ")
		secret, err = term.ReadPassword(int(os.Stdin.Fd()))
		fmt.Fprintln(os.Stderr)
	default:
		secret, err = io.ReadAll(io.LimitReader(os.Stdin, 64<<10))
	}
	if err != nil {
		return err
	}
	_, err = cl.ImageService.PutCredential(ctx, connect.NewRequest(&dsecv1.PutCredentialRequest{Host: x.Host, Username: x.User, Secret: strings.TrimRight(string(secret), "\r\n")}))
	return client.Wrap(err)
}

type imageLogoutCmd struct {
	Host string `arg:"" help:"Registry."`
}

func (x *imageLogoutCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	_, err = cl.ImageService.RemoveCredential(ctx, connect.NewRequest(&dsecv1.RemoveCredentialRequest{Host: x.Host}))
	return client.Wrap(err)
}

type imageLoginsCmd struct{}

func (x *imageLoginsCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	r, err := cl.ImageService.ListCredentials(ctx, connect.NewRequest(&dsecv1.ListCredentialsRequest{}))
	if err != nil {
		return client.Wrap(err)
	}
	return emitList(c, r.Msg.Credentials, func() {
		var rows [][]string
		for _, k := range r.Msg.Credentials {
			rows = append(rows, []string{k.Host, k.Username, ago(k.Created.AsTime())})
		}
		table(os.Stdout, []string{"REGISTRY", "USER", "AGE"}, rows)
	})
}
