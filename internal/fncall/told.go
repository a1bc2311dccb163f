package fncall

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Told is a record of a stream of calls as a reader is told it.
type Told struct {
	Kind     string        // call | call_end; "" of the stream's first record
	Request  proto.Message // of a call, without its programs, which are the record's input; nil where its hash alone was kept
	Hash     []byte        // then: the SHA-256 of the request
	Response proto.Message // of a call_end
}

// Teller reads the records of a stream of calls in their order.
type Teller struct {
	key  string
	kind kind
}

// Tell reads one record. An answer whose call was not told before is read by before, which gives the record ahead of it.
func (t *Teller) Tell(r *trajectory.Record, before func() (*trajectory.Record, error)) (*Told, error) {
	switch {
	case r.Kind == trajectory.KindCreate:
		return &Told{}, nil
	case r.Kind == trajectory.KindStepStart && len(r.Payload) >= 2 && r.Payload[0] == tagAsked:
		t.key, t.kind = r.Step, kind(r.Payload[1])
		request, _ := t.messages()
		rest := r.Payload[2:]
		if request == nil {
			break
		}
		if r.Input != nil && r.Input.Kept == trajectory.KeptHash {
			return &Told{Kind: "call", Hash: rest}, nil
		}
		if err := proto.Unmarshal(rest, request); err != nil {
			return nil, fmt.Errorf("record %d: request: %w: %w", r.Seq, err, sandbox.ErrLost)
		}
		return &Told{Kind: "call", Request: request}, nil
	case r.Kind == trajectory.KindStepEnd && len(r.Payload) >= 33 && r.Payload[0] == tagAnswered:
		if t.key != r.Step {
			p, err := before()
			if err != nil {
				return nil, fmt.Errorf("record %d: its call: %w", r.Seq, err)
			}
			if p.Step != r.Step || len(p.Payload) < 2 || p.Payload[0] != tagAsked {
				break
			}
			t.key, t.kind = p.Step, kind(p.Payload[1])
		}
		_, response := t.messages()
		if response == nil {
			break
		}
		if err := proto.Unmarshal(r.Payload[33:], response); err != nil {
			return nil, fmt.Errorf("record %d: answer: %w: %w", r.Seq, err, sandbox.ErrLost)
		}
		return &Told{Kind: "call_end", Response: response}, nil
	}
	return nil, fmt.Errorf("record %d: is no record of a call: %w", r.Seq, sandbox.ErrLost)
}

func (t *Teller) messages() (request, response proto.Message) {
	switch t.kind {
	case kindRun:
		return &dsecv1.RunCallRequest{}, &dsecv1.RunCallResponse{}
	case kindBatch:
		return &dsecv1.RunCallBatchRequest{}, &dsecv1.RunCallBatchResponse{}
	case kindPair:
		return &dsecv1.RunCallPairRequest{}, &dsecv1.RunCallPairResponse{}
	}
	return nil, nil
}

// Quiet takes what programs printed and left out of an answer.
func Quiet(response proto.Message) {
	still := func(all ...*dsecv1.CallResult) {
		for _, r := range all {
			if r != nil {
				r.Stdout, r.StdoutRaw, r.Stderr, r.StderrRaw, r.Files = "", nil, "", nil, nil
			}
		}
	}
	switch m := response.(type) {
	case *dsecv1.RunCallResponse:
		still(m.Compile, m.Result)
	case *dsecv1.RunCallBatchResponse:
		still(append(m.Results, m.Compile)...)
	case *dsecv1.RunCallPairResponse:
		still(m.ProgramCompile, m.InteractorCompile, m.Program, m.Interactor)
	}
}
