package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// residentKB is how much memory a process has and had at the most.
func residentKB(t *testing.T, pid int) (now, most int64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		fmt.Sscanf(line, "VmRSS: %d kB", &now)
		fmt.Sscanf(line, "VmHWM: %d kB", &most)
	}
	return now, most
}

// What a program leaves under the names that its caller asks for is never followed, opened as a device, waited for, or taken whole into memory.
func TestCallHostileOutputs(t *testing.T) {
	s := fncalls(t)
	c := s.client()
	code := `
import os, socket
os.symlink('/etc/passwd', 'link'); os.symlink('/dev/zero', 'zero'); os.symlink('self', 'self'); os.symlink('../../../etc', 'up')
os.mkdir('dir'); os.mkfifo('fifo'); os.symlink('dir', 'dirlink'); open('dir/inner', 'w').write('x')
socket.socket(socket.AF_UNIX).bind('sock')
try: os.mknod('device', 0o20666, os.makedev(1, 5)); print('made a device')
except OSError: pass
for i in range(8):
    with open('sparse%d' % i, 'wb') as f: f.truncate(16 << 20)
with open('huge', 'wb') as f: f.truncate(60 << 20)
open('a\nb', 'w').write('newline'); open(b'\xff\xfe', 'w').write('octets'); open('-rf', 'w').write('dash'); open('$(id)', 'w').write('shell')
open('locked', 'w').write('mode 0'); os.chmod('locked', 0)
p = ''
for i in range(60): p += 'd' * 50 + '/'; os.mkdir(p[:-1]) if len(p) < 3000 else None
os.link('a\nb', 'hard')
`
	var outputs []*dsecv1.CallOutput
	want := map[string]string{}
	refused := []string{"link", "zero", "self", "up/passwd", "dir", "fifo", "dirlink/inner", "sock", "huge", "link/x"}
	for _, p := range refused {
		outputs = append(outputs, &dsecv1.CallOutput{Path: p})
	}
	for p, text := range map[string]string{"a\nb": "newline", "-rf": "dash", "$(id)": "shell", "dir/inner": "x", "hard": "newline", "locked": "mode 0"} {
		outputs, want[p] = append(outputs, &dsecv1.CallOutput{Path: p}), text
	}
	outputs, want["\xff\xfe"] = append(outputs, &dsecv1.CallOutput{PathRaw: []byte("\xff\xfe")}), "octets"
	run := func(outputs []*dsecv1.CallOutput) (*dsecv1.CallResult, map[string]string) {
		t.Helper()
		res, err := c.Calls.Run(within(t), connect.NewRequest(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: "python", Code: code}, Outputs: outputs, QueueMs: 60_000}))
		if err != nil {
			t.Fatal(client.Wrap(err))
		}
		got := map[string]string{}
		for _, f := range res.Msg.Result.Files {
			name := f.Path
			if len(f.PathRaw) > 0 {
				name = string(f.PathRaw)
			}
			got[name] = string(f.Data)
		}
		return res.Msg.Result, got
	}
	r, got := run(outputs)
	if r.Verdict != "OK" || r.Stdout != "" || len(got) != len(want) {
		t.Errorf("%s %q %q, %d files, want %d: %s", r.Verdict, r.Stdout, r.Stderr, len(got), len(want), r.Error)
	}
	for p, text := range want {
		if got[p] != text {
			t.Errorf("%q: %q, want %q", p, got[p], text)
		}
	}
	for _, p := range refused {
		if !strings.Contains(r.Error, fmt.Sprintf("output %q: ", p)) {
			t.Errorf("%q is not told of in %q", p, r.Error)
		}
	}
	if !strings.Contains(r.Error, fmt.Sprintf("output \"huge\": has %d octets", 60<<20)) {
		t.Errorf("a file beyond its bound: %q", r.Error)
	}
	// Together they are more than one answer holds, though they took no room on the disk: some come, the others are told of, and what the
	// run came to is not lost.
	outputs = nil
	for i := range 8 {
		outputs = append(outputs, &dsecv1.CallOutput{Path: fmt.Sprintf("sparse%d", i)})
	}
	r, got = run(outputs)
	if r.Verdict != "OK" || len(got) == 0 || len(got) == 8 || len(got)+strings.Count(r.Error, "output \"sparse") != 8 {
		t.Errorf("eight times 16 MiB: %s, %d files, %s", r.Verdict, len(got), r.Error)
	}
	for _, o := range outputs {
		o.Keep = true
	}
	r, got = run(outputs)
	if r.Verdict != "OK" || len(got) != 8 || r.Error != "" {
		t.Errorf("eight times 16 MiB, kept: %s, %d files, %s", r.Verdict, len(got), r.Error)
	}
}

