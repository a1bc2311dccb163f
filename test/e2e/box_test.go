package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// entry is one of a test layer's tar.
type entry struct {
	name  string
	kind  byte // tar.TypeReg when zero
	mode  int64
	uid   int
	gid   int
	link  string
	data  string
	xattr map[string]string
	major int64
	minor int64
}

func tarOf(entries ...entry) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Mode: e.mode, Uid: e.uid, Gid: e.gid, Linkname: e.link, Size: int64(len(e.data)),
			ModTime: time.Unix(1e9, 0), Format: tar.FormatPAX, Devmajor: e.major, Devminor: e.minor}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if e.kind == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		for k, v := range e.xattr {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// smallRoot is a root file system of busybox.
var smallRoot = sync.OnceValues(func() ([]byte, error) {
	bb, err := busybox()
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(bb)
	if err != nil {
		return nil, err
	}
	list, err := exec.Command(bb, "--list").Output()
	if err != nil {
		return nil, err
	}
	dir := func(name string, mode int64, id int) entry {
		return entry{name: name + "/", kind: tar.TypeDir, mode: mode, uid: id, gid: id}
	}
	root := []entry{dir("bin", 0o755, 0), dir("etc", 0o755, 0), dir("root", 0o700, 0), dir("home", 0o755, 0), dir("home/alice", 0o755, 1000),
		dir("tmp", 0o1777, 0), dir("usr", 0o755, 0), dir("usr/bin", 0o755, 0), dir("var", 0o755, 0), dir("run", 0o755, 0), dir("srv", 0o755, 0), dir("opt", 0o755, 0),
		dir("opt/locked", 0o700, 0),
		{name: "bin/busybox", mode: 0o755, data: string(program)},
		{name: "etc/passwd", data: "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n"},
		{name: "etc/group", data: "root:x:0:\ntty:x:5:\nalice:x:1000:\nnogroup:x:65534:\n"},
	}
	for _, name := range strings.Fields(string(list)) {
		if name != "busybox" {
			root = append(root, entry{name: "bin/" + name, kind: tar.TypeSymlink, mode: 0o777, link: "busybox"})
		}
	}
	return tarOf(root...), nil
})

var layersMu sync.Mutex

// layer imports a tar and returns its ID.
func (s *service) layer(t testing.TB, data []byte) string {
	t.Helper()
	r, err := s.client().ImportLayer(within(t), "", "test", bytes.NewReader(data))
	if err != nil {
		t.Fatalf("import: %v", err)
	}
	return r.Layer.Id
}

// named imports a layer once per service.
func (s *service) named(t testing.TB, name string, open func() (io.ReadCloser, error)) string {
	t.Helper()
	layersMu.Lock()
	defer layersMu.Unlock()
	c := s.client()
	if _, err := c.GetLayer(within(t), name); err == nil {
		return name
	}
	in, err := open()
	if err != nil {
		t.Fatalf("layer %s: %v", name, err)
	}
	defer in.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if _, err := c.ImportLayer(ctx, name, "test", in); err != nil {
		t.Fatalf("layer %s: %v", name, err)
	}
	return name
}

// small is the layer of busybox.
func (s *service) small(t testing.TB) string {
	return s.named(t, "base/small", func() (io.ReadCloser, error) {
		b, err := smallRoot()
		return io.NopCloser(bytes.NewReader(b)), err
	})
}

// debian is the layer of a Debian with bash, python, sudo and the like.
func (s *service) debian(t testing.TB) string {
	return s.named(t, "base/debian", func() (io.ReadCloser, error) {
		file, err := debianTar()
		if err != nil {
			return nil, err
		}
		return os.Open(file)
	})
}

// within is a context that outlasts everything a test waits for.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	return ctx
}

// box makes a sandbox that is stopped with the test; without layers it is of busybox.
// runtimeVar names the runtime under which the boxes of all tests run, in place of dsec's own: crun, runc or gvisor.
const runtimeVar = "DSEC_E2E_RUNTIME"

func (s *service) box(t testing.TB, edit ...func(*client.Options)) *client.Sandbox {
	t.Helper()
	sb, err := s.tryBox(t, edit...)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb
}

func (s *service) tryBox(t testing.TB, edit ...func(*client.Options)) (*client.Sandbox, error) {
	t.Helper()
	o := client.Options{Runtime: os.Getenv(runtimeVar), Memory: 256 << 20, Disk: 256 << 20, Pids: 512, Idle: 10 * time.Minute, Labels: map[string]string{"test": strings.ReplaceAll(t.Name(), "/", "_")}}
	for _, f := range edit {
		f(&o)
	}
	if len(o.Layers) == 0 && o.Environment == "" && o.Image == "" {
		o.Layers = []string{s.small(t)}
	}
	sb, err := s.client().RunContainer(within(t), o)
	if err == nil {
		t.Cleanup(func() {
			if err := sb.Close(); err != nil && !errors.Is(err, client.ErrNotFound) {
				t.Errorf("stop %s: %v", sb.ID, err)
			}
		})
	}
	return sb, err
}

// debianBox is a sandbox of Debian.
func (s *service) debianBox(t testing.TB, edit ...func(*client.Options)) *client.Sandbox {
	t.Helper()
	return s.box(t, append([]func(*client.Options){func(o *client.Options) {
		o.Layers, o.Memory = []string{s.debian(t)}, 512<<20
	}}, edit...)...)
}

