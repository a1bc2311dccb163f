package fake

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

type box struct {
	w      *World
	id     sandbox.ID
	spec   *sandbox.Spec
	life   context.Context
	cancel context.CancelFunc

	// Under World.mu.
	gone       bool
	sink       sandbox.Sink
	gen        int
	queue      []event
	delivering bool
	commands   map[string]*command
	sessions   map[string]*session
	thaw       chan struct{} // not nil while frozen
	deadline   time.Time
	timer      *time.Timer
}

type session struct{ cwd string }

type eventKind uint8

const (
	evOutput eventKind = iota
	evCommand
	evSession
	evEnded
	evDenied
)

type event struct {
	kind    eventKind
	cmd     string
	stream  sandbox.StreamName
	offset  int64
	data    []byte
	late    bool
	outcome sandbox.Outcome
	cause   sandbox.Cause
	detail  string
}

func (x *box) post(e event) {
	x.w.mu.Lock()
	x.postLocked(e)
	x.w.mu.Unlock()
}

func (x *box) postLocked(e event) {
	x.queue = append(x.queue, e)
	if !x.delivering && x.sink != nil && x.gen == x.w.gen {
		x.delivering = true
		go x.pump()
	}
}

func (x *box) deliver() {
	x.w.mu.Lock()
	if !x.delivering && x.sink != nil && len(x.queue) > 0 {
		x.delivering = true
		go x.pump()
	}
	x.w.mu.Unlock()
}

