package sandboxfusion

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

type fake struct {
	got  *dsecv1.RunCallRequest
	auth string
	res  *dsecv1.RunCallResponse
	err  error
}

func (f *fake) Run(_ context.Context, r *connect.Request[dsecv1.RunCallRequest]) (*connect.Response[dsecv1.RunCallResponse], error) {
	f.got, f.auth = r.Msg, r.Header().Get("Authorization")
	if f.err != nil {
		return nil, f.err
	}
	return connect.NewResponse(f.res), nil
}

func post(t *testing.T, f *fake, path, body string, with ...func(*http.Request)) (int, string) {
	t.Helper()
	mux := http.NewServeMux()
	New(f).Register(mux)
	r := httptest.NewRequest("POST", path, strings.NewReader(body))
	for _, w := range with {
		w(r)
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	b, err := io.ReadAll(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(b)
}

func TestRequest(t *testing.T) {
	f := &fake{res: &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "OK"}}}
	code, body := post(t, f, "/run_code", `{"code":"print(1)","language":"nodejs","stdin":"in","run_timeout":1.5,"compile_timeout":3,
		"memory_limit_MB":64,"files":{"./a/b":"aGk=","skipped":null},"fetch_files":["out"],"of_later_versions":1}`,
		func(r *http.Request) { r.SetBasicAuth("dsec_key", "") })
	if code != 200 {
		t.Fatal(code, body)
	}
	want := &dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: "javascript", Code: "print(1)", Files: []*dsecv1.CallFile{{Path: "a/b", Data: []byte("hi")}}},
		Input: &dsecv1.CallInput{Stdin: "in"}, Limits: &dsecv1.CallLimits{WallMs: 1500, CpuMs: 96000, Memory: 64 << 20},
		CompileLimits: &dsecv1.CallLimits{WallMs: 3000, CpuMs: 192000}, Outputs: []*dsecv1.CallOutput{{Path: "out", Optional: true}}, QueueMs: 8000}
	if d := cmp.Diff(want, f.got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if f.auth != "Bearer dsec_key" {
		t.Errorf("the key of the URL went on as %q", f.auth)
	}
}

