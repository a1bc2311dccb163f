package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// travel is a sandbox of a machine between two hosts, with a counter in the memory of a shell and a command that prints it.
type travel struct {
	t     *testing.T
	hosts []*service
	g     *service
	sb    *client.Sandbox
	count int
}

func newTravel(t *testing.T) *travel {
	hosts, g := apart(t, ownDir(t), 2, "[vm]\nno_templates = true") // each boots one machine at most
	tr := &travel{t: t, hosts: hosts, g: g}
	c := g.client()
	small := g.small(t)
	twoTellOf(t, c, "microvm")
	sb, err := c.RunContainer(within(t), tr.options(small))
	must(t, err)
	tr.sb = sb
	_, err = sb.Session(within(t), client.SessionOptions{Name: "s", Shell: "/bin/sh"})
	must(t, err)
	tr.say("n=0", "")
	return tr
}

func (tr *travel) options(layer string) client.Options {
	return client.Options{Layers: []string{layer}, Backend: "microvm", AllowDegraded: true, Job: "move", Key: "k", Name: "traveller", Memory: 64 << 20, Disk: 64 << 20, Pids: 64}
}

// say runs a line in the session, through a client that knows nothing yet.
func (tr *travel) say(line, want string) {
	tr.t.Helper()
	id := fmt.Sprintf("say-%d", tr.count)
	tr.count++
	var r *client.Result
	err := again(tr.t, line, func(ctx context.Context) (err error) {
		s, err := tr.g.client().Sandbox(tr.sb.ID).Session(ctx, client.SessionOptions{Name: "s"}) // joins it
		if err == nil {
			r, err = s.RunCmd(ctx, line, client.Cmd{ID: id})
		}
		return err
	})
	if err != nil || string(r.Stdout) != want {
		tr.t.Fatalf("%s: %v, %v; want %q", line, r, err, want)
	}
}

// goesOn checks that the shell's memory is as it was left, and that one host alone has the sandbox.
func (tr *travel) goesOn(n int) {
	tr.t.Helper()
	tr.say("n=$((n+1)); echo $n", fmt.Sprintf("%d\n", n))
	must(tr.t, eventually(func() error {
		have := 0
		for _, h := range tr.hosts {
			left := tr.remains(h)
			if len(left) > 0 {
				have++
			}
			if h.instance() != tr.where() && len(left) > 0 {
				return fmt.Errorf("host %s does not have the sandbox, but %v", h.instance(), left)
			}
		}
		if have != 1 {
			return fmt.Errorf("%d hosts have something of the sandbox", have)
		}
		return nil
	}))
}

// where is the host that has the sandbox.
func (tr *travel) where() string {
	tr.t.Helper()
	var host string
	must(tr.t, again(tr.t, "where it is", func(ctx context.Context) error {
		sb, err := tr.g.client().Get(ctx, tr.sb.ID)
		if err == nil {
			host = sb.Data.Host
		}
		return err
	}))
	return host
}

// remains are the files of sandboxes of machines on a host.
func (tr *travel) remains(h *service) (list []string) {
	for _, pattern := range []string{"microvm/h*.disk", "microvm/h*.saved*"} {
		found, err := filepath.Glob(filepath.Join(h.state, pattern))
		must(tr.t, err)
		list = append(list, found...)
	}
	return list
}

func (tr *travel) ends() (source, target *service) {
	at := tr.where()
	for _, h := range tr.hosts {
		if h.instance() == at {
			source = h
		} else {
			target = h
		}
	}
	return source, target
}

