package oci_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/oci"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// sink keeps outputs and ends.
type sink struct {
	mu    sync.Mutex
	out   strings.Builder
	ends  map[string]sandbox.Outcome
	cause *sandbox.Cause
}

func newSink() *sink { return &sink{ends: map[string]sandbox.Outcome{}} }

func (s *sink) Output(_ context.Context, _ string, _ sandbox.StreamName, _ int64, data []byte, _ bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Write(data)
	return nil
}

func (s *sink) CommandEnded(_ context.Context, cmd string, o sandbox.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends[cmd] = o
	return nil
}

func (s *sink) SessionEnded(context.Context, string, sandbox.Outcome) error { return nil }

func (s *sink) Ended(_ context.Context, c sandbox.Cause) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cause = &c
	return nil
}

func (s *sink) Denied(context.Context, string, string, string) {}

func (s *sink) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	sandboxtest.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return ok()
	}, func() string { return what + " did not come; output so far " + strconv.Quote(s.out.String()) })
}

func (u *under) spec() *sandbox.Spec {
	s := &sandbox.Spec{
		Layers: []string{u.Layer}, Env: []string{"PATH=/bin"},
		Resources: sandbox.Resources{Memory: 128 << 20, Disk: 32 << 20, Pids: 64},
	}
	s.Fill()
	return s
}

// living is a sandbox with a command that goes on.
func (u *under) living(t *testing.T, s *sandbox.Spec) (sandbox.ID, sandbox.Instance, *sink) {
	t.Helper()
	id, k := sandbox.NewID(sandbox.NewHostID()), newSink()
	x, err := u.backend.Create(sandboxtest.Within(t), id, s, k)
	if err != nil {
		t.Fatal(err)
	}
	c := &sandbox.Command{ID: "c", Argv: []string{"/bin/sh", "-c", "trap '' TERM; (setsid sleep 301 &); echo up; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo went"}}
	c.Fill(s)
	if err := x.Start(sandboxtest.Within(t), c); err != nil {
		t.Fatal(err)
	}
	k.until(t, "start", func() bool { return strings.Contains(k.out.String(), "up\n") })
	return id, x, k
}

// left is what a driver's Left does not see: what the keeper lays and what runtimes make of their own.
func (u *under) left(t *testing.T) []string {
	t.Helper()
	out := u.Env.Left(t)
	bundles, _ := filepath.Glob(filepath.Join(u.Config.RunDir, "oci", "*"))
	for _, b := range bundles {
		out = append(out, "bundle "+b)
	}
	for _, depth := range []string{"", "*/"} {
		groups, _ := filepath.Glob("/sys/fs/cgroup/" + depth + "dsec-" + u.Config.Instance + "-*")
		out = append(out, groups...)
	}
	return out
}

func (u *under) same(t *testing.T, before []string) {
	t.Helper()
	var now []string
	sandboxtest.Eventually(t, func() bool {
		now = u.left(t)
		return slices.Equal(now, before)
	}, func() string {
		return "on the host now:\n" + strings.Join(now, "\n") + "\nand before:\n" + strings.Join(before, "\n")
	})
}

func destroy(t *testing.T, x sandbox.Instance) {
	t.Helper()
	if err := x.Destroy(sandboxtest.Within(t)); err != nil {
		t.Errorf("destroy: %v", err)
	}
}

// each runs a test under every runtime that is here.
func each(t *testing.T, f func(t *testing.T, u *under)) {
	for _, name := range oci.Names() {
		t.Run(name, func(t *testing.T) { f(t, newUnder(t, name, containertest.Options{})) })
	}
}

// What is killed takes with it what it must and nothing more, and leaves nothing: the keeper (C, B26) its sandboxes, the daemon none, a
// process of the runtime its own sandbox.
func TestKilled(t *testing.T) {
	each(t, func(t *testing.T, u *under) {
		before := u.left(t)
		t.Run("the keeper", func(t *testing.T) {
			_, x, k := u.living(t, u.spec())
			if err := unix.Kill(u.KeeperPid(t), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			k.until(t, "word of the loss", func() bool { return k.cause != nil })
			if k.cause.Class != sandbox.ClassPlatform {
				t.Errorf("cause %+v, want platform", *k.cause)
			}
			destroy(t, x)
			u.same(t, before)
		})
		t.Run("daemon and keeper", func(t *testing.T) {
			s := u.spec()
			id, x, k := u.living(t, s)
			if err := unix.Kill(u.KeeperPid(t), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			u.Env.Restart(t)
			u.wrap(t)
			if _, err := u.backend.Recover(sandboxtest.Within(t), id, s, x.Handle(), k); !errors.Is(err, sandbox.ErrLost) {
				t.Errorf("recover: %v, want ErrLost", err)
			}
			if err := u.backend.Sweep(sandboxtest.Within(t), nil); err != nil {
				t.Errorf("sweep: %v", err)
			}
			u.same(t, before)
		})
		t.Run("the daemon", func(t *testing.T) {
			s := u.spec()
			id, x, k := u.living(t, s)
			u.Env.Restart(t)
			u.wrap(t)
			y, err := u.backend.Recover(sandboxtest.Within(t), id, s, x.Handle(), k)
			if err != nil {
				t.Fatal(err)
			}
			if err := u.backend.Sweep(sandboxtest.Within(t), map[sandbox.ID]bool{id: true}); err != nil {
				t.Fatal(err)
			}
			c := &sandbox.Command{ID: "d", Argv: []string{"/bin/touch", "/tmp/go"}}
			c.Fill(s)
			if err := y.Start(sandboxtest.Within(t), c); err != nil {
				t.Fatal(err)
			}
			k.until(t, "end of what ran before", func() bool { o, ok := k.ends["c"]; return ok && o.Kind == sandbox.Exited })
			if got := k.out.String(); got != "up\nwent\n" {
				t.Errorf("output over the restart: %q", got)
			}
			destroy(t, y)
			u.same(t, before)
		})
		t.Run("process 1 or the runtime's kernel", func(t *testing.T) {
			_, x, k := u.living(t, u.spec())
			for _, pid := range u.first(t) {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
					t.Fatal(err)
				}
			}
			k.until(t, "word of the end", func() bool { return k.cause != nil && len(k.ends) == 1 })
			if k.cause.Class != sandbox.ClassPlatform || k.ends["c"].Kind != sandbox.Killed {
				t.Errorf("cause %+v, command %+v; want platform, killed", *k.cause, k.ends["c"])
			}
			destroy(t, x)
			u.same(t, before)
		})
	})
}

// first are the processes that were there at a birth: process 1, or what stands for it.
func (u *under) first(t *testing.T) (pids []int) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(u.Config.RunDir, "oci", "*", "pid"))
	for _, f := range files {
		text, err := os.ReadFile(f)
		pid, e := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil || e != nil {
			t.Fatal(err, e)
		}
		pids = append(pids, pid)
	}
	if len(pids) == 0 {
		t.Fatal("no process of a runtime is told")
	}
	return pids
}

