package history_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/test/history"
)

// act is one step that a client may ask for, again and again under its key.
type act struct {
	op      history.Op
	box     string
	step    string
	request string
	do      func(ctx context.Context, id string) (value string, n int64, err error)
	// before is called when it is asked for, as often as it is.
	private bool // nobody else sends it
}

// simClient sends what it draws, sends it again when no answer comes, and notes all that it hears.
type simClient struct {
	s     *sim
	n     int
	rng   *rand.Rand
	id    map[string]string // sandboxes by box
	old   []act
	calls int    // of restore
	over  string // box whose sandbox was refused as being over
	why   string // the last refusal or failure

	Sandboxes dsecv1connect.SandboxServiceClient
	Commands  dsecv1connect.CommandServiceClient
	Files     dsecv1connect.FileServiceClient
	Logs      dsecv1connect.LogServiceClient
	Restores  dsecv1connect.RestoreServiceClient
}

type keyed struct {
	key  string
	next http.RoundTripper
}

func (k keyed) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Api-Key", k.key)
	return k.next.RoundTrip(r)
}

func (s *sim) newClient(n int) *simClient {
	h := &http.Client{Transport: keyed{s.g.key, s.front}}
	const base = "http://gateway"
	return &simClient{s: s, n: n, rng: rand.New(rand.NewPCG(s.plan.seed, uint64(100+n))), id: map[string]string{},
		Sandboxes: dsecv1connect.NewSandboxServiceClient(h, base), Commands: dsecv1connect.NewCommandServiceClient(h, base),
		Files: dsecv1connect.NewFileServiceClient(h, base), Logs: dsecv1connect.NewLogServiceClient(h, base), Restores: dsecv1connect.NewRestoreServiceClient(h, base)}
}

func (c *simClient) chance(n int) bool { return c.rng.IntN(n) == 0 }

func (c *simClient) run() {
	for i := range c.s.plan.steps {
		box := c.s.boxes[c.rng.IntN(len(c.s.boxes))]
		if !c.create(box) {
			continue
		}
		a := c.draw(box, i)
		if c.send(a) && !a.private {
			c.old = append(c.old, a)
		}
		if c.over == box && !c.chance(3) {
			c.restore(box, "")
		}
		c.over = ""
		if c.chance(3) {
			pause(context.Background(), time.Duration(c.rng.IntN(int(300*time.Millisecond))))
		}
	}
}

// create finds the sandbox of a box; it is asked for before every step now and then, as a trainer does that was started again.
func (c *simClient) create(box string) bool {
	if c.id[box] != "" && !c.chance(6) {
		return true
	}
	layer := c.s.g.layer
	_, durability, _ := strings.Cut(box, "-")
	return c.send(act{op: history.Create, box: box, request: "create " + box, do: func(ctx context.Context, _ string) (string, int64, error) {
		r, err := c.Sandboxes.Create(ctx, connect.NewRequest(&dsecv1.CreateRequest{Layers: []string{layer}, Job: "j", Key: box, Durability: durability}))
		if err != nil {
			return "", 0, err
		}
		return r.Msg.GetSandbox().GetId(), 0, nil
	}})
}

// send asks until there is an answer or patience ends, and reports whether there was one.
func (c *simClient) send(a act) bool {
	for try := range 8 {
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
		id := c.id[a.box]
		call := c.s.rec.Invoke(history.Call{Client: c.n, Box: a.box, ID: id, Op: a.op, Step: a.step, Request: a.request})
		if a.op == history.Create {
			call.ID = ""
		}
		value, n, err := a.do(ctx, id)
		cancel()
		reply, value := judge(a.op, value, err)
		call.N = n
		if err != nil && (reply == history.Lost || reply == history.Refused) {
			call.Note, c.why = err.Error(), err.Error()
		}
		if a.op == history.Create && reply == history.Answered {
			call.ID = value
			c.id[a.box] = value
		}
		if reply == history.Lost {
			if c.chance(12) || try == 7 {
				return false // gives up, without hearing
			}
			pause(context.Background(), time.Duration(c.rng.IntN(int(400*time.Millisecond))))
			continue
		}
		c.s.rec.Return(call, reply, value)
		if reply == history.Refused && a.op == history.Create {
			c.id[a.box] = ""
		} else if reply == history.Refused && a.op != history.Restore {
			c.over = a.box
		}
		return reply == history.Answered
	}
	return false
}