func exe(t testing.TB, sb *client.Sandbox, c client.Cmd) *client.Result {
	t.Helper()
	r, err := sb.Run(within(t), c)
	if err != nil {
		t.Fatalf("run %.200q: %v", c.Argv, err)
	}
	return r
}

func sh(script string) client.Cmd { return client.Cmd{Argv: []string{"sh", "-c", script}} }

func shAs(user, script string) client.Cmd {
	return client.Cmd{Argv: []string{"sh", "-c", script}, User: user}
}

// out is the standard output of a command that must succeed.
func out(t testing.TB, sb *client.Sandbox, script string) string {
	t.Helper()
	r := exe(t, sb, sh(script))
	if !r.OK() {
		t.Fatalf("%s: %s", script, describe(r))
	}
	return string(r.Stdout)
}

func describe(r *client.Result) string {
	return fmt.Sprintf("%s, stdout %.300q, stderr %.300q", describeOutcome(r.Outcome), r.Stdout, r.Stderr)
}

func describeOutcome(o *dsecv1.Outcome) string {
	text := o.GetKind()
	switch text {
	case "exited":
		text += fmt.Sprintf(" %d", o.Code)
	case "signalled", "killed", "out_of_memory", "session_ended":
		text += fmt.Sprintf(" (code %d, signal %d)", o.Code, o.Signal)
	}
	for name, on := range map[string]bool{"memory_hit": o.GetMemoryHit(), "pids_hit": o.GetPidsHit(), "disk_hit": o.GetDiskHit(),
		"output_open": o.GetOutputOpen(), "session_end": o.GetSessionEnd(), "shared": o.GetShared()} {
		if on {
			text += " " + name
		}
	}
	if o.GetError() != "" {
		text += ": " + o.Error
	}
	return text
}

// want checks exit code and both streams.
func want(t testing.TB, r *client.Result, code int, stdout, stderr string) {
	t.Helper()
	if r.Outcome.Kind != "exited" || int(r.Outcome.Code) != code || string(r.Stdout) != stdout || string(r.Stderr) != stderr {
		t.Errorf("%s; want exit %d, stdout %.300q, stderr %.300q", describe(r), code, stdout, stderr)
	}
}

// errorText fails unless err holds all the words, in any letter case.
func errorText(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error; want one that names %v", words)
		return
	}
	for _, w := range words {
		if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(w)) {
			t.Errorf("error %q does not name %q", err, w)
		}
	}
}

// terminal is a command with one.
func terminal(c client.Cmd, rows, cols uint32) client.Cmd {
	c.Terminal = &dsecv1.Terminal{Rows: rows, Cols: cols}
	return c
}

// ways runs a script in every way in which a command can be run and hands over what it printed: as a command of each user with and
// without a terminal, in a session, and as a sandbox's entrypoint.
func ways(t *testing.T, s *service, edit func(*client.Options), script string, check func(t *testing.T, way, stdout, stderr string, o *dsecv1.Outcome)) {
	t.Helper()
	options := func(o *client.Options) {
		if edit != nil {
			edit(o)
		}
	}
	sb := s.box(t, options)
	for _, user := range []string{"root", "nobody", "alice", "12345"} {
		r := exe(t, sb, shAs(user, script))
		check(t, "command as "+user, string(r.Stdout), string(r.Stderr), r.Outcome)
		r = exe(t, sb, terminal(shAs(user, script), 24, 80))
		check(t, "terminal as "+user, strings.ReplaceAll(string(r.Stdout), "\r\n", "\n"), "", r.Outcome)
		ses, err := sb.Session(within(t), client.SessionOptions{User: user, Shell: "/bin/sh"})
		if err != nil {
			t.Fatalf("session as %s: %v", user, err)
		}
		r, err = ses.Run(within(t), script)
		if err != nil {
			t.Fatalf("session as %s: %v", user, err)
		}
		check(t, "session as "+user, string(r.Stdout), string(r.Stderr), r.Outcome)
	}
	entry := s.box(t, options, func(o *client.Options) { o.Entrypoint = []string{"sh", "-c", script} })
	r, err := entry.Process("entrypoint").Wait(within(t))
	if err != nil {
		t.Fatalf("entrypoint: %v", err)
	}
	check(t, "entrypoint", string(r.Stdout), string(r.Stderr), r.Outcome)
}

// treeOf is a tar with all parents of a few files.
func treeOf(files map[string]string) []byte {
	made := map[string]bool{".": true}
	var list []entry
	var dirs func(d string)
	dirs = func(d string) {
		if made[d] {
			return
		}
		dirs(path.Dir(d))
		made[d] = true
		list = append(list, entry{name: d + "/", kind: tar.TypeDir})
	}
	for name, data := range files {
		dirs(path.Dir(name))
		list = append(list, entry{name: name, data: data})
	}
	return tarOf(list...)
}

// without returns the list without a word.
func without(list []string, word string) []string {
	var out []string
	for _, w := range list {
		if w != word {
			out = append(out, w)
		}
	}
	return out
}

// peek is what a running command has written to its standard output.
func peek(t testing.TB, s *service, sb *client.Sandbox, id string) ([]byte, error) {
	t.Helper()
	r, err := s.client().Commands.ReadOutput(within(t), connect.NewRequest(&dsecv1.ReadOutputRequest{Sandbox: sb.ID, Id: id, Stream: "stdout"}))
	if err != nil {
		return nil, err
	}
	return r.Msg.Data, nil
}

// cgroupOf is the text of a process's cgroups.
func cgroupOf(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return string(b)
}

func request[M any](m *M) *connect.Request[M] { return connect.NewRequest(m) }
