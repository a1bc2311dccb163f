package sandbox

import "context"

// ForkKey is what the specification of a fork has: its create is known by it.
type ForkKey struct{ Project, Job, Key string }

// Forked is an [Instance] whose memory can be forked.
type Forked interface {
	// Point holds memory and disk of the sandbox as they are at one point, while its processes stand still. Until release the creates with
	// these keys, each once, go on from there: with its processes, fresh random numbers and a right clock. Processes of commands of
	// before go on for themselves: their output and ends are told to nobody, and their IDs are free again. ErrUnsupported where this sandbox can't be forked.
	Point(ctx context.Context, keys []ForkKey) (release func(), err error)
}
