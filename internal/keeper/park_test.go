package keeper

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestParkHoldsDescriptorsOfOthers(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	ctx, cancel := context.WithCancel(context.Background())
	k := &Keeper{log: slog.New(slog.DiscardHandler)}
	wait, err := k.servePark(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); wait() }()
	p := NewPark(dir)
	if _, _, err := p.Parked(ctx, "x"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("nothing parked: %v", err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Park(ctx, "x", "note", f, f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	os.Remove(file)
	for range 2 {
		note, files, err := p.Parked(ctx, "x")
		if err != nil || note != "note" || len(files) != 2 {
			t.Fatalf("%q, %d files, %v", note, len(files), err)
		}
		got := make([]byte, 4)
		if _, err := files[1].ReadAt(got, 0); err != nil && err != io.EOF || string(got) != "kept" {
			t.Errorf("%q, %v", got, err)
		}
		for _, f := range files {
			f.Close()
		}
	}
	if err := p.Park(ctx, "", "", nil...); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no name: %v", err)
	}
	for i := range maxParked {
		d, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = p.Park(ctx, string(rune('a'+i)), "", d)
		d.Close()
		if i == maxParked-1 && !errors.Is(err, sandbox.ErrExhausted) || i < maxParked-1 && err != nil {
			t.Errorf("name %d: %v", i, err)
		}
	}
}
