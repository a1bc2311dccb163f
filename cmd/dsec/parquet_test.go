package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/parquet-go/parquet-go"
)

func TestParquetHoldsTheRows(t *testing.T) {
	rows := []string{
		`{"row":"step","project":"default","job":"j","key":"k","sandbox":"s","labels":{"a":"b"},"layers":["sha256:1","sha256:2"],"reward":0.5,"metadata":{"x":1},"state":"ended","seq":3,"step":"one","kind":"command","started":"2026-01-02T03:04:05.000006000Z","request":{"argv":["true"]},"outcome":{"kind":"exited","code":2},"stdout":{"base64":"/wA=","octets":2,"shown":2,"truncated":false},"stderr":{"text":"no","octets":900,"shown":2,"truncated":true}}`,
		`{"row":"trajectory","project":"default","job":"-","key":"l","sandbox":"t","state":"stopped","summary":{"steps":"4","class":"client"},"ended":"2026-01-02T03:04:06.000000000Z"}`,
	}
	var b bytes.Buffer
	w := newParquetWriter(&b)
	w.held = parquetGroup // the first row ends a group
	for _, r := range rows {
		if _, err := w.Write([]byte(r)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Write([]byte("{")); err == nil {
		t.Error("a broken row was taken")
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := parquet.Read[parquetRow](bytes.NewReader(b.Bytes()), int64(b.Len()))
	if err != nil {
		t.Fatal(err)
	}
	p := func(s string) *string { return &s }
	n := func(i int64) *int64 { return &i }
	half := 0.5
	started, ended := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC), time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)
	want := []parquetRow{
		{Row: "step", Project: "default", Job: "j", Key: "k", Sandbox: "s", Labels: map[string]string{"a": "b"}, Layers: []string{"sha256:1", "sha256:2"}, Reward: &half, Metadata: p(`{"x":1}`),
			State: "ended", Seq: n(3), Step: p("one"), Kind: p("command"), Started: &started, Request: p(`{"argv":["true"]}`), Outcome: p(`{"kind":"exited","code":2}`), OutcomeKind: p("exited"), Code: n(2),
			Stdout: []byte{0xff, 0}, StdoutTotal: n(2), Stderr: []byte("no"), StderrTotal: n(900)},
		{Row: "trajectory", Project: "default", Job: "-", Key: "l", Sandbox: "t", State: "stopped", Summary: p(`{"steps":"4","class":"client"}`), Class: p("client"), Ended: &ended},
	}
	for i := range got {
		if len(got[i].Labels) == 0 {
			got[i].Labels = nil
		}
		if len(got[i].Layers) == 0 {
			got[i].Layers = nil
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
