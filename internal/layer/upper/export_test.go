package upper

import "context"

// Kill drops what the kernel drops when a process dies.
func Kill(p *Pool) { p.lock.Close() }

// Sweep does one round of Run.
func Sweep(p *Pool) error { return p.d.sweep(context.Background()) }

// AsWorkload writes as a sandbox would.
var AsWorkload = asWorkload
