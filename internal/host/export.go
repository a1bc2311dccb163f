package host

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// row is what every row of an export says of its trajectory: docs/format/export.md.
type row struct {
	Row         string            `json:"row"` // step | trajectory
	Project     string            `json:"project"`
	Job         string            `json:"job"`
	Key         string            `json:"key"`
	Sandbox     string            `json:"sandbox"`
	Labels      map[string]string `json:"labels,omitempty"`
	Environment string            `json:"environment,omitempty"`
	Layers      []string          `json:"layers,omitempty"`
	Reward      *float64          `json:"reward,omitempty"`
	Metadata    json.RawMessage   `json:"metadata,omitempty"`
}

type trajectoryRow struct {
	row
	State   string          `json:"state"`
	Cause   json.RawMessage `json:"cause,omitempty"`
	Created string          `json:"created,omitempty"`
	Ended   string          `json:"ended,omitempty"`
	Summary json.RawMessage `json:"summary,omitempty"`
}

type stepRow struct {
	row
	Seq     int64           `json:"seq"`
	Step    string          `json:"step"`
	Kind    string          `json:"kind"`
	State   string          `json:"state"`
	Started string          `json:"started,omitempty"`
	Session string          `json:"session,omitempty"`
	Opaque  bool            `json:"opaque,omitempty"`
	Request json.RawMessage `json:"request,omitempty"`
	Outcome json.RawMessage `json:"outcome,omitempty"`
	Input   *inputRow       `json:"input,omitempty"`
	Layer   string          `json:"layer,omitempty"`
	Stdout  *outputRow      `json:"stdout,omitempty"`
	Stderr  *outputRow      `json:"stderr,omitempty"`
}

type inputRow struct {
	Octets int64  `json:"octets"`
	SHA256 string `json:"sha256"`
	Kept   string `json:"kept"`
}

// outputRow is a stream: text where it is UTF-8, else base64.
type outputRow struct {
	Text      string `json:"text,omitempty"`
	Base64    string `json:"base64,omitempty"`
	Octets    int64  `json:"octets"` // that the command wrote
	Shown     int64  `json:"shown"`  // that are here, from the first one on
	Truncated bool   `json:"truncated"`
}

var rowForm = protojson.MarshalOptions{UseProtoNames: true}

// raw is a message as JSON; nil for none.
func raw[M proto.Message](m M, there bool) json.RawMessage {
	if !there {
		return nil
	}
	b, err := rowForm.Marshal(m)
	if err != nil {
		return nil // text that is not UTF-8, which the log keeps out
	}
	var out bytes.Buffer
	if json.Compact(&out, b) != nil {
		return nil
	}
	return out.Bytes()
}

func rowOf(kind string, p *dsecv1.Sandbox) row {
	r := row{Row: kind, Project: p.GetProject(), Job: p.GetJob(), Key: p.GetKey(), Sandbox: p.GetId(), Labels: p.GetLabels(),
		Environment: p.GetEnvironment(), Layers: p.GetLayers()}
	if v := p.GetVerdict(); v != nil {
		r.Reward, r.Metadata = v.Reward, raw(v.GetMetadata(), v.GetMetadata() != nil)
	}
	return r
}

func line(v any) (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return "", fmt.Errorf("make a row: %w", err)
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte{'\n'})), nil
}

func trajectoryLine(p *dsecv1.Sandbox) (string, error) {
	r := trajectoryRow{row: rowOf("trajectory", p), State: p.GetState(), Cause: raw(p.GetCause(), p.GetCause() != nil), Summary: raw(p.GetSummary(), p.GetSummary() != nil)}
	if t := p.GetCreated(); t != nil {
		r.Created = t.AsTime().Format(timeForm)
	}
	if t := p.GetEnded(); t != nil {
		r.Ended = t.AsTime().Format(timeForm)
	}
	return line(r)
}

const timeForm = "2006-01-02T15:04:05.000000000Z"

func stepLine(base row, s *dsecv1.Step) (string, error) {
	r := stepRow{row: base, Seq: s.GetSeq(), Step: s.GetId(), Kind: s.GetKind(), State: s.GetState(), Session: s.GetSession(), Opaque: s.GetOpaque(),
		Outcome: raw(s.GetOutcome(), s.GetOutcome() != nil), Layer: s.GetLayer()}
	if t := s.GetStarted(); t != nil {
		r.Started = t.AsTime().Format(timeForm)
	}
	if q := s.GetRequestJson(); q != "" {
		var b bytes.Buffer
		if json.Compact(&b, []byte(q)) == nil {
			r.Request = b.Bytes()
		}
	}
	if s.GetInput() != "" {
		r.Input = &inputRow{Octets: s.GetInputSize(), SHA256: s.GetInputSha256(), Kept: s.GetInput()}
	}
	if s.GetKind() == "command" && s.GetOutcome() != nil {
		r.Stdout = outputOf(s.GetStdout(), s.GetOutcome().GetStdout().GetTotal())
		r.Stderr = outputOf(s.GetStderr(), s.GetOutcome().GetStderr().GetTotal())
	}
	return line(r)
}

// outputOf shows the first octets of a stream of total octets. A character that the cut splits is left out.
func outputOf(p []byte, total int64) *outputRow {
	cut := int64(len(p)) < total
	text := p
	if cut {
		text = wholeRunes(p)
	}
	o := &outputRow{Octets: total, Shown: int64(len(p)), Truncated: cut}
	if utf8.Valid(text) {
		o.Text, o.Shown = string(text), int64(len(text))
	} else {
		o.Base64 = base64.StdEncoding.EncodeToString(p)
	}
	return o
}

// wholeRunes leaves out the beginning of a character at the end.
func wholeRunes(p []byte) []byte {
	for i := 1; i <= min(len(p), utf8.UTFMax-1); i++ {
		c := p[len(p)-i]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(p[len(p)-i:]) {
				return p[:len(p)-i]
			}
			return p
		}
	}
	return p
}

// export yields the rows of all trajectories that match, and answers how many nothing but their labels left out.
func (h *Host) export(ctx context.Context, q *dsecv1.ExportRequest, yield func(string) error) (left int64, err error) {
	limit, err := outputLimit(q.GetOutputLimit())
	if err != nil {
		return 0, err
	}
	if q.GetRows() != "" && q.GetRows() != "steps" && q.GetRows() != "trajectories" {
		return 0, fmt.Errorf("rows %.40q: want steps or trajectories: %w", q.GetRows(), sandbox.ErrInvalid)
	}
	boxes, left, err := h.matching(ctx, q.GetFilter())
	if err != nil {
		return 0, err
	}
	for _, b := range boxes {
		p := b.proto()
		if q.GetRows() == "trajectories" {
			l, err := trajectoryLine(p)
			if err == nil {
				err = yield(l)
			}
			if err != nil {
				return 0, err
			}
			continue
		}
		base := rowOf("step", p)
		err := b.walk(ctx, limit, true, func(s *dsecv1.Step) error {
			l, err := stepLine(base, s)
			if err != nil {
				return err
			}
			return yield(l)
		})
		if err != nil && !h.removed(b, err) {
			return 0, err
		}
	}
	return left, nil
}
