package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// publishShell makes the environment shell, which is busybox alone.
func publishShell(t *testing.T, s *service) {
	t.Helper()
	_, err := s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "shell", Base: s.small(t)})
	must(t, err)
}

// shell is a call of a script in that environment.
func shell(script string) client.Call {
	return client.Call{Cmd: []string{"sh", "-c", script}, Environment: "shell", Limits: &dsecv1.CallLimits{CpuMs: 60_000, WallMs: 60_000}, Queue: 2 * time.Minute}
}

// TestCallsOfAKilledDaemon kills the daemon in the middle of 500 calls. Without another daemon everything of them ends by itself, and at its
// start the next one takes what is left away; keys then answer as if nothing had been.
func TestCallsOfAKilledDaemon(t *testing.T) {
	s := own(t)
	publishShell(t, s)
	s.conf = "[fncall]\nplaces = 64\n"
	must(t, s.finish(os.Interrupt))
	must(t, s.begin())
	var wg sync.WaitGroup
	var begun, answered atomic.Int64
	c := s.client()
	for i := range 500 {
		q := shell("echo x >/tmp/left; echo x >left; (setsid sleep 3131 &) ; sleep 3131")
		if i%4 == 0 {
			q = shell("echo $((6*7))")
		}
		q.Key, q.Job, q.Pooled = fmt.Sprint("k", i), "killed", i%2 == 0
		wg.Go(func() {
			begun.Add(1)
			if a, err := c.FnCall(context.Background(), q); err == nil && a.Verdict == "OK" {
				answered.Add(1)
			}
		})
	}
	must(t, eventually(func() error {
		if n := len(s.calls()); n < 64 {
			return fmt.Errorf("%d processes of calls", n)
		}
		return nil
	}))
	s.kill()
	wg.Wait()
	if n := begun.Load(); n != 500 {
		t.Fatalf("%d calls were made", n)
	}
	must(t, eventually(func() error {
		if left := s.calls(); len(left) > 0 {
			return fmt.Errorf("%d processes outlived the daemon: %v", len(left), left[0])
		}
		if left := s.leftovers(); len(left) > 0 {
			return errors.New(strings.Join(left, "\n"))
		}
		return nil
	}))
	must(t, s.begin())
	t.Logf("%d of 125 short calls were answered before the daemon was killed", answered.Load())
	c = s.client()
	for i := 0; i < 40; i += 4 { // whether it was answered or lost, the key has one answer now
		q := shell("echo $((6*7))")
		q.Key, q.Job, q.Pooled = fmt.Sprint("k", i), "killed", true
		a, err := c.FnCall(within(t), q)
		if err != nil || a.Verdict != "OK" || string(a.Result.Stdout) != "42\n" {
			t.Errorf("key %s: %v %v", q.Key, a, err)
		}
	}
	q := shell("echo another")
	q.Key, q.Job = "k0", "killed"
	if _, err := c.FnCall(within(t), q); !errors.Is(err, client.ErrExists) {
		t.Errorf("a key with another request: %v", err)
	}
}

// calls are the processes that function calls run, by their groups.
func (s *service) calls() (out []string) {
	for _, p := range processes() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
		if err == nil && strings.Contains(string(b), "dsec-"+s.instance()+"/") && strings.Contains(string(b), "/fncall-") {
			out = append(out, p.String())
		}
	}
	return out
}