var errUnknown = errors.New("the command's end is unknown")

// judge reads an answer as the rules know it.
func judge(op history.Op, value string, err error) (history.Reply, string) {
	switch {
	case err == nil:
		return history.Answered, value
	case errors.Is(err, errUnknown):
		return history.Unknown, ""
	}
	return history.Judge(op, connect.CodeOf(err).String(), err.Error())
}

// draw makes up the next step: a new one, one of before again, or another request under a key of before.
func (c *simClient) draw(box string, i int) act {
	if len(c.old) > 0 && c.chance(5) {
		a := c.old[c.rng.IntN(len(c.old))]
		if !c.chance(3) {
			return a
		}
		b := c.command(a.box, a.step, "echo another")
		b.private = true
		if a.op == history.Command {
			return b
		}
		return a
	}
	step := fmt.Sprintf("c%d-%d", c.n, i)
	if c.chance(4) { // a key that all clients use, for the same
		step = fmt.Sprintf("all-%d", c.rng.IntN(3))
		return c.command(box, step, "echo shared "+step)
	}
	dir := fmt.Sprintf("%s/c%d", c.s.rootOf(box), c.n)
	file := fmt.Sprintf("%s/f%d", dir, c.rng.IntN(3))
	switch c.rng.IntN(16) {
	case 0, 1:
		return c.command(box, step, "echo "+step)
	case 2:
		return c.command(box, step, fmt.Sprintf("echo a ; sleep %dms ; err b ; exit %d", c.rng.IntN(400), c.rng.IntN(4)))
	case 3:
		return c.command(box, step, fmt.Sprintf("print %d ; sleep 20ms ; print %d", c.rng.IntN(3000), c.rng.IntN(3000)))
	case 4:
		return c.command(box, step, [...]string{"nosuch", "late 60ms", "false", "id"}[c.rng.IntN(4)])
	case 5:
		if c.chance(2) {
			return c.signalled(box, step)
		}
		return c.stdin(box, step)
	case 6:
		return c.session(box, step)
	case 7, 8:
		return c.write(history.Write, box, file, step, fmt.Sprintf("text of %s %s", step, strings.Repeat("w", c.rng.IntN(2000))))
	case 9, 10:
		return c.write(history.Append, box, c.s.rootOf(box)+"/log", step, step+";\n")
	case 11:
		return c.upload(box, dir+"/up", step)
	case 12:
		d := fmt.Sprintf("%s/d%d", dir, c.rng.IntN(2))
		return act{op: history.MakeDir, box: box, step: step, request: "makedir " + d, do: func(ctx context.Context, id string) (string, int64, error) {
			_, err := c.Files.MakeDir(ctx, connect.NewRequest(&dsecv1.MakeDirRequest{At: at(id, d), Step: step, Parents: true}))
			return "ok", 0, err
		}}
	case 13:
		to := fmt.Sprintf("%s/f%d", dir, c.rng.IntN(3))
		return act{op: history.Move, box: box, step: step, request: "move " + file + " " + to, do: func(ctx context.Context, id string) (string, int64, error) {
			_, err := c.Files.Move(ctx, connect.NewRequest(&dsecv1.MoveRequest{From: at(id, file), To: to, Step: step, Replace: true}))
			return "ok", 0, err
		}}
	case 14:
		return act{op: history.Remove, box: box, step: step, request: "remove " + file, do: func(ctx context.Context, id string) (string, int64, error) {
			_, err := c.Files.Remove(ctx, connect.NewRequest(&dsecv1.RemoveRequest{At: at(id, file), Step: step, MissingOk: c.n%2 == 0}))
			return "ok", 0, err
		}}
	default:
		return c.rare(box, step)
	}
}

