package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// fusionVersion is the client's, as released on PyPI.
const fusionVersion = "0.3.7"

// fusionPython is an interpreter that has SandboxFusion's own client.
var fusionPython = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(repository(), "bin", "sandbox-fusion-"+fusionVersion)
	python := filepath.Join(dir, "bin", "python")
	if exec.Command(python, "-c", "import sandbox_fusion").Run() == nil {
		return python, nil
	}
	for _, args := range [][]string{{"python3", "-m", "venv", "--clear", dir}, {python, "-m", "pip", "install", "-q", "sandbox-fusion==" + fusionVersion}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			return "", err
		}
	}
	return python, nil
})

// bridge gives a service a TCP address for as long as the test runs; services of tests listen on sockets alone.
func bridge(t *testing.T, s *service) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	t.Cleanup(func() { l.Close(); conns.Wait() })
	conns.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", s.socket())
			if err != nil {
				in.Close()
				continue
			}
			conns.Go(func() {
				defer in.Close()
				io.Copy(in, out)
			})
			conns.Go(func() {
				defer out.Close()
				io.Copy(out, in)
			})
		}
	})
	return l.Addr().String()
}

// TestSandboxFusionClient lets SandboxFusion's own client, sync and async, make calls, 128 at once at the end.
func TestSandboxFusionClient(t *testing.T) {
	s := fncalls(t)
	python, err := fusionPython()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, "testdata/sandboxfusion.py", "http://dsec:"+s.key()+"@"+bridge(t, s)) // the key stands in the address, since that client sends no header
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// TestSandboxFusionByHand sends what that client can't: memory limits as verl does, notebooks, wrong keys and languages.
func TestSandboxFusionByHand(t *testing.T) {
	s := fncalls(t)
	addr := bridge(t, s)
	defer http.DefaultClient.CloseIdleConnections()
	post := func(path, key, body string) (int, map[string]any) {
		r, err := http.NewRequest("POST", "http://"+addr+path, bytes.NewReader([]byte(body)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		if key != "" {
			r.Header.Set("Authorization", "Bearer "+key)
		}
		res, err := (&http.Client{Timeout: time.Minute}).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatalf("%d %s: %v", res.StatusCode, b, err)
		}
		return res.StatusCode, m
	}
	code, m := post("/run_code", s.key(), `{"code":"a=[]\nwhile True: a.append('x'*1000000)","language":"python","compile_timeout":10,"run_timeout":10,"memory_limit_MB":64}`)
	run, _ := m["run_result"].(map[string]any)
	if code != 200 || m["status"] != "Failed" || run["return_code"] != float64(137) {
		t.Errorf("out of memory: %d %v", code, m)
	}
	code, m = post("/run_code", s.key(), `{"code":"print(1)","language":"python","memory_limit_MB":-1}`)
	if run, _ = m["run_result"].(map[string]any); code != 200 || m["status"] != "Success" || run["stdout"] != "1\n" || m["compile_result"] != nil {
		t.Errorf("no limit: %d %v", code, m)
	}
	if code, m = post("/run_code", s.key(), `{"code":"x","language":"cobol"}`); code != 400 || !strings.Contains(m["detail"].(string), "python, cpp, bash, nodejs, go, pytest") {
		t.Errorf("unknown language: %d %v", code, m)
	}
	if code, m = post("/run_code", "", `{"code":"print(1)","language":"python"}`); code != 401 {
		t.Errorf("without a key: %d %v", code, m)
	}
	if code, m = post("/run_jupyter", s.key(), `{"cells":["1"]}`); code != 501 || !strings.Contains(m["detail"].(string), "run_jupyter") {
		t.Errorf("notebook: %d %v", code, m)
	}
}
