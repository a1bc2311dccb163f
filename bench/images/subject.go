package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// subject is an environment under measurement.
type subject struct {
	env    environment
	stored int64 // octets in the far store
	local  sample
	warm   sample // local, the second start
	links  []linked
}

// linked are the figures over one link.
type linked struct {
	speed                   speed
	pull, cold, hot, hotter sample // hotter: the second start after hot
}

func measureOne(ctx context.Context, e environment, dir, cache string, p plan) (s *subject, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	tree, err := e.tree(ctx, cache)
	if err != nil {
		return nil, err
	}
	s = &subject{env: e}
	if err := s.measureLocal(ctx, tree, p.rounds); err != nil {
		return nil, fmt.Errorf("local: %w", err)
	}
	for _, sp := range speeds {
		s.links = append(s.links, linked{speed: sp})
		if p.hotOnly {
			break
		}
	}
	if !p.hotOnly {
		if err := s.measurePull(ctx, tree, dir, p.rounds); err != nil {
			return nil, fmt.Errorf("pull: %w", err)
		}
	}
	if err := s.measureDemand(ctx, tree, dir, p); err != nil {
		return nil, fmt.Errorf("on demand: %w", err)
	}
	return s, nil
}

const pool = "6g"

func importTar(ctx context.Context, s *measure.Server, tree string) (string, error) {
	f, err := os.Open(tree)
	if err != nil {
		return "", err
	}
	defer f.Close()
	made, err := s.Client.ImportLayer(ctx, "bench/image", "bench", f)
	if err != nil {
		return "", fmt.Errorf("import the image: %w", err)
	}
	return made.Layer.Id, nil
}

// measureLocal has the layer's files on the host's own disk.
func (s *subject) measureLocal(ctx context.Context, tree string, rounds int) (err error) {
	measure.Note("%s: local", s.env.name)
	server, err := measure.StartEmpty(ctx, measure.Config{Pool: pool})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	layer, err := importTar(ctx, server, tree)
	if err != nil {
		return err
	}
	for range rounds {
		if err := server.Restart(ctx, func() error { return nil }); err != nil {
			return err
		}
		do := func() error { return command(ctx, server, layer, s.env.command) }
		f, err := start(server.Dir, new(link), false, do, nil)
		if err != nil {
			return err
		}
		s.local = append(s.local, f)
		measure.Note("local: create %v of %.3f s; CPU %v", lastCreate, f.seconds, f.machine)
		if f, err = start(server.Dir, new(link), true, do, nil); err != nil {
			return err
		}
		s.warm = append(s.warm, f)
		if err := stopEnded(ctx); err != nil {
			return err
		}
	}
	return nil
}

// measurePull fetches the image from a registry and unpacks it, then does the command in it.
func (s *subject) measurePull(ctx context.Context, tree, dir string, rounds int) error {
	l := new(link)
	blobs := filepath.Join(dir, "registry")
	if err := os.Mkdir(blobs, 0o700); err != nil {
		return err
	}
	r := newRegistry(blobs, l)
	defer r.server.Close()
	if err := r.push(ctx, s.env.name, tree); err != nil {
		return err
	}
	for i := range s.links {
		x := &s.links[i]
		measure.Note("%s: pull over the %s link", s.env.name, x.speed.name)
		for range (rounds + 1) / 2 { // each is long, and far from what it is compared with
			root := filepath.Join(dir, "pulled")
			l.set(x.speed.latency, x.speed.rate)
			f, err := start(dir, l, false, func() error {
				if err := os.Mkdir(root, 0o755); err != nil {
					return err
				}
				if err := r.pull(ctx, s.env.name, root); err != nil {
					return err
				}
				return inFolder(ctx, root, s.env.command)
			}, nil)
			if err := errors.Join(err, os.RemoveAll(root)); err != nil {
				return err
			}
			l.set(0, 0)
			x.pull = append(x.pull, f)
		}
	}
	return nil
}

