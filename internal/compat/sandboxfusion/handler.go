// Package sandboxfusion answers SandboxFusion's POST /run_code and GET /v1/ping with function calls, so that trainers written for it work
// unchanged.
//
// It hides that service's vocabulary: its languages, states and time limits in seconds. It is a translator in front of a gateway and holds
// no state: a request becomes one FnCallService/Run, with the caller's key passed on as it came.
//
// Invariants: what a program does, limits included, is never a SandboxError; return_code is always set; a call that did not get its turn
// within [Handler.Queue] is answered 504, which callers take as "try again".
//
// Wire format as of the PyPI package sandbox-fusion 0.3.7; memory_limit_MB as verl sends it.
package sandboxfusion

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Calls is the part of FnCallService that is used.
type Calls interface {
	Run(context.Context, *connect.Request[dsecv1.RunCallRequest]) (*connect.Response[dsecv1.RunCallResponse], error)
}

// Handler serves /run_code, /run_jupyter and /v1/ping.
type Handler struct {
	Calls Calls
	// Queue is the longest wait for a turn. 8 s is what a caller with a read timeout of its own bears.
	Queue time.Duration
	// Names maps SandboxFusion's languages to ours.
	Names map[string]string
}

// New makes a handler with the usual languages and waiting time.
func New(calls Calls) *Handler {
	return &Handler{Calls: calls, Queue: 8 * time.Second, Names: map[string]string{
		"python": "python", "cpp": "cpp", "bash": "bash", "nodejs": "javascript", "go": "go", "pytest": "pytest"}}
}

// served is the order in which a refusal names the languages.
const served = "python, cpp, bash, nodejs, go, pytest"

const (
	bodyMax    = 64 << 20 // octets of a request
	secondsMax = 480      // of one stage
	fetchMax   = 64       // files asked back
)

type request struct {
	CompileTimeout *float64           `json:"compile_timeout"`
	RunTimeout     *float64           `json:"run_timeout"`
	MemoryLimitMB  *float64           `json:"memory_limit_MB"`
	Code           *string            `json:"code"`
	Stdin          *string            `json:"stdin"`
	Language       string             `json:"language"`
	Files          map[string]*string `json:"files"`
	FetchFiles     []string           `json:"fetch_files"`
}

type stage struct {
	Status        string  `json:"status"` // Finished | TimeLimitExceeded
	ExecutionTime float64 `json:"execution_time"`
	CPUTime       float64 `json:"cpu_time"`
	ReturnCode    int32   `json:"return_code"`
	Stdout        string  `json:"stdout"`
	Stderr        string  `json:"stderr"`
}

type response struct {
	Status  string            `json:"status"` // Success | Failed | SandboxError
	Message string            `json:"message"`
	Compile *stage            `json:"compile_result"`
	Run     *stage            `json:"run_result"`
	Host    string            `json:"executor_pod_name"`
	Files   map[string]string `json:"files"`
}

// Register adds the routes to a mux.
func (h *Handler) Register(mux *http.ServeMux) {
	mux.HandleFunc("POST /run_code", h.runCode)
	mux.HandleFunc("POST /run_jupyter", func(w http.ResponseWriter, r *http.Request) {
		refuse(w, http.StatusNotImplemented, "run_jupyter is not served: notebooks keep state between cells, function calls keep none; "+
			"run the cells in a session of a sandbox, or as one program by /run_code")
	})
	mux.HandleFunc("GET /v1/ping", func(w http.ResponseWriter, r *http.Request) { answer(w, "pong") })
}

func (h *Handler) runCode(w http.ResponseWriter, r *http.Request) {
	var in request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyMax)).Decode(&in); err != nil {
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			refuse(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("body: more than %d octets", bodyMax))
			return
		}
		refuse(w, http.StatusBadRequest, "body: "+err.Error())
		return
	}
	call, err := h.call(&in)
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	req := connect.NewRequest(call)
	forward(req.Header(), r)
	res, err := h.Calls.Run(r.Context(), req)
	if err != nil {
		refuse(w, statusOf(err), message(err))
		return
	}
	answer(w, h.response(res.Msg))
}

// forward passes the caller's key on: a bearer token, or the password or user name of a URL like http://dsec:KEY@host/, which is all that
// SandboxFusion's clients can be told.
func forward(to http.Header, r *http.Request) {
	key := r.Header.Get("Authorization")
	if user, password, ok := r.BasicAuth(); ok {
		if password == "" {
			password = user
		}
		key = "Bearer " + password
	}
	if key != "" {
		to.Set("Authorization", key)
	}
}