func TestAnswers(t *testing.T) {
	ok := &dsecv1.CallResult{Verdict: "OK", Stdout: "1\n", WallUs: 1500000, CpuUs: 250000}
	finished := &stage{Status: "Finished", Stdout: "1\n", ExecutionTime: 1.5, CPUTime: .25}
	for _, c := range []struct {
		name string
		in   *dsecv1.RunCallResponse
		want response
	}{
		{"ok", &dsecv1.RunCallResponse{Result: ok, Host: "h"}, response{Status: "Success", Run: finished, Host: "h"}},
		{"compiled", &dsecv1.RunCallResponse{Compile: ok, Result: ok}, response{Status: "Success", Compile: finished, Run: finished}},
		{"compile error", &dsecv1.RunCallResponse{Compile: &dsecv1.CallResult{Verdict: "CE", Code: 1, Stderr: "no"}},
			response{Status: "Failed", Message: "CE", Compile: &stage{Status: "Finished", ReturnCode: 1, Stderr: "no"}}},
		{"compiler out of time", &dsecv1.RunCallResponse{Compile: &dsecv1.CallResult{Verdict: "CE", Code: 137, Limit: "wall"}},
			response{Status: "Failed", Message: "CE", Compile: &stage{Status: "TimeLimitExceeded", ReturnCode: 137}}},
		{"run-time error", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "RE", Code: 3}},
			response{Status: "Failed", Message: "RE", Run: &stage{Status: "Finished", ReturnCode: 3}}},
		{"signal", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "SIG", Code: 139, Signal: 11}},
			response{Status: "Failed", Message: "SIG", Run: &stage{Status: "Finished", ReturnCode: 139}}},
		{"time", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "TLE", Code: 137, Limit: "wall"}},
			response{Status: "Failed", Message: "TLE", Run: &stage{Status: "TimeLimitExceeded", ReturnCode: 137}}},
		{"output of a program that exits with 0", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "OLE"}},
			response{Status: "Failed", Message: "OLE", Run: &stage{Status: "Finished", ReturnCode: 153}}},
		{"memory of one whose child was killed", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "MLE"}},
			response{Status: "Failed", Message: "MLE", Run: &stage{Status: "Finished", ReturnCode: 137}}},
		{"ours", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "SYS", Error: "disk"}},
			response{Status: "SandboxError", Message: "SYS: disk", Run: &stage{Status: "Finished", ReturnCode: 1}}},
		{"octets and files", &dsecv1.RunCallResponse{Result: &dsecv1.CallResult{Verdict: "OK", StdoutRaw: []byte("a\xffb"), Files: []*dsecv1.CallFile{{Path: "f", Data: []byte("x")}}}},
			response{Status: "Success", Run: &stage{Status: "Finished", Stdout: "a\uFFFDb"}, Files: map[string]string{"f": "eA=="}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, body := post(t, &fake{res: c.in}, "/run_code", `{"code":"","language":"python"}`)
			if code != 200 {
				t.Fatal(code, body)
			}
			var got response
			if err := json.Unmarshal([]byte(body), &got); err != nil {
				t.Fatal(err)
			}
			if c.want.Files == nil {
				c.want.Files = map[string]string{}
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, body string
		err        error
		code       int
		says       string
	}{
		{"language", `{"code":"","language":"cobol"}`, nil, 400, served},
		{"no code", `{"language":"python"}`, nil, 400, "code: missing"},
		{"zero seconds", `{"code":"","language":"python","run_timeout":0}`, nil, 400, "run_timeout 0"},
		{"too many seconds", `{"code":"","language":"python","compile_timeout":1e300}`, nil, 400, "compile_timeout"},
		{"memory", `{"code":"","language":"python","memory_limit_MB":1e30}`, nil, 400, "memory_limit_MB"},
		{"base64", `{"code":"","language":"python","files":{"a":"%%"}}`, nil, 400, "no base64"},
		{"json", `{`, nil, 400, "body"},
		{"too busy", `{"code":"","language":"python"}`, connect.NewError(connect.CodeResourceExhausted, errors.New("queue")), 504, "queue"},
		{"no host", `{"code":"","language":"python"}`, connect.NewError(connect.CodeUnavailable, errors.New("away")), 504, "away"},
		{"key", `{"code":"","language":"python"}`, connect.NewError(connect.CodeUnauthenticated, errors.New("no key")), 401, "no key"},
		{"path", `{"code":"","language":"python"}`, connect.NewError(connect.CodeInvalidArgument, errors.New("path")), 400, "path"},
		{"ours", `{"code":"","language":"python"}`, errors.New("broken"), 500, "broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, body := post(t, &fake{err: c.err}, "/run_code", c.body)
			var said struct{ Detail string }
			if err := json.Unmarshal([]byte(body), &said); err != nil {
				t.Fatal(err, body)
			}
			if code != c.code || !strings.Contains(said.Detail, c.says) {
				t.Errorf("got %d %q, want %d naming %q", code, said.Detail, c.code, c.says)
			}
		})
	}
	if code, body := post(t, &fake{}, "/run_jupyter", `{}`); code != 501 || !strings.Contains(body, "session") {
		t.Error(code, body)
	}
}

func TestInside(t *testing.T) {
	calls := Over(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer k" || !strings.HasSuffix(r.URL.Path, "/Run") {
			t.Errorf("%s %q", r.URL.Path, r.Header)
		}
		connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodeResourceExhausted, errors.New("full")))
	}))
	req := connect.NewRequest(&dsecv1.RunCallRequest{})
	req.Header().Set("Authorization", "Bearer k")
	if _, err := calls.Run(t.Context(), req); connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "full") {
		t.Error(err)
	}
}