// measureDemand has the layer in an S3 store behind the link, first as it was imported, then with the files in front that the
// command reads.
func (s *subject) measureDemand(ctx context.Context, tree, dir string, p plan) (err error) {
	l := new(link)
	objects := filepath.Join(dir, "s3")
	if err := os.Mkdir(objects, 0o700); err != nil {
		return err
	}
	bucket := storetest.NewS3(objects)
	s3 := httptest.NewServer(l.wrap(bucket))
	defer s3.Close()
	far := "s3://" + storetest.Bucket + "/bench?endpoint=" + s3.URL + "&path_style=true"
	server, err := measure.StartEmpty(ctx, measure.Config{Pool: pool, Args: []string{"--store", far}, Env: credentials})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	layer, err := importTar(ctx, server, tree)
	if err != nil {
		return err
	}
	s.stored = bucket.Octets()
	do := func() error { return command(ctx, server, layer, s.env.command) }
	settle := func() error { return flushed(ctx, server) }
	for _, hot := range []bool{false, true} {
		if p.hotOnly && !hot {
			continue
		}
		if hot {
			if err := profile(ctx, server, layer, s.env.command, far); err != nil {
				return err
			}
		}
		for i := range s.links {
			x := &s.links[i]
			measure.Note("%s: on demand over the %s link, hot files first: %t", s.env.name, x.speed.name, hot)
			for range p.rounds {
				if err := server.Restart(ctx, func() error { return forget(server.Dir) }); err != nil {
					return err
				}
				l.set(x.speed.latency, x.speed.rate)
				f, err := start(server.Dir, l, false, do, settle)
				if err != nil {
					return err
				}
				if hot {
					x.hot = append(x.hot, f)
					tell(ctx, server, f)
					if f, err = start(server.Dir, l, true, do, settle); err != nil {
						return err
					}
					x.hotter = append(x.hotter, f)
				} else {
					x.cold = append(x.cold, f)
				}
				l.set(0, 0)
				if err := stopEnded(ctx); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// tell says where the time and the octets of a start on demand went.
func tell(ctx context.Context, s *measure.Server, f figure) {
	st, err := stats(ctx, s)
	if err != nil {
		measure.Note("figures of the blob daemon: %v", err)
		return
	}
	measure.Note("hot: create %v of %.3f s; the kernel asked %d times for %.1f MB, %.1f of them at once; %.1f MB came, as %.1f over the link; %.1f written; CPU %v, of it %v the blob daemon's and %v the far store's",
		lastCreate, f.seconds, st.Reads, float64(st.Asked)/mb, float64(st.FromCache)/mb, float64(st.Fetched)/mb, f.fetched/mb, f.written/mb,
		f.machine, time.Duration(st.CPU), f.self)
}

// flushed waits until the blob daemon has written what it fetched.
func flushed(ctx context.Context, s *measure.Server) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		st, err := stats(ctx, s)
		if err != nil {
			return err
		}
		if st.Held == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the blob daemon holds %d octets that it does not write", st.Held)
		}
	}
}

func stats(ctx context.Context, s *measure.Server) (st blob.Stats, err error) {
	hosts, err := filepath.Glob(filepath.Join(s.Dir, "run", "blobd-*"))
	if err != nil || len(hosts) == 0 {
		return st, errors.Join(err, errors.New("there is none"))
	}
	c, err := blob.Dial(ctx, hosts[0])
	if err != nil {
		return st, err
	}
	defer c.Close()
	return c.Stats(ctx)
}

// forget removes all that a host keeps of a far store.
func forget(dir string) error {
	var err error
	for _, name := range []string{"layers", "blobs", "spool"} {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, "state", name)))
	}
	return err
}

// profile lays the layer out anew, with what a first start of the command read in front.
func profile(ctx context.Context, s *measure.Server, layer, text, far string) error {
	if err := s.Restart(ctx, func() error { return forget(s.Dir) }); err != nil {
		return err
	}
	if err := measure.DropCaches(); err != nil {
		return err
	}
	if err := command(ctx, s, layer, text); err != nil {
		return err
	}
	if err := stopEnded(ctx); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, measure.Binary(), "layer", "profile", layer, "--layout", "--run", filepath.Join(s.Dir, "run"), "--local", far,
		"--url", "unix:"+filepath.Join(s.Dir, "run/dsec.sock"), "--key-file", filepath.Join(s.Dir, "run/key"))
	cmd.Env = append(os.Environ(), credentials...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("profile: %w: %s", err, tail(out.String()))
	}
	return nil
}

var credentials = []string{"AWS_ACCESS_KEY_ID=" + storetest.AccessKey, "AWS_SECRET_ACCESS_KEY=" + storetest.SecretKey}

const mb = 1e6

func (s *subject) print() {
	line := func(kind string, f figure) {
		name := "images." + s.env.name + "." + kind
		measure.Print(name+".s", f.seconds, "s")
		measure.Print(name+".fetched", f.fetched/mb, "MB")
		measure.Print(name+".written", f.written/mb, "MB")
	}
	measure.Print("images."+s.env.name+".stored", float64(s.stored)/mb, "MB")
	line("local", s.local.median())
	line("local_warm", s.warm.median())
	for _, x := range s.links {
		if len(x.pull) > 0 {
			line(x.speed.name+".pull", x.pull.median())
			line(x.speed.name+".cold", x.cold.median())
		}
		line(x.speed.name+".hot", x.hot.median())
		line(x.speed.name+".warm", x.hotter.median())
	}
}

// worst prints the worst of the environments for each aim: hot files first, over the fast link.
func worst(all []*subject, hotOnly bool) {
	var local, fetched, write, pull []float64
	for _, s := range all {
		x := s.links[0]
		hot, own := x.hot.median(), s.local.median()
		local = append(local, hot.seconds/own.seconds)
		fetched = append(fetched, hot.fetched/float64(s.stored))
		if hotOnly {
			continue
		}
		full := x.pull.median()
		write = append(write, (hot.written-own.written)/(full.written-own.written))
		warm := s.warm.median().seconds
		pull = append(pull, (full.seconds-warm)/(hot.seconds-warm))
	}
	measure.Print("images.cold_over_local", slices.Max(local), "x")
	measure.Print("images.fetched_share", slices.Max(fetched), "")
	if hotOnly {
		return
	}
	measure.Print("images.write_share", slices.Max(write), "")
	measure.Print("images.pull_over_cold", slices.Min(pull), "x")
}
