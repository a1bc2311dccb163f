package sandboxtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// recorder is a Sink that keeps everything and holds the backend to the contract: octets of a stream come without a gap but for
// the one that a cap makes, octets that are sent again are the same, late ones come after the end and others before, an end that
// is sent again is the same, and what the end says of a stream fits its octets.
type recorder struct {
	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each change
	cmds     map[string]*record
	sessions map[string][]sandbox.Outcome
	cause    *sandbox.Cause
	faults   []string
	refuse   int // so many of the next events are answered with an error
	dead     bool
}

type record struct {
	streams [3]stream
	end     *sandbox.Outcome
}

// stream holds octets as pieces, without gaps inside a piece.
type stream struct {
	pieces []piece
}

type piece struct {
	at   int64
	data []byte
}

func newRecorder() *recorder {
	return &recorder{changed: make(chan struct{}), cmds: map[string]*record{}, sessions: map[string][]sandbox.Outcome{}}
}

var errRefused = errors.New("the test's sink refuses")

// admit applies the test's own failures; the caller holds mu.
func (r *recorder) admit() error {
	if r.dead {
		return errRefused
	}
	if r.refuse > 0 {
		r.refuse--
		return errRefused
	}
	return nil
}

// refuseNext lets the next n events fail, as a full log would.
func (r *recorder) refuseNext(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = n
}

// die refuses everything from now on, as a daemon that was killed does.
func (r *recorder) die() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dead = true
}

// revive takes events again, with all that was taken before: the log that a new daemon reads.
func (r *recorder) revive() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dead = false
}

func (r *recorder) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *recorder) fault(format string, args ...any) {
	if len(r.faults) < 20 {
		r.faults = append(r.faults, fmt.Sprintf(format, args...))
	}
}

func (r *recorder) broken() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.faults)
}

func (r *recorder) record(cmd string) *record {
	c := r.cmds[cmd]
	if c == nil {
		c = &record{}
		r.cmds[cmd] = c
	}
	return c
}

func (r *recorder) Output(_ context.Context, cmd string, name sandbox.StreamName, offset int64, data []byte, late bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.admit(); err != nil {
		return err
	}
	if name != sandbox.Stdout && name != sandbox.Stderr {
		r.fault("command %s: stream %d", cmd, name)
		return nil
	}
	c := r.record(cmd)
	if late != (c.end != nil) {
		r.fault("command %s: octets at %d with late=%v when its end is known=%v", cmd, offset, late, c.end != nil)
	}
	if err := c.streams[name].put(offset, data); err != nil {
		r.fault("command %s, stream %d: %v", cmd, name, err)
	}
	r.notify()
	return nil
}

func (s *stream) put(at int64, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	if len(s.pieces) == 0 && at != 0 {
		return fmt.Errorf("first octets come at %d", at)
	}
	for i := range s.pieces {
		p := &s.pieces[i]
		end := p.at + int64(len(p.data))
		if at < p.at || at > end {
			continue
		}
		known := min(end-at, int64(len(data)))
		if !bytes.Equal(p.data[at-p.at:at-p.at+known], data[:known]) {
			return fmt.Errorf("octets at %d are sent again with other values", at)
		}
		if known < int64(len(data)) && i != len(s.pieces)-1 {
			return fmt.Errorf("octets at %d fill the gap of the cap", at+known)
		}
		p.data = append(p.data, data[known:]...)
		return nil
	}
	if len(s.pieces) > 4 {
		return fmt.Errorf("octets at %d make another gap", at)
	}
	s.pieces = append(s.pieces, piece{at, slices.Clone(data)})
	return nil
}