// pump hands events over in order; one that is refused stays at the head and is tried again.
func (x *box) pump() {
	for {
		x.w.mu.Lock()
		if len(x.queue) == 0 || x.sink == nil || x.gen != x.w.gen {
			x.delivering = false
			x.w.mu.Unlock()
			return
		}
		e, sink, gen := x.queue[0], x.sink, x.gen
		x.w.mu.Unlock()
		err := send(context.Background(), sink, e)
		x.w.mu.Lock()
		if err == nil && x.gen == gen && len(x.queue) > 0 {
			x.queue = x.queue[1:]
		}
		x.w.mu.Unlock()
		if err != nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

func send(ctx context.Context, sink sandbox.Sink, e event) error {
	switch e.kind {
	case evOutput:
		return sink.Output(ctx, e.cmd, e.stream, e.offset, e.data, e.late)
	case evCommand:
		return sink.CommandEnded(ctx, e.cmd, e.outcome)
	case evSession:
		return sink.SessionEnded(ctx, e.cmd, e.outcome)
	case evEnded:
		return sink.Ended(ctx, e.cause)
	default:
		sink.Denied(ctx, e.cmd, e.detail, "")
		return nil
	}
}

type command struct {
	x       *box
	req     sandbox.Command
	signals chan int
	started time.Time
	stops   context.CancelFunc
	ctx     context.Context

	// Under World.mu.
	in     []byte // given and not read
	taken  int64
	eof    bool
	more   chan struct{} // closed when in or eof changes
	size   sandbox.Size
	out    [3]int64
	hashes [3]hash.Hash
}

func newCommand(x *box, c *sandbox.Command) *command {
	cmd := &command{x: x, req: *c, signals: make(chan int, 8), started: time.Now(), more: make(chan struct{})}
	cmd.ctx, cmd.stops = context.WithCancel(x.life)
	cmd.in, cmd.taken, cmd.eof = bytes.Clone(c.Stdin), int64(len(c.Stdin)), !c.StdinOpen
	if c.Terminal != nil {
		cmd.size = *c.Terminal
	}
	cmd.hashes[sandbox.Stdout], cmd.hashes[sandbox.Stderr] = sha256.New(), sha256.New()
	return cmd
}

func (c *command) stdin(offset int64, data []byte, eof bool) (int64, error) {
	if offset > c.taken {
		return c.taken, fmt.Errorf("stdin of %s at %d: %d taken so far: %w", c.req.ID, offset, c.taken, sandbox.ErrState)
	}
	if skip := c.taken - offset; skip < int64(len(data)) {
		if c.eof {
			return c.taken, fmt.Errorf("stdin of %s: closed: %w", c.req.ID, sandbox.ErrState)
		}
		c.in = append(c.in, data[skip:]...)
		c.taken += int64(len(data)) - skip
	}
	c.eof = c.eof || eof
	close(c.more)
	c.more = make(chan struct{})
	return c.taken, nil
}

// write prints octets; with an output cap the middle is cut as a keeper does: the head as it comes, the tail at the end.
func (c *command) write(stream sandbox.StreamName, data []byte, late bool) {
	c.x.w.mu.Lock()
	defer c.x.w.mu.Unlock()
	head := c.req.OutputCap - sandbox.Tail(c.req.OutputCap)
	for len(data) > 0 {
		n := min(len(data), 64<<10)
		off := c.out[stream]
		c.out[stream] += int64(n)
		if !late {
			c.hashes[stream].Write(data[:n])
		}
		if late || off+int64(n) <= head || c.req.OutputCap == 0 {
			c.x.postLocked(event{kind: evOutput, cmd: c.req.ID, stream: stream, offset: off, data: bytes.Clone(data[:n]), late: late})
		}
		data = data[n:]
	}
}

// end reports the end; the words below never exceed the cap but by "print", whose octets are all the same.
func (c *command) end(o sandbox.Outcome, late func()) {
	c.x.w.mu.Lock()
	o.Started, o.Ended = c.started, time.Now()
	o.Usage.MemoryPeak = -1
	for s, e := range map[sandbox.StreamName]*sandbox.StreamEnd{sandbox.Stdout: &o.Stdout, sandbox.Stderr: &o.Stderr} {
		total, limit := c.out[s], c.req.OutputCap
		*e = sandbox.StreamEnd{Total: total, Head: total, SHA256: hex.EncodeToString(c.hashes[s].Sum(nil))}
		tail := sandbox.Tail(limit)
		if head := limit - tail; limit > 0 && total > head {
			// The words print in pieces of at most 64 KiB, so the head may end before the cap's; tell what was sent.
			sent := head / (64 << 10) * (64 << 10)
			keep := min(tail, total-sent)
			if total <= limit {
				keep = total - sent
			}
			for off := total - keep; off < total; {
				n := min(total-off, 64<<10)
				c.x.postLocked(event{kind: evOutput, cmd: c.req.ID, stream: s, offset: off, data: bytes.Repeat([]byte("x"), int(n))})
				off += n
			}
			e.Head, e.Tail, e.Truncated = sent, keep, sent+keep < total
		}
	}
	c.x.postLocked(event{kind: evCommand, cmd: c.req.ID, outcome: o})
	c.x.w.mu.Unlock()
	c.stops()
	if late != nil {
		late()
	}
}

// pausable waits until d of unfrozen time has gone, or ctx ends.
func (c *command) pausable(ctx context.Context) error {
	for {
		c.x.w.mu.Lock()
		thaw := c.x.thaw
		c.x.w.mu.Unlock()
		if thaw == nil {
			return ctx.Err()
		}
		select {
		case <-thaw:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *command) sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return c.pausable(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run interprets the words: true, false, exit N, echo A..., err A..., print N, sleep D, cat, hang, env, pwd, size, id,
// late D (ends, then prints after D). Several may follow each other, separated by ";". A session's text is split at spaces.
func (c *command) run() {
	words := c.req.Argv
	if c.req.Session != "" {
		c.x.w.mu.Lock()
		open := c.x.sessions[c.req.Session] != nil
		c.x.w.mu.Unlock()
		if !open {
			c.end(sandbox.Outcome{Kind: sandbox.SessionEnded, Error: "session " + c.req.Session + " has ended"}, nil)
			return
		}
		words = strings.Fields(c.req.Text)
	}
	ctx := c.ctx
	var timedOut bool
	if c.req.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.req.Timeout)
		defer cancel()
	}
	type result struct {
		o    sandbox.Outcome
		late func()
	}
	done := make(chan result, 1)
	work, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		o, late := c.words(work, words)
		done <- result{o, late}
	}()
	for {
		select {
		case r := <-done:
			if ctx.Err() != nil && c.x.life.Err() == nil {
				timedOut = true
			}
			switch {
			case c.x.life.Err() != nil:
				return // the sandbox is gone; whoever ended it tells of it
			case timedOut:
				r.o = sandbox.Outcome{Kind: sandbox.TimedOut}
			}
			c.end(r.o, r.late)
			return
		case sig := <-c.signals:
			stop()
			<-done
			if c.x.life.Err() == nil {
				c.end(sandbox.Outcome{Kind: sandbox.Signalled, Signal: sig}, nil)
			}
			return
		}
	}
}

func (c *command) words(ctx context.Context, words []string) (sandbox.Outcome, func()) {
	code := 0
	for len(words) > 0 {
		n := 0
		for n < len(words) && words[n] != ";" {
			n++
		}
		word, args := words[0], words[1:max(n, 1)]
		words = words[min(n+1, len(words)):]
		arg := func() int { v, _ := strconv.Atoi(strings.Join(args, "")); return v }
		code = 0
		switch word {
		case "true":
		case "false":
			code = 1
		case "exit":
			if c.req.Session != "" {
				c.x.w.mu.Lock()
				delete(c.x.sessions, c.req.Session)
				c.x.w.mu.Unlock()
				c.x.post(event{kind: evSession, cmd: c.req.Session, outcome: sandbox.Outcome{Kind: sandbox.Exited, Code: arg(), Ended: time.Now()}})
			}
			return sandbox.Outcome{Kind: sandbox.Exited, Code: arg(), SessionEnd: c.req.Session != ""}, nil
		case "echo":
			c.write(sandbox.Stdout, []byte(strings.Join(args, " ")+"\n"), false)
		case "err":
			c.write(sandbox.Stderr, []byte(strings.Join(args, " ")+"\n"), false)
		case "print":
			c.write(sandbox.Stdout, bytes.Repeat([]byte("x"), arg()), false)
		case "env":
			c.write(sandbox.Stdout, []byte(strings.Join(sandbox.MergeEnv(c.x.spec.Env, c.req.Env), "\n")+"\n"), false)
		case "id":
			c.write(sandbox.Stdout, []byte(string(c.x.id)+"\n"), false)
		case "pwd":
			c.write(sandbox.Stdout, []byte(c.req.Cwd+"\n"), false)
		case "size":
			c.x.w.mu.Lock()
			size := c.size
			c.x.w.mu.Unlock()
			c.write(sandbox.Stdout, fmt.Appendf(nil, "%d %d\n", size.Rows, size.Cols), false)
		case "sleep":
			d, _ := time.ParseDuration(strings.Join(args, ""))
			if c.sleep(ctx, d) != nil {
				return sandbox.Outcome{Kind: sandbox.Signalled, Signal: 9}, nil
			}
		case "hang":
			<-ctx.Done()
			return sandbox.Outcome{Kind: sandbox.Signalled, Signal: 9}, nil
		case "cat":
			if !c.cat(ctx) {
				return sandbox.Outcome{Kind: sandbox.Signalled, Signal: 9}, nil
			}
		case "late":
			d, _ := time.ParseDuration(strings.Join(args, ""))
			return sandbox.Outcome{Kind: sandbox.Exited, OutputOpen: true}, func() {
				if c.sleep(c.x.life, d) == nil {
					c.write(sandbox.Stdout, []byte("late\n"), true)
				}
			}
		default:
			return sandbox.Outcome{Kind: sandbox.StartFailed, Error: fmt.Sprintf("program %q: no such file", word)}, nil
		}
	}
	return sandbox.Outcome{Kind: sandbox.Exited, Code: code}, nil
}

func (c *command) cat(ctx context.Context) bool {
	for {
		c.x.w.mu.Lock()
		in, eof, more := c.in, c.eof, c.more
		c.in = nil
		c.x.w.mu.Unlock()
		if len(in) > 0 {
			c.write(sandbox.Stdout, in, false)
			continue
		}
		if eof {
			return true
		}
		select {
		case <-more:
		case <-ctx.Done():
			return false
		}
	}
}