func (h *Handler) call(in *request) (*dsecv1.RunCallRequest, error) {
	lang, ok := h.Names[in.Language]
	if !ok {
		return nil, fmt.Errorf("language %.100q: want one of %s", in.Language, served)
	}
	if in.Code == nil {
		return nil, errors.New("code: missing")
	}
	if len(in.FetchFiles) > fetchMax {
		return nil, fmt.Errorf("fetch_files: %d, %d at most", len(in.FetchFiles), fetchMax)
	}
	run, err := limits("run_timeout", in.RunTimeout)
	if err != nil {
		return nil, err
	}
	compile, err := limits("compile_timeout", in.CompileTimeout)
	if err != nil {
		return nil, err
	}
	if m := in.MemoryLimitMB; m != nil && *m > 0 { // verl sends -1 for none
		if *m > 1<<20 {
			return nil, fmt.Errorf("memory_limit_MB %g: %d at most", *m, 1<<20)
		}
		run.Memory = int64(*m * (1 << 20))
	}
	call := &dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: lang, Code: *in.Code}, Input: &dsecv1.CallInput{},
		Limits: run, CompileLimits: compile, QueueMs: h.Queue.Milliseconds()}
	if in.Stdin != nil {
		call.Input.Stdin = *in.Stdin
	}
	for name, text := range in.Files {
		if text == nil {
			continue
		}
		data, err := base64.StdEncoding.DecodeString(*text)
		if err != nil {
			return nil, fmt.Errorf("files: %.200q is no base64: %v", name, err)
		}
		call.Program.Files = append(call.Program.Files, &dsecv1.CallFile{Path: strings.TrimPrefix(name, "./"), Data: data})
	}
	for _, name := range in.FetchFiles {
		call.Outputs = append(call.Outputs, &dsecv1.CallOutput{Path: strings.TrimPrefix(name, "./"), Optional: true})
	}
	return call, nil
}

// limits reads a time limit in seconds of the wall, the only clock that SandboxFusion has: CPU time is bounded by it on every core.
func limits(field string, seconds *float64) (*dsecv1.CallLimits, error) {
	s := 10.0
	if seconds != nil {
		s = *seconds
	}
	if !(s > 0) || s > secondsMax {
		return nil, fmt.Errorf("%s %g: want seconds above 0, %d at most", field, s, secondsMax)
	}
	ms := int64(math.Ceil(s * 1000))
	return &dsecv1.CallLimits{WallMs: ms, CpuMs: min(64*ms, secondsMax*1000)}, nil
}

func (h *Handler) response(m *dsecv1.RunCallResponse) *response {
	out := &response{Status: "Success", Compile: stageOf(m.Compile), Run: stageOf(m.Result), Host: m.Host, Files: map[string]string{}}
	for _, r := range []*dsecv1.CallResult{m.Compile, m.Result} {
		switch {
		case r == nil || r.Verdict == "OK":
		case r.Verdict == "SYS" || r.Verdict == "CANCELLED":
			out.Status, out.Message = "SandboxError", said(r)
		case out.Status == "Success":
			out.Status, out.Message = "Failed", said(r)
		}
	}
	if m.Result != nil {
		for _, f := range m.Result.Files {
			name, data := f.Path, f.Data
			if name == "" {
				name = string(f.PathRaw)
			}
			if f.Text != "" {
				data = []byte(f.Text)
			}
			out.Files[name] = base64.StdEncoding.EncodeToString(data)
		}
	}
	return out
}

func said(r *dsecv1.CallResult) string {
	if r.Error != "" {
		return r.Verdict + ": " + r.Error
	}
	return r.Verdict
}

func stageOf(r *dsecv1.CallResult) *stage {
	if r == nil {
		return nil
	}
	s := &stage{Status: "Finished", ExecutionTime: float64(r.WallUs) / 1e6, CPUTime: float64(r.CpuUs) / 1e6, ReturnCode: r.Code,
		Stdout: text(r.Stdout, r.StdoutRaw), Stderr: text(r.Stderr, r.StderrRaw)}
	if r.Limit == "wall" || r.Limit == "cpu" { // of a run, or of a compiler, whose verdict is CE
		s.Status = "TimeLimitExceeded"
	}
	if s.ReturnCode == 0 && r.Verdict != "OK" {
		s.ReturnCode = codes[r.Verdict]
		if s.ReturnCode == 0 {
			s.ReturnCode = 1
		}
	}
	return s
}

// codes stand for limits that a program met although it could still exit with 0, as if their signal had ended it.
var codes = map[string]int32{"TLE": 128 + 9, "MLE": 128 + 9, "OLE": 128 + 25, "SEC": 128 + 31}

func text(s string, raw []byte) string {
	if s == "" {
		s = string(raw)
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// statusOf maps a refusal. Everything that means "not begun, try again" is 504.
func statusOf(err error) int {
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeResourceExhausted, connect.CodeDeadlineExceeded, connect.CodeAborted, connect.CodeCanceled:
		return http.StatusGatewayTimeout
	case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeFailedPrecondition, connect.CodeOutOfRange, connect.CodeAlreadyExists:
		return http.StatusBadRequest
	case connect.CodeUnauthenticated:
		return http.StatusUnauthorized
	case connect.CodePermissionDenied:
		return http.StatusForbidden
	case connect.CodeUnimplemented:
		return http.StatusNotImplemented
	}
	return http.StatusInternalServerError
}

func message(err error) string {
	if e := new(connect.Error); errors.As(err, &e) {
		return e.Message()
	}
	return err.Error()
}

func refuse(w http.ResponseWriter, status int, detail string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// A client that is gone needs no answer.
	_ = json.NewEncoder(w).Encode(map[string]string{"detail": detail})
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		panic(http.ErrAbortHandler) // half an answer must not look like a whole one
	}
}
