package e2e

import (
	"encoding/json"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// What one cluster pushes to a bucket, another one pulls from it and runs.
func TestPushAndPull(t *testing.T) {
	t.Parallel()
	a, b := own(t), own(t)
	bucket := httptest.NewServer(storetest.NewS3(t.TempDir()))
	defer bucket.Close()
	far := "s3://" + storetest.Bucket + "/depot?path_style=true&endpoint=" + bucket.URL
	dsec := func(s *service, args ...string) (string, error) {
		cmd := exec.CommandContext(within(t), binary, append(args, "--local", filepath.Join(s.state, "store"))...)
		cmd.Env = append(os.Environ(), "DSEC_URL=unix:"+s.socket(), "DSEC_KEY="+s.key(), "AWS_ACCESS_KEY_ID="+storetest.AccessKey, "AWS_SECRET_ACCESS_KEY="+storetest.SecretKey)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	ok := func(s *service, args ...string) string {
		t.Helper()
		out, err := dsec(s, args...)
		if err != nil {
			t.Fatalf("dsec %v: %v\n%s", args, err, out)
		}
		return out
	}
	small := a.small(t)
	tree := t.TempDir()
	must(t, os.WriteFile(filepath.Join(tree, "task"), []byte("solve it"), 0o644))
	cmd := exec.CommandContext(within(t), binary, "layer", "build", "ws/task", "--dir", tree, "--at", "/w")
	cmd.Env = append(os.Environ(), "DSEC_URL=unix:"+a.socket(), "DSEC_KEY="+a.key())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := a.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "task", Base: small, Workspace: "ws/task", Cwd: "/w"}); err != nil {
		t.Fatal(err)
	}
	ok(a, "layer", "push", "task", far, "--env")
	if out := ok(a, "layer", "push", "task", far, "--env"); !strings.Contains(out, "0 of 0") {
		t.Errorf("pushed again: %s", out)
	}
	if out, err := dsec(b, "layer", "pull", "none", far); err == nil || !strings.Contains(out, "none") {
		t.Errorf("a name that is not there: %v %s", err, out)
	}
	if out := ok(b, "layer", "pull", "task", far, "--env"); !strings.Contains(out, "task@1") {
		t.Errorf("pulled: %s", out)
	}
	if out := ok(b, "layer", "pull", "task@1", far, "--env"); !strings.Contains(out, "task@1") {
		t.Errorf("pulled again: %s", out)
	}
	sb, err := b.client().RunContainer(within(t), client.Options{Environment: "task", Memory: 64 << 20, Disk: 32 << 20, Pids: 64})
	must(t, err)
	defer sb.Stop(within(t))
	r, err := sb.Run(within(t), client.Cmd{ID: "s", Argv: []string{"cat", "task"}})
	if err != nil || string(r.Stdout) != "solve it" {
		t.Errorf("in it: %v %v", r, err)
	}
	if out := ok(a, "-o", "json", "layer", "push", small, far); !json.Valid([]byte(out)) || !strings.Contains(out, `"layers":1`) {
		t.Errorf("pushed, as JSON: %s", out)
	}
	if out, err := dsec(b, "layer", "pull", "base/small", far); err != nil || !strings.Contains(out, "base/small@1") {
		t.Errorf("a layer: %v %s", err, out)
	}
}