func (c *simClient) rare(box, step string) act {
	switch c.rng.IntN(4) {
	case 0:
		return act{op: history.Snapshot, box: box, step: step, request: "snapshot", do: func(ctx context.Context, id string) (string, int64, error) {
			r, err := c.Sandboxes.Snapshot(ctx, connect.NewRequest(&dsecv1.SnapshotRequest{Id: id, Step: step}))
			if err != nil {
				return "", 0, err
			}
			return "layer " + r.Msg.GetLayer(), 0, nil
		}}
	case 1:
		reward := float64(c.rng.IntN(10))
		return act{op: history.Verdict, box: box, step: "verdict-" + step, request: fmt.Sprint("verdict ", reward), private: true, do: func(ctx context.Context, id string) (string, int64, error) {
			r, err := c.Logs.SetVerdict(ctx, connect.NewRequest(&dsecv1.SetVerdictRequest{Sandbox: id, Verdict: &dsecv1.Verdict{Key: "v-" + step, Reward: &reward}}))
			if err != nil {
				return "", 0, err
			}
			return fmt.Sprint(r.Msg.GetVerdict().GetReward()), 0, nil
		}}
	case 2:
		if c.chance(3) {
			return act{op: history.Stop, box: box, step: "stop", request: "stop", private: true, do: func(ctx context.Context, id string) (string, int64, error) {
				r, err := c.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Id: id}))
				if err == nil && len(r.Msg.GetErrors()) > 0 {
					err = connect.NewError(connect.CodeUnavailable, errors.New(r.Msg.GetErrors()[0].GetMessage()))
				}
				return "ok", 0, err
			}}
		}
	}
	return act{op: history.Read, box: box, step: "log", request: "read", private: true, do: func(ctx context.Context, id string) (string, int64, error) {
		log, err := c.records(ctx, &dsecv1.ReadLogRequest{Sandbox: id})
		return history.LogDigest(log), int64(len(log)), err
	}}
}

func at(id, path string) *dsecv1.Path { return &dsecv1.Path{Sandbox: id, Path: path} }

// command runs words of the fake backend and hears its end by one of the ways that there are.
func (c *simClient) command(box, step, words string) act {
	k := classed(step)
	return c.start(box, &dsecv1.StartRequest{Id: step, Argv: strings.Fields(words), Restore: k.Restore, Check: k.Check}, words)
}

func (c *simClient) start(box string, q *dsecv1.StartRequest, request string) act {
	return act{op: history.Command, box: box, step: q.Id, request: request, do: func(ctx context.Context, id string) (string, int64, error) {
		q := &dsecv1.StartRequest{Sandbox: id, Id: q.Id, Argv: q.Argv, Session: q.Session, Text: q.Text, Stdin: q.Stdin, StdinOpen: q.StdinOpen, Restore: q.Restore, Check: q.Check, OutputLimit: 1 << 20}
		if !c.chance(3) {
			q.WaitMs = int64(c.rng.IntN(2000))
		}
		r, err := c.Commands.Start(ctx, connect.NewRequest(q))
		if err != nil {
			return "", 0, err
		}
		cmd := r.Msg.GetCommand()
		if q.WaitMs == 0 && cmd.GetState() == "ended" { // who does not wait is given no output
			cmd = &dsecv1.Command{Id: cmd.GetId(), State: "running"}
		}
		return c.await(ctx, id, cmd, r.Msg.GetStdout(), r.Msg.GetStderr())
	}}
}

func (c *simClient) await(ctx context.Context, id string, cmd *dsecv1.Command, stdout, stderr []byte) (string, int64, error) {
	for cmd.GetState() == "running" {
		if c.chance(3) {
			return c.attach(ctx, id, cmd.GetId())
		}
		r, err := c.Commands.Wait(ctx, connect.NewRequest(&dsecv1.WaitRequest{Sandbox: id, Id: cmd.GetId(), WaitMs: int64(1 + c.rng.IntN(3000)), OutputLimit: 1 << 20}))
		if err != nil {
			return "", 0, lostToo(err)
		}
		cmd, stdout, stderr = r.Msg.GetCommand(), r.Msg.GetStdout(), r.Msg.GetStderr()
	}
	if cmd.GetState() == "unknown" {
		return "", 0, errUnknown
	}
	return history.CommandValue(cmd.GetOutcome(), stdout, stderr), 0, nil
}

