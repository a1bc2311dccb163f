package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
)

// Runtimes are those that dsec is compared with, and the Debian package of each.
func Runtimes() map[string]string {
	return map[string]string{"crun": "crun", "runc": "runc", "containerd": "containerd"}
}

// Missing says which packages would have to be installed.
func Missing() []string {
	var list []string
	for program, pkg := range map[string]string{"crun": "crun", "runc": "runc", "containerd": "containerd", "ctr": "containerd"} {
		if _, err := exec.LookPath(program); err != nil {
			list = append(list, pkg)
		}
	}
	return list
}

// Peer is a runtime that is ready to be driven.
type Peer struct {
	Name string

	dir   string
	group *measure.Group
	cmd   *exec.Cmd
	in    io.WriteCloser
	enc   *json.Encoder
	dec   *json.Decoder
	log   strings.Builder
	place string // of the containers' groups
	self  time.Duration
}

// Start starts a driver's process of the runtime, for at most width containers at once.
func Start(name string, width int) (*Peer, error) {
	p := &Peer{Name: name}
	if err := p.start(width); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func (p *Peer) start(width int) (err error) {
	name := p.Name
	if p.group, err = measure.NewGroup(name); err != nil {
		return err
	}
	// Containers are counted where they are put by the runtime: with both versions of control groups they stay in our group of version
	// 2; with version 2 alone they are moved below it, beside the driver, since no group has both processes and children with limits.
	at := p.group.Path
	p.place = "/" + filepath.Base(p.group.Path)
	if root, _ := measure.GroupRoot(); root == "/sys/fs/cgroup" {
		at = filepath.Join(at, "driver")
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
		p.place += "/c"
	}
	fd, err := os.Open(at)
	if err != nil {
		return err
	}
	defer fd.Close()
	if p.dir, err = os.MkdirTemp("", "dsec-bench-"+name+"-"); err != nil {
		return err
	}
	if err := os.Chmod(p.dir, 0o755); err != nil { // mapped ids walk through it
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p.cmd = exec.Command(exe, "peer", name, p.dir, p.place, fmt.Sprint(width))
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: syscall.CLONE_NEWNS, UseCgroupFD: true, CgroupFD: int(fd.Fd())}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		p.cmd = nil
		return err
	}
	p.enc, p.dec = json.NewEncoder(p.in), json.NewDecoder(out)
	var a answer
	if err := p.dec.Decode(&a); err != nil {
		return fmt.Errorf("%s: driver ended: %w: %s", name, err, p.log.String())
	}
	if a.Err != "" {
		return fmt.Errorf("%s: %s", name, a.Err)
	}
	return nil
}

// Run does count cycles, width of them at once, and returns how long each and all took.
func (p *Peer) Run(ctx context.Context, row Row, count, width int, every time.Duration) ([]time.Duration, time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	if err := p.enc.Encode(order{row, count, width, every}); err != nil {
		return nil, 0, err
	}
	type result struct {
		a   answer
		err error
	}
	got := make(chan result, 1)
	go func() {
		var r result
		r.err = p.dec.Decode(&r.a)
		got <- r
	}()
	var r result
	select {
	case r = <-got:
	case <-ctx.Done():
		p.in.Close() // the driver stops what runs and answers
		<-got
		return nil, 0, ctx.Err()
	}
	if r.err != nil {
		return nil, 0, fmt.Errorf("%s: driver ended: %w: %s", p.Name, r.err, p.log.String())
	}
	if r.a.Err != "" {
		return nil, 0, fmt.Errorf("%s %s: %s", p.Name, row, r.a.Err)
	}
	p.self += r.a.Self
	return r.a.Times, r.a.Wall, nil
}

// Self is the CPU time of the driver, the load client, in all runs so far.
func (p *Peer) Self() (time.Duration, error) { return p.self, nil }

// CPU is the time used by the runtime, its daemons and its containers so far.
func (p *Peer) CPU() (time.Duration, error) {
	all, err := p.group.CPU()
	return all - p.self, err
}

// Stop ends the driver and removes all it made.
func (p *Peer) Stop() error {
	var errs []error
	if p.cmd != nil {
		p.in.Close()
		done := make(chan error, 1)
		go func() { done <- p.cmd.Wait() }()
		select {
		case err := <-done:
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: driver: %w: %s", p.Name, err, p.log.String()))
			}
		case <-time.After(time.Minute):
			p.cmd.Process.Kill()
			<-done
			errs = append(errs, fmt.Errorf("%s: driver did not end", p.Name))
		}
	}
	if p.group != nil {
		errs = append(errs, p.group.Remove())
		hierarchies, _ := filepath.Glob("/sys/fs/cgroup/*" + p.place)
		for _, h := range hierarchies {
			errs = append(errs, measure.RemoveGroups(h))
		}
	}
	if p.dir != "" {
		errs = append(errs, os.RemoveAll(p.dir))
	}
	return errors.Join(errs...)
}
