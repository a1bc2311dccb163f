package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// warmLanguages are Python and a shell that loads something from a device first, as a framework does for a GPU.
const warmLanguages = `[language.python]
environment = "debian"
source = "main.py"
run = ["/usr/bin/python3", "main.py"]
warm = true
env = ["PYTHONDONTWRITEBYTECODE=1", "PYTHONIOENCODING=utf-8"]
[language.framework]
environment = "shell"
source = "main.sh"
run = ["/bin/sh", "-c", "loaded=$(head -c 3 /dev/gpu0 | wc -c); . ./main.sh"]
warm = true
`

// TestWarmCalls compares calls that begin in an interpreter that is up with fresh ones: the same streams, codes and state, but a hash seed,
// random numbers and addresses of their own.
func TestWarmCalls(t *testing.T) {
	t.Parallel()
	s := newService(ownDir(t), "up", withDefaults(nil)...)
	node := filepath.Join(s.dir, "gpu0") // a fake, which answers as /dev/zero
	must(t, os.MkdirAll(s.dir, 0o700))
	must(t, unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))))
	must(t, os.WriteFile(filepath.Join(s.dir, "languages.toml"), []byte(warmLanguages), 0o600))
	s.conf = fmt.Sprintf("[fncall]\nlanguages = [%q]\nplaces = 2\nwarm = 3\n[[fncall.gpu]]\nname = \"fake\"\nnodes = [%q]\n", filepath.Join(s.dir, "languages.toml"), node)
	start(t, s)
	publishShell(t, s)
	_, err := s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "debian", Base: s.debian(t)})
	must(t, err)
	c := s.client()
	// warm makes calls until one began in an interpreter that was up.
	warm := func(q client.Call) *client.CallAnswer {
		t.Helper()
		q.Warm = true
		var a *client.CallAnswer
		must(t, eventually(func() (err error) {
			if a, err = c.FnCall(within(t), q); err == nil && !a.Result.Warm {
				err = errors.New("none was up")
			}
			return err
		}))
		return a
	}
	type end struct {
		Verdict, Limit string
		Code, Signal   int32
		Stdout, Stderr string
	}
	told := func(a *client.CallAnswer) end {
		return end{a.Verdict, a.Result.Limit, a.Result.Code, a.Result.Signal, string(a.Result.Stdout), string(a.Result.Stderr)}
	}
	for name, q := range map[string]client.Call{
		"itself":      {Code: "import sys, os\nprint(sys.argv, sys.orig_argv, __name__, __file__, __builtins__, __spec__, sys.path, sys.flags, os.getcwd(), os.getpid(), os.getppid(), sorted(os.environ.items()))"},
		"modules":     {Code: "import sys\nprint(sorted(sys.modules), sorted(vars(sys.modules['__main__'])), sys.stdin, sys.stdout, sys.stderr)"},
		"traceback":   {Code: "def f(x):\n  return g(x)\ndef g(x):\n  raise KeyError(x)\nf('x')"},
		"syntax":      {Code: "print(1)\ndef f(:\n  pass"},
		"stdin":       {Code: "import sys\na=input()\nprint(a, sys.stdin.read(), sys.stdin.seekable(), sys.stdin.isatty())", Stdin: []byte("1 2\nmore\n")},
		"no stdin":    {Code: "input()"},
		"exit":        {Code: "import atexit, sys\natexit.register(print, 'bye')\nsys.exit('words')"},
		"signal":      {Code: "import os, signal\nprint(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGPIPE), flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"},
		"children":    {Code: "import subprocess, multiprocessing as m\nm.set_start_method('spawn')\ndef f(q): q.put(__name__)\nif __name__ == '__main__':\n  q = m.Queue(); p = m.Process(target=f, args=(q,)); p.start(); print(q.get()); p.join(); print(subprocess.run(['id']).returncode)"},
		"descriptors": {Code: "import os\nprint(sorted(os.listdir('/proc/self/fd')), os.listdir('.'), os.stat('main.py').st_size, open('main.py').read())"},
		"no memory":   {Code: "a=[]\nwhile True: a.append('x'*1000000)", Limits: &dsecv1.CallLimits{Memory: 96 * mib}},
		"no time":     {Code: "while True: pass", Limits: &dsecv1.CallLimits{CpuMs: 300, WallMs: 120_000}},
		"a main":      {Code: "import dis, inspect\ndef f(): return 1\nprint(inspect.getsource(f), f.__code__.co_filename)\nimport main\nprint(main.__name__)"},
	} {
		q.Lang = "python"
		fresh, err := c.FnCall(within(t), q)
		must(t, err)
		if d := cmp.Diff(told(fresh), told(warm(q))); d != "" {
			t.Errorf("%s: -fresh +warm:\n%s", name, d)
		}
	}
	// Each is an interpreter of its own.
	seen := map[string]bool{}
	for range 4 {
		a := warm(client.Call{Lang: "python", Code: "import random\nprint(hash('x'), random.random(), id(object()) >> 12)"})
		for i, f := range strings.Fields(string(a.Result.Stdout)) {
			if key := fmt.Sprint(i, " ", f); seen[key] {
				t.Errorf("twice: %s", key)
			} else {
				seen[key] = true
			}
		}
	}
	// Its own start is no call's: Python alone takes more than this.
	a := warm(client.Call{Lang: "python", Code: "pass"})
	if fresh, err := c.FnCall(within(t), client.Call{Lang: "python", Code: "pass"}); err != nil || fresh.Result.CpuUs < a.Result.CpuUs {
		t.Errorf("CPU time: %d us warm, %v fresh: %v", a.Result.CpuUs, fresh, err)
	}
	// What drives a device is loaded before there is a program.
	a = warm(client.Call{Lang: "framework", Code: "echo $loaded; head -c 4 /dev/gpu0 | wc -c; exit 3", GPU: "exclusive"})
	if a.Verdict != "RE" || a.Result.Code != 3 || string(a.Result.Stdout) != "3\n4\n" {
		t.Errorf("with a device: %v", a.Result)
	}
	b, err := c.FnCallBatch(within(t), client.Call{Lang: "python", Code: "print(int(input())**2)", Warm: true}, []*dsecv1.CallInput{{Stdin: "3"}, {Stdin: "x"}, {Stdin: "5"}}, false)
	if err != nil || string(b.Results[0].Stdout)+string(b.Results[2].Stdout) != "9\n25\n" || b.Results[1].Verdict != "RE" {
		t.Errorf("a batch: %v %v", b, err)
	}
	if a, err = c.FnCall(within(t), client.Call{Lang: "python", Code: "import os, sys; print(sys.argv[1], os.environ['A'], open('d/f').read())", Args: []string{"x"}, Env: map[string]string{"A": "y"},
		Files: []*dsecv1.CallFile{{Path: "d/f", Text: "z"}}, Warm: true}); err != nil || string(a.Result.Stdout) != "x y z\n" || a.Result.Warm {
		t.Errorf("with things of its own: %v %v", a, err)
	}
	for _, q := range []client.Call{{Lang: "c", Code: "int main(void){return 0;}", Environment: "debian", Warm: true}, {Cmd: []string{"true"}, Environment: "shell", Warm: true}} {
		if _, err := c.FnCall(within(t), q); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "mode warm: not for language") {
			t.Errorf("%v: %v", q, err)
		}
	}
	must(t, eventually(func() error {
		r, err := http.NewRequest("GET", "http://dsec/metrics", nil)
		must(t, err)
		r.Header.Set("Authorization", "Bearer "+s.key())
		if _, text := s.send(t, r); !strings.Contains(text, "\ndsec_fncall_standbys 3\n") {
			return fmt.Errorf("as many as are kept at the most: %.200s", text[max(0, strings.Index(text, "dsec_fncall_standbys")):])
		}
		return nil
	}))
	// They end with the daemon, and the next one starts anew.
	s.kill()
	must(t, eventually(func() error {
		if left := s.calls(); len(left) > 0 {
			return fmt.Errorf("%d processes outlived the daemon: %v", len(left), left[0])
		}
		return nil
	}))
	must(t, s.begin())
	c = s.client()
	warm(client.Call{Lang: "python", Code: "pass"})
}
