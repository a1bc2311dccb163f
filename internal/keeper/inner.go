package keeper

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// What follows is how the groups of commands are handled: by the keeper on the host, or, where the sandbox has a kernel of its own, by
// process 1, which is told their numbers.

const (
	maxInnerGroup = 1<<16 - 1
	askBound      = 5 * time.Second
)

// takeGroup is group.take. For the holder of box.mu.
func (b *box) takeGroup() (name string, cpu time.Duration, err error) {
	if !b.inner {
		return b.grp.take()
	}
	b.lastGroup = b.lastGroup%maxInnerGroup + 1
	return "inner-" + strconv.Itoa(b.lastGroup), -1, nil
}

// innerNumber is the number of a group that process 1 makes; 0: it is the host's.
func innerNumber(group string) int {
	n, ok := strings.CutPrefix(group, "inner-")
	if !ok {
		return 0
	}
	v, _ := strconv.Atoi(n)
	return v
}

// giveGroup is group.put. Process 1 removes its own once they are empty. For the holder of box.mu.
func (b *box) giveGroup(name string) {
	if !b.inner {
		b.grp.put(name)
	}
}

// killGroup kills all in a command's group.
func (b *box) killGroup(name string) error {
	if !b.inner {
		return b.grp.kill(name)
	}
	b.mu.Lock()
	num := b.nextNum
	b.nextNum++
	b.mu.Unlock()
	return b.tell(wire.TGroup, num, wire.Group{Number: uint32(innerNumber(name)), Act: wire.GroupKill})
}

// askGroup has process 1 do something with a group and returns what it counted. Not for the reader of its frames.
func (b *box) askGroup(name string, act uint32, sig unix.Signal) (int, error) {
	answer := make(chan uint32, 1)
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		return 0, fmt.Errorf("sandbox %s has ended: %w", b.id, sandbox.ErrState)
	}
	num := b.nextNum
	b.nextNum++
	if b.asked == nil {
		b.asked = map[uint64]chan uint32{}
	}
	b.asked[num] = answer
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.asked, num)
		b.mu.Unlock()
	}()
	if err := b.tell(wire.TGroup, num, wire.Group{Number: uint32(innerNumber(name)), Act: act, Signal: uint32(sig)}); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), askBound)
	defer cancel()
	select {
	case n := <-answer:
		return int(min(n, 1<<16)), nil // hostile: a count, used as one alone
	case <-ctx.Done():
		return 0, fmt.Errorf("process 1 of %s does not answer: %w", b.id, ctx.Err())
	}
}

// grouped takes an answer to a GROUP frame.
func (b *box) grouped(f wire.Frame) error {
	f.CloseFDs()
	n, err := wire.DecodeGrouped(f.Body)
	if err != nil {
		return err
	}
	b.mu.Lock()
	answer := b.asked[f.ID]
	delete(b.asked, f.ID)
	b.mu.Unlock()
	if answer != nil {
		answer <- n
	}
	return nil // a kill's answer is not waited for
}

// relayed makes the pipes of a terminal that process 1 carries, and returns the far ends.
func (c *command) relayed(req *sandbox.Command) (far []int, err error) {
	in, near, err := c.b.pipe(false)
	if err != nil {
		return nil, err
	}
	c.in = newInput(near, req)
	c.in.own = true
	out, from, err := c.b.pipe(true)
	if err != nil {
		near.Close()
		unix.Close(in)
		return nil, err
	}
	s, err := newStream(c, sandbox.Stdout, from, req.OutputCap)
	if err != nil {
		near.Close()
		from.Close()
		closeAll([]int{in, out})
		return nil, err
	}
	c.mu.Lock()
	c.out, c.relay = s, true
	c.mu.Unlock()
	return []int{in, out}, nil
}
