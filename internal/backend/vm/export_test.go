package vm

import (
	"context"
	"errors"
	"os"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// HalfLoad starts the monitor of a saved sandbox and leaves it waiting for its state, as a host does that is killed in a resume.
func HalfLoad(ctx context.Context, i sandbox.Instance) error {
	x := i.(*instance)
	if err := os.Mkdir(x.dir(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	s, err := x.again(ctx)
	if err != nil {
		return err
	}
	defer closeDisks(s.Disks)
	f, err := os.Open(x.savedFile())
	if err != nil {
		return err
	}
	defer f.Close()
	s.Incoming, s.From = true, f
	vm, err := x.b.driver.Create(ctx, s)
	if err == nil {
		vm.Release()
	}
	return err
}

// HalfSave writes the state of a frozen sandbox, and no word that it is whole, as a host does that is killed in a save.
func HalfSave(ctx context.Context, i sandbox.Instance) error {
	x := i.(*instance)
	f, err := os.Create(x.savedFile())
	if err != nil {
		return err
	}
	defer f.Close()
	return x.vm.Save(ctx, f, false)
}
