package main

import (
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// What a step asked for is words for people, whatever its kind, and holds what the request named.
func TestRequestText(t *testing.T) {
	at := &dsecv1.Path{Sandbox: "s", Path: "/a b", User: "u"}
	seen := map[string]bool{}
	for _, c := range []struct {
		kind string
		m    proto.Message
		want string
	}{
		{"create", &dsecv1.HostCreateRequest{Spec: &dsecv1.Spec{Environment: "e@1", Job: "j", User: "u", Network: "none", Resources: &dsecv1.Resources{Memory: 1 << 20, Disk: 1 << 20, Pids: 8}}},
			"e@1, job j, memory 1.0 MiB, disk 1.0 MiB, 8 processes, network none, user u"},
		{"command", &dsecv1.StartRequest{Argv: []string{"echo", "a b"}}, "echo 'a b'"},
		{"command", &dsecv1.StartRequest{ArgvRaw: [][]byte{[]byte("echo"), []byte("\xff")}}, "echo \xff"},
		{"command", &dsecv1.StartRequest{Session: "x", Text: "cd /"}, `[x] "cd /"`},
		{"command", &dsecv1.StartRequest{Session: "x", TextRaw: []byte("\xff")}, `[x] "\xff"`},
		{"session", &dsecv1.OpenSessionRequest{Name: "x", Shell: "/bin/sh", Cwd: "/w", User: "u"}, "x /bin/sh in /w as u"},
		{"stdin", &dsecv1.WriteStdinRequest{Id: "c", Eof: true}, "closed"},
		{"stdin", &dsecv1.WriteStdinRequest{Id: "c"}, ""},
		{"signal", &dsecv1.SignalRequest{Id: "c", Signal: 15}, "TERM to c"},
		{"signal", &dsecv1.SignalRequest{Id: "c", Name: "INT"}, "INT to c"},
		{"signal", &dsecv1.SignalRequest{Id: "c", Signal: 40}, "40 to c"},
		{"resize", &dsecv1.ResizeRequest{Id: "c", Size: &dsecv1.Terminal{Rows: 50, Cols: 120}}, "c to 50x120"},
		{"lifetime", &dsecv1.SetLifetimeRequest{Lifetime: &dsecv1.Lifetime{IdleMs: 90_000, OnIdle: "pause", TotalMs: 3_600_000}}, "idle 1m30s pause total 1h0m0s"},
		{"snapshot", &dsecv1.SnapshotRequest{Id: "s", Step: "k", Publish: "work/x"}, "as work/x"},
		{"snapshot", &dsecv1.SnapshotRequest{Id: "s", Step: "k"}, ""},
		{"write", &dsecv1.WriteRequest{At: at}, "'/a b' as u"},
		{"write", &dsecv1.WriteRequest{At: at, Append: true}, "append to '/a b' as u"},
		{"makedir", &dsecv1.MakeDirRequest{At: &dsecv1.Path{PathRaw: []byte("/\xff")}}, "/\xff"},
		{"move", &dsecv1.MoveRequest{From: at, To: "/c"}, "'/a b' to /c as u"},
		{"remove", &dsecv1.RemoveRequest{At: at}, "'/a b' as u"},
		{"upload", &dsecv1.UploadRequest{At: at}, "'/a b' as u"},
		{"screen", &dsecv1.ScreenActRequest{Acts: []*dsecv1.ScreenAct{{Keys: []string{"ctrl", "a"}}, {Text: "x"}, {Pointer: &dsecv1.ScreenPointer{X: 1, Y: 2}},
			{Pointer: &dsecv1.ScreenPointer{X: 1, Y: 2, Button: "left"}}, {Pointer: &dsecv1.ScreenPointer{X: 1, Y: 2, Drag: true, ToX: 3, ToY: 4}}, {Scroll: &dsecv1.ScreenScroll{X: 1, Y: 2, Steps: -3}}}},
			`keys ctrl+a, type "x", move 1,2, click left 1,2, drag 1,2 to 3,4, scroll -3 at 1,2`},
	} {
		j, err := protojson.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		seen[c.kind] = true
		if got := requestText(c.kind, string(j)); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.kind, j, got, c.want)
		}
	}
	for kind := range requests {
		if !seen[kind] {
			t.Errorf("no case of %s", kind)
		}
	}
	if got := requestText("port", `{"port":80}`); got != `{"port":80}` {
		t.Errorf("a kind that nobody asked for: %q", got)
	}
}