// TestCallQueue fills a service with one place: another project has its turn, rates are kept, what can't wait is told so in time, and what
// is given up leaves its place to the next.
func TestCallQueue(t *testing.T) {
	t.Parallel()
	s := newService(ownDir(t), "up", withDefaults(nil)...)
	node := filepath.Join(s.dir, "gpu0") // a fake, which answers as /dev/zero
	must(t, os.MkdirAll(s.dir, 0o700))
	must(t, unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))))
	s.conf = fmt.Sprintf("[fncall]\nplaces = 1\nwaiting = 40\n[[fncall.gpu]]\nname = \"fake\"\nplaces = 2\nnodes = [%q]\nenv = [\"WHICH=fake\"]\n", node)
	start(t, s)
	publishShell(t, s)
	_, err := s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "fncall", Base: s.small(t)})
	must(t, err)
	c := s.client()
	for mode, want := range map[string]string{"": "none\n", "shared": "fake\n4\n", "exclusive": "fake\n4\n"} {
		q := shell("[ -c /dev/gpu0 ] || { echo none$WHICH; exit; }; echo $WHICH; head -c 4 /dev/gpu0 | wc -c")
		q.GPU = mode
		a, err := c.FnCall(within(t), q)
		if err != nil || a.Verdict != "OK" || string(a.Result.Stdout) != want {
			t.Errorf("gpu %q: %v %v", mode, a, err)
		}
	}
	// Every run takes a second of the only place.
	ctx, give := context.WithCancel(within(t))
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { c.FnCall(ctx, shell("sleep 1")) })
	}
	must(t, eventually(func() error {
		if len(s.calls()) == 0 {
			return errors.New("none runs")
		}
		return nil
	}))
	// The facade answers 504 within its 8 s, in a shape that SandboxFusion's callers read; nothing of the call ran.
	begin := time.Now()
	r, err := http.NewRequest("POST", "http://dsec/run_code", bytes.NewReader([]byte(`{"code":"echo late","language":"bash"}`)))
	must(t, err)
	r.Header.Set("Authorization", "Bearer "+s.key())
	code, body := s.send(t, r)
	var told struct{ Detail string }
	if took := time.Since(begin); code != 504 || json.Unmarshal([]byte(body), &told) != nil || !strings.Contains(told.Detail, "no place within") || took > patience {
		t.Errorf("a call that can't begin: %d %s after %v", code, body, took)
	}
	// A place further back than all that may wait is refused at once.
	var refused atomic.Int64
	for range 60 {
		wg.Go(func() {
			if _, err := c.FnCall(ctx, shell("sleep 1")); errors.Is(err, client.ErrExhausted) {
				refused.Add(1)
			}
		})
	}
	must(t, eventually(func() error {
		if refused.Load() == 0 {
			return errors.New("none is refused")
		}
		return nil
	}))
	give()
	wg.Wait()
	// All that were given up made room, as soon as the service has seen that they were.
	must(t, eventually(func() error {
		a, err := c.FnCall(within(t), shell("echo next"))
		if err == nil && (a.Verdict != "OK" || a.Queued > 15*time.Second) {
			t.Errorf("after them: %v", a)
		}
		return err
	}))
}

// TestCallCancelRaces cancels calls at any moment between before they are sent and after their end: each is answered as cancelled or as what
// it is, the key says the same for ever, and nothing stays.
func TestCallCancelRaces(t *testing.T) {
	s := shared(t)
	publishShell(t, s)
	c := s.client()
	r := random(t)
	var wg sync.WaitGroup
	var cancelled, whole atomic.Int64
	for i := range 60 {
		q := shell("sleep 0.05; echo done")
		q.Key, q.Job = fmt.Sprint("race", i), "race"
		wait := time.Duration(r.IntN(400)) * time.Millisecond
		wg.Go(func() {
			wg.Go(func() {
				time.Sleep(wait)
				if err := c.CancelCall(within(t), q.Job, q.Key); err != nil && !errors.Is(err, client.ErrNotFound) {
					t.Errorf("cancel: %v", err)
				}
			})
			a, err := c.FnCall(within(t), q)
			if err != nil {
				t.Errorf("%s: %v", q.Key, err)
				return
			}
			switch {
			case a.Verdict == "CANCELLED":
				cancelled.Add(1)
			case a.Verdict == "OK" && string(a.Result.Stdout) == "done\n":
				whole.Add(1)
			default:
				t.Errorf("%s: %s", q.Key, a.Verdict)
			}
			b, err := c.FnCall(within(t), q)
			if err != nil || b.Verdict != a.Verdict || !b.Recorded {
				t.Errorf("%s: again %v %v, was %s", q.Key, b, err, a.Verdict)
			}
		})
	}
	wg.Wait()
	t.Logf("%d cancelled, %d ended by themselves", cancelled.Load(), whole.Load())
	must(t, s.idle())
}

