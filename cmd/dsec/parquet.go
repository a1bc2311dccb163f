package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/zstd"
)

// parquetRow is an exported row as columns: docs/format/export.md. What has a form of its own is JSON text.
type parquetRow struct {
	Row         string            `parquet:"row,dict"`
	Project     string            `parquet:"project,dict"`
	Job         string            `parquet:"job,dict"`
	Key         string            `parquet:"key,dict"`
	Sandbox     string            `parquet:"sandbox,dict"`
	Labels      map[string]string `parquet:"labels"`
	Environment string            `parquet:"environment,dict"`
	Layers      []string          `parquet:"layers,list"`
	Reward      *float64          `parquet:"reward,optional"`
	Metadata    *string           `parquet:"metadata,optional"`
	State       string            `parquet:"state,dict"`
	Class       *string           `parquet:"class,optional,dict"`
	Cause       *string           `parquet:"cause,optional"`
	Created     *time.Time        `parquet:"created,optional,timestamp(microsecond)"`
	Ended       *time.Time        `parquet:"ended,optional,timestamp(microsecond)"`
	Summary     *string           `parquet:"summary,optional"`
	Seq         *int64            `parquet:"seq,optional"`
	Step        *string           `parquet:"step,optional"`
	Kind        *string           `parquet:"kind,optional,dict"`
	Started     *time.Time        `parquet:"started,optional,timestamp(microsecond)"`
	Session     *string           `parquet:"session,optional,dict"`
	Opaque      bool              `parquet:"opaque"`
	Request     *string           `parquet:"request,optional"`
	Outcome     *string           `parquet:"outcome,optional"`
	OutcomeKind *string           `parquet:"outcome_kind,optional,dict"`
	Code        *int64            `parquet:"code,optional"`
	Input       *string           `parquet:"input,optional"`
	Layer       *string           `parquet:"layer,optional"`
	Stdout      []byte            `parquet:"stdout,optional"`
	StdoutTotal *int64            `parquet:"stdout_octets,optional"`
	Stderr      []byte            `parquet:"stderr,optional"`
	StderrTotal *int64            `parquet:"stderr_octets,optional"`
}

// parquetGroup is how many octets of rows are held until they are written as a group.
const parquetGroup = 32 << 20

// parquetWriter makes a Parquet file of rows that come as JSON.
type parquetWriter struct {
	w    *parquet.GenericWriter[parquetRow]
	held int
}

func newParquetWriter(w io.Writer) *parquetWriter {
	return &parquetWriter{w: parquet.NewGenericWriter[parquetRow](w, parquet.Compression(&zstd.Codec{}), parquet.CreatedBy("dsec", version, ""))}
}

// Write takes one row.
func (p *parquetWriter) Write(line []byte) (int, error) {
	r, err := parquetOf(line)
	if err != nil {
		return 0, err
	}
	if _, err := p.w.Write([]parquetRow{r}); err != nil {
		return 0, fmt.Errorf("write parquet: %w", err)
	}
	if p.held += len(line); p.held > parquetGroup {
		p.held = 0
		if err := p.w.Flush(); err != nil {
			return 0, fmt.Errorf("write parquet: %w", err)
		}
	}
	return len(line), nil
}

func (p *parquetWriter) Close() error {
	if err := p.w.Close(); err != nil {
		return fmt.Errorf("write parquet: %w", err)
	}
	return nil
}

func parquetOf(line []byte) (parquetRow, error) {
	type stream struct {
		Text, Base64 string
		Octets       int64
	}
	var j struct {
		Row, Project, Job, Key, Sandbox, Environment, State string
		Labels                                              map[string]string
		Layers                                              []string
		Reward                                              *float64
		Metadata, Cause, Summary, Request, Outcome, Input   json.RawMessage
		Created, Ended, Started                             *time.Time
		Seq                                                 *int64
		Step, Kind, Session, Layer                          *string
		Opaque                                              bool
		Stdout, Stderr                                      *stream
	}
	if err := json.Unmarshal(line, &j); err != nil {
		return parquetRow{}, fmt.Errorf("read a row: %w", err)
	}
	text := func(m json.RawMessage) *string {
		if len(m) == 0 {
			return nil
		}
		s := string(m)
		return &s
	}
	r := parquetRow{Row: j.Row, Project: j.Project, Job: j.Job, Key: j.Key, Sandbox: j.Sandbox, Labels: j.Labels, Environment: j.Environment, Layers: j.Layers,
		Reward: j.Reward, Metadata: text(j.Metadata), State: j.State, Cause: text(j.Cause), Created: j.Created, Ended: j.Ended, Summary: text(j.Summary), Seq: j.Seq,
		Step: j.Step, Kind: j.Kind, Started: j.Started, Session: j.Session, Opaque: j.Opaque, Request: text(j.Request), Outcome: text(j.Outcome), Input: text(j.Input), Layer: j.Layer}
	var o struct {
		Kind string
		Code int64
	}
	if len(j.Outcome) > 0 && json.Unmarshal(j.Outcome, &o) == nil {
		r.OutcomeKind, r.Code = &o.Kind, &o.Code
	}
	var s struct{ Class string }
	if len(j.Summary) > 0 && json.Unmarshal(j.Summary, &s) == nil && s.Class != "" {
		r.Class = &s.Class
	}
	for _, x := range []struct {
		from  *stream
		to    *[]byte
		total **int64
	}{{j.Stdout, &r.Stdout, &r.StdoutTotal}, {j.Stderr, &r.Stderr, &r.StderrTotal}} {
		if x.from == nil {
			continue
		}
		*x.to, *x.total = []byte(x.from.Text), &x.from.Octets
		if x.from.Base64 != "" {
			b, err := base64.StdEncoding.DecodeString(x.from.Base64)
			if err != nil {
				return parquetRow{}, fmt.Errorf("read a row: %w", err)
			}
			*x.to = b
		}
	}
	return r, nil
}
