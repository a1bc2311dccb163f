package client

import (
	"encoding/json"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// The vectors are those that the host is tested with.
func TestRequestHash(t *testing.T) {
	data, err := os.ReadFile("testdata/request_hash.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name, Stdin, Cwd, User, Hash string
		Request                      json.RawMessage
	}
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		q := &dsecv1.StartRequest{}
		if err := protojson.Unmarshal(v.Request, q); err != nil {
			t.Fatal(err)
		}
		q.Stdin = []byte(v.Stdin)
		if got := requestHash(q, v.Cwd, v.User); got != v.Hash {
			t.Errorf("%s: %s, want %s", v.Name, got, v.Hash)
		}
	}
}

func TestRecordedAnswers(t *testing.T) {
	c := &Client{}
	sb := &Sandbox{ID: "h-1", c: c}
	cmd := Cmd{ID: "a", Argv: []string{"ls"}, Env: map[string]string{"B": "2", "A": "1"}}
	hash := requestHash(sb.startRequest(cmd), "/w", "u")
	step := func(id string, out string, total int64) *dsecv1.Step {
		return &dsecv1.Step{Id: id, State: "ended", RequestHash: hash, Stdout: []byte(out), Outcome: &dsecv1.Outcome{Kind: "exited", Code: 3, Stdout: &dsecv1.StreamEnd{Total: total, Head: total}}}
	}
	unknown := step("c", "", 0)
	unknown.State = "unknown"
	n := c.recorded.take("h-1", &dsecv1.StepsResponse{Sandbox: &dsecv1.Sandbox{Id: "h-1", Cwd: "/w", User: "u"}, Steps: []*dsecv1.Step{step("a", "out", 3), step("b", "out", 4), unknown}})
	if n != 1 {
		t.Fatalf("%d", n)
	}
	r := c.recorded.answer(sb.startRequest(cmd))
	if r == nil || string(r.Stdout) != "out" || r.Code() != 3 {
		t.Fatalf("%v", r)
	}
	for _, other := range []Cmd{{ID: "b", Argv: cmd.Argv, Env: cmd.Env}, {ID: "c", Argv: cmd.Argv, Env: cmd.Env}, {ID: "a", Argv: cmd.Argv}, {Argv: cmd.Argv, Env: cmd.Env},
		{ID: "a", Argv: cmd.Argv, Env: cmd.Env, Secret: []string{"A"}}, {ID: "a", Argv: cmd.Argv, Env: cmd.Env, Cwd: "/"}} {
		if r := c.recorded.answer(sb.startRequest(other)); r != nil {
			t.Errorf("%+v: %v", other, r)
		}
	}
	c.recorded.forget()
	if c.recorded.answer(sb.startRequest(cmd)) != nil {
		t.Error("answered from nothing")
	}
}
