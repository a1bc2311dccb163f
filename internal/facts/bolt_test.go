package facts_test

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/facts/factstest"
)

func TestBolt(t *testing.T) {
	factstest.Run(t, func(t *testing.T) facts.Facts {
		b, err := facts.OpenBolt(filepath.Join(t.TempDir(), "state", "facts.db"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return b
	})
}

func TestBoltSurvivesReopening(t *testing.T) {
	ctx, file := context.Background(), filepath.Join(t.TempDir(), "facts.db")
	b, err := facts.OpenBolt(file)
	if err != nil {
		t.Fatal(err)
	}
	rev, err := b.Put(ctx, "a", []byte("1"), facts.Absent)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err = facts.OpenBolt(file); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	got, err := b.Get(ctx, "a")
	if err != nil || got.Revision != rev || string(got.Value) != "1" {
		t.Errorf("%+v %v", got, err)
	}
}
