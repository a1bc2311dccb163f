package keeper

import (
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func (c *command) endSent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end >= outSent
}

func (c *command) rewind() {
	for _, s := range c.streams() {
		s.rewind()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.end == outSent {
		c.end = outPending
	}
}

// pump sends a segment of each stream, then the end, and what is late after it; left says that more is there.
func (c *command) pump(l *link) (sent int, left bool, err error) {
	// Asked before the streams are: an end that becomes due while they are looked at comes with octets that were not seen there, and
	// goes out at the next turn. Else the end would overtake them.
	c.mu.Lock()
	due, ended := c.end == outPending, c.end >= outSent
	c.mu.Unlock()
	for _, s := range c.streams() {
		g := s.next(ended)
		if g == nil {
			continue
		}
		left = true
		sent += len(g.data)
		err := l.send(evOutput, &outputEvent{c.b.id, c.id, s.name, g.offset, g.late}, g.data, func() {
			s.ack(g)
			c.maybeDrop()
		})
		if err != nil {
			return sent, false, err
		}
	}
	if left || !due {
		return sent, left, nil
	}
	c.mu.Lock()
	if c.end != outPending {
		c.mu.Unlock()
		return sent, false, nil
	}
	c.end = outSent
	o := c.outcome
	c.mu.Unlock()
	err = l.send(evCommandEnded, &endEvent{c.b.id, c.id, o}, nil, func() {
		c.mu.Lock()
		c.end = outTaken
		c.mu.Unlock()
		c.maybeDrop()
	})
	for _, s := range c.streams() {
		left = left || s.unsent()
	}
	return sent, left, err
}

// maybeDrop forgets all of a command but that it was, once the host has everything.
func (c *command) maybeDrop() {
	c.mu.Lock()
	taken := c.end == outTaken
	c.mu.Unlock()
	if !taken {
		return
	}
	for _, s := range c.streams() {
		if !s.idle() {
			return
		}
	}
	c.b.mu.Lock()
	if c.b.cmds[c.id] == c {
		delete(c.b.cmds, c.id)
	}
	c.b.mu.Unlock()
}

func (c *command) running() Running {
	r := Running{ID: c.id, Session: c.session}
	for _, s := range c.streams() {
		if s.name == sandbox.Stdout {
			r.Stdout = s.ackedTo()
		} else {
			r.Stderr = s.ackedTo()
		}
	}
	c.mu.Lock()
	r.Ended = c.exited
	in := c.in
	c.mu.Unlock()
	if in != nil {
		r.Stdin = in.takenTo()
	}
	return r
}