// A machine goes to another host and back: memory, sessions, commands, output and log go on, its ID, key and name lead to it.
func TestMigration(t *testing.T) {
	t.Parallel()
	tr := newTravel(t)
	home, away := tr.ends()
	p, err := tr.sb.Start(within(t), sh("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo line $i; sleep 0.05; done"))
	must(t, err)
	var printed bytes.Buffer
	streamed := make(chan error, 1)
	go func() {
		_, err := tr.g.client().Sandbox(tr.sb.ID).Process(p.ID).Stream(within(t), &printed, &printed)
		streamed <- err
	}()
	from, err := tr.sb.Migrate(within(t), "")
	must(t, err)
	if from != home.instance() || tr.sb.Data.Host != away.instance() || tr.where() != away.instance() {
		t.Fatalf("it went from %s to %s, and is at %s; want %s to %s", from, tr.sb.Data.Host, tr.where(), home.instance(), away.instance())
	}
	tr.goesOn(1)
	if sb, err := tr.g.client().RunContainer(within(t), tr.options("base/small")); err != nil || sb.ID != tr.sb.ID {
		t.Errorf("its key makes %v, %v", sb, err)
	}
	if sb, err := tr.g.client().Get(within(t), "traveller"); err != nil || sb.ID != tr.sb.ID {
		t.Errorf("its name leads to %v, %v", sb, err)
	}
	if err := tr.sb.Files().WriteFile(within(t), "/srv/file", []byte("written"), 0o644); err != nil {
		t.Errorf("a file after the move: %v", err)
	}
	if list, err := tr.g.client().List(within(t), &dsecv1.Selector{Job: "move"}); err != nil || len(list) != 1 {
		t.Errorf("%d listed, %v", len(list), err)
	}
	if from, err := tr.sb.Migrate(within(t), away.instance()); err != nil || from != away.instance() {
		t.Errorf("a move to where it is: %q, %v", from, err)
	}
	// A host that was started again, and a gateway that knows nothing, still find it; it goes back by the command line.
	home.kill()
	must(t, home.begin())
	tr.g.kill()
	must(t, tr.g.begin())
	tr.goesOn(2)
	if b, err := tr.g.dsec("migrate", tr.sb.ID, "--to", home.instance()).CombinedOutput(); err != nil || !strings.Contains(string(b), "went from host "+away.instance()+" to "+home.instance()) {
		t.Errorf("%s, %v", b, err)
	}
	tr.goesOn(3)
	if b, err := tr.sb.Files().ReadFile(within(t), "/srv/file"); err != nil || string(b) != "written" {
		t.Errorf("%q, %v", b, err)
	}
	exe(t, tr.sb, sh("touch /tmp/stop"))
	must(t, <-streamed)
	lines := strings.Split(strings.TrimSpace(printed.String()), "\n")
	for i, l := range lines {
		if l != fmt.Sprintf("line %d", i+1) {
			t.Fatalf("line %d of %d reads %q", i+1, len(lines), l)
		}
	}
	tr.wholeLog()
	t.Run("refused", func(t *testing.T) {
		sb := tr.g.box(t)
		for what, c := range map[string]struct {
			sb   *client.Sandbox
			to   string
			want error
			says string
		}{
			"a container":     {sb, "", client.ErrUnsupported, "can't be moved"},
			"an unknown host": {tr.sb, "hnowhere", client.ErrNotFound, "no host of this gateway"},
			"no host ID":      {tr.sb, "No Host", client.ErrInvalid, "to:"},
		} {
			if _, err := c.sb.Migrate(within(t), c.to); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if torture {
			open := tr.g.box(t, func(o *client.Options) {
				o.Backend, o.AllowDegraded, o.Network, o.Runtime = "microvm", true, "open", ""
			})
			if _, err := open.Migrate(within(t), ""); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "its network is open") {
				t.Errorf("one of network open: %v", err)
			}
		}
		tr.goesOn(4)
	})
	must(t, tr.sb.Stop(within(t)))
	for _, h := range tr.hosts {
		if left := tr.remains(h); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// wholeLog checks that the log has all records and that epochs never go back.
func (tr *travel) wholeLog() {
	tr.t.Helper()
	next, epoch, moves := int64(1), int64(0), 0
	err := tr.g.client().Log(within(tr.t), &dsecv1.ReadLogRequest{Sandbox: tr.sb.ID}, func(r *dsecv1.LogRecord) error {
		if r.Seq != next || r.Epoch < epoch {
			return fmt.Errorf("record %d of epoch %d follows %d of %d", r.Seq, r.Epoch, next-1, epoch)
		}
		if r.Kind == "recalled" {
			moves++
		}
		next, epoch = r.Seq+1, r.Epoch
		return nil
	})
	if err != nil || moves == 0 {
		tr.t.Errorf("log: %v, %d moves", err, moves)
	}
}

// Every party is killed between the steps of a move, which the test drives as a gateway does: the sandbox is whole on one host, nothing of it on the
// other, and the next call finds it.
func TestMigrationIsKilled(t *testing.T) {
	t.Parallel()
	tr := newTravel(t)
	const first, half, all, given = "some is sent", "a file is half sent", "all is there", "it is given away"
	type kill struct {
		at                      string
		source, target, gateway bool
	}
	list := []kill{{at: given, source: true, target: true}, {at: all, source: true, gateway: true}}
	if torture {
		list = nil
		for _, at := range []string{first, half, all, given} {
			for i := range 8 {
				list = append(list, kill{at, i&1 > 0, i&2 > 0, i&4 > 0})
			}
		}
	}
	for i, k := range list {
		source, target := tr.ends()
		nonce := fmt.Sprintf("nonce-%d", i)
		tr.drive(source, target, nonce, map[string]int{first: 2, half: 6, all: 1 << 30, given: 1 << 30}[k.at], k.at == given)
		for s, dies := range map[*service]bool{source: k.source, target: k.target, tr.g: k.gateway} {
			if dies {
				s.kill()
			}
		}
		for _, s := range append(slices.Clone(tr.hosts), tr.g) { // a gateway waits for hosts
			if !s.lives() {
				must(t, s.begin())
			}
		}
		want := source
		if k.at == given {
			want = target
		}
		if at := tr.where(); at != want.instance() {
			t.Errorf("killed (source %v, target %v, gateway %v) when %s: it is at %s, want %s", k.source, k.target, k.gateway, k.at, at, want.instance())
		}
		tr.goesOn(i + 1)
	}
	_, err := tr.sb.Migrate(within(t), "")
	must(t, err)
	tr.goesOn(len(list) + 1)
	tr.wholeLog()
	must(t, tr.sb.Stop(within(t)))
}

// lives says whether the service's process runs.
func (s *service) lives() bool {
	s.mu.Lock()
	end := s.end
	s.mu.Unlock()
	select {
	case err := <-end:
		end <- err
		return false
	default:
		return true
	}
}

// drive begins a move and leaves it after some parts, or when all is there, or when it is given away.
func (tr *travel) drive(source, target *service, nonce string, parts int, give bool) {
	t := tr.t
	t.Helper()
	token, err := os.ReadFile(filepath.Join(filepath.Dir(tr.g.dir), "token"))
	must(t, err)
	peer := func(s *service) *rpc.Peer {
		p, err := rpc.Dial("unix:"+s.socket(), rpc.PeerConfig{Token: strings.TrimSpace(string(token))})
		must(t, err)
		t.Cleanup(p.Close)
		return p
	}
	from, to := peer(source), peer(target)
	ctx, cut := context.WithCancel(rpc.WithProject(within(t), "default"))
	defer cut()
	in, err := from.Moves.Depart(ctx, connect.NewRequest(&dsecv1.DepartRequest{Sandbox: tr.sb.ID, Nonce: nonce, To: target.instance()}))
	must(t, err)
	out := to.Moves.Arrive(ctx)
	n := 0
	for end := false; n < parts && !end && in.Receive(); n++ {
		must(t, out.Send(in.Msg()))
		end = in.Msg().GetEnd() != nil
	}
	must(t, in.Err())
	if n == parts {
		return
	}
	if _, err := out.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	if !give {
		return
	}
	r, err := from.Moves.Conclude(ctx, connect.NewRequest(&dsecv1.ConcludeRequest{Sandbox: tr.sb.ID, Nonce: nonce, Commit: true}))
	must(t, err)
	if !r.Msg.Moved {
		t.Fatal("it was not given away")
	}
}
