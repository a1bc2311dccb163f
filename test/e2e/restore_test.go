package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// A sandbox that is gone is made again: files, a shell's state and a server are as they were, keys answer what was recorded, and the trainer
// goes on from there. Also over a snapshot, from the command line, and after the service was killed.
func TestRestoreOnItsHost(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep", "--pool-size", "1g", "--store", filepath.Join(ownDir(t), "store"))
	layer := s.small(t)
	c := s.client()
	job, err := c.OpenJob(within(t), "restored", 0, "")
	must(t, err)
	o := client.Options{Layers: []string{layer}, Key: "r1", Memory: 64 << 20, Disk: 64 << 20, Pids: 64}
	sb, err := job.RunContainer(within(t), o)
	must(t, err)
	first := sb.ID
	step := func(sb *client.Sandbox, id, script string) *client.Result {
		t.Helper()
		r, err := sb.Run(within(t), client.Cmd{ID: id, Argv: []string{"sh", "-c", script}})
		must(t, err)
		return r
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	must(t, sb.Files().WriteFile(within(t), "/srv/big", big, 0o600))
	step(sb, "a", "echo >>/srv/runs; wc -l </srv/runs; md5sum /srv/big")
	step(sb, "b", "echo wrong >&2; exit 7")
	shell, err := sb.Session(within(t), client.SessionOptions{Name: "shell"})
	must(t, err)
	_, err = shell.RunCmd(within(t), "cd /srv; v=kept; mkdir made", client.Cmd{ID: "c"})
	must(t, err)
	_, err = sb.Start(within(t), client.Cmd{ID: "server", Argv: []string{"sh", "-c", "echo up; touch /srv/up; exec sleep 1000"}, Restore: "repeat"})
	must(t, err)
	serves := func(sb *client.Sandbox) {
		t.Helper()
		must(t, eventually(func() error {
			if _, err := sb.Files().Stat(within(t), "/srv/up", false); err != nil {
				return fmt.Errorf("the server is not up: %w", err)
			}
			return nil
		}))
		all, err := sb.ListCommands(within(t))
		must(t, err)
		for _, c := range all {
			if c.Id == "server" && c.State != "running" {
				t.Fatal(c)
			}
		}
	}
	serves(sb)
	if _, err := c.Restore(within(t), sb.ID, client.RestoreOptions{}); !errors.Is(err, client.ErrState) {
		t.Fatalf("a living sandbox: %v", err)
	}
	must(t, sb.Stop(within(t)))

	check := func(r *client.Restored, err error) *client.Sandbox {
		t.Helper()
		must(t, err)
		must(t, r.Err())
		sb := r.Sandbox
		if sb.ID == first || r.Differing != 0 || sb.Data.State != "running" {
			t.Fatal(r.RestoreResponse)
		}
		if got := out(t, sb, "cat /srv/runs | wc -l; ls -d /srv/made; cmp /srv/big /srv/big && stat -c %s.%a /srv/big"); got != fmt.Sprintf("1\n/srv/made\n%d.600\n", len(big)) {
			t.Fatalf("files are %q", got)
		}
		// The recorded results stand, and no step runs twice.
		for _, id := range []string{first, sb.ID} {
			if r := step(c.Sandbox(id), "b", "echo wrong >&2; exit 7"); r.Code() != 7 || string(r.Stderr) != "wrong\n" {
				t.Fatal(id, describe(r))
			}
		}
		if r := step(sb, "a", "echo >>/srv/runs; wc -l </srv/runs; md5sum /srv/big"); !strings.HasPrefix(string(r.Stdout), "1\n") {
			t.Fatal(describe(r))
		}
		shell, err := sb.Session(within(t), client.SessionOptions{Name: "shell"})
		must(t, err)
		res, err := shell.Run(within(t), "echo $PWD $v")
		must(t, err)
		want(t, res, 0, "/srv kept\n", "")
		serves(sb)
		same, err := job.RunContainer(within(t), o)
		must(t, err)
		if same.ID != sb.ID {
			t.Fatalf("the create key answers %s, not %s", same.ID, sb.ID)
		}
		return sb
	}
	sb = check(job.Restore(within(t), "r1", client.RestoreOptions{}))
	if r := step(sb, "new", "echo >>/srv/runs; wc -l </srv/runs"); string(r.Stdout) != "2\n" {
		t.Fatal(describe(r))
	}
	var rows bytes.Buffer
	must(t, c.Export(within(t), client.ExportOptions{Job: "restored"}, &rows))
	if n := strings.Count(rows.String(), `"step":"new"`); n != 1 || strings.Count(rows.String(), `"step":"a"`) != 1 {
		t.Errorf("%d rows of a step:\n%s", n, rows.String())
	}
	// A snapshot at which a shell is open is no base: the shell's state is not in it. Then one without.
	_, err = sb.Snapshot(within(t), "")
	must(t, err)
	must(t, shellClose(t, sb, "shell"))
	must(t, sb.Process("server").Signal(within(t), 9))
	_, err = sb.Process("server").Wait(within(t))
	must(t, err)
	must(t, sb.Stop(within(t)))
	r, err := c.Restore(within(t), first, client.RestoreOptions{})
	must(t, err)
	must(t, r.Err())
	if r.Base != "environment" {
		t.Errorf("from %s", r.Base)
	}
	sb = r.Sandbox
	if got := out(t, sb, "wc -l </srv/runs"); got != "2\n" {
		t.Errorf("%q", got)
	}
	snap, err := sb.Snapshot(within(t), "")
	must(t, err)
	if r := step(sb, "behind", "rm -r /srv/made; echo >>/srv/runs; wc -l </srv/runs"); string(r.Stdout) != "3\n" {
		t.Fatal(describe(r))
	}
	s.kill()
	must(t, s.begin())
	must(t, sb.Stop(within(t)))
	var told struct {
		State, Base   string
		RepeatedSteps string `json:"repeated_steps"`
		Sandbox       struct{ Id string }
	}
	b, err := s.dsec("restore", first, "-o", "json").Output()
	must(t, err)
	must(t, json.Unmarshal(b, &told))
	if told.State != "restored" || told.Base != snap {
		t.Fatalf("%s", b)
	}
	sb = c.Sandbox(told.Sandbox.Id)
	if got := out(t, sb, "wc -l </srv/runs; ls /srv; stat -c %s.%a /srv/big"); got != fmt.Sprintf("3\nbig\nruns\nup\n%d.600\n", len(big)) {
		t.Errorf("%q", got)
	}
	if b, err := s.dsec("replay", sb.ID).CombinedOutput(); err != nil {
		t.Errorf("replay of what was restored: %v\n%s", err, b)
	}
	if b, err := s.dsec("restore", "--job", "restored", "--create-key", "nothing").CombinedOutput(); err == nil {
		t.Errorf("%s", b)
	}
	must(t, sb.Stop(within(t)))
	s.stopKept(t)
}

func shellClose(t testing.TB, sb *client.Sandbox, name string) error {
	t.Helper()
	sh, err := sb.Session(within(t), client.SessionOptions{Name: name})
	if err != nil {
		return err
	}
	return sh.Close(within(t))
}

// A service that is killed again and again in the midst of a restore: the same call restores, and one sandbox lives.
func TestRestoreIsKilled(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep", "--pool-size", "1g")
	layer := s.small(t)
	rnd := random(t)
	c := s.client()
	sb, err := c.RunContainer(within(t), client.Options{Layers: []string{layer}, Job: "killed", Key: "r", Memory: 64 << 20, Disk: 32 << 20, Pids: 64})
	must(t, err)
	const steps = 12
	for i := range steps {
		exe(t, sb, client.Cmd{ID: fmt.Sprint("s", i), Argv: []string{"sh", "-c", "sleep 0.05; echo >>/srv/runs; wc -l </srv/runs"}})
	}
	must(t, sb.Stop(within(t)))
	rounds := 4
	if torture {
		rounds = 40
	}
	for n := range rounds {
		id := fmt.Sprint("call-", n)
		done := make(chan error, 1)
		var r *client.Restored
		go func() {
			var err error
			r, err = s.client().RestoreKey(within(t), "killed", "r", client.RestoreOptions{ID: id})
			done <- err
		}()
		for range 1 + rnd.IntN(3) {
			time.Sleep(time.Duration(rnd.IntN(900)) * time.Millisecond)
			s.kill()
			must(t, s.begin())
		}
		must(t, <-done)
		must(t, r.Err())
		list, err := s.client().List(within(t), &dsecv1.Selector{Job: "killed"})
		must(t, err)
		if len(list) != 1 || list[0].ID != r.Sandbox.ID {
			t.Fatalf("round %d: %d live, restored %s", n, len(list), r.Sandbox.ID)
		}
		if got := out(t, list[0], "wc -l </srv/runs"); got != fmt.Sprintf("%d\n", steps) {
			t.Fatalf("round %d: %q runs", n, got)
		}
		must(t, list[0].Stop(within(t)))
	}
	s.stopKept(t)
}

// A host is gone with its disk: another goes on with its sandboxes from what the store has. The lost one returns and gives up.
func TestRestoreOfALostHost(t *testing.T) {
	t.Parallel()
	dir := ownDir(t)
	hosts, g := apart(t, dir, 2)
	c := g.client()
	layer := g.small(t)
	job, err := c.OpenJob(within(t), "lost", 0, "")
	must(t, err)
	var boxes []*client.Sandbox
	options := func(i int) client.Options {
		return client.Options{Layers: []string{layer}, Key: fmt.Sprint("r", i), Memory: 64 << 20, Disk: 64 << 20, Pids: 64, Durability: "store"}
	}
	big := bytes.Repeat([]byte("x"), 300<<10)
	apartOn := map[string]bool{}
	for i := 0; i < 6 || len(apartOn) < 2 && i < 40; i++ { // where each goes is chance
		sb, err := job.RunContainer(within(t), options(i))
		must(t, err)
		boxes = append(boxes, sb)
		apartOn[sb.Data.Host] = true
	}
	each(6, len(boxes), func(i int) {
		if err := boxes[i].Files().WriteFile(within(t), "/srv/big", big, 0o644); err != nil {
			t.Error(err)
		}
		for n := range 3 {
			r, err := boxes[i].Run(within(t), client.Cmd{ID: fmt.Sprint("s", n), Argv: []string{"sh", "-c", "echo >>/srv/runs; wc -l </srv/runs"}})
			if err != nil || string(r.Stdout) != fmt.Sprintf("%d\n", n+1) {
				t.Error(r, err)
			}
		}
	})
	if t.Failed() {
		return
	}
	lost := hosts[0]
	gone := lost.instance()
	t.Cleanup(func() { // so that the host can be started to clean up: this gives up what the epoch guards
		_ = lost.cmd.Process.Signal(syscall.SIGCONT)
		must(t, os.Remove(filepath.Join(dir, "store", "logs", gone, "epoch")))
	})
	var theirs, ours []*client.Sandbox
	for _, sb := range boxes {
		if sb.Data.Host == gone {
			theirs = append(theirs, sb)
		} else {
			ours = append(ours, sb)
		}
	}
	if len(theirs) == 0 || len(ours) == 0 {
		t.Fatal("all were placed on one host")
	}
	if _, err := c.Restore(within(t), theirs[0].ID, client.RestoreOptions{LostHost: gone}); !errors.Is(err, client.ErrState) {
		t.Fatalf("a host that answers was taken for lost: %v", err)
	}
	must(t, lost.cmd.Process.Signal(syscall.SIGSTOP))
	must(t, eventually(func() error {
		ctx, cancel := context.WithTimeout(within(t), 3*time.Second)
		defer cancel()
		_, err := c.Restore(ctx, theirs[0].ID, client.RestoreOptions{})
		if !errors.Is(err, client.ErrState) || !strings.Contains(err.Error(), "lost_host") {
			return fmt.Errorf("a host that is silent: %v", err)
		}
		return nil
	}))
	restored := make([]*client.Restored, len(theirs))
	each(4, len(theirs), func(i int) {
		var err error
		if restored[i], err = c.Restore(within(t), theirs[i].ID, client.RestoreOptions{LostHost: gone}); err == nil {
			err = restored[i].Err()
		}
		if err != nil {
			t.Errorf("%s: %v", theirs[i].ID, err)
		}
	})
	if t.Failed() {
		return
	}
	for i, r := range restored {
		sb := r.Sandbox
		if sb.Data.Host == gone || r.Differing != 0 {
			t.Fatal(r.RestoreResponse)
		}
		if got := out(t, sb, "wc -l </srv/runs; stat -c %s /srv/big"); got != fmt.Sprintf("3\n%d\n", len(big)) {
			t.Errorf("%q", got)
		}
		for _, id := range []string{theirs[i].ID, sb.ID} { // the old ID answers too
			res, err := c.Sandbox(id).Run(within(t), client.Cmd{ID: "s1", Argv: []string{"sh", "-c", "echo >>/srv/runs; wc -l </srv/runs"}})
			must(t, err)
			want(t, res, 0, "2\n", "")
		}
		was, err := c.Get(within(t), theirs[i].ID)
		must(t, err)
		if was.Data.State != "failed" || was.Data.Cause.GetReason() != "host_lost" || was.Data.Next != sb.ID {
			t.Error(was.Data)
		}
		n := slices.Index(boxes, theirs[i])
		same, err := job.RunContainer(within(t), options(n))
		if err == nil && same.ID != sb.ID {
			t.Errorf("the create key answers %s, not %s", same.ID, sb.ID)
		}
		res, err := sb.Run(within(t), client.Cmd{ID: "new", Argv: []string{"sh", "-c", "echo >>/srv/runs; wc -l </srv/runs"}})
		must(t, err)
		want(t, res, 0, "4\n", "")
	}
	// A call by key finds it as well; it lives.
	if _, err := c.RestoreKey(within(t), "lost", fmt.Sprint("r", slices.Index(boxes, theirs[0])), client.RestoreOptions{LostHost: gone}); !errors.Is(err, client.ErrState) {
		t.Errorf("%v", err)
	}
	// It comes back: what it had is over, and nothing lives twice.
	must(t, lost.cmd.Process.Signal(syscall.SIGCONT))
	must(t, eventually(func() error {
		if left := lost.inside(); len(left) > 0 {
			return fmt.Errorf("%d processes still live on the host that was taken for lost", len(left))
		}
		return nil
	}))
	for _, sb := range ours {
		if got := out(t, sb, "wc -l </srv/runs"); got != "3\n" {
			t.Errorf("%q", got)
		}
	}
	if b, err := g.dsec("ps", "-a").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, b)
	}
	for _, r := range restored {
		must(t, r.Sandbox.Stop(within(t)))
	}
}
