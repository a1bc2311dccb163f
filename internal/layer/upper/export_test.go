package upper

import (
	"context"
	"errors"
)

// Kill drops what the kernel drops when a process dies.
func Kill(p *Pool) { p.lock.Close() }

// Sweep does one round of Run.
func Sweep(p *Pool) error {
	err := p.d.sweep(context.Background())
	if t, ok := p.d.(tidier); ok {
		err = errors.Join(err, t.tidy(context.Background()))
	}
	return err
}

// AsWorkload writes as a sandbox would.
var AsWorkload = asWorkload
