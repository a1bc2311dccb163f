package e2e

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// fncallTar is the environment of the languages that come with dsec, made once and kept for later runs, as examples/judge does.
var fncallTar = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("examples/judge/env.sh")
	cmd.Dir, cmd.Stderr = repository(), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", err
	}
	return filepath.Join(repository(), strings.TrimSpace(string(out))), nil
})

// fncalls is a `dsec up` with that environment, for all tests of calls.
func fncalls(t *testing.T) *service {
	t.Helper()
	s := shared(t)
	s.named(t, "fncall", func() (io.ReadCloser, error) {
		file, err := fncallTar()
		if err != nil {
			return nil, err
		}
		return os.Open(file)
	})
	layersMu.Lock()
	defer layersMu.Unlock()
	c := s.client()
	_, err := c.LayerService.GetEnvironment(within(t), request(&dsecv1.GetEnvironmentRequest{Ref: "fncall"}))
	if errors.Is(client.Wrap(err), client.ErrNotFound) {
		_, err = c.PublishEnvironment(within(t), &dsecv1.Environment{Name: "fncall", Base: "fncall"})
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestCallVerdicts gives every case to the judge, those of interpreters in mode warm too; with a variable of their own, so that none is left
// waiting. Cases that measure time run with the others: limits are of CPU time or far apart.
func TestCallVerdicts(t *testing.T) {
	s := fncalls(t)
	c := s.client()
	for i := range callCases {
		k := &callCases[i]
		modes := map[string][]*dsecv1.EnvVar{"fresh": nil}
		if k.lang == "python" || k.lang == "pytest" || k.lang == "javascript" {
			modes["warm"] = []*dsecv1.EnvVar{{Name: "OWN", Value: "1"}}
		}
		for mode, env := range modes {
			t.Run(k.name+", "+mode, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
				defer cancel()
				res, err := c.Calls.Run(ctx, connect.NewRequest(&dsecv1.RunCallRequest{Job: "verdicts", Mode: mode,
					Program: &dsecv1.CallProgram{Lang: k.lang, Code: k.code}, Input: &dsecv1.CallInput{Stdin: k.stdin, Args: k.args, Env: env},
					Limits: k.limits, CompileLimits: k.compile, QueueMs: 120_000}))
				if err != nil {
					t.Fatal(client.Wrap(err))
				}
				k.judge(t, res.Msg)
			})
		}
	}
}