// lostToo: a command that was begun and is not known a moment later is asked for again, under its key.
func lostToo(err error) error {
	if connect.CodeOf(err) == connect.CodeNotFound {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	return err
}

func (c *simClient) attach(ctx context.Context, id, cmd string) (string, int64, error) {
	st, err := c.Commands.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{Sandbox: id, Id: cmd}))
	if err != nil {
		return "", 0, lostToo(err)
	}
	defer st.Close()
	out := map[string][]byte{}
	for st.Receive() {
		switch e := st.Msg().Event.(type) {
		case *dsecv1.AttachResponse_Chunk:
			if e.Chunk.Late {
				continue
			}
			if int64(len(out[e.Chunk.Stream])) != e.Chunk.Offset {
				return "", 0, fmt.Errorf("%s: octets at %d after %d", e.Chunk.Stream, e.Chunk.Offset, len(out[e.Chunk.Stream]))
			}
			out[e.Chunk.Stream] = append(out[e.Chunk.Stream], e.Chunk.Data...)
		case *dsecv1.AttachResponse_Ended:
			if e.Ended.GetState() == "unknown" {
				return "", 0, errUnknown
			}
			return history.CommandValue(e.Ended.GetOutcome(), out["stdout"], out["stderr"]), 0, nil
		}
	}
	if err := st.Err(); err != nil {
		return "", 0, lostToo(err)
	}
	return "", 0, connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF)
}

// stdin starts cat and writes to it in pieces, which are sent again at their offsets, then waits for what it printed.
func (c *simClient) stdin(box, step string) act {
	text := fmt.Sprintf("octets for %s, %d of them", step, c.rng.IntN(1000))
	q := &dsecv1.StartRequest{Id: step, Argv: []string{"cat"}, StdinOpen: true}
	inner := c.start(box, q, "cat")
	return act{op: history.Command, box: box, step: step, request: "cat", private: true, do: func(ctx context.Context, id string) (string, int64, error) {
		if _, err := c.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Id: step, Argv: q.Argv, StdinOpen: true})); err != nil {
			return "", 0, err
		}
		for off := 0; off < len(text); {
			end := min(len(text), off+1+c.rng.IntN(20))
			ok := c.send(act{op: history.Stdin, box: box, step: step, request: text, do: func(ctx context.Context, id string) (string, int64, error) {
				r, err := c.Commands.WriteStdin(ctx, connect.NewRequest(&dsecv1.WriteStdinRequest{Sandbox: id, Id: step, Offset: int64(off), Data: []byte(text[off:end]), Eof: end == len(text)}))
				if err != nil {
					return "", 0, lostToo(err)
				}
				return "taken", r.Msg.GetTaken(), nil
			}})
			if !ok {
				break
			}
			off = end
		}
		return inner.do(ctx, id)
	}}
}

// signalled starts what never ends by itself, sends one signal under a key, and waits for the end.
func (c *simClient) signalled(box, step string) act {
	hang := c.command(box, step, "hang")
	signal := act{op: history.Signal, box: box, step: "signal-" + step, request: "TERM " + step, do: func(ctx context.Context, id string) (string, int64, error) {
		_, err := c.Commands.Signal(ctx, connect.NewRequest(&dsecv1.SignalRequest{Sandbox: id, Id: step, Name: "TERM", Step: "signal-" + step}))
		return "ok", 0, err
	}}
	return act{op: history.Command, box: box, step: step, request: "hang", private: true, do: func(ctx context.Context, id string) (string, int64, error) {
		if _, err := c.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: id, Id: step, Argv: []string{"hang"}, Restore: classed(step).Restore, Check: classed(step).Check})); err != nil {
			return "", 0, err
		}
		if !c.send(signal) { // it may never have been sent: another, under another key, ends it
			_, err := c.Commands.Signal(ctx, connect.NewRequest(&dsecv1.SignalRequest{Sandbox: id, Id: step, Name: "KILL"}))
			if err != nil && connect.CodeOf(err) != connect.CodeFailedPrecondition && connect.CodeOf(err) != connect.CodeNotFound {
				return "", 0, err
			}
			return "", 0, connect.NewError(connect.CodeUnavailable, errors.New("was given up"))
		}
		if c.chance(2) {
			c.old = append(c.old, signal)
		}
		return hang.do(ctx, id)
	}}
}

// session opens the client's session, which others join, and runs a command in it.
func (c *simClient) session(box, step string) act {
	name := fmt.Sprint("s", c.rng.IntN(2))
	c.send(act{op: history.Session, box: box, step: name, request: "open", do: func(ctx context.Context, id string) (string, int64, error) {
		_, err := c.Commands.OpenSession(ctx, connect.NewRequest(&dsecv1.OpenSessionRequest{Sandbox: id, Name: name}))
		return "open", 0, err
	}})
	text := "echo in " + name
	return c.start(box, &dsecv1.StartRequest{Id: step, Session: name, Text: text}, name+": "+text)
}

