package keeper

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// standbys are calls with a Hold that were started before anybody asked for them: all of one but what comes with its request. Each is used
// once and by a request that would have been started alike, so the only trace of having been made ahead is its age.
//
// Whoever takes one, or finds none, leaves behind that another is to be made. That is done while fewer calls run than there are
// processors, so as not to take from those that run.
type standbys struct {
	c    *calls
	gone sync.WaitGroup // what is made or ended

	mu      sync.Mutex
	kinds   map[[32]byte]*standbyKind
	n       int            // of all kinds, those that are yet to be made among them
	running int            // calls, and standbys in the making
	alone   map[string]int // calls that have a card for themselves
	warned  time.Time
}

// standbyKind is what standbys of one kind have in common. There is none without a standby: requests may be of any number of kinds.
type standbyKind struct {
	call Call // without files and input
	list []*standby
	used time.Time
}

type standby struct {
	made   chan struct{} // closed when x or err is there; nil: nobody has begun to make it
	cancel context.CancelFunc
	x      *running
	err    error
	gone   chan struct{} // not nil: closed when it has been ended
}

const (
	// standbyIdle is after how long standbys end that nobody asks for.
	standbyIdle = 5 * time.Minute
	// MaxStandbys is the most that a host may keep: each takes one of the marks that the kernel gives a user, 128 in most.
	MaxStandbys = 64
)

func newStandbys(c *calls) *standbys {
	return &standbys{c: c, kinds: map[[32]byte]*standbyKind{}, alone: map[string]int{}}
}

// common is a request without what may differ between calls of one kind.
func common(r *Call) Call {
	k := *r
	k.StdinFD, k.Stdin = r.StdinFD || len(r.Stdin) > 0, nil
	k.Files, k.Copy, k.CPU, k.Wall, k.Output, k.Standbys, k.Alone = nil, nil, 0, 0, 0, 0, false
	return k
}

func (k *Call) key() [32]byte { return sha256.Sum256(appendValue(nil, k)) }

// mayBeAhead says that a call may be started before its program is there. An interpreter may look for other files before it opens that, so
// where there are any they are there when it starts.
func (r *Call) mayBeAhead() bool { return r.Hold != "" && len(r.Files) == 1 }

// take gives a call that has opened the file that is held, or has ended before: a standby, then ahead is true, or a new one.
func (s *standbys) take(ctx context.Context, r *Call, fds []int) (x *running, ahead bool, err error) {
	if !r.mayBeAhead() {
		x, err = s.c.beginHeld(ctx, r, fds)
		return x, false, err
	}
	kind := common(r)
	if sp := s.pop(&kind, r.Standbys); sp != nil {
		select {
		case <-sp.made:
		case <-ctx.Done():
			s.end(sp)
			return nil, false, fmt.Errorf("wait for one that is made ahead: %w", ctx.Err())
		}
		if sp.err == nil && !sp.x.over() {
			return sp.x, true, nil
		}
		s.end(sp)
	}
	x, err = s.c.beginHeld(ctx, &kind, nil)
	return x, false, err
}

// beginHeld starts a call that waits for its program. Without fds those of the request come with it.
func (c *calls) beginHeld(ctx context.Context, r *Call, fds []int) (*running, error) {
	x, err := c.begin(ctx, r, fds)
	if err != nil {
		return nil, err
	}
	if err := x.held(ctx); err != nil {
		x.abandon()
		x.end()
		return nil, err
	}
	return x, nil
}

// pop takes a standby that is made or in the making, and has another one made for the next call where the host keeps any.
func (s *standbys) pop(call *Call, most int) (sp *standby) {
	key := call.key()
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[key]
	if s.c.k.host.Load() == 0 { // its host is gone
		most = 0
	}
	if k == nil {
		if most <= 0 {
			return nil
		}
		k = &standbyKind{call: *call}
		s.kinds[key] = k
	}
	k.used = time.Now()
	if len(k.list) > 0 {
		sp, k.list = k.list[0], k.list[1:]
		s.n--
		if sp.made == nil {
			sp = nil
		}
	}
	if s.room(k, min(most, MaxStandbys)) {
		k.list = append(k.list, &standby{})
		s.n++
	}
	if len(k.list) == 0 {
		delete(s.kinds, key)
	}
	s.make()
	return sp
}

// room makes room for one more of a kind, where need be by ending one of the kind that was used least lately. mu is held.
func (s *standbys) room(k *standbyKind, most int) bool {
	for s.n >= most {
		var old *standbyKind
		var at [32]byte
		for key, o := range s.kinds {
			if o != k && len(o.list) > 0 && (old == nil || o.used.Before(old.used)) {
				old, at = o, key
			}
		}
		if old == nil {
			return false
		}
		s.end(old.list[0])
		if old.list = old.list[1:]; len(old.list) == 0 {
			delete(s.kinds, at)
		}
		s.n--
	}
	return true
}