// TestSandboxFusionBadBodies sends what is no request: always a refusal in JSON that says what, never an answer of a program, never 504 or 5xx.
func TestSandboxFusionBadBodies(t *testing.T) {
	s := shared(t)
	deep := strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000)
	for _, body := range []string{"", "{", "null", "[]", "3", `"x"`, `{"code":1,"language":"python"}`, `{"code":null,"language":"python"}`, `{"code":"1"}`,
		`{"code":"1","language":["python"]}`, `{"code":"1","language":"python","run_timeout":"x"}`, `{"code":"1","language":"python","run_timeout":-1}`,
		`{"code":"1","language":"python","run_timeout":1e999}`, `{"code":"1","language":"python","files":[]}`, `{"code":"1","language":"python","files":{"../x":"aGk="}}`,
		`{"code":"1","language":"python","files":{"/etc/x":"aGk="}}`, `{"code":"1","language":"python","files":{"":"aGk="}}`, `{"code":"1","language":"python","files":{"a\u0000b":"aGk="}}`,
		`{"code":"1","language":"python","files":{"a":"*"}}`, `{"code":"1","language":"python","fetch_files":["../../etc/passwd"]}`, `{"code":"1","language":"python","fetch_files":"x"}`,
		"\xff\xfe", deep} {
		r, err := http.NewRequest("POST", "http://dsec/run_code", strings.NewReader(body))
		must(t, err)
		r.Header.Set("Authorization", "Bearer "+s.key())
		code, answer := s.send(t, r)
		var told struct{ Detail string }
		if code < 400 || code > 499 || json.Unmarshal([]byte(answer), &told) != nil || told.Detail == "" {
			t.Errorf("%.80q: %d %.200s", body, code, answer)
		}
	}
}

// TestCallPairs lets programs and interactors meet every end that either can come to.
func TestCallPairs(t *testing.T) {
	s := fncalls(t)
	c := s.client()
	guess := "#include <cstdio>\nint main(){int lo=1,hi=1000;char r[8];while(1){int m=(lo+hi)/2;printf(\"%d\\n\",m);fflush(stdout);if(scanf(\"%7s\",r)!=1)return 4;if(r[0]=='=')return 0;if(r[0]=='<')hi=m-1;else lo=m+1;}}"
	// Who ends because the other has takes half a second for it: of two ends within a moment either may be told as the first.
	host := "import sys, time\nn=0\nfor line in sys.stdin:\n  n+=1; x=int(line)\n  print('=' if x==729 else '<' if x>729 else '>', flush=True)\n  if x==729: sys.exit(0 if n<=10 else 1)\ntime.sleep(0.5)\nsys.exit(2)"
	for _, k := range []struct {
		name                string
		program, interactor client.Call
		want, other         string // verdicts; "": either
		first               string
	}{
		{"solved", client.Call{Lang: "cpp", Code: guess}, client.Call{Lang: "python", Code: host}, "OK", "OK", ""},
		{"the program gives up", client.Call{Lang: "python", Code: "import sys; sys.exit(5)"}, client.Call{Lang: "python", Code: host}, "RE", "RE", "program"},
		{"the interactor does", client.Call{Lang: "python", Code: "import time\ntry: input()\nfinally: time.sleep(0.5)"}, client.Call{Lang: "python", Code: "import sys; sys.exit(1)"}, "RE", "RE", "interactor"},
		{"both wait", client.Call{Lang: "python", Code: "input()", Limits: &dsecv1.CallLimits{WallMs: 1000}}, client.Call{Lang: "python", Code: "input()", Limits: &dsecv1.CallLimits{WallMs: 20_000}}, "TLE", "RE", "program"},
		{"a flood that nobody reads", client.Call{Lang: "python", Code: "import time\ntry:\n  while True: print('x'*1000)\nfinally: time.sleep(0.5)", Limits: &dsecv1.CallLimits{WallMs: 20_000}}, client.Call{Lang: "python", Code: "import time; time.sleep(0.3)"}, "", "OK", "interactor"},
		{"a crash", client.Call{Lang: "c", Code: "int main(void){return *(volatile int*)0;}"}, client.Call{Lang: "python", Code: host}, "SIG", "RE", "program"},
		{"memory", client.Call{Lang: "python", Code: "a=[]\nwhile True: a.append('x'*1000000)", Limits: &dsecv1.CallLimits{Memory: 64 << 20}}, client.Call{Lang: "bash", Code: "cat; sleep 0.5"}, "MLE", "OK", "program"},
		{"another architecture", client.Call{Lang: "c", Code: "#include <unistd.h>\nint main(void){return syscall(0x40000000|39)>0;}"}, client.Call{Lang: "bash", Code: "cat; sleep 0.5"}, "SEC", "OK", "program"},
	} {
		a, err := c.FnCallPair(within(t), k.program, k.interactor)
		if err != nil || a.Program == nil || a.Interactor == nil {
			t.Errorf("%s: %v %v", k.name, a, err)
			continue
		}
		if k.want != "" && a.Program.Verdict != k.want || k.other != "" && a.Interactor.Verdict != k.other || k.first != "" && a.FirstEnded != k.first {
			t.Errorf("%s: want %s and %s, %s first; got %v and %v, %s first", k.name, k.want, k.other, k.first, a.Program.CallResult, a.Interactor.CallResult, a.FirstEnded)
		}
	}
	a, err := c.FnCallPair(within(t), client.Call{Lang: "c", Code: "int main({"}, client.Call{Lang: "bash", Code: "cat"})
	if err != nil || a.ProgramCompile == nil || a.ProgramCompile.Verdict != "CE" || a.Program != nil || a.Interactor != nil {
		t.Errorf("a program that does not compile: %v %v", a, err)
	}
}

