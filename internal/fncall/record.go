package fncall

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Log is what the engine needs of the host's log.
type Log interface {
	Append(ctx context.Context, id trajectory.ID, recs []trajectory.Record, d sandbox.Durability) (first uint64, err error)
	Read(ctx context.Context, id trajectory.ID, q trajectory.Query) (recs []trajectory.Record, next uint64, err error)
	NewInputWriter() *trajectory.InputWriter
}

// Stream begins the key of the trajectories that calls are recorded in: one for a project and job, and one a day for those without a job,
// so that the day as a whole can expire. No sandbox can have such a key.
const Stream = "!fncall"

// streamOf is the trajectory of a job's calls at a time.
func streamOf(project, job string, at time.Time) trajectory.ID {
	id := trajectory.ID{Project: project, Job: job, Key: Stream}
	if job == noJob {
		id.Key += "/" + at.UTC().Format(time.DateOnly)
	}
	return id
}

// StreamDay is the day of a stream of calls without a job, or false.
func StreamDay(id trajectory.ID) (day time.Time, ok bool) {
	text, ok := strings.CutPrefix(id.Key, Stream+"/")
	if !ok {
		return day, false
	}
	day, err := time.Parse(time.DateOnly, text)
	return day, err == nil
}

const noJob = "-"

// Tags of payloads: what was asked, without the programs, which are the record's input; and what was answered, behind the digest of what
// was asked. docs/fncall.md describes both.
const (
	tagAsked    = 'q'
	tagAnswered = 'a'
)

// kind of a request; part of payloads.
type kind byte

const (
	kindRun   kind = 'r'
	kindBatch kind = 'b'
	kindPair  kind = 'p'
)

// asked is a request, as what keys and records need of it.
type asked struct {
	kind     kind
	job, key string
	hash     string // of the client's own request, as the gateway had it
	hashOnly bool
	n        int // runs
	request  proto.Message
	programs []*dsecv1.CallProgram
}

var deterministic = proto.MarshalOptions{Deterministic: true}

// records writes calls down and knows those with a key of their own.
type records struct {
	log Log

	mu     sync.Mutex
	opened map[trajectory.ID]bool
	known  map[trajectory.ID]map[string]place // of streams that were read or written
	n      int
}

// place is where the answer of a key lies.
type place struct {
	seq    uint64
	digest [32]byte
}

// maxKeys bounds the keys that are known at once, with about 200 octets each.
const maxKeys = 2_000_000

func newRecords(l Log) *records {
	return &records{log: l, opened: map[trajectory.ID]bool{}, known: map[trajectory.ID]map[string]place{}}
}

func (a *asked) digest(project string) ([32]byte, []byte, error) {
	b, err := deterministic.Marshal(a.request)
	if err != nil {
		return [32]byte{}, nil, fmt.Errorf("call: %w", err)
	}
	h := sha256.New()
	h.Write([]byte{byte(a.kind)})
	if a.hash != "" { // what the client said: an environment may have a new version meanwhile
		h.Write([]byte(a.hash))
	} else {
		h.Write(b)
	}
	return [32]byte(h.Sum(nil)), b, nil
}

// find gives the recorded answer of a key; nil when there is none.
func (r *records) find(ctx context.Context, project string, a *asked, digest [32]byte) ([]byte, error) {
	if r.log == nil {
		return nil, nil
	}
	now := time.Now()
	streams := []trajectory.ID{streamOf(project, a.job, now)}
	if a.job == noJob {
		streams = append(streams, streamOf(project, a.job, now.AddDate(0, 0, -1)))
	}
	for _, id := range streams {
		if err := r.load(ctx, id); err != nil {
			return nil, err
		}
		r.mu.Lock()
		p, ok := r.known[id][a.key]
		r.mu.Unlock()
		if !ok {
			continue
		}
		if p.digest != digest {
			return nil, fmt.Errorf("its key was used for another request: %w", sandbox.ErrExists)
		}
		recs, _, err := r.log.Read(ctx, id, trajectory.Query{From: p.seq, Limit: 1})
		if err != nil || len(recs) != 1 || len(recs[0].Payload) < 33 {
			return nil, fmt.Errorf("read its recorded answer: %w", errors.Join(err, sandbox.ErrLost))
		}
		return recs[0].Payload[33:], nil
	}
	return nil, nil
}

