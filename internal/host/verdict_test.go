package host

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func reward(key string, v float64) *dsecv1.Verdict {
	m, _ := structpb.NewStruct(map[string]any{"grader": "g", "tests": []any{1.0, "two"}})
	return &dsecv1.Verdict{Key: key, Reward: &v, Metadata: m}
}

func TestVerdictIsAttachedOnceUnderItsKey(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	b.mustStart(t, "c", "cat")
	b.mustWait(t, "c")
	ctx := context.Background()
	judge := func(v *dsecv1.Verdict) bool {
		t.Helper()
		_, existed, err := r.box(b.id).judge(ctx, v)
		if err != nil {
			t.Fatal(err)
		}
		return existed
	}
	if judge(reward("first", 0.5)) || !judge(reward("first", 0.5)) {
		t.Fatal("a resend was recorded again, or the first was known")
	}
	_, _, err := b.judge(ctx, reward("first", 0.75))
	wantErr(t, err, sandbox.ErrExists, "first")
	r.mustStop(b)
	if judge(reward("second", 1)) { // after its end
		t.Fatal("existed")
	}
	for _, bad := range []*dsecv1.Verdict{nil, {}, {Key: "a b", Reward: new(float64)}} {
		_, _, err := b.judge(ctx, bad)
		wantErr(t, err, sandbox.ErrInvalid)
	}
	big, _ := structpb.NewStruct(map[string]any{"x": strings.Repeat("y", maxMetadata)})
	_, _, err = b.judge(ctx, &dsecv1.Verdict{Metadata: big})
	wantErr(t, err, sandbox.ErrInvalid, "metadata")
	for range 2 {
		p := r.box(b.id).proto()
		if p.Verdict.GetReward() != 1 || p.Verdict.GetKey() != "second" || p.Verdict.GetSeq() == 0 || p.Verdict.GetMetadata().GetFields()["grader"].GetStringValue() != "g" {
			t.Fatalf("verdict %v", p.Verdict)
		}
		if s := p.Summary; s.GetSteps() != 1 || s.GetCommands() != 1 || s.GetFailed() != 0 || s.GetClass() != "none" {
			t.Fatalf("summary %v", s)
		}
		r.restart()
		if !judge(reward("first", 0.5)) {
			t.Fatal("a restart forgot a verdict")
		}
	}
	n := 0
	for _, rec := range r.records(r.box(b.id)) {
		if rec.Kind == trajectory.KindVerdict {
			n++
		}
	}
	if n != 2 {
		t.Fatalf("%d verdicts are recorded", n)
	}
}

func TestSummaryCountsStepsAndRetries(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	for _, c := range []string{"a", "b"} {
		b.mustStart(t, c, "cat")
		b.mustWait(t, c)
	}
	b.mu.Lock()
	b.retries = 3
	b.steps["b"].outcome.Code = 1
	b.steps["b"].outcome.Usage = sandbox.Usage{CPU: time.Second, MemoryPeak: 1 << 40}
	b.mu.Unlock()
	r.mustStop(b)
	s := b.proto().Summary
	if s.GetSteps() != 2 || s.GetFailed() != 1 || s.GetRetries() != 3 || s.GetCpuUs() < 1e6 || s.GetMemoryPeak() != 1<<40 {
		t.Fatalf("%v", s)
	}
}

func TestWalkTellsWhatWasDone(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	ctx := context.Background()
	for _, id := range []string{"a", "b"} {
		if _, _, err := b.start(ctx, &sandbox.Command{ID: id, Argv: []string{"cat"}, Stdin: []byte("octets of " + id)}); err != nil {
			t.Fatal(err)
		}
		b.mustWait(t, id)
	}
	walk := func(limit int64) (all []*dsecv1.Step) {
		t.Helper()
		if err := r.box(b.id).walk(ctx, limit, true, func(s *dsecv1.Step) error { all = append(all, s); return nil }); err != nil {
			t.Fatal(err)
		}
		return all
	}
	check := func(all []*dsecv1.Step) {
		t.Helper()
		if len(all) != 2 || all[0].Id != "a" || string(all[1].Stdout) != "octets of b" || all[0].Kind != "command" || all[0].State != "ended" ||
			len(all[0].RequestHash) != 64 || all[0].RequestHash == all[1].RequestHash || all[0].InputSize != 11 || !strings.Contains(all[0].RequestJson, "cat") {
			t.Fatalf("%v", all)
		}
	}
	check(walk(stepOutput))
	if all := walk(4); string(all[0].Stdout) != "octe" {
		t.Fatalf("%v", all)
	}
	r.mustStop(b)
	check(walk(stepOutput))
	r.restart()
	check(walk(stepOutput))
}

