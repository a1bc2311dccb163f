package fncall

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"sync"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// artifact is a file that compiling made; it is kept in the cache, for no owner: who has the sources may have it.
type artifact struct {
	path    string
	content string
	exec    bool
}

// compiled remembers what compiling came to, by everything that goes into it. Failures are not remembered: a limit of time may have been
// met by chance.
type compiled struct {
	mu    *sync.Mutex
	by    map[[32]byte]*list.Element
	used  *list.List // of *compilation, the latest first
	going map[[32]byte]chan struct{}
}

type compilation struct {
	key    [32]byte
	arts   []artifact
	result *dsecv1.CallResult
}

const (
	keptCompilations = 8192
	maxArtifact      = 256 << 20 // octets; a program may hold a large table
)

func newCompiled() compiled {
	return compiled{mu: &sync.Mutex{}, by: map[[32]byte]*list.Element{}, used: list.New(), going: map[[32]byte]chan struct{}{}}
}

// compile gives the artifacts of a program; the result is nil for a language without a compiler. One program is compiled once at a time.
func (e *Engine) compile(ctx context.Context, j *job, p *program) ([]artifact, *dsecv1.CallResult, error) {
	if len(p.lang.Compile) == 0 {
		return nil, nil, nil
	}
	key, err := p.key(j)
	if err != nil {
		return nil, nil, err
	}
	c := &e.compiled
	for {
		c.mu.Lock()
		if el := c.by[key]; el != nil {
			c.used.MoveToFront(el)
			k := el.Value.(*compilation)
			c.mu.Unlock()
			if e.there(k.arts) {
				r := proto.CloneOf(k.result)
				r.Cached = true
				return k.arts, r, nil
			}
			c.forget(key)
			continue
		}
		wait := c.going[key]
		if wait == nil {
			wait = make(chan struct{})
			c.going[key] = wait
			c.mu.Unlock()
			arts, r, err := e.compileNow(ctx, j, p)
			c.mu.Lock()
			delete(c.going, key)
			if err == nil && r.Verdict == string(OK) {
				c.by[key] = c.used.PushFront(&compilation{key, arts, r})
				if last := c.used.Back(); c.used.Len() > keptCompilations {
					delete(c.by, last.Value.(*compilation).key)
					c.used.Remove(last)
				}
			}
			c.mu.Unlock()
			close(wait)
			return arts, r, err
		}
		c.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			r, _ := e.gaveUp(ctx, ctx.Err(), "")
			return nil, r, nil
		}
	}
}

func (c *compiled) forget(key [32]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if el := c.by[key]; el != nil {
		delete(c.by, key)
		c.used.Remove(el)
	}
}

// there reports whether all artifacts are still kept.
func (e *Engine) there(arts []artifact) bool {
	for _, a := range arts {
		f, err := e.cache.Open("", a.content)
		if err != nil {
			return false
		}
		f.Close()
	}
	return true
}

// key is everything that decides what a compiler makes.
func (p *program) key(j *job) (key [32]byte, err error) {
	h := sha256.New()
	enc := json.NewEncoder(h)
	files := make([][4]any, 0, len(p.files))
	for _, f := range p.files {
		owner := ""
		if f.content != "" {
			owner = f.owner
		}
		files = append(files, [4]any{f.path, sha256.Sum256(f.data), f.content + owner, f.exec})
	}
	if err := enc.Encode([]any{p.lang, p.layers, p.env, files, p.args, p.compileLimits}); err != nil {
		return key, fmt.Errorf("compile: %w", err)
	}
	h.Sum(key[:0])
	return key, nil
}

// compileNow runs the compiler.
func (e *Engine) compileNow(ctx context.Context, j *job, p *program) ([]artifact, *dsecv1.CallResult, error) {
	in := &input{}
	for _, a := range p.lang.Artifacts {
		in.copies = append(in.copies, Copy{Path: a, Max: maxArtifact})
		in.outputs = append(in.outputs, &dsecv1.CallOutput{Path: a})
	}
	q := *p
	q.run, q.limits, q.env = p.lang.command(p.args), p.compileLimits, sandbox.MergeEnv(p.env, p.lang.CompileEnv)
	plain := *p.lang
	plain.Compile = nil // all files are the compiler's
	q.lang = &plain
	_, release, err := e.place(ctx, j, 1, "")
	if err != nil {
		r, err := e.gaveUp(ctx, err, "")
		return nil, r, err
	}
	x, done, err := e.prepare(j, &q, nil, in)
	if err != nil {
		release()
		return nil, nil, err
	}
	defer done()
	exit, err := e.again(ctx, func() (*Exit, error) { return e.deps.Runner.Exec(ctx, x) })
	release()
	if err != nil {
		return nil, nil, err
	}
	defer exit.close()
	r := e.plain(exit, x.Limits)
	if r.Verdict != string(OK) {
		switch Verdict(r.Verdict) {
		case SYS, Cancelled:
		default: // whatever stops a compiler, it is the source that did not compile
			if r.Error == "" && r.Verdict != string(RE) {
				r.Error = "the compiler ended with " + r.Verdict
				if r.Limit != "" {
					r.Error += " (" + r.Limit + ")"
				}
			}
			r.Verdict = string(CE)
		}
		return nil, r, nil
	}
	var arts []artifact
	for _, f := range exit.Files {
		if f.Err != "" {
			r.Verdict, r.Error = string(CE), fmt.Sprintf("the compiler made no %s: %s", f.Path, f.Err)
			return nil, r, nil
		}
		var from io.Reader = bytes.NewReader(f.Data)
		if f.From != nil {
			from = f.From
		}
		content, _, err := e.cache.Put("", from, maxArtifact)
		if err != nil {
			return nil, nil, fmt.Errorf("keep what the compiler made: %w", err)
		}
		arts = append(arts, artifact{f.Path, content, f.Exec})
	}
	return arts, r, nil
}
