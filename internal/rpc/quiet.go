package rpc

import (
	"sync"
	"time"

	"connectrpc.com/connect"
)

// quiet keeps a client that fails in a loop from filling the disk with lines: of each procedure and code a few are told at once, then
// one a second, with the number of those that were left out in between. The zero value is ready.
type quiet struct {
	mu   sync.Mutex
	kind map[failure]*told
}

type failure struct {
	procedure string
	code      connect.Code
}

// told is a bucket of lines.
type told struct {
	tokens float64
	at     time.Time
	left   int
}

const (
	tellBurst = 10  // lines at once
	tellRate  = 1.0 // a second
	mostKinds = 1024
)

// admit reports whether a failure is to be told, and how many like it were not since the last that was.
func (q *quiet) admit(procedure string, code connect.Code, now time.Time) (tell bool, left int) {
	if len(procedure) > 200 {
		procedure = procedure[:200]
	}
	k := failure{procedure, code}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.kind[k]
	if t == nil {
		if len(q.kind) >= mostKinds { // paths are the caller's: what is not known shares one bucket
			k = failure{"", code}
			t = q.kind[k]
		}
		if t == nil {
			t = &told{tokens: tellBurst, at: now}
			if q.kind == nil {
				q.kind = map[failure]*told{}
			}
			q.kind[k] = t
		}
	}
	t.tokens = min(tellBurst, t.tokens+now.Sub(t.at).Seconds()*tellRate)
	t.at = now
	if t.tokens < 1 {
		t.left++
		return false, 0
	}
	t.tokens--
	left, t.left = t.left, 0
	return true, left
}
