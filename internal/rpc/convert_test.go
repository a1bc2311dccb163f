package rpc

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func octets() *rapid.Generator[string] {
	return rapid.Map(rapid.SliceOfN(rapid.Byte(), 0, 12), func(b []byte) string { return string(b) })
}

// envs draws entries with a name, which may not hold "=".
func envs() *rapid.Generator[[]string] {
	one := rapid.Custom(func(t *rapid.T) string {
		name := strings.ReplaceAll("N"+octets().Draw(t, "name"), "=", "_")
		return name + "=" + octets().Draw(t, "value")
	})
	return rapid.SliceOfN(one, 0, 4)
}

// wire sends a message through its encoding, which refuses text that is not UTF-8.
func wire[M proto.Message](t *rapid.T, m, into M) M {
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(b, into); err != nil {
		t.Fatal(err)
	}
	return into
}

func equal(t *rapid.T, want, got any) {
	opt := cmp.FilterValues(func(a, b []string) bool { return len(a)+len(b) == 0 }, cmp.Ignore())
	if diff := cmp.Diff(want, got, opt); diff != "" {
		t.Fatal(diff)
	}
}

func TestSpecSurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &sandbox.Spec{
			Project: "a/b", Job: "j", Key: "k", Name: "n", Labels: map[string]string{"x": "y"}, Backend: "container",
			Layers: []string{"sha256:1"}, EnvName: "e@1", Env: envs().Draw(t, "env"), User: "u", Cwd: "/" + octets().Draw(t, "cwd"),
			Hostname: "h", Entry: []string{"/init"}, BestEffort: rapid.Bool().Draw(t, "be"), NoNewPrivs: true,
			Resources:  sandbox.Resources{Memory: rapid.Int64Min(0).Draw(t, "memory"), Disk: 2, Pids: 3, CPU: 4, CPUWeight: 5},
			Lifetime:   sandbox.Lifetime{Idle: time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "idle")) * time.Millisecond, Total: time.Hour, OnIdle: sandbox.EndPause, OnTotal: sandbox.EndStop},
			Network:    sandbox.NetworkOpen,
			Durability: sandbox.DurabilityHost,
		}
		got, err := Spec(wire(t, SpecProto(s, nil), &dsecv1.Spec{}))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, s, got)
	})
}

func TestCommandSurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		env := envs().Draw(t, "env")
		c := &sandbox.Command{
			ID: "1", Argv: rapid.SliceOfN(octets(), 1, 4).Draw(t, "argv"), Env: env, Cwd: octets().Draw(t, "cwd"), User: "u",
			Stdin: []byte{0xff}, StdinOpen: true, Terminal: &sandbox.Size{Rows: 1, Cols: 65535}, Timeout: time.Second, OutputCap: 7,
		}
		if rapid.Bool().Draw(t, "session") {
			c.Argv, c.Session, c.Text = nil, "s", octets().Draw(t, "text")
		}
		if len(env) > 0 {
			name, _, _ := strings.Cut(env[0], "=")
			for _, kv := range env {
				if strings.HasPrefix(kv, name+"=") {
					c.SecretEnv = append(c.SecretEnv, name)
				}
			}
		}
		got, err := Command(wire(t, StartRequest(c), &dsecv1.StartRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, c, got)
	})
}

func TestSessionOutcomeCauseCapabilitiesSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &sandbox.Session{Name: "s", Shell: "/bin/sh", Env: envs().Draw(t, "env"), Cwd: octets().Draw(t, "cwd"), User: "u"}
		gotS, _, err := Session(wire(t, OpenSessionRequest(s, nil), &dsecv1.OpenSessionRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, s, gotS)

		at := time.Unix(rapid.Int64Range(0, 1e9).Draw(t, "at"), 5).UTC()
		o := sandbox.Outcome{
			Kind: sandbox.Exited, Code: rapid.IntRange(-1, 255).Draw(t, "code"), Signal: 9, Error: "e", MemoryHit: true, PidsHit: true, DiskHit: true,
			OutputOpen: true, SessionEnd: true, Shared: true, Stdout: sandbox.StreamEnd{Total: 9, Head: 1, Tail: 2, Truncated: true, SHA256: "aa"},
			Usage: sandbox.Usage{CPU: time.Millisecond, MemoryPeak: -1}, Started: at, Ended: at.Add(time.Second),
		}
		equal(t, o, Outcome(wire(t, OutcomeProto(o), &dsecv1.Outcome{})))

		cause := sandbox.Cause{Class: sandbox.ClassLimit, Reason: "idle", Detail: "d"}
		equal(t, cause, Cause(wire(t, CauseProto(cause), &dsecv1.Cause{})))

		caps := sandbox.Capabilities{
			Backend: "container", Isolation: "medium", PauseLevels: []sandbox.PauseLevel{sandbox.Frozen}, Networks: []string{"none"}, Fork: "files",
			Snapshot: true, Terminal: true, Sessions: true, Ports: true, Features: map[string]string{"a": "b"},
		}
		equal(t, caps, Capabilities(wire(t, CapabilitiesProto(caps, "habcdef"), &dsecv1.Capabilities{})))
	})
}

func TestRequestsThatAreRefused(t *testing.T) {
	both := []byte("b")
	for name, f := range map[string]func() error{
		"cwd twice": func() error { _, err := Command(&dsecv1.StartRequest{Cwd: "a", CwdRaw: both}); return err },
		"argv twice": func() error {
			_, err := Command(&dsecv1.StartRequest{Argv: []string{"a"}, ArgvRaw: [][]byte{both}})
			return err
		},
		"text twice":  func() error { _, err := Command(&dsecv1.StartRequest{Text: "a", TextRaw: both}); return err },
		"name of env": func() error { _, _, err := Env("env", []*dsecv1.EnvVar{{Name: "A=B"}}); return err },
		"value twice": func() error {
			_, _, err := Env("env", []*dsecv1.EnvVar{{Name: "A", Value: "a", ValueRaw: both}})
			return err
		},
		"terminal":       func() error { _, err := Size(&dsecv1.Terminal{Rows: 65536}); return err },
		"timeout":        func() error { _, err := Command(&dsecv1.StartRequest{TimeoutMs: 1 << 62}); return err },
		"total negative": func() error { _, err := Lifetime(&dsecv1.Lifetime{TotalMs: -1}); return err },
		"memory":         func() error { _, err := Resources(&dsecv1.Resources{Memory: -1}); return err },
		"no spec":        func() error { _, err := Spec(nil); return err },
	} {
		if err := f(); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l, err := Lifetime(&dsecv1.Lifetime{IdleMs: -1})
	if err != nil || l.Idle != Unbounded {
		t.Errorf("no idle bound: %v, %v", l, err)
	}
}
