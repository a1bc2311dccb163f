package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

const (
	cachePrefix = "build/"
	cacheFormat = "dsec build 1"
	maxLook     = 64 << 10 // octets read of a file that may be a secret
	maxSecrets  = 200      // files that are looked into
	setupTime   = 10 * time.Minute
)

// Options of one build.
type Options struct {
	Name        string    // overrides the file's
	NoCache     bool      // execute every step, and keep what comes of it
	FailSecrets bool      // what looks like a secret fails the build
	Output      io.Writer // progress and the output of steps, for people
}

// Result is what a build made.
type Result struct {
	Environment *dsecv1.Environment
	Cached      int // steps found
	Executed    int
	Removed     []string // leftovers
	Secrets     []Secret
}

// StepError says which step failed and how.
type StepError struct {
	N       int // from 1; 0 is the check
	Step    string
	Outcome *dsecv1.Outcome
	Tail    string // end of the output
}

func (e *StepError) Error() string {
	what := fmt.Sprintf("step %d (%s)", e.N, e.Step)
	if e.N == 0 {
		what = "check (" + e.Step + ")"
	}
	how := e.Outcome.Kind
	switch how {
	case "exited":
		how = fmt.Sprintf("exited with %d", e.Outcome.Code)
	case "timed_out":
		how = "ran into its timeout"
	case "out_of_memory":
		how = "ran out of memory; raise memory in the build file"
	}
	if t := strings.TrimRight(e.Tail, "\n"); t != "" {
		how += "; its output ends with\n" + t
	}
	return what + " " + how
}

// builder is one build under way.
type builder struct {
	c   *client.Client
	f   *File
	o   Options
	out Result

	start   []string // layer IDs below the steps, lowest first
	stack   []string // with those of the steps
	env     map[string]string
	workdir string
	user    string
	base    *dsecv1.Environment // what it is built from; nil with layer:
}

// Run builds the environment and publishes it.
func Run(ctx context.Context, c *client.Client, f *File, o Options) (*Result, error) {
	if o.Name == "" {
		o.Name = f.Name
	}
	if o.Name == "" {
		return nil, errors.New("name: give the environment a name, in the file or with --name")
	}
	if o.Output == nil {
		o.Output = io.Discard
	}
	b := &builder{c: c, f: f, o: o, env: map[string]string{}, user: f.User, workdir: f.Workdir}
	if err := b.from(ctx); err != nil {
		return nil, err
	}
	maps.Copy(b.env, f.Env)
	b.start = append([]string{}, b.stack...)
	for i := range f.Steps {
		if err := b.step(ctx, i+1, &f.Steps[i]); err != nil {
			return nil, err
		}
	}
	for _, k := range f.Kits {
		if err := b.kit(ctx, k); err != nil {
			return nil, err
		}
	}
	if err := b.secrets(ctx, b.start); err != nil {
		return nil, err
	}
	if o.FailSecrets && len(b.out.Secrets) > 0 {
		return nil, fmt.Errorf("%s looks like a secret (%s), and %d more; nothing was published", b.out.Secrets[0].Where, b.out.Secrets[0].Why, len(b.out.Secrets)-1)
	}
	if f.Check != "" {
		b.say("check %s", f.Check)
		if err := b.check(ctx); err != nil {
			return nil, err
		}
	}
	return &b.out, b.publish(ctx)
}

func (b *builder) say(format string, args ...any) { fmt.Fprintf(b.o.Output, format+"\n", args...) }

func (b *builder) from(ctx context.Context) error {
	if ref, ok := strings.CutPrefix(b.f.From, "layer:"); ok {
		return b.kit(ctx, ref)
	}
	name := b.f.From
	if ref, ok := strings.CutPrefix(name, "image:"); ok {
		b.say("import %s", ref)
		i, err := b.c.PullImage(ctx, &dsecv1.PullRequest{Ref: ref}, nil)
		if err != nil {
			return fmt.Errorf("from %s: %w", b.f.From, err)
		}
		name = i.Environment
	}
	r, err := b.c.LayerService.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: name}))
	if err != nil {
		return fmt.Errorf("from %s: %w", b.f.From, client.Wrap(err))
	}
	e := r.Msg.Environment
	b.base, b.stack = e, append([]string{}, e.Layers...)
	for _, v := range e.Env {
		if len(v.NameRaw) == 0 && len(v.ValueRaw) == 0 {
			b.env[v.Name] = v.Value
		}
	}
	if b.user == "" {
		b.user = e.User
	}
	if b.workdir == "" {
		b.workdir = e.Cwd
	}
	return nil
}

