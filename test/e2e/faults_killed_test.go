package e2e

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// A command that a stop ends is told as killed, with why, with what it used, and with the limits that it had met.
func TestCommandsEndedByAStop(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.client()
	small := s.small(t)
	for _, tc := range []struct {
		name, script string
		memory, pids bool
	}{
		{"plain", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo ready; exec sleep 300", false, false},
		{"memory", "dd if=/dev/zero of=/dev/null bs=200M count=1; echo ready; exec sleep 300", true, false},
		{"pids", `sh -c 'i=0; while [ $i -lt 60 ]; do sleep 300 & i=$((i+1)); done'; echo ready; exec sleep 300`, false, true},
	} {
		sb, err := c.RunContainer(within(t), client.Options{Layers: []string{small}, Memory: 64 << 20, Disk: 32 << 20, Pids: 30})
		must(t, err)
		_, err = sb.Start(within(t), client.Cmd{ID: "c", Argv: []string{"sh", "-c", tc.script}})
		must(t, err)
		for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			r, err := c.Commands.ReadOutput(within(t), connect.NewRequest(&dsecv1.ReadOutputRequest{Sandbox: sb.ID, Id: "c", Stream: "stdout", Limit: 100}))
			if err == nil && strings.Contains(string(r.Msg.GetData()), "ready") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: not ready: %v", tc.name, err)
			}
		}
		must(t, sb.Stop(within(t)))
		var o *dsecv1.Outcome
		must(t, c.Log(within(t), &dsecv1.ReadLogRequest{Sandbox: sb.ID}, func(r *dsecv1.LogRecord) error {
			if r.Kind == "end" && r.Step == "c" {
				o = r.Outcome
			}
			return nil
		}))
		if o == nil {
			t.Errorf("%s: no end in the log", tc.name)
			continue
		}
		if o.Kind != "killed" || o.Signal != 9 || !strings.Contains(o.Error, "stopped") || o.MemoryHit != tc.memory || o.PidsHit != tc.pids || o.CpuUs <= 0 {
			t.Errorf("%s: %v", tc.name, o)
		}
	}
}
