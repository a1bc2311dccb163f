package main

import (
	"bufio"
	"bytes"
	"io"
	"testing"
)

func TestExportLeavesReplaysOut(t *testing.T) {
	const plainRow, replayRow, talks = `{"row":"step","labels":{"a":"b"}}`, `{"row":"step","labels":{"dsec-replay":"h-1"}}`, `{"row":"step","stdout":{"text":"dsec-replay"}}`
	for name, c := range map[string]struct {
		x    exportCmd
		want int
	}{
		"all":          {exportCmd{}, 2},
		"with replays": {exportCmd{Replay: true}, 3},
		"of a job":     {exportCmd{Job: "j"}, 3},
		"by the label": {exportCmd{Label: map[string]string{"dsec-replay": "h-1"}}, 3},
	} {
		var b bytes.Buffer
		rows := c.x.rows(&b, "")
		for _, r := range []string{plainRow, replayRow, talks} {
			if n, err := io.WriteString(rows, r+"\n"); err != nil || n != len(r)+1 {
				t.Fatal(n, err)
			}
		}
		rows.w.Flush()
		got := 0
		for s := bufio.NewScanner(&b); s.Scan(); got++ {
		}
		if got != c.want || rows.lines != c.want || rows.left != 3-c.want {
			t.Errorf("%s: %d rows (%d counted, %d left out), want %d", name, got, rows.lines, rows.left, c.want)
		}
	}
}