func TestExportRows(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	ctx := context.Background()
	for i, key := range []string{"k0", "k1", "k2"} {
		b := r.create(key, func(s *dsecv1.Spec) { s.Labels = map[string]string{"fold": key} })
		if _, _, err := b.start(ctx, &sandbox.Command{ID: "s", Argv: []string{"cat"}, Stdin: []byte("<é>\xff"[:4+i%2])}); err != nil {
			t.Fatal(err)
		}
		b.mustWait(t, "s")
		if i > 0 {
			if _, _, err := b.judge(ctx, reward("", float64(i))); err != nil {
				t.Fatal(err)
			}
		}
		r.mustStop(b)
	}
	var left int64
	export := func(q *dsecv1.ExportRequest) (rows []map[string]any) {
		t.Helper()
		var err error
		left, err = r.h.export(ctx, q, func(l string) error {
			if strings.Contains(l, "\n") {
				t.Errorf("row with a newline: %q", l)
			}
			var m map[string]any
			if err := json.Unmarshal([]byte(l), &m); err != nil {
				t.Errorf("%q: %v", l, err)
			}
			rows = append(rows, m)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return rows
	}
	for _, c := range []struct {
		filter *dsecv1.TrajectoryFilter
		want   []string
		left   int64
	}{
		{&dsecv1.TrajectoryFilter{Job: "j"}, []string{"k0", "k1", "k2"}, 0},
		{&dsecv1.TrajectoryFilter{Job: "other"}, nil, 0},
		{&dsecv1.TrajectoryFilter{Labels: map[string]string{"fold": "k1"}}, []string{"k1"}, 0},
		{&dsecv1.TrajectoryFilter{Reward: ">1"}, []string{"k2"}, 0},
		{&dsecv1.TrajectoryFilter{Reward: "<= 1"}, []string{"k1"}, 0},
		{&dsecv1.TrajectoryFilter{Reward: "none", Ended: true}, []string{"k0"}, 0},
		{&dsecv1.TrajectoryFilter{Reward: "any"}, []string{"k1", "k2"}, 0},
		{&dsecv1.TrajectoryFilter{WithoutLabels: []string{"other"}}, []string{"k0", "k1", "k2"}, 0},
		{&dsecv1.TrajectoryFilter{WithoutLabels: []string{"other", "fold"}}, nil, 3},
		{&dsecv1.TrajectoryFilter{WithoutLabels: []string{"fold"}, Reward: "any"}, nil, 2}, // what else leaves out is not counted
	} {
		for _, rows := range []string{"steps", "trajectories"} {
			var got []string
			for _, m := range export(&dsecv1.ExportRequest{Filter: c.filter, Rows: rows}) {
				got = append(got, m["key"].(string))
			}
			slices.Sort(got)
			if d := cmp.Diff(c.want, got); d != "" || left != c.left {
				t.Errorf("%v %s: %d left out, want %d: %s", c.filter, rows, left, c.left, d)
			}
		}
	}
	row := export(&dsecv1.ExportRequest{Filter: &dsecv1.TrajectoryFilter{Labels: map[string]string{"fold": "k2"}}})[0]
	if out := row["stdout"].(map[string]any); out["text"] != "<é>" || out["truncated"] != false || row["reward"] != 2.0 || row["metadata"].(map[string]any)["grader"] != "g" {
		t.Errorf("%v", row)
	}
	row = export(&dsecv1.ExportRequest{Filter: &dsecv1.TrajectoryFilter{Labels: map[string]string{"fold": "k1"}}})[0]
	if out := row["stdout"].(map[string]any); out["base64"] != "PMOpPv8=" {
		t.Errorf("%v", row)
	}
	row = export(&dsecv1.ExportRequest{Filter: &dsecv1.TrajectoryFilter{Labels: map[string]string{"fold": "k2"}}, OutputLimit: 2})[0]
	if out := row["stdout"].(map[string]any); out["text"] != "<" || out["shown"] != 1.0 || out["octets"] != 4.0 || out["truncated"] != true {
		t.Errorf("%v", row)
	}
	row = export(&dsecv1.ExportRequest{Filter: &dsecv1.TrajectoryFilter{Labels: map[string]string{"fold": "k1"}}, Rows: "trajectories"})[0]
	if row["state"] != "stopped" || row["summary"].(map[string]any)["steps"] != "1" {
		t.Errorf("%v", row)
	}
	for _, q := range []*dsecv1.ExportRequest{{Rows: "columns"}, {OutputLimit: -2}, {Filter: &dsecv1.TrajectoryFilter{Reward: "> x"}}, {Filter: &dsecv1.TrajectoryFilter{Reward: "1"}}} {
		_, err := r.h.export(ctx, q, func(string) error { return nil })
		wantErr(t, err, sandbox.ErrInvalid)
	}
}

func TestRemoveLogs(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	ctx := context.Background()
	b := r.create("k")
	_, err := r.h.removeLogs(ctx, "", 0)
	wantErr(t, err, sandbox.ErrInvalid)
	_, err = r.h.removeLogs(ctx, "j", 0)
	wantErr(t, err, sandbox.ErrState, "live")
	r.mustStop(b)
	if n, err := r.h.removeLogs(ctx, "", time.Hour); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := r.h.removeLogs(ctx, "j", 0); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	_, err = r.h.get(ctx, string(b.id))
	wantErr(t, err, sandbox.ErrNotFound)
	_, _, err = r.h.create(ctx, createRequest("k"))
	wantErr(t, err, sandbox.ErrState, "expired")
	loose := r.create("l", func(s *dsecv1.Spec) { s.Job = "-" })
	r.mustStop(loose)
	if n, err := r.h.removeLogs(ctx, "-", 0); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := r.log.Stat(loose.traj); err == nil {
		t.Fatal("its records are there")
	}
}

// The clients compute the same hashes: the vectors are theirs too.
func TestRequestHash(t *testing.T) {
	data, err := os.ReadFile("../../client/testdata/request_hash.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name    string
		Request json.RawMessage
		Stdin   string
		Cwd     string
		User    string
		Hash    string
	}
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		q := &dsecv1.StartRequest{}
		if err := unmarshalJSON(v.Request, q); err != nil {
			t.Fatal(err)
		}
		var in *trajectory.Input
		if v.Stdin != "" {
			in = trajectory.NewInput([]byte(v.Stdin))
		}
		if q.Session == "" {
			if q.Cwd == "" && q.CwdRaw == nil {
				q.Cwd = v.Cwd
			}
			if q.User == "" {
				q.User = v.User
			}
		}
		if q.OutputCap == 0 {
			q.OutputCap = sandbox.DefaultOutputCap
		}
		if got := requestHash(q, in); got != v.Hash {
			t.Errorf("%s: %s, want %s", v.Name, got, v.Hash)
		}
	}
}

func FuzzReward(f *testing.F) {
	f.Add(">=0.5", 1.0)
	f.Add("none", 0.0)
	f.Fuzz(func(t *testing.T, s string, v float64) {
		ok, err := rewardFilter(s)
		if err == nil && ok != nil {
			ok(nil)
			ok(&dsecv1.Verdict{})
			ok(&dsecv1.Verdict{Reward: &v})
		}
	})
}

func unmarshalJSON(b []byte, m *dsecv1.StartRequest) error { return protojson.Unmarshal(b, m) }