// A birth that fails at whatever step leaves nothing.
func TestFailedBirthLeavesNothing(t *testing.T) {
	u := newUnder(t, oci.Runc, containertest.Options{})
	before := u.left(t)
	bad := filepath.Join(t.TempDir(), "runc")
	for name, text := range map[string]string{
		"it fails":            "#!/bin/sh\necho no such luck >&2; exit 3\n",
		"it lies":             "#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = --pid-file ] && echo 1 >$2; shift; done\n",
		"it leaves a process": "#!/bin/sh\nsleep 300 & while [ $# -gt 1 ]; do [ $1 = --pid-file ] && echo $! >$2; shift; done\n",
		"it dies":             "#!/bin/sh\nkill -9 $$\n",
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(bad, []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
			b, err := oci.New(u.Env.Backend, oci.Runtime{Name: oci.Runc, Program: bad, Version: "1.1.0"})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			x, err := b.Create(ctx, sandbox.NewID(sandbox.NewHostID()), u.spec(), newSink())
			if err == nil {
				destroy(t, x)
				t.Error("a birth without a process 1 went well")
			} else if name == "it fails" && !strings.Contains(err.Error(), "no such luck") {
				t.Errorf("%v does not tell what the runtime said", err)
			}
			u.same(t, before)
		})
	}
}

// A sandbox under gVisor runs on gVisor's kernel, and none of its processes is the host's root.
func TestGVisorIsGVisor(t *testing.T) {
	u := newUnder(t, oci.GVisor, containertest.Options{})
	box := sandboxtest.NewBox(t, u.suite())
	if got := box.Out(t, "dmesg; cat /proc/version"); !strings.Contains(got, "gVisor") || !strings.Contains(got, "gvisor") {
		t.Errorf("the kernel says %q", got)
	}
	var h struct {
		Runtime   string `json:"runtime"`
		OwnKernel bool   `json:"own_kernel"`
	}
	if err := json.Unmarshal(box.Instance().Handle(), &h); err != nil || h.Runtime != oci.GVisor || !h.OwnKernel {
		t.Errorf("handle %s, %v", box.Instance().Handle(), err)
	}
	for _, line := range u.Env.Left(t) {
		pid, ok := strings.CutPrefix(line, "process ")
		if !ok {
			continue
		}
		pid, cmd, _ := strings.Cut(pid, " ")
		var st unix.Stat_t
		if unix.Stat("/proc/"+pid, &st) == nil && st.Uid == 0 {
			uids, _ := os.ReadFile("/proc/" + pid + "/uid_map")
			if strings.Join(strings.Fields(string(uids)), " ") == "0 0 4294967295" {
				t.Errorf("process %s %s is root of the host", pid, cmd)
			}
		}
	}
}

// Runtimes that are missing, too old or broken are told with the reason and the fix, and are not made backends.
func TestFind(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, c := range []struct{ name, program, want string }{
		{oci.Crun, script("old", "echo crun version 0.17\n"), "older than 1.8"},
		{oci.Crun, script("new", "echo crun version 1.21; echo spec\n"), ""},
		{oci.Runc, script("mute", "exit 0\n"), "says nothing"},
		{oci.Runc, script("broken", "exit 7\n"), "exit status 7"},
		{oci.Runc, script("loud", "yes | head -c 1000000\n"), ""},
		{oci.Runc, filepath.Join(dir, "none"), "is no program"},
		{oci.Runc, "relative", "absolute path"},
		{oci.GVisor, script("module", "echo runsc version VERSION_MISSING\n"), ""},
		{oci.GVisor, script("released", "echo runsc version release-20260905.0\n"), ""},
		{oci.GVisor, script("ancient", "echo runsc version release-20221219.0\n"), "older than"},
	} {
		all := oci.Find(t.Context(), oci.Config{Programs: map[string]string{c.name: c.program}, Beside: dir})
		i := slices.IndexFunc(all, func(r oci.Runtime) bool { return r.Name == c.name })
		if i < 0 {
			t.Fatalf("%s is not told", c.name)
		}
		r := all[i]
		if c.want == "" && r.Reason != "" || c.want != "" && (!strings.Contains(r.Reason, c.want) || !strings.Contains(r.Reason, oci.Fix(c.name))) {
			t.Errorf("%s: reason %q, want %q and the fix", c.program, r.Reason, c.want)
		}
		if _, err := oci.New((*container.Backend)(nil), r); (err == nil) != (c.want == "") || err != nil && !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%s: a backend of it: %v", c.program, err)
		}
	}
}