// Inputs that are small on the wire and large where they arrive are refused, without the memory for them.
func TestCallInputBombs(t *testing.T) {
	s := own(t)
	publishShell(t, s)
	c := s.client()
	call := func(q *dsecv1.RunCallRequest) error {
		q.Program.Environment = "shell"
		_, err := c.Calls.Run(within(t), connect.NewRequest(q))
		return client.Wrap(err)
	}
	_, before := residentKB(t, s.cmd.Process.Pid)
	// A kept file of 24 MiB, named a few hundred times.
	content, err := c.PutCallFile(within(t), bytes.Repeat([]byte("dsec"), 6<<20))
	must(t, err)
	var files []*dsecv1.CallFile
	for i := range 300 {
		files = append(files, &dsecv1.CallFile{Path: fmt.Sprintf("f%d", i), Content: content})
	}
	for _, disk := range []int64{0, 14 << 30} {
		err := call(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Cmd: []string{"true"}, Files: files}, Limits: &dsecv1.CallLimits{Disk: disk}})
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("300 times 24 MiB with a disk of %d: %v", disk, err)
		}
	}
	// A few fit.
	err = call(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Cmd: []string{"true"}, Files: files[:4]}})
	must(t, err)
	// A body that unpacks to a thousand times its size, for the service and for the adapter in front of it.
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	io.WriteString(w, `{"program":{"lang":"python","code":"`)
	for range 1 << 8 {
		w.Write(bytes.Repeat([]byte("a"), 1<<20))
	}
	io.WriteString(w, `"}}`)
	must(t, w.Close())
	for _, path := range []string{"/dsec.v1.FnCallService/Run", "/run_code"} {
		r, err := http.NewRequest("POST", "http://dsec"+path, bytes.NewReader(packed.Bytes()))
		must(t, err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Content-Encoding", "gzip")
		r.Header.Set("Authorization", "Bearer "+s.key())
		if code, body := s.send(t, r); code < 400 || code > 499 {
			t.Errorf("%s: 256 MiB in %d octets: %d %.200s", path, packed.Len(), code, body)
		}
	}
	if _, most := residentKB(t, s.cmd.Process.Pid); most-before > 300<<10 {
		t.Errorf("the service took %d MiB more for them", (most-before)>>10)
	}
}

// 128 callers at once with the worst that programs do: each is judged, and what is ordinary between them is served.
func TestCallFloods(t *testing.T) {
	s := fncalls(t)
	c := s.client()
	n := 128
	kinds := []struct {
		name, code string
		limits     *dsecv1.CallLimits
		verdict    string
		check      func(r *dsecv1.CallResult) bool
		sometimes  bool // what is checked must be true of one alone: so short a time may end before it on a busy machine
	}{
		{"fork bomb", "#include <unistd.h>\nint main(void){for(;;)fork();}", &dsecv1.CallLimits{WallMs: 150, CpuMs: 5000}, "TLE",
			func(r *dsecv1.CallResult) bool { return r.ProcessesHit && r.Leftover > 0 }, true},
		{"thread bomb", "#include <pthread.h>\n#include <unistd.h>\nvoid*f(void*a){pause();return 0;}\nint main(void){pthread_t t;for(;;)if(pthread_create(&t,0,f,0))usleep(1000);}", &dsecv1.CallLimits{WallMs: 150, CpuMs: 5000}, "TLE",
			func(r *dsecv1.CallResult) bool { return r.ProcessesHit }, true},
		{"output flood", "#include <unistd.h>\nint main(void){static char b[65536];if(!fork())for(;;)write(2,b,sizeof b);for(;;)write(1,b,sizeof b);}", &dsecv1.CallLimits{WallMs: 20_000}, "OLE",
			func(r *dsecv1.CallResult) bool {
				return len(r.StdoutRaw)+len(r.Stdout)+len(r.StderrRaw)+len(r.Stderr) <= 2<<20
			}, false},
		{"ordinary", "#include <stdio.h>\nint main(void){puts(\"fine\");return 0;}", nil, "OK", func(r *dsecv1.CallResult) bool { return r.Stdout == "fine\n" }, false},
	}
	seen := make([]atomic.Bool, len(kinds))
	var wg sync.WaitGroup
	for i := range n {
		k := &kinds[i%len(kinds)]
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
			defer cancel()
			res, err := c.Calls.Run(ctx, connect.NewRequest(&dsecv1.RunCallRequest{Job: "floods", Program: &dsecv1.CallProgram{Lang: "c", Code: k.code}, Limits: k.limits, QueueMs: 200_000}))
			if err != nil {
				t.Errorf("%s: %v", k.name, client.Wrap(err))
				return
			}
			r := res.Msg.Result
			if r == nil || r.Verdict != k.verdict || !k.check(r) && !k.sometimes {
				t.Errorf("%s: %.400s", k.name, fmt.Sprint(res.Msg))
				return
			}
			if k.check(r) {
				seen[i%len(kinds)].Store(true)
			}
		})
	}
	wg.Wait()
	for i := range kinds {
		if !seen[i].Load() {
			t.Errorf("%s: what its limit does was never seen", kinds[i].name)
		}
	}
	must(t, s.idle())
}
