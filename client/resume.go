package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"sync"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Bounds of what a client keeps of recorded steps; what goes beyond is asked of the server, step by step.
const (
	recordedOutput = 64 << 10 // octets of a stream
	recordedMost   = 1 << 30  // octets of all
	maxAnswer      = 16 << 20 // octets of a stream in a result
)

// recorded is what a client knows of steps that were done before it came.
type recorded struct {
	mu    sync.Mutex
	boxes map[string]*recordedBox // by sandbox ID
	size  int64
}

type recordedBox struct {
	cwd, user string
	steps     map[string]*dsecv1.Step
}

// FastForward learns the recorded steps of all trajectories of a job, or of some sandboxes (IDs) of it: a [Sandbox.Run] of this client with one of their IDs and the same
// request is then answered at once, without a call; one that runs is joined, and any other goes to the server as always. It returns how
// many steps it learned.
func (c *Client) FastForward(ctx context.Context, job string, sandboxes ...string) (int, error) {
	st, err := c.Logs.Steps(ctx, connect.NewRequest(&dsecv1.StepsRequest{Filter: &dsecv1.TrajectoryFilter{Job: job, Sandboxes: sandboxes}, OutputLimit: recordedOutput}))
	if err != nil {
		return 0, wrap(err)
	}
	defer st.Close()
	n := 0
	id := ""
	var missing []*dsecv1.ItemError
	for st.Receive() {
		m := st.Msg()
		missing = append(missing, m.Errors...)
		if m.Sandbox != nil {
			id = m.Sandbox.Id
		}
		n += c.recorded.take(id, m)
	}
	if err := st.Err(); err != nil {
		return n, wrap(err)
	}
	return n, missingHosts("fast-forward", missing)
}

func (r *recorded) take(id string, m *dsecv1.StepsResponse) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.boxes == nil {
		r.boxes = map[string]*recordedBox{}
	}
	b := r.boxes[id]
	if b == nil || m.Sandbox != nil {
		b = &recordedBox{cwd: m.Sandbox.GetCwd(), user: m.Sandbox.GetUser(), steps: map[string]*dsecv1.Step{}}
		r.boxes[id] = b
	}
	for _, s := range m.Steps {
		delete(b.steps, s.Id) // the last end counts
		if s.State != "ended" || s.RequestHash == "" || s.Outcome.GetKind() == "interrupted" || !whole(s.Stdout, s.Outcome.GetStdout()) || !whole(s.Stderr, s.Outcome.GetStderr()) {
			continue
		}
		size := int64(len(s.Stdout) + len(s.Stderr) + 400)
		if r.size+size > recordedMost {
			continue
		}
		r.size += size
		b.steps[s.Id] = s
		n++
	}
	return n
}

// whole says whether a result of the server would have no more octets.
func whole(p []byte, e *dsecv1.StreamEnd) bool {
	n := e.GetTotal()
	if e.GetTruncated() {
		n = e.GetHead()
	}
	return int64(len(p)) >= min(n, maxAnswer)
}

// answer is the recorded result of a request; nil where the server is to be asked, which also refuses another request under the ID.
func (r *recorded) answer(q *dsecv1.StartRequest) *Result {
	if q.Id == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.boxes[q.Sandbox]
	if b == nil || b.steps[q.Id] == nil {
		return nil
	}
	s := b.steps[q.Id]
	if hash := requestHash(q, b.cwd, b.user); hash == "" || hash != s.RequestHash {
		return nil
	}
	return &Result{ID: s.Id, Stdout: s.Stdout, Stderr: s.Stderr, Outcome: s.Outcome}
}

// forget frees what is known of steps.
func (r *recorded) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.boxes, r.size = nil, 0
}

// requestHash is that of docs/format/records.md, for a sandbox of that cwd and user.
func requestHash(q *dsecv1.StartRequest, cwd, user string) string {
	if q.Terminal != nil {
		return ""
	}
	var b []byte
	put := func(s string) {
		b = strconv.AppendInt(b, int64(len(s)), 10)
		b = append(b, ':')
		b = append(b, s...)
	}
	number := func(n int64) { put(strconv.FormatInt(n, 10)) }
	put("dsec-request-1")
	if len(q.ArgvRaw) > 0 {
		number(int64(len(q.ArgvRaw)))
		for _, a := range q.ArgvRaw {
			put(string(a))
		}
	} else {
		number(int64(len(q.Argv)))
		for _, a := range q.Argv {
			put(a)
		}
	}
	put(q.Session)
	put(fromOctets(q.Text, q.TextRaw))
	number(int64(len(q.Env)))
	for _, v := range q.Env {
		if v.Secret {
			return ""
		}
		put(fromOctets(v.Name, v.NameRaw) + "=" + fromOctets(v.Value, v.ValueRaw))
	}
	own, by := fromOctets(q.Cwd, q.CwdRaw), q.User
	if q.Session == "" {
		if own == "" {
			own = cwd
		}
		if by == "" {
			by = user
		}
	}
	put(own)
	put(by)
	if len(q.Stdin) == 0 {
		put("")
	} else {
		sum := sha256.Sum256(q.Stdin)
		put(hex.EncodeToString(sum[:]))
	}
	if q.StdinOpen {
		number(1)
	} else {
		number(0)
	}
	number(q.TimeoutMs)
	limit := q.OutputCap
	if limit == 0 {
		limit = 16 << 20
	}
	number(limit)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