// make begins to make what is yet to be made, as far as there are processors for it, for the kind first that was used last. mu is held.
func (s *standbys) make() {
	for s.running < runtime.NumCPU() {
		var k *standbyKind
		var next *standby
		for _, o := range s.kinds {
			if i := slices.IndexFunc(o.list, func(sp *standby) bool { return sp.made == nil }); i >= 0 && s.alone[o.call.Card] == 0 && (k == nil || o.used.After(k.used)) {
				k, next = o, o.list[i]
			}
		}
		if next == nil {
			return
		}
		var ctx context.Context
		ctx, next.cancel = context.WithCancel(context.Background())
		next.made = make(chan struct{})
		s.running++
		s.gone.Go(func() { s.makeOne(ctx, k, next) })
	}
}

func (s *standbys) makeOne(ctx context.Context, k *standbyKind, sp *standby) {
	x, err := s.c.beginHeld(ctx, &k.call, nil)
	if err == nil && x.early != nil {
		x.abandon()
		x.end()
		err = fmt.Errorf("its command ended before it opened %.80q: %w", k.call.Hold, sandbox.ErrState)
	}
	if err == nil {
		sp.x = x
	} else {
		sp.err = err
	}
	close(sp.made)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running--
	if at := slices.Index(k.list, sp); err != nil && at >= 0 { // the next call of its kind asks again
		k.list = slices.Delete(k.list, at, at+1)
		s.n--
		maps.DeleteFunc(s.kinds, func(_ [32]byte, o *standbyKind) bool { return len(o.list) == 0 })
	}
	if err != nil && ctx.Err() == nil && time.Since(s.warned) > time.Minute { // its calls are told too
		s.warned = time.Now()
		s.c.k.log.Warn("make a call ahead", "argv", k.call.Argv, "err", err)
	}
	s.make()
}

// begins and ended tell of every call that runs.
func (s *standbys) begins(r *Call) {
	s.mu.Lock()
	s.running++
	s.mu.Unlock()
	if r.Alone {
		s.clear(r)
	}
}

func (s *standbys) ended(r *Call) {
	s.mu.Lock()
	s.running--
	if r.Alone {
		if s.alone[r.Card]--; s.alone[r.Card] == 0 {
			delete(s.alone, r.Card)
		}
	}
	if s.n > 0 {
		s.make()
	}
	s.mu.Unlock()
}

// clear ends what is ahead with the card that a call has alone, but for the one that it takes itself, and waits until all that is gone.
func (s *standbys) clear(r *Call) {
	kind := common(r)
	own := kind.key()
	var all []*standby
	s.mu.Lock()
	s.alone[r.Card]++
	for key, k := range s.kinds {
		if k.call.Card != r.Card {
			continue
		}
		keep := 0
		if key == own && r.mayBeAhead() {
			keep = 1
		}
		all = append(all, s.cut(key, k, keep)...)
	}
	s.mu.Unlock()
	for _, sp := range all {
		if sp.gone != nil {
			<-sp.gone
		}
	}
}

// cut ends the standbys of a kind but for the first ones. mu is held.
func (s *standbys) cut(key [32]byte, k *standbyKind, keep int) []*standby {
	keep = min(keep, len(k.list))
	ended := k.list[keep:]
	for _, sp := range ended {
		s.end(sp)
	}
	s.n -= len(ended)
	if k.list = k.list[:keep:keep]; keep == 0 {
		delete(s.kinds, key)
	}
	return ended
}

// end ends a standby that nobody takes any more, without waiting for it.
func (s *standbys) end(sp *standby) {
	if sp.made == nil {
		return
	}
	sp.cancel()
	sp.gone = make(chan struct{})
	s.gone.Go(func() {
		defer close(sp.gone)
		<-sp.made
		if sp.x != nil {
			sp.x.abandon()
			sp.x.end()
		}
	})
}

// drop ends the standbys of kinds.
func (s *standbys) drop(match func(*standbyKind) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, k := range s.kinds {
		if match(k) {
			s.cut(key, k, 0)
		}
	}
}

// dropLayer ends those whose environment has a layer, which is to be unmounted.
func (s *standbys) dropLayer(id string) {
	s.drop(func(k *standbyKind) bool { return slices.Contains(k.call.Layers, id) })
}

// run ends standbys that nobody asks for, until ctx ends.
func (s *standbys) run(ctx context.Context) {
	for {
		select {
		case <-time.After(standbyIdle / 10):
			s.dropIdle(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

func (s *standbys) dropIdle(now time.Time) {
	s.drop(func(k *standbyKind) bool { return now.Sub(k.used) > standbyIdle })
}

// close ends all and waits until they are gone.
func (s *standbys) close() {
	s.drop(func(*standbyKind) bool { return true })
	s.gone.Wait()
}

// count is how many there are that wait for their program.
func (s *standbys) count() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kinds {
		for _, sp := range k.list {
			select {
			case <-sp.made:
				n++
			default:
			}
		}
	}
	return n
}

// Standbys is how many calls the keeper has ahead that wait for their program.
func (c *Client) Standbys(ctx context.Context) (int, error) {
	var r standbysResponse
	err := c.do(ctx, opStandbys, nil, &r)
	return r.N, err
}