func (r *recorder) CommandEnded(_ context.Context, cmd string, o sandbox.Outcome) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.admit(); err != nil {
		return err
	}
	c := r.record(cmd)
	if c.end != nil {
		if c.end.Kind != o.Kind || c.end.Code != o.Code || c.end.Signal != o.Signal || c.end.Stdout != o.Stdout || c.end.Stderr != o.Stderr {
			r.fault("command %s: its end came again and says otherwise: %+v, then %+v", cmd, *c.end, o)
		}
		return nil
	}
	c.end = &o
	for name, e := range map[sandbox.StreamName]sandbox.StreamEnd{sandbox.Stdout: o.Stdout, sandbox.Stderr: o.Stderr} {
		if err := c.streams[name].fits(e); err != nil {
			r.fault("command %s, stream %d: %v", cmd, name, err)
		}
	}
	if o.Ended.Before(o.Started) {
		r.fault("command %s: ended at %v, before its start at %v", cmd, o.Ended, o.Started)
	}
	r.notify()
	return nil
}

// fits reports whether the octets that came are those that the end speaks of.
func (s *stream) fits(e sandbox.StreamEnd) error {
	var got int64
	for _, p := range s.pieces {
		got += int64(len(p.data))
	}
	if got != e.Head+e.Tail {
		return fmt.Errorf("%d octets came before the end, which says head %d and tail %d of %d", got, e.Head, e.Tail, e.Total)
	}
	if e.Truncated != (e.Head+e.Tail < e.Total) || e.Head+e.Tail > e.Total {
		return fmt.Errorf("head %d, tail %d, total %d, truncated %v do not fit", e.Head, e.Tail, e.Total, e.Truncated)
	}
	if e.Truncated {
		last := s.pieces[len(s.pieces)-1]
		if last.at+int64(len(last.data)) != e.Total || last.at > e.Total-e.Tail {
			return fmt.Errorf("the last octets came at %d to %d, want up to %d", last.at, last.at+int64(len(last.data)), e.Total)
		}
		return nil
	}
	sum := sha256.Sum256(s.bytes())
	if e.Total > 0 && e.SHA256 != hex.EncodeToString(sum[:]) {
		return fmt.Errorf("hash %s is not that of the %d octets that came", e.SHA256, e.Total)
	}
	return nil
}

func (s *stream) bytes() []byte {
	var b []byte
	for _, p := range s.pieces {
		b = append(b, p.data...)
	}
	return b
}

func (r *recorder) SessionEnded(_ context.Context, session string, o sandbox.Outcome) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.admit(); err != nil {
		return err
	}
	r.sessions[session] = append(r.sessions[session], o)
	r.notify()
	return nil
}

func (r *recorder) Ended(_ context.Context, c sandbox.Cause) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.admit(); err != nil {
		return err
	}
	if r.cause == nil {
		r.cause = &c
	}
	r.notify()
	return nil
}

func (r *recorder) Denied(context.Context, string, string, string) {}

// wait blocks until ok, which is called under mu, or the time is over.
func (r *recorder) wait(d time.Duration, ok func() bool) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		r.mu.Lock()
		done, changed := ok(), r.changed
		r.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		}
	}
}

func (r *recorder) waitEnd(cmd string, d time.Duration) (sandbox.Outcome, bool) {
	var o sandbox.Outcome
	ok := r.wait(d, func() bool {
		c := r.cmds[cmd]
		if c == nil || c.end == nil {
			return false
		}
		o = *c.end
		return true
	})
	return o, ok
}

// ended reports whether a command's end has come.
func (r *recorder) ended(cmd string) bool {
	_, ok := r.waitEnd(cmd, 0)
	return ok
}

func (r *recorder) waitSession(name string, d time.Duration) (sandbox.Outcome, bool) {
	var o sandbox.Outcome
	ok := r.wait(d, func() bool {
		l := r.sessions[name]
		if len(l) == 0 {
			return false
		}
		o = l[len(l)-1]
		return true
	})
	return o, ok
}

func (r *recorder) waitCause(d time.Duration) (sandbox.Cause, bool) {
	var c sandbox.Cause
	ok := r.wait(d, func() bool {
		if r.cause == nil {
			return false
		}
		c = *r.cause
		return true
	})
	return c, ok
}

// text is what came of a stream, head and tail.
func (r *recorder) text(cmd string, name sandbox.StreamName) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.cmds[cmd]
	if c == nil {
		return ""
	}
	return string(c.streams[name].bytes())
}