// body sends a stream in pieces, and breaks it off now and then.
func body[Q, S any](c *simClient, st *connect.ClientStreamForClient[Q, S], cancel context.CancelFunc, head *Q, put func(*Q, []byte), data []byte) (*S, error) {
	breaks := !c.s.calmed() && c.chance(10)
	for m := head; ; m = new(Q) {
		n := min(len(data), 1+c.rng.IntN(900))
		put(m, data[:n])
		if st.Send(m) != nil {
			break // the answer says why
		}
		if data = data[n:]; len(data) == 0 {
			break
		}
		if breaks {
			cancel()
			return nil, connect.NewError(connect.CodeUnavailable, errors.New("broken off"))
		}
	}
	r, err := st.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func (c *simClient) write(op history.Op, box, file, step, text string) act {
	start := int64(0)
	if op == history.Append {
		start = -1
	}
	return act{op: op, box: box, step: step, request: fmt.Sprint(op, " ", file, " ", text), do: func(ctx context.Context, id string) (string, int64, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		head := &dsecv1.WriteRequest{At: at(id, file), Step: step, Parents: true, Append: op == history.Append, StartOffset: start}
		_, err := body(c, c.Files.Write(ctx), cancel, head, func(m *dsecv1.WriteRequest, b []byte) { m.Data = b }, []byte(text))
		return "ok", 0, err
	}}
}

func (c *simClient) upload(box, dir, step string) act {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range 1 + c.rng.IntN(3) {
		text := fmt.Sprintf("%s file %d", step, i)
		_ = w.WriteHeader(&tar.Header{Name: fmt.Sprint("u", i), Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg})
		_, _ = io.WriteString(w, text)
	}
	_ = w.Close()
	return act{op: history.Upload, box: box, step: step, request: "upload " + dir + " " + step, do: func(ctx context.Context, id string) (string, int64, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		_, err := body(c, c.Files.Upload(ctx), cancel, &dsecv1.UploadRequest{At: at(id, dir), Step: step, Parents: true}, func(m *dsecv1.UploadRequest, b []byte) { m.Data = b }, b.Bytes())
		return "ok", 0, err
	}}
}

func (c *simClient) records(ctx context.Context, q *dsecv1.ReadLogRequest) (all []*dsecv1.LogRecord, err error) {
	st, err := c.Logs.Read(ctx, connect.NewRequest(q))
	if err != nil {
		return nil, err
	}
	defer st.Close()
	for st.Receive() {
		all = append(all, st.Msg().GetRecords()...)
	}
	return all, st.Err()
}

// readLog notes what the log of a box says now.
func (c *simClient) readLog(box string) {
	c.send(act{op: history.Read, box: box, step: "log", request: "read", do: func(ctx context.Context, _ string) (string, int64, error) {
		log, err := c.records(ctx, &dsecv1.ReadLogRequest{Job: "j", Key: box})
		return history.LogDigest(log), int64(len(log)), err
	}})
}

// finalLog is what is left of a box: its sandbox, and all records with their octets. It waits for commands to end.
func (c *simClient) finalLog(box string) (*dsecv1.Sandbox, []*dsecv1.LogRecord) {
	var last error
	for range 60 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		log, err := c.records(ctx, &dsecv1.ReadLogRequest{Job: "j", Key: box, Output: true})
		if err == nil && len(log) > 0 {
			for _, id := range slices.Backward(creations(log)) { // the last may be that of a restore that was given up
				var r *connect.Response[dsecv1.GetResponse]
				if r, err = c.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: id})); err == nil {
					cancel()
					return r.Msg.GetSandbox(), log
				}
				if connect.CodeOf(err) != connect.CodeNotFound {
					break
				}
			}
		}
		cancel()
		if connect.CodeOf(err) == connect.CodeNotFound {
			return nil, nil
		}
		last = err
		pause(context.Background(), 500*time.Millisecond)
	}
	c.s.t.Errorf("read the log of %s: %v", box, last)
	return nil, nil
}

func creations(log []*dsecv1.LogRecord) (ids []string) {
	for _, r := range log {
		if r.GetKind() == "create" {
			ids = append(ids, r.GetStep())
		}
	}
	return ids
}

// ids are the sandboxes that clients were told of.
func (c *simClient) ids(box string) map[string]bool {
	ids := map[string]bool{}
	for _, call := range c.s.rec.History().Calls {
		if call.Box == box && call.ID != "" {
			ids[call.ID] = true
		}
	}
	return ids
}