// load reads the keys of a stream, once.
func (r *records) load(ctx context.Context, id trajectory.ID) error {
	r.mu.Lock()
	_, have := r.known[id]
	r.mu.Unlock()
	if have {
		return nil
	}
	keys := map[string]place{}
	q := trajectory.Query{Kinds: trajectory.Kinds(trajectory.KindStepEnd)}
	there := false
	for {
		recs, next, err := r.log.Read(ctx, id, q)
		for _, rec := range recs {
			if len(rec.Payload) >= 33 && rec.Payload[0] == tagAnswered && !madeKey(rec.Step) {
				keys[rec.Step] = place{rec.Seq, [32]byte(rec.Payload[1:33])}
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
		case errors.Is(err, sandbox.ErrLost) && next > q.From: // what the disk lost is skipped
			q.From = next
			continue
		case err != nil:
			return fmt.Errorf("read the calls of job %s: %w", id.Job, err)
		case next > max(q.From, 1):
			there = true
			q.From = next
			continue
		}
		break
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, have := r.known[id]; !have {
		r.known[id] = keys
		r.n += len(keys)
		r.opened[id] = r.opened[id] || there
	}
	return nil
}

// Forget drops what is known of streams that were removed from the log.
func (e *Engine) Forget(gone func(trajectory.ID) bool) {
	r := e.records
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, keys := range r.known {
		if gone(id) {
			r.n -= len(keys)
			delete(r.known, id)
		}
	}
	for id := range r.opened {
		if gone(id) {
			delete(r.opened, id)
		}
	}
}

// add records a call and its answer, next to each other. own: the key is the client's.
func (r *records) add(ctx context.Context, project string, a *asked, digest [32]byte, answer []byte, own bool) error {
	if r.log == nil {
		return nil
	}
	id := streamOf(project, a.job, time.Now())
	r.mu.Lock()
	full := own && r.n >= maxKeys
	opened := r.opened[id]
	r.mu.Unlock()
	if full {
		return fmt.Errorf("call %s: %d keys are kept already: %w", a.key, maxKeys, sandbox.ErrExhausted)
	}
	request, programs, err := a.split()
	if err != nil {
		return err
	}
	input, err := r.keep(programs, a.hashOnly)
	if err != nil {
		return err
	}
	defer input.Release()
	if a.hashOnly {
		sum := sha256.Sum256(request)
		request = sum[:]
	}
	recs := []trajectory.Record{
		{Kind: trajectory.KindStepStart, Step: a.key, Input: input, Payload: append([]byte{tagAsked, byte(a.kind)}, request...)},
		{Kind: trajectory.KindStepEnd, Step: a.key, Payload: append(append([]byte{tagAnswered}, digest[:]...), answer...)},
	}
	if !opened {
		_, err := r.log.Append(ctx, id, []trajectory.Record{{Kind: trajectory.KindCreate, Payload: []byte{tagAsked}}}, sandbox.DurabilityProcess)
		if err != nil && !errors.Is(err, sandbox.ErrExists) {
			return fmt.Errorf("record the calls of job %s: %w", a.job, err)
		}
		r.mu.Lock()
		r.opened[id] = true
		r.mu.Unlock()
	}
	first, err := r.log.Append(ctx, id, recs, sandbox.DurabilityProcess)
	if err != nil {
		return fmt.Errorf("record call %s: %w", a.key, err)
	}
	if own {
		r.mu.Lock()
		if r.known[id] == nil {
			r.known[id] = map[string]place{}
		}
		if _, have := r.known[id][a.key]; !have {
			r.n++
		}
		r.known[id][a.key] = place{first + 1, digest}
		r.mu.Unlock()
	}
	return nil
}

// split takes the programs out of a request.
func (a *asked) split() (request, programs []byte, err error) {
	for _, p := range a.programs {
		b, err := deterministic.Marshal(p)
		if err != nil {
			return nil, nil, err
		}
		programs = append(programs, b...)
	}
	rest := proto.Clone(a.request)
	switch q := rest.(type) {
	case *dsecv1.RunCallRequest:
		q.Program = nil
		hide(q.GetInput())
	case *dsecv1.RunCallBatchRequest:
		q.Program = nil
		for _, in := range q.GetInputs() {
			hide(in)
		}
	case *dsecv1.RunCallPairRequest:
		for _, s := range []*dsecv1.CallSide{q.GetProgram(), q.GetInteractor()} {
			if s != nil {
				s.Program = nil
				hide(s.Input)
			}
		}
	}
	request, err = deterministic.Marshal(rest)
	if err == nil && len(request) > trajectory.MaxPayload-64 {
		return nil, nil, fmt.Errorf("inputs have %d octets, at most %d of a call; keep the longer ones as files: %w", len(request), trajectory.MaxPayload, sandbox.ErrInvalid)
	}
	return request, programs, err
}

// hide takes the values of secret variables out of what is recorded.
func hide(in *dsecv1.CallInput) {
	for _, v := range in.GetEnv() {
		if v.GetSecret() {
			v.Value, v.ValueRaw = "", nil
		}
	}
}

// keep makes the input of a record: in the log by content, or as its hash alone.
func (r *records) keep(data []byte, hashOnly bool) (*trajectory.Input, error) {
	if hashOnly {
		return &trajectory.Input{Kept: trajectory.KeptHash, Size: int64(len(data)), SHA256: sha256.Sum256(data)}, nil
	}
	if len(data) <= trajectory.MaxInline {
		return trajectory.NewInput(data), nil
	}
	w := r.log.NewInputWriter()
	if _, err := w.Write(data); err != nil {
		w.Abort()
		return nil, fmt.Errorf("keep a call's program: %w", err)
	}
	in, err := w.Finish(sandbox.DurabilityProcess)
	if err != nil {
		return nil, fmt.Errorf("keep a call's program: %w", err)
	}
	return in, nil
}