// TestCallBatchesAndKeptFiles compiles once for many inputs and keeps files between calls, for their project alone.
func TestCallBatchesAndKeptFiles(t *testing.T) {
	s := fncalls(t)
	c := s.client()
	q := client.Call{Lang: "cpp", Code: fmt.Sprintf("#include <iostream>\nint main(){int n;std::cin>>n;if(n==13)return 13;std::cout<<n*n<<std::endl;} // %d", time.Now().UnixNano())}
	var inputs []*dsecv1.CallInput
	for i := range 20 {
		inputs = append(inputs, &dsecv1.CallInput{Id: fmt.Sprint(i), Stdin: fmt.Sprint(i)})
	}
	for _, again := range []bool{false, true} {
		b, err := c.FnCallBatch(within(t), q, inputs, false)
		if err != nil || len(b.Results) != 20 || b.Verdict != "RE" || b.Compile == nil || b.Compile.Cached != again {
			t.Fatalf("again %v: %v %v", again, b, err)
		}
		for i, r := range b.Results {
			want, code := fmt.Sprintln(i*i), int32(0)
			if i == 13 {
				want, code = "", 13
			}
			if r.Id != fmt.Sprint(i) || string(r.Stdout) != want || r.Code != code {
				t.Errorf("input %d: %v", i, r.CallResult)
			}
		}
	}
	b, err := c.FnCallBatch(within(t), client.Call{Lang: "bash", Code: "exit 1"}, inputs, true)
	if err != nil || b.Verdict != "RE" || b.Results[19].Verdict != "CANCELLED" {
		t.Errorf("the first failure ends it: %v %v", b, err)
	}
	// What a call keeps is the next one's input, without a way through the client.
	a, err := c.FnCall(within(t), client.Call{Lang: "python", Code: "open('o','wb').write(bytes(range(256))*8192)", Outputs: []*dsecv1.CallOutput{{Path: "o", Keep: true}}})
	must(t, err)
	if len(a.Result.Files) != 1 || a.Result.Files[0].Content == "" || len(a.Result.Files[0].Data) > 0 {
		t.Fatalf("kept: %v", a.Result.CallResult)
	}
	content := a.Result.Files[0].Content
	a, err = c.FnCall(within(t), client.Call{Lang: "python", Code: "import sys; print(len(sys.stdin.buffer.read()), len(open('d/f','rb').read()), len(open('/dev/stdin','rb').read()))", StdinKept: content,
		Files: []*dsecv1.CallFile{{Path: "d/f", Content: content}}})
	if err != nil || string(a.Result.Stdout) != "2097152 2097152 2097152\n" {
		t.Errorf("%v %v", a, err)
	}
	data, err := c.GetCallFile(within(t), content)
	if err != nil || len(data) != 2<<20 {
		t.Errorf("%d octets: %v", len(data), err)
	}
	if _, err := c.GetCallFile(within(t), strings.Repeat("0", 64)); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a file that nobody kept: %v", err)
	}
}