// kit lays a layer on the stack.
func (b *builder) kit(ctx context.Context, ref string) error {
	r, err := b.c.GetLayer(ctx, ref)
	if err != nil {
		return fmt.Errorf("layer %s: %w", ref, err)
	}
	b.stack = append(b.stack, r.Layer.Id)
	return nil
}

func (b *builder) step(ctx context.Context, n int, s *Step) error {
	switch {
	case len(s.Env) > 0:
		maps.Copy(b.env, s.Env)
		return nil
	case s.Workdir != "":
		b.workdir = s.Workdir
		return nil
	case s.User != "":
		b.user = s.User
		return nil
	case s.Kit != "":
		if err := b.kit(ctx, s.Kit); err != nil {
			return fmt.Errorf("step %d: %w", n, err)
		}
		return nil
	}
	var t *tree
	copied := ""
	if s.Copy != "" {
		var err error
		if t, err = openTree(b.f.dir, s); err == nil {
			defer t.close()
			copied, err = t.hash()
		}
		if err != nil {
			return fmt.Errorf("step %d (%s): %w", n, s, err)
		}
	}
	name, err := b.cacheName(s, copied)
	if err != nil {
		return err
	}
	if !b.o.NoCache {
		r, err := b.c.GetLayer(ctx, name)
		if err == nil {
			b.say("step %d: %s (found)", n, s)
			b.out.Cached++
			b.push(r.Layer)
			return nil
		}
		if !errors.Is(err, client.ErrNotFound) {
			return err
		}
	}
	b.say("step %d: %s", n, s)
	b.out.Executed++
	l, err := b.execute(ctx, n, s, t, name)
	if err != nil {
		return err
	}
	b.push(l)
	return nil
}

// push lays a step's snapshot on the stack, unless it changed nothing.
func (b *builder) push(l *dsecv1.Layer) {
	if l.Entries > 0 {
		b.stack = append(b.stack, l.Id)
	}
}

// cacheName is where the result of a step on the present stack is kept.
func (b *builder) cacheName(s *Step, copied string) (string, error) {
	key := struct {
		Format, Copied, Builder, Workdir, Network string
		Owner                                     string `json:",omitempty"` // of the folder of the steps
		Stack, Keep, Rules                        []string
		Env                                       map[string]string
		Step                                      Step
	}{cacheFormat, copied, b.builderUser(), b.workdir, b.f.Network, b.workdirOwner(), b.stack, b.f.Keep, nil, nil, *s}
	key.Step.Timeout = "" // changes nothing about what comes out
	if s.Run != "" {
		key.Env = b.env
		for _, r := range Rules {
			key.Rules = append(key.Rules, r.Name)
		}
	}
	text, err := json.Marshal(key)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return cachePrefix + hex.EncodeToString(sum[:20]), nil
}

func (b *builder) builderUser() string {
	if b.f.Builder == "" {
		return "root"
	}
	return b.f.Builder
}

func (b *builder) sandbox(ctx context.Context, user string) (*client.Sandbox, error) {
	return b.on(ctx, b.stack, user)
}

func (b *builder) on(ctx context.Context, stack []string, user string) (*client.Sandbox, error) {
	return b.c.RunContainer(ctx, client.Options{Layers: stack, User: user, Network: b.f.Network, Memory: b.f.Memory, Disk: b.f.Disk,
		Labels: map[string]string{"dsec-build": strings.NewReplacer("/", "_").Replace(b.o.Name)}, Idle: 30 * time.Minute})
}

func (b *builder) execute(ctx context.Context, n int, s *Step, t *tree, name string) (*dsecv1.Layer, error) {
	sb, err := b.sandbox(ctx, b.builderUser())
	if err != nil {
		return nil, fmt.Errorf("step %d (%s): %w", n, s, err)
	}
	defer sb.Close()
	if t != nil {
		err = b.copy(ctx, sb, s, t)
	} else {
		err = b.run(ctx, sb, n, s)
	}
	if err != nil {
		var failed *StepError
		if errors.As(err, &failed) {
			return nil, err
		}
		return nil, fmt.Errorf("step %d (%s): %w", n, s, err)
	}
	long, cancel := context.WithTimeout(ctx, setupTime)
	defer cancel()
	ref, err := sb.Snapshot(long, name)
	if err != nil {
		return nil, fmt.Errorf("step %d (%s): snapshot: %w", n, s, err)
	}
	r, err := b.c.GetLayer(ctx, ref)
	if err != nil {
		return nil, err
	}
	return r.Layer, nil
}

