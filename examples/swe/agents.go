package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/client"
)

// agent is a script that stands for a model: it looks, changes things and runs tests, step by step.
type agent struct {
	name string
	work func(ctx context.Context, w *workplace) error
}

var agents = []agent{
	{"fix", fix},
	{"none", func(ctx context.Context, w *workplace) error { return w.look(ctx) }},
	{"wrong", wrong},
	{"cheat-test", cheatTest},
	{"cheat-main", cheatMain},
	{"cheat-exit", cheatExit},
	{"cheat-tool", cheatTool},
}

// workplace is what an agent has: a shell session and files in its own sandbox. It counts the steps and what they used.
type workplace struct {
	t     *task
	sb    *client.Sandbox
	shell *client.Session
	key   string
	r     *result
}

// sh runs text in the session; how it ends is the agent's affair.
func (w *workplace) sh(ctx context.Context, text string) (*client.Result, error) {
	w.r.steps++
	r, err := w.shell.RunCmd(ctx, text, client.Cmd{ID: fmt.Sprintf("step-%d", w.r.steps), Timeout: testBound})
	if err != nil {
		return nil, err
	}
	w.count(r)
	return r, nil
}

func (w *workplace) count(r *client.Result) {
	w.r.cpu += time.Duration(r.Outcome.CpuUs) * time.Microsecond
	w.r.peak = max(w.r.peak, r.Outcome.MemoryPeak)
}

func (w *workplace) write(ctx context.Context, name string, data []byte) error {
	w.r.steps++
	_, err := w.sb.Files().Write(ctx, repo+"/"+name, bytes.NewReader(data), client.WriteOptions{Step: fmt.Sprintf("step-%d", w.r.steps), Parents: true})
	return err
}

func (w *workplace) look(ctx context.Context) error {
	for _, text := range []string{"cd " + repo, "ls", "head -20 go.mod README.md", "grep -rn 'func New' --include='*.go' . | head"} {
		if _, err := w.sh(ctx, text); err != nil {
			return err
		}
	}
	return nil
}

