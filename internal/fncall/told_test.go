package fncall

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Whatever a record holds, reading it neither panics nor tells something that is none.
func FuzzTell(f *testing.F) {
	request, err := proto.Marshal(&dsecv1.RunCallRequest{Job: "j"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint8(trajectory.KindStepStart), uint8(trajectory.KeptInline), append([]byte{tagAsked, byte(kindRun)}, request...))
	f.Add(uint8(trajectory.KindStepStart), uint8(trajectory.KeptHash), append([]byte{tagAsked, byte(kindPair)}, make([]byte, 32)...))
	f.Add(uint8(trajectory.KindStepEnd), uint8(0), append([]byte{tagAnswered}, make([]byte, 32)...))
	f.Add(uint8(trajectory.KindStepEnd), uint8(0), []byte{tagAnswered})
	f.Add(uint8(trajectory.KindCreate), uint8(0), []byte{})
	f.Fuzz(func(t *testing.T, kind, kept uint8, payload []byte) {
		r := &trajectory.Record{Seq: 2, Kind: trajectory.Kind(kind), Step: "k", Payload: payload, Input: &trajectory.Input{Kept: trajectory.Kept(kept)}}
		var teller Teller
		for range 2 {
			told, err := teller.Tell(r, func() (*trajectory.Record, error) { return r, nil })
			switch {
			case err != nil && !errors.Is(err, sandbox.ErrLost):
				t.Fatal(err)
			case err == nil && told.Kind == "call" && told.Request == nil && told.Hash == nil, err == nil && told.Kind == "call_end" && told.Response == nil:
				t.Fatalf("%+v", told)
			case err == nil:
				Quiet(told.Response)
			}
		}
	})
}