func (b *builder) run(ctx context.Context, sb *client.Sandbox, n int, s *Step) error {
	homes := []string{"/root"}
	if h, _, _, err := account(ctx, sb, b.builderUser()); err == nil && h != "" && h != "/root" && h != "/" {
		homes = append(homes, h)
	}
	at := places(b.f.Keep, homes)
	before, err := contents(ctx, sb, at)
	if err != nil {
		return err
	}
	own, err := b.makeWorkdir(ctx, sb)
	if err != nil {
		return err
	}
	timeout, _ := s.timeout()
	if err := b.command(ctx, sb, n, s.String(), s.Run, b.builderUser(), timeout); err != nil {
		return err
	}
	if err := own(ctx); err != nil {
		return err
	}
	gone, err := clean(ctx, sb, at, before)
	if err != nil {
		return fmt.Errorf("remove leftovers: %w", err)
	}
	for _, p := range gone {
		b.say("removed %s", p)
	}
	b.out.Removed = append(b.out.Removed, gone...)
	return nil
}

// command runs shell text and passes its output on.
func (b *builder) command(ctx context.Context, sb *client.Sandbox, n int, what, text, user string, timeout time.Duration) error {
	p, err := sb.Start(ctx, client.Cmd{Argv: []string{"/bin/sh", "-e", "-c", text}, Env: b.env, Cwd: b.workdir, User: user, Timeout: timeout})
	if err != nil {
		return err
	}
	tail := &tail{w: b.o.Output}
	o, err := p.Stream(ctx, tail, tail)
	if err != nil {
		return err
	}
	if o.Kind != "exited" || o.Code != 0 {
		return &StepError{N: n, Step: what, Outcome: o, Tail: tail.String()}
	}
	return nil
}

// tail passes output on and remembers its end.
type tail struct {
	w   io.Writer
	end []byte
}

const maxTail = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.end = append(t.end, p...)
	if len(t.end) > 2*maxTail {
		t.end = append(t.end[:0], t.end[len(t.end)-maxTail:]...)
	}
	return t.w.Write(p)
}

func (t *tail) String() string {
	b := t.end[max(0, len(t.end)-maxTail):]
	return strings.ToValidUTF8(string(b), "\uFFFD")
}

func (b *builder) copy(ctx context.Context, sb *client.Sandbox, s *Step, t *tree) error {
	uid, gid := 0, 0
	if s.Owner != "" {
		var err error
		if _, uid, gid, err = account(ctx, sb, s.Owner); err != nil {
			return err
		}
	}
	if _, err := b.makeWorkdir(ctx, sb); err != nil {
		return err
	}
	return b.upload(ctx, sb, t.folder(s.To), func(w io.Writer) error { return t.write(w, uid, gid) })
}

// upload lays what write writes, a tar, below a folder of the sandbox, with the owners that it names.
func (b *builder) upload(ctx context.Context, sb *client.Sandbox, to string, write func(io.Writer) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	go func() { w.CloseWithError(write(w)) }()
	defer r.Close()
	st := b.c.FileService.Upload(ctx)
	head := &dsecv1.UploadRequest{At: &dsecv1.Path{Sandbox: sb.ID, Path: to, User: "root"}, Parents: true, KeepOwner: true}
	buf := make([]byte, 256<<10)
	for end := false; !end; {
		k, err := io.ReadFull(r, buf)
		end = err == io.EOF || err == io.ErrUnexpectedEOF
		if err != nil && !end {
			return err
		}
		head.Data = bytes.Clone(buf[:k])
		if err := st.Send(head); err != nil {
			if errors.Is(err, io.EOF) {
				break // the server's own word comes with the answer
			}
			return client.Wrap(err)
		}
		head = &dsecv1.UploadRequest{}
	}
	_, err := st.CloseAndReceive()
	return client.Wrap(err)
}

// account finds a user's home, uid and gid in the sandbox's /etc/passwd; a number needs none.
func account(ctx context.Context, sb *client.Sandbox, user string) (home string, uid, gid int, err error) {
	name, group, both := strings.Cut(user, ":")
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		uid, gid = int(n), int(n)
		if both {
			g, err := strconv.ParseUint(group, 10, 32)
			if err != nil {
				return "", 0, 0, fmt.Errorf("owner %q: want a name, or uid[:gid]", user)
			}
			gid = int(g)
		}
		return "", uid, gid, nil
	}
	var text bytes.Buffer
	if _, err := sb.FilesAs("root").Read(ctx, "/etc/passwd", 0, 1<<20, &text); err != nil {
		return "", 0, 0, fmt.Errorf("user %s: %w", user, err)
	}
	return lookup(text.String(), name)
}

