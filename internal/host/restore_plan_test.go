package host

import (
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Whatever lies in a trajectory, planning a restore of it neither panics nor hangs.
func FuzzPlan(f *testing.F) {
	create := encode(tagCreate, &dsecv1.HostCreateRequest{Spec: &dsecv1.Spec{Layers: []string{"l"}, Env: []*dsecv1.EnvVar{{Name: "A", Value: "b", Secret: true}}}})
	f.Add(uint8(trajectory.KindRedo), "c", uint32(1), encode(tagRedo, &dsecv1.Redo{State: redoEnded, TakesOver: true, Outcome: &dsecv1.Outcome{Kind: "exited"}}))
	f.Add(uint8(trajectory.KindRedo), "", uint32(1), encode(tagRestored, &dsecv1.Restored{Id: "x"}))
	f.Add(uint8(trajectory.KindEvent), "", uint32(1), encode(tagRecalled, &dsecv1.Recalled{Host: "h"}))
	f.Add(uint8(trajectory.KindState), "hlost01-aaaaaaaaaaaaaaaa", uint32(2), create)
	f.Add(uint8(trajectory.KindVoid), "hlost01-aaaaaaaaaaaaaaaa", uint32(2), []byte{})
	f.Add(uint8(trajectory.KindStepEnd), "c", uint32(0), encode(tagResult, &dsecv1.LogRecord{Step: "sha256:1", Outcome: &dsecv1.Outcome{Kind: "exited"}}))
	f.Add(uint8(trajectory.KindStepStart), "c", uint32(0), encode(tagSnapshot, &dsecv1.SnapshotRequest{}))
	f.Add(uint8(trajectory.KindSessionOpen), "s", uint32(0), encode(tagSession, &dsecv1.OpenSessionRequest{Shell: "/bin/sh"}))
	f.Fuzz(func(t *testing.T, kind uint8, name string, epoch uint32, payload []byte) {
		r := trajectory.Record{Kind: trajectory.Kind(kind), Step: name, Epoch: epoch, Payload: payload, Wall: time.Unix(1, 0)}
		state := trajectory.Record{Kind: trajectory.KindState, Epoch: epoch, Payload: encode(tagState, &dsecv1.LogRecord{State: "running", Data: []byte("h")})}
		command := trajectory.Record{Kind: trajectory.KindStepStart, Step: "c", Epoch: epoch, Payload: encode(tagCommand, &dsecv1.StartRequest{Argv: []string{"a"}})}
		first := trajectory.Record{Kind: trajectory.KindCreate, Step: "hlost01-bbbbbbbbbbbbbbbb", Payload: create}
		h := &Host{cfg: Config{ID: testHost}, secret: make([]byte, 32)}
		pl := &planner{p: &plan{}, h: h, o: &order{secrets: map[string]string{"A": "b"}}, open: map[string]*deed{}, running: map[*deed]bool{},
			sessions: map[string]bool{}, snaps: map[*deed]bool{}, secrets: map[string]bool{}}
		st := &story{history: newHistory(), loose: map[string]bool{}}
		var seq uint64
		for _, x := range []trajectory.Record{first, state, command, r, r, state, r, command, r} {
			seq++
			x.Seq = seq
			_ = pl.record(&x)
			_ = st.add(&x)
		}
		pl.decide("")
		pl.p.asks()
		if st.create != nil {
			_, _ = h.retell(trajectory.ID{}, st)
		}
	})
}
