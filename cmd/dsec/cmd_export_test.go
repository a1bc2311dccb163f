package main

import (
	"slices"
	"testing"
)

// The server leaves replays out: TestExportRows (internal/host).
func TestExportLeavesReplaysOut(t *testing.T) {
	for name, c := range map[string]struct {
		x    exportCmd
		want []string
	}{
		"all":          {exportCmd{}, []string{replayLabel}},
		"other label":  {exportCmd{Label: map[string]string{"a": "b"}}, []string{replayLabel}},
		"with replays": {exportCmd{Replay: true}, nil},
		"of a job":     {exportCmd{Job: "j"}, nil},
		"by the label": {exportCmd{Label: map[string]string{replayLabel: "h-1"}}, nil},
	} {
		if got := c.x.without(); !slices.Equal(got, c.want) {
			t.Errorf("%s: without %q, want %q", name, got, c.want)
		}
	}
}