// lookup finds an account in the text of /etc/passwd, which whoever made the layers wrote: numbers that are none of an account are
// refused, and a home that no path can be is none.
func lookup(text, name string) (home string, uid, gid int, err error) {
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) < 6 || f[0] != name {
			continue
		}
		u, err1 := strconv.ParseUint(f[2], 10, 32)
		g, err2 := strconv.ParseUint(f[3], 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return "", 0, 0, fmt.Errorf("user %s: /etc/passwd: %w", name, err)
		}
		if u == math.MaxUint32 || g == math.MaxUint32 {
			return "", 0, 0, fmt.Errorf("user %s: /etc/passwd: %d:%d is no account", name, u, g)
		}
		home := f[5]
		if !path.IsAbs(home) || strings.ContainsRune(home, 0) {
			home = ""
		}
		return home, int(u), int(g), nil
	}
	return "", 0, 0, fmt.Errorf("user %s: /etc/passwd does not have it", name)
}

// check runs the check in a fresh sandbox, as the run-time user.
func (b *builder) check(ctx context.Context) error {
	user := b.user
	if user == "" {
		user = "root"
	}
	sb, err := b.sandbox(ctx, user)
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	defer sb.Close()
	return b.command(ctx, sb, 0, b.f.Check, b.f.Check, user, 0)
}

// secrets reports what looks like one among what the steps made.
func (b *builder) secrets(ctx context.Context, start []string) error {
	b.out.Secrets = SecretVars(b.env)
	if len(b.stack) > len(start) {
		was := map[string]string{}
		if len(start) > 0 {
			err := b.each(ctx, start, func(_ *client.Sandbox, p string, e *dsecv1.FileInfo) error {
				was[p] = fmt.Sprint(e.Size, e.Modified.AsTime())
				return nil
			})
			if err != nil {
				return err
			}
		}
		looked := 0
		err := b.each(ctx, b.stack, func(sb *client.Sandbox, p string, e *dsecv1.FileInfo) error {
			if was[p] == fmt.Sprint(e.Size, e.Modified.AsTime()) {
				return nil
			}
			why, look := suspicious(p)
			if looked++; look != nil && looked <= maxSecrets {
				var text bytes.Buffer
				if _, err := sb.FilesAs("root").Read(ctx, p, 0, maxLook, &text); err != nil {
					return nil // it stays unreported that this could not be read: it can't be by others either
				}
				if !look.Match(text.Bytes()) {
					return nil
				}
			}
			b.out.Secrets = append(b.out.Secrets, Secret{p, why})
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, s := range b.out.Secrets {
		b.say("warning: %s looks like a secret: %s", s.Where, s.Why)
	}
	return nil
}

// each lists the files of a stack whose path may be a secret's.
func (b *builder) each(ctx context.Context, stack []string, do func(*client.Sandbox, string, *dsecv1.FileInfo) error) error {
	sb, err := b.on(ctx, stack, "root")
	if err != nil {
		return fmt.Errorf("look for secrets: %w", err)
	}
	defer sb.Close()
	files := sb.FilesAs("root")
	top, err := files.List(ctx, "/", 1)
	if err != nil {
		return fmt.Errorf("look for secrets: %w", err)
	}
	for _, d := range top {
		if d.Type != "dir" || d.Path == "proc" || d.Path == "sys" || d.Path == "dev" {
			continue
		}
		list, err := files.List(ctx, "/"+d.Path, 64)
		if err != nil {
			return fmt.Errorf("look for secrets in /%s: %w", d.Path, err)
		}
		for _, e := range list {
			p := path.Join("/", d.Path, e.Path)
			if why, _ := suspicious(p); e.Type != "file" || why == "" {
				continue
			}
			if err := do(sb, p, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// publish gives the environment its next version.
func (b *builder) publish(ctx context.Context) error {
	e := &dsecv1.Environment{Name: b.o.Name, User: b.user, Cwd: b.workdir}
	if b.base != nil {
		e.Resources, e.Image = b.base.Resources, b.base.Image
	}
	n := len(b.stack) - len(b.f.Kits)
	for i, l := range b.stack {
		if i >= n {
			l = b.f.Kits[i-n] // by name, so that an upgrade finds it
		}
		if i == 0 {
			e.Base = l
		} else {
			e.Kits = append(e.Kits, l)
		}
	}
	for k, v := range b.env {
		e.Env = append(e.Env, &dsecv1.EnvVar{Name: k, Value: v})
	}
	out, err := b.c.PublishEnvironment(ctx, e)
	if err != nil {
		return fmt.Errorf("publish %s: %w", b.o.Name, err)
	}
	b.out.Environment = out
	return nil
}
