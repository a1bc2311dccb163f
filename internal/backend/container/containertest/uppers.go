package containertest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// folders are uppers as plain folders, without a limit.
type folders struct{ dir string }

func newUppers(t testing.TB, dir string) container.Uppers {
	t.Helper()
	do(t, os.MkdirAll(dir, 0o700))
	return folders{dir}
}

func (f folders) Create(_ context.Context, id sandbox.ID, _ int64) (upper, work string, err error) {
	dir := filepath.Join(f.dir, string(id))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", "", err
	}
	upper, work = filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if err := os.Mkdir(upper, 0o755); err != nil {
		return "", "", err
	}
	return upper, work, os.Mkdir(work, 0o755)
}

func (f folders) Remove(_ context.Context, id sandbox.ID) error {
	return os.RemoveAll(filepath.Join(f.dir, string(id)))
}

func (f folders) Usage(context.Context, sandbox.ID) (int64, error) { return -1, nil }

func (f folders) List(context.Context) ([]sandbox.ID, error) {
	dirs, err := os.ReadDir(f.dir)
	var ids []sandbox.ID
	for _, d := range dirs {
		ids = append(ids, sandbox.ID(d.Name()))
	}
	return ids, err
}