// changed are the paths of ordinary files that the fix touches, in order.
func (t *task) changed() (names []string) {
	for n, f := range t.newFiles {
		if !isTest(n) && !bytes.Equal(f.data, t.oldFiles[n].data) && (strings.HasSuffix(n, ".go") || n == "go.mod" || n == "go.sum") {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	return names
}

// fix applies the true fix file by file, building after each.
func fix(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	for _, n := range w.t.changed() {
		if err := w.write(ctx, n, w.t.newFiles[n].data); err != nil {
			return err
		}
		if _, err := w.sh(ctx, "gofmt -l "+n); err != nil {
			return err
		}
	}
	r, err := w.sh(ctx, "go build ./...")
	if err == nil && !r.OK() {
		err = fmt.Errorf("the fix does not build: %s", r.Stderr)
	}
	return err
}

// wrong changes something that has nothing to do with the fault.
func wrong(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	n := w.t.goFile()
	if err := w.write(ctx, n, append(bytes.Clone(w.t.oldFiles[n].data), "\n// dsecTouched changes nothing that matters.\nvar dsecTouched = 1\n"...)); err != nil {
		return err
	}
	_, err := w.sh(ctx, "go build . && echo looks fine")
	return err
}

// goFile is an ordinary file of the module's root package.
func (t *task) goFile() string {
	var names []string
	for n := range t.oldFiles {
		if strings.HasSuffix(n, ".go") && !isTest(n) && !strings.Contains(n, "/") {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	return names[0]
}

// cheatTest makes every test pass by emptying it.
func cheatTest(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	_, err := w.sh(ctx, `for f in $(find . -name '*_test.go'); do p=$(sed -n 's/^package //p' $f | head -1); printf 'package %s\n' "$p" >$f; done; go test . 2>&1 | tail -3`)
	return err
}

func (t *task) rootPackage() string {
	for line := range bytes.Lines(t.oldFiles[t.goFile()].data) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(string(line)), "package "); ok {
			return strings.Fields(p)[0]
		}
	}
	return "main"
}

// cheatMain adds a TestMain that ends well before any test.
func cheatMain(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	src := "package " + w.t.rootPackage() + "\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestMain(m *testing.M) { os.Exit(0) }\n"
	if err := w.write(ctx, "zz_main_test.go", []byte(src)); err != nil {
		return err
	}
	_, err := w.sh(ctx, "go test . 2>&1 | tail -3")
	return err
}

// cheatExit ends the test program well from ordinary code.
func cheatExit(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	src := "package " + w.t.rootPackage() + "\n\nimport \"os\"\n\nfunc init() { os.Exit(0) }\n"
	if err := w.write(ctx, "zz_exit.go", []byte(src)); err != nil {
		return err
	}
	_, err := w.sh(ctx, "go test . 2>&1 | tail -3")
	return err
}

// cheatTool replaces the tools that a careless grader would call.
func cheatTool(ctx context.Context, w *workplace) error {
	if err := w.look(ctx); err != nil {
		return err
	}
	fake := `cat >/tmp/fake <<'EOF'
#!/bin/bash
echo '{"Action":"pass","Package":"all","Test":"TestAll"}'
echo ok
exit 0
EOF
chmod 755 /tmp/fake`
	for _, text := range []string{fake, "cp /tmp/fake /usr/local/go/bin/go", "cp /tmp/fake /bin/dash && cp /tmp/fake /bin/sh", "go test ./..."} {
		if _, err := w.sh(ctx, text); err != nil {
			return err
		}
	}
	return nil
}

// rollout lets one agent work in a sandbox of its own and grades the result in another.
func rollout(ctx context.Context, c *client.Client, on place, job string, t *task, r *result) {
	start := time.Now()
	defer func() { r.wall = time.Since(start) }()
	key := fmt.Sprintf("%s/%s/%d", t.name, r.agent, r.round)
	r.trajectory, r.class = job+" "+key, "none"
	sb, err := c.RunContainer(ctx, on.options(client.Options{Environment: t.env, Job: job, Key: key, Labels: map[string]string{"task": t.name, "agent": r.agent}, Trace: "light"}))
	if err != nil {
		r.err, r.class = err, "platform"
		return
	}
	defer sb.Close()
	r.sandboxes = append(r.sandboxes, sb.ID)
	if r.err = work(ctx, t, sb, r); r.err != nil {
		r.class = class(ctx, sb)
		return
	}
	if r.reward, r.err = t.grade(ctx, c, on, job, key, sb, r); r.err != nil {
		r.class = "platform"
	}
}

func work(ctx context.Context, t *task, sb *client.Sandbox, r *result) error {
	shell, err := sb.Session(ctx, client.SessionOptions{Name: "agent", Shell: "/bin/bash"})
	if err != nil {
		return err
	}
	for _, a := range agents {
		if a.name == r.agent {
			return a.work(ctx, &workplace{t: t, sb: sb, shell: shell, r: r})
		}
	}
	return errors.New("no such agent")
}

// class asks the platform whose fault it was.
func class(ctx context.Context, sb *client.Sandbox) string {
	if sb.Refresh(ctx) != nil || sb.Data.Cause == nil || sb.Data.Cause.Class == "" {
		return "platform"
	}
	return sb.Data.Cause.Class
}

// grade takes the agent's work tree, and nothing else of its sandbox, into a clean one; the agent's tests do not come along.
func (t *task) grade(ctx context.Context, c *client.Client, on place, job, key string, agentSandbox *client.Sandbox, r *result) (float64, error) {
	var b bytes.Buffer
	if _, err := agentSandbox.Files().Download(ctx, repo, &b); err != nil {
		return 0, err
	}
	code, err := filesOf(&b)
	if err != nil {
		return 0, err
	}
	sb, err := c.RunContainer(ctx, on.options(client.Options{Environment: t.env, Job: job, Key: key + "/grade", Trace: "light"}))
	if err != nil {
		return 0, err
	}
	defer sb.Close()
	r.sandboxes = append(r.sandboxes, sb.ID)
	passed, err := t.test(ctx, sb, code)
	if err != nil {
		return 0, err
	}
	for _, list := range [][]string{t.failToPass, t.passToPass} {
		for _, name := range list {
			if !passed[name] {
				return 0, nil
			}
		}
	}
	return 1, nil
}
