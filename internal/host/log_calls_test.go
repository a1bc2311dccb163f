package host

import (
	"crypto/sha256"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// The calls of a job are read as records: each with its request and its answer, of every kind, from any record on, and without what was printed
// when that is not asked for. A record that can't be read hides no other. Another project reads nothing.
func TestCallsAreReadable(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	p := r.serve()
	day := time.Now().UTC().Format(time.DateOnly)
	asked := func(kind byte, request []byte) []byte { return append([]byte{'q', kind}, request...) }
	answered := func(answer []byte) []byte {
		d := sha256.Sum256(answer)
		return append(append([]byte{'a'}, d[:]...), answer...)
	}
	octetsOf := func(m proto.Message) []byte {
		t.Helper()
		b, err := deterministic.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	result := &dsecv1.CallResult{Verdict: "OK", Stdout: "out"}
	add := func(job, key string, recs ...trajectory.Record) {
		t.Helper()
		id := trajectory.ID{Project: "default", Job: job, Key: key}
		recs = append([]trajectory.Record{{Kind: trajectory.KindCreate, Payload: []byte{'q'}}}, recs...)
		if _, err := r.log.Append(t.Context(), id, recs, sandbox.DurabilityProcess); err != nil {
			t.Fatal(err)
		}
	}
	start, end := trajectory.KindStepStart, trajectory.KindStepEnd
	add("j", fncall.Stream,
		trajectory.Record{Kind: start, Step: "run", Input: trajectory.NewInput([]byte("program")), Payload: asked('r', octetsOf(&dsecv1.RunCallRequest{Job: "j", Input: &dsecv1.CallInput{Stdin: "in"}}))},
		trajectory.Record{Kind: end, Step: "run", Payload: answered(octetsOf(&dsecv1.RunCallResponse{Verdict: "OK", Result: result}))},
		trajectory.Record{Kind: start, Step: "batch", Input: &trajectory.Input{Kept: trajectory.KeptHash, Size: 7}, Payload: asked('b', make([]byte, 32))},
		trajectory.Record{Kind: end, Step: "batch", Payload: answered(octetsOf(&dsecv1.RunCallBatchResponse{Verdict: "OK", Results: []*dsecv1.CallResult{result}}))},
		trajectory.Record{Kind: start, Step: "odd", Payload: asked('?', nil)},
		trajectory.Record{Kind: end, Step: "odd", Payload: []byte{'a'}},
		trajectory.Record{Kind: start, Step: "pair", Input: trajectory.NewInput(nil), Payload: asked('p', octetsOf(&dsecv1.RunCallPairRequest{}))},
		trajectory.Record{Kind: end, Step: "pair", Payload: answered(octetsOf(&dsecv1.RunCallPairResponse{Program: result, Interactor: result}))},
	)
	add("-", fncall.Stream+"/2020-01-02", trajectory.Record{Kind: start, Step: "old", Payload: asked('r', nil)})
	add("-", fncall.Stream+"/"+day, trajectory.Record{Kind: start, Step: "new", Payload: asked('r', nil)})

	read := func(project string, q *dsecv1.ReadLogRequest) (kinds []string, text string, err error) {
		st, err := p.Logs.Read(in(project), connect.NewRequest(q))
		if err != nil {
			return nil, "", rpc.FromError(err)
		}
		defer st.Close()
		for st.Receive() {
			for _, rec := range st.Msg().Records {
				kinds = append(kinds, rec.Kind+" "+rec.Step)
				text += rec.RequestJson + rec.ResponseJson + "\n"
			}
		}
		return kinds, text, rpc.FromError(st.Err())
	}
	want := []string{"create ", "call run", "call_end run", "call batch", "call_end batch", "lost odd", "lost odd", "call pair", "call_end pair"}
	for _, c := range []struct {
		name    string
		project string
		q       *dsecv1.ReadLogRequest
		kinds   []string
		has     string
		lacks   string
	}{
		{"all", "default", &dsecv1.ReadLogRequest{Job: "j", Key: "!fncall", Output: true}, want, `"out"`, "octets of"},
		{"request", "default", &dsecv1.ReadLogRequest{Job: "j", Key: "!fncall"}, want, `"in"`, `"out"`},
		{"from an answer on", "default", &dsecv1.ReadLogRequest{Job: "j", Key: "!fncall", FromSeq: 5, Output: true}, want[4:], `"out"`, `"in"`},
		{"all days", "default", &dsecv1.ReadLogRequest{Key: "!fncall"}, []string{"create ", "call old", "create ", "call new"}, "{}", "program"},
		{"a day", "default", &dsecv1.ReadLogRequest{Key: "!fncall/" + day}, []string{"create ", "call new"}, "{}", "program"},
		{"another job", "default", &dsecv1.ReadLogRequest{Job: "none", Key: "!fncall"}, nil, "", "out"},
		{"another project", "other", &dsecv1.ReadLogRequest{Job: "j", Key: "!fncall"}, nil, "", "out"},
	} {
		kinds, text, err := read(c.project, c.q)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if d := cmp.Diff(c.kinds, kinds); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
		if !strings.Contains(text, c.has) || strings.Contains(text, c.lacks) {
			t.Errorf("%s: %s", c.name, text)
		}
	}
	for what, q := range map[string]*dsecv1.ReadLogRequest{
		"follow": {Job: "j", Key: "!fncall", Follow: true}, "from_seq": {Key: "!fncall", FromSeq: 2}, "sandbox or key": {Sandbox: "x", Key: "!fncall"},
	} {
		_, _, err := read("default", q)
		wantErr(t, err, sandbox.ErrInvalid, what)
	}
}
