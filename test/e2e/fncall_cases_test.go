package e2e

import (
	"fmt"
	"strings"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// callCase is one submission and what a judge must say of it.
type callCase struct {
	name    string
	lang    string
	code    string
	stdin   string
	args    []string
	limits  *dsecv1.CallLimits
	compile *dsecv1.CallLimits
	verdict string
	codes   []int32 // one of these; none: 0 for OK, anything else is free
	signal  int32
	limit   string
	out     string // exact standard output; "*": free
	err     string // part of standard error, or of the compiler's output
	check   func(t *testing.T, r *dsecv1.CallResult)
}

const (
	ms  = int64(1)
	mib = int64(1) << 20
)

// fault numbers stand in the names of cases from the list of faults: B10 memory, B28 time, B30 processes, B02 streams, B37 environment.
var callCases = []callCase{
	// Each language, OK and RE.
	{name: "c ok", lang: "c", code: "#include <stdio.h>\nint main(void){int a,b;scanf(\"%d%d\",&a,&b);printf(\"%d\\n\",a+b);return 0;}", stdin: "2 3\n", verdict: "OK", out: "5\n"},
	{name: "c exit", lang: "c", code: "int main(void){return 42;}", verdict: "RE", codes: []int32{42}},
	{name: "cpp ok", lang: "cpp", code: "#include <iostream>\n#include <vector>\n#include <numeric>\nint main(){std::vector<int>v{1,2,3};std::cout<<std::accumulate(v.begin(),v.end(),0)<<std::endl;}", verdict: "OK", out: "6\n"},
	{name: "cpp exception", lang: "cpp", code: "#include <stdexcept>\nint main(){throw std::runtime_error(\"boom\");}", verdict: "SIG", signal: 6, err: "boom"},
	{name: "cpp exit", lang: "cpp", code: "#include <cstdlib>\nint main(){std::exit(7);}", verdict: "RE", codes: []int32{7}},
	{name: "go ok", lang: "go", code: "package main\nimport \"fmt\"\nfunc main(){var s string;fmt.Scan(&s);fmt.Println(\"hi\",s)}", stdin: "you", verdict: "OK", out: "hi you\n"},
	{name: "go panic", lang: "go", code: "package main\nfunc main(){panic(\"no\")}", verdict: "RE", codes: []int32{2}, err: "panic: no"},
	{name: "python ok", lang: "python", code: "print(sum(map(int, input().split())))", stdin: "1 2 3\n", verdict: "OK", out: "6\n"},
	{name: "python exception", lang: "python", code: "raise ValueError('x')", verdict: "RE", codes: []int32{1}, err: "ValueError: x"},
	{name: "python syntax", lang: "python", code: "def (", verdict: "RE", codes: []int32{1}, err: "SyntaxError"},
	{name: "javascript ok", lang: "javascript", code: "process.stdin.on('data', d => console.log(String(d).toUpperCase().trim()))", stdin: "abc", verdict: "OK", out: "ABC\n"},
	{name: "javascript throw", lang: "javascript", code: "throw new Error('x')", verdict: "RE", codes: []int32{1}, err: "Error: x"},
	{name: "pytest passes", lang: "pytest", code: "def test_a(): assert 1 + 1 == 2\n", verdict: "OK", out: "*", check: func(t *testing.T, r *dsecv1.CallResult) {
		if !strings.Contains(r.Stdout, "1 passed") {
			t.Errorf("%s", r.Stdout)
		}
	}},
	{name: "pytest fails", lang: "pytest", code: "def test_a(): assert [1, 2] == [1, 3]\n", verdict: "RE", codes: []int32{1}, err: "At index 1 diff: 2 != 3"},
	{name: "bash ok", lang: "bash", code: "read a; echo \"$a-$1\"", stdin: "x\n", args: []string{"y z"}, verdict: "OK", out: "x-y z\n"},
	{name: "bash exit", lang: "bash", code: "exit 255", verdict: "RE", codes: []int32{255}},
	{name: "arguments with odd octets", lang: "python", code: "import sys; print(sys.argv[1:])", args: []string{"", "a b", "$HOME", "\"q\"\n"}, verdict: "OK", out: "['', 'a b', '$HOME', '\"q\"\\n']\n"},

	// Compilers.
	{name: "c compile error", lang: "c", code: "int main(void){return x;}", verdict: "CE", err: "undeclared"},
	{name: "cpp compile error", lang: "cpp", code: "int main({", verdict: "CE", err: "error"},
	{name: "go compile error", lang: "go", code: "package main\nfunc main(){var unused int}", verdict: "CE", err: "declared and not used"},
	{name: "compiler out of time", lang: "cpp", code: "template<int N,int M>struct F{static const long v=(F<N-1,M>::v+F<N-1,M+1>::v)%1000003;};template<int M>struct F<0,M>{static const long v=M;};int main(){return F<800,0>::v;}", compile: &dsecv1.CallLimits{WallMs: 1500 * ms}, verdict: "CE", limit: "wall"},
	{name: "compiler out of memory", lang: "c", code: "char big[1<<30]={1};int main(void){return big[5];}", compile: &dsecv1.CallLimits{Memory: 64 * mib}, verdict: "CE"},
	{name: "a large program", lang: "c", code: "static char a[48<<20]={1};int main(void){return a[0]-1;}", verdict: "OK"},
	{name: "a file that the compiler must not see", lang: "c", code: "#include \"/etc/shadow\"\nint main(void){return 0;}", verdict: "CE"},

	// Time (B28).
	{name: "B28 four children of half a second", lang: "python", code: "import os,time\nfor i in range(4):\n  if os.fork()==0:\n    t=time.process_time()\n    while time.process_time()-t<0.5: pass\n    os._exit(0)\nfor i in range(4): os.wait()", limits: &dsecv1.CallLimits{CpuMs: 1000, WallMs: 120000}, verdict: "TLE", limit: "cpu"},
	{name: "B28 sleep", lang: "bash", code: "sleep 30", limits: &dsecv1.CallLimits{CpuMs: 1000, WallMs: 1500}, verdict: "TLE", limit: "wall", check: func(t *testing.T, r *dsecv1.CallResult) {
		if r.CpuUs > 500_000 || r.WallUs < 1_490_000 {
			t.Errorf("cpu %d us, wall %d us", r.CpuUs, r.WallUs)
		}
	}},
	{name: "B28 an orphan spins", lang: "c", code: "#include <unistd.h>\n#include <time.h>\nint main(void){if(!fork()){if(!fork()){setsid();for(;;);}_exit(0);}struct timespec t={0,300000000};nanosleep(&t,0);return 0;}", verdict: "OK", check: func(t *testing.T, r *dsecv1.CallResult) {
		if r.Leftover < 1 || r.CpuUs < 3_000 {
			t.Errorf("leftover %d, cpu %d us", r.Leftover, r.CpuUs)
		}
	}},
	{name: "B28 nine tenths of a second", lang: "c", code: "#include <time.h>\nint main(void){while(clock()<CLOCKS_PER_SEC*9/10);return 0;}", limits: &dsecv1.CallLimits{CpuMs: 2000, WallMs: 120000}, verdict: "OK", check: func(t *testing.T, r *dsecv1.CallResult) {
		if r.CpuUs < 850_000 {
			t.Errorf("cpu %d us", r.CpuUs)
		}
	}},
	{name: "B28 four threads spin", lang: "c", code: "#include <pthread.h>\nvoid*f(void*a){for(;;);}\nint main(void){pthread_t t;for(int i=0;i<4;i++)pthread_create(&t,0,f,0);f(0);}", limits: &dsecv1.CallLimits{CpuMs: 1000, WallMs: 120000}, verdict: "TLE", limit: "cpu"},
	{name: "B28 deaf to signals", lang: "c", code: "#include <signal.h>\nint main(void){for(int i=1;i<64;i++)signal(i,SIG_IGN);for(;;);}", limits: &dsecv1.CallLimits{CpuMs: 500, WallMs: 120000}, verdict: "TLE", limit: "cpu"},
	{name: "endless loop", lang: "python", code: "while True: pass", limits: &dsecv1.CallLimits{CpuMs: 500, WallMs: 120000}, verdict: "TLE", limit: "cpu"},
	{name: "waits for input that never comes", lang: "c", code: "#include <unistd.h>\nint main(void){pause();return 0;}", limits: &dsecv1.CallLimits{WallMs: 500}, verdict: "TLE", limit: "wall"},

	// Memory (B10).
	{name: "B10 big static array", lang: "c", code: "static char a[700<<20];int main(void){for(long i=0;i<sizeof a;i+=4096)a[i]=1;return a[4096*7]-1;}", limits: &dsecv1.CallLimits{Memory: 256 * mib}, verdict: "MLE", check: memoryHit},
	{name: "B10 malloc in a loop", lang: "c", code: "#include <stdlib.h>\n#include <string.h>\nint main(void){for(;;){char*p=malloc(1<<20);if(!p)return 1;memset(p,1,1<<20);}}", limits: &dsecv1.CallLimits{Memory: 256 * mib}, verdict: "MLE", check: memoryHit},
	{name: "B10 the child is killed, the parent exits with 0", lang: "c", code: bomb("return 0;"), limits: &dsecv1.CallLimits{Memory: 64 * mib}, verdict: "MLE", check: memoryHit},
	{name: "B10 the child is killed, the parent exits with 1", lang: "c", code: bomb("return 1;"), limits: &dsecv1.CallLimits{Memory: 64 * mib}, verdict: "MLE", check: memoryHit},
	{name: "B10 exit 137", lang: "c", code: "int main(void){return 137;}", verdict: "RE", codes: []int32{137}, check: noMemoryHit},
	{name: "B10 abort", lang: "c", code: "#include <stdlib.h>\nint main(void){abort();}", verdict: "SIG", signal: 6, check: noMemoryHit},
	{name: "B10 kills itself", lang: "bash", code: "kill -9 $$", verdict: "SIG", signal: 9, check: noMemoryHit},
	{name: "memory bomb in python", lang: "python", code: "a=[]\nwhile True: a.append('x'*1000000)", limits: &dsecv1.CallLimits{Memory: 128 * mib}, verdict: "MLE"},
	{name: "what was used is told", lang: "c", code: "#include <stdlib.h>\n#include <string.h>\nint main(void){volatile char*p=malloc(50<<20);for(long i=0;i<50<<20;i+=4096)p[i]=1;return p[4096]-1;}", verdict: "OK", check: func(t *testing.T, r *dsecv1.CallResult) {
		if r.Memory < 50*mib || r.Memory > 60*mib {
			t.Errorf("memory %d", r.Memory)
		}
	}},

	// Signals.
	{name: "null pointer", lang: "c", code: "int main(void){volatile int*p=0;return *p;}", verdict: "SIG", signal: 11},
	{name: "division by zero", lang: "c", code: "int main(void){volatile int n=100,z=0;return n/z;}", verdict: "SIG", signal: 8},
	{name: "endless recursion", lang: "c", code: "int f(volatile int n){volatile char b[4096];b[0]=n;return f(n+1)+b[0];}int main(void){return f(0);}", verdict: "SIG", signal: 11},
	{name: "terminates itself", lang: "bash", code: "kill -TERM $$", verdict: "SIG", signal: 15},
	{name: "assertion", lang: "c", code: "#include <assert.h>\nint main(void){assert(0);}", verdict: "SIG", signal: 6, err: "Assertion"},
	{name: "broken pipe of its own", lang: "bash", code: "yes | head -1; exit ${PIPESTATUS[1]}", verdict: "OK", out: "y\n"},

	// Output and files.
	{name: "output flood", lang: "c", code: "#include <stdio.h>\nint main(void){for(;;)puts(\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\");}", limits: &dsecv1.CallLimits{Output: 65536}, verdict: "OLE", limit: "output", out: "*", check: func(t *testing.T, r *dsecv1.CallResult) {
		if len(r.Stdout) != 65536 || !r.StdoutTruncated {
			t.Errorf("%d octets kept, truncated %v", len(r.Stdout), r.StdoutTruncated)
		}
	}},
	{name: "flood of errors", lang: "bash", code: "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa >&2; done", limits: &dsecv1.CallLimits{Output: 4096}, verdict: "OLE", limit: "output"},
	{name: "exactly the limit", lang: "python", code: "import sys; sys.stdout.write('x'*4096)", limits: &dsecv1.CallLimits{Output: 4096}, verdict: "OK", out: "*"},
	{name: "a file beyond its size", lang: "c", code: "#include <stdio.h>\nint main(void){static char b[1<<20];FILE*f=fopen(\"big\",\"w\");for(int i=0;i<32;i++)fwrite(b,1,sizeof b,f);fflush(f);return 0;}", limits: &dsecv1.CallLimits{FileSize: 4 * mib}, verdict: "OLE", limit: "file_size"},
	{name: "a full disk is the program's affair", lang: "python", code: "import errno\ntry:\n  for i in range(64): open('f%d'%i,'wb').write(b'x'*(1<<20))\nexcept OSError as e: print(errno.errorcode[e.errno])", limits: &dsecv1.CallLimits{Disk: 8 * mib}, verdict: "OK", out: "ENOSPC\n"},
	{name: "too many files is the program's affair", lang: "python", code: "try:\n  for i in range(5000): open('f%d'%i,'w')\nexcept OSError as e: print(e.strerror)", limits: &dsecv1.CallLimits{Files: 100}, verdict: "OK", out: "No space left on device\n"},
	{name: "closed stdout", lang: "python", code: "import os,sys\nos.close(1)\ntry: os.write(1,b'x')\nexcept OSError: sys.exit(9)", verdict: "RE", codes: []int32{9}},
	{name: "octets that are no text", lang: "python", code: "import sys; sys.stdout.buffer.write(bytes(range(256)))", verdict: "OK", out: "*", check: func(t *testing.T, r *dsecv1.CallResult) {
		if len(r.StdoutRaw) != 256 {
			t.Errorf("%d octets", len(r.StdoutRaw))
		}
	}},
	{name: "B02 streams by their names", lang: "bash", code: "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1; cat /dev/stdin", stdin: "x", verdict: "OK", out: "a\nc\nx", err: "b"},

	// Processes (B30).
	{name: "B30 eight threads in javascript", lang: "javascript", code: "const {Worker,isMainThread}=require('worker_threads'); if(isMainThread){let n=0;for(let i=0;i<8;i++)new Worker(__filename).on('exit',()=>{if(++n==8)console.log('ok')})}", verdict: "OK", out: "ok\n"},
	{name: "B30 eight threads in python", lang: "python", code: "import threading\nt=[threading.Thread(target=lambda:0) for _ in range(8)]\n[x.start() for x in t];[x.join() for x in t];print('ok')", verdict: "OK", out: "ok\n"},
	{name: "B30 thirty-two threads in c++", lang: "cpp", code: "#include <thread>\n#include <vector>\n#include <cstdio>\nint main(){std::vector<std::thread>v;for(int i=0;i<32;i++)v.emplace_back([]{});for(auto&t:v)t.join();puts(\"ok\");}", verdict: "OK", out: "ok\n"},
	{name: "B30 a thousand goroutines", lang: "go", code: "package main\nimport \"sync\"\nfunc main(){var w sync.WaitGroup;for i:=0;i<1000;i++{w.Add(1);go func(){w.Done()}()};w.Wait();println(\"ok\")}", verdict: "OK", err: "ok"},
	{name: "B30 three hundred one after the other", lang: "c", code: "#include <unistd.h>\n#include <sys/wait.h>\nint main(void){for(int i=0;i<300;i++){int p=fork();if(p<0)return 1;if(!p)_exit(0);waitpid(p,0,0);}return 0;}", verdict: "OK"},
	{name: "B30 fork bomb", lang: "c", code: "#include <unistd.h>\nint main(void){for(;;)fork();}", limits: &dsecv1.CallLimits{CpuMs: 1000, WallMs: 5000}, verdict: "TLE", check: func(t *testing.T, r *dsecv1.CallResult) {
		if !r.ProcessesHit {
			t.Error("the limit of processes was not told")
		}
	}},
	{name: "a fork that is refused is told", lang: "python", code: "import os,time\nn=0\ntry:\n  while True:\n    if os.fork()==0: time.sleep(100); os._exit(0)\n    n+=1\nexcept OSError: print('refused' if n>10 else n)", limits: &dsecv1.CallLimits{Processes: 20, WallMs: 60000}, verdict: "OK", out: "refused\n", check: func(t *testing.T, r *dsecv1.CallResult) {
		if !r.ProcessesHit || r.Leftover == 0 {
			t.Errorf("hit %v, leftover %d", r.ProcessesHit, r.Leftover)
		}
	}},
	{name: "a sleeping child is left", lang: "bash", code: "sleep 1000 & echo done", verdict: "OK", out: "done\n", check: leftover},
	{name: "a daemon by double fork", lang: "python", code: "import os,time\nif os.fork()==0:\n  os.setsid()\n  if os.fork()==0:\n    os.close(1); os.close(2); time.sleep(1000)\n  os._exit(0)\nos.wait()", verdict: "OK", check: leftover},

	// Calls.
	{name: "int 0x80", lang: "c", code: "#include <stdio.h>\nint main(void){long r;__asm__ volatile(\"int $0x80\":\"=a\"(r):\"a\"(20):\"memory\");printf(\"%ld\\n\",r);return 0;}", verdict: "SEC", out: "*"},
	{name: "x32", lang: "c", code: "#include <unistd.h>\n#include <sys/syscall.h>\nint main(void){return syscall(0x40000000|SYS_getpid)>0;}", verdict: "SEC", out: "*"},
	{name: "a refused call is an event alone", lang: "c", code: "#include <errno.h>\n#include <sys/mount.h>\n#include <stdio.h>\nint main(void){int r=mount(\"x\",\"/box\",\"tmpfs\",0,0);printf(\"%d\\n\",r);return 0;}", verdict: "OK", out: "-1\n"},
	{name: "no network", lang: "python", code: "import socket\ns=socket.socket();s.settimeout(3)\ntry: s.connect(('192.0.2.1',80)); print('connected')\nexcept OSError: print('no')", verdict: "OK", out: "no\n"},
	{name: "loopback is its own", lang: "python", code: "import socket\ns=socket.socket();s.bind(('127.0.0.1',0));s.listen();c=socket.create_connection(s.getsockname());print('ok')", verdict: "OK", out: "ok\n"},
	{name: "the root can't be written", lang: "python", code: "try: open('/usr/bin/x','w'); print('written')\nexcept OSError as e: print(e.errno)", verdict: "OK", out: "30\n"},
	{name: "no other processes are seen", lang: "bash", code: "n=0; for d in /proc/[0-9]*; do n=$((n+1)); done; [ $n -lt 6 ] && echo few || echo $n", verdict: "OK", out: "few\n"},
	{name: "the host's name is not the machine's", lang: "python", code: "import os; print(len(os.uname().nodename)>0)", verdict: "OK", out: "True\n"},
}

func bomb(end string) string {
	return "#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n#include <sys/wait.h>\nint main(void){int p=fork();if(!p){for(;;){char*q=malloc(1<<20);if(!q)_exit(1);memset(q,1,1<<20);}}waitpid(p,0,0);" + end + "}"
}

func memoryHit(t *testing.T, r *dsecv1.CallResult) {
	if !r.MemoryHit {
		t.Error("the memory event was not told")
	}
}

func noMemoryHit(t *testing.T, r *dsecv1.CallResult) {
	if r.MemoryHit {
		t.Error("a memory event was told")
	}
}

func leftover(t *testing.T, r *dsecv1.CallResult) {
	if r.Leftover < 1 {
		t.Error("nothing was told to be left over")
	}
}

// judge compares a response with what a case wants.
func (c *callCase) judge(t *testing.T, m *dsecv1.RunCallResponse) {
	t.Helper()
	r := m.Result
	if c.verdict == "CE" {
		if r != nil {
			t.Errorf("a program that does not compile ran: %v", r)
		}
		r = m.Compile
	}
	if r == nil {
		t.Fatalf("verdict %s without a result", m.Verdict)
	}
	told := fmt.Sprintf("%s code %d signal %d limit %q error %q stdout %.200q stderr %.300q cpu %d us wall %d us memory %d", r.Verdict, r.Code, r.Signal, r.Limit,
		r.Error, r.Stdout, r.Stderr, r.CpuUs, r.WallUs, r.Memory)
	if r.Verdict != c.verdict || m.Verdict != c.verdict {
		t.Fatalf("want %s, got %s: %s", c.verdict, m.Verdict, told)
	}
	codes := c.codes
	if c.verdict == "OK" {
		codes = []int32{0}
	}
	ok := len(codes) == 0
	for _, code := range codes {
		ok = ok || code == r.Code
	}
	if !ok || c.signal != 0 && (r.Signal != c.signal || r.Code != 128+c.signal) || c.limit != "" && r.Limit != c.limit {
		t.Errorf("want codes %v, signal %d, limit %q: %s", codes, c.signal, c.limit, told)
	}
	if c.verdict == "OK" && c.out != "*" && r.Stdout != c.out {
		t.Errorf("want output %q: %s", c.out, told)
	}
	if c.err != "" && !strings.Contains(r.Stderr+r.Stdout, c.err) {
		t.Errorf("want %q among the errors: %s", c.err, told)
	}
	if c.check != nil {
		c.check(t, r)
	}
}
