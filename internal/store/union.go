package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// union is several stores as one.
type union struct {
	all []Store // the first is written
}

// Union makes several stores one. A key is looked for in each in turn; what is written goes to the first, and only from there is anything
// deleted. A store that fails is passed over as long as another has the object.
func Union(primary Store, others ...Store) Store {
	if len(others) == 0 {
		return primary
	}
	return &union{append([]Store{primary}, others...)}
}

func (u *union) Create(ctx context.Context) (Draft, error)    { return u.all[0].Create(ctx) }
func (u *union) Delete(ctx context.Context, key string) error { return u.all[0].Delete(ctx, key) }

// first asks the stores in turn. That all say "not found" is the answer only when none failed.
func first[T any](ctx context.Context, u *union, ask func(Store) (T, error)) (T, error) {
	var failed, missing error
	for _, s := range u.all {
		v, err := ask(s)
		switch {
		case err == nil:
			return v, nil
		case errors.Is(err, sandbox.ErrInvalid) || ctx.Err() != nil:
			return v, err
		case errors.Is(err, sandbox.ErrNotFound):
			if missing == nil {
				missing = err
			}
		case failed == nil:
			failed = err
		}
	}
	var none T
	if failed != nil {
		return none, failed
	}
	return none, missing
}

func (u *union) Open(ctx context.Context, key string) (Reader, error) {
	return first(ctx, u, func(s Store) (Reader, error) { return s.Open(ctx, key) })
}

func (u *union) Stat(ctx context.Context, key string) (Info, error) {
	return first(ctx, u, func(s Store) (Info, error) { return s.Stat(ctx, key) })
}

// Path is that of the first store that has the object, when its objects are files.
func (u *union) Path(key string) (string, bool) {
	for _, s := range u.all {
		if p, ok := s.Path(key); ok {
			if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() {
				return p, true
			}
		}
	}
	return "", false
}

// List merges the lists, which are in order of keys.
func (u *union) List(ctx context.Context, prefix string, each func(Info) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type source struct {
		next func() (Info, error, bool)
		head Info
		more bool
	}
	sources := make([]source, len(u.all))
	step := func(s *source) error {
		info, err, more := s.next()
		s.head, s.more = info, more
		return err
	}
	for i, s := range u.all {
		next, stop := iter.Pull2(func(yield func(Info, error) bool) {
			stopped := false
			if err := s.List(ctx, prefix, func(i Info) bool {
				stopped = !yield(i, nil)
				return !stopped
			}); err != nil && !stopped {
				yield(Info{}, err)
			}
		})
		defer stop()
		sources[i].next = next
		if err := step(&sources[i]); err != nil {
			return fmt.Errorf("store %d of %d: %w", i+1, len(u.all), err)
		}
	}
	for {
		var least *source
		for i := range sources {
			if s := &sources[i]; s.more && (least == nil || s.head.Key < least.head.Key) {
				least = s
			}
		}
		if least == nil {
			return nil
		}
		info := least.head
		if !each(info) {
			return nil
		}
		for i := range sources { // the same key in several
			if s := &sources[i]; s.more && s.head.Key == info.Key {
				if err := step(s); err != nil {
					return fmt.Errorf("store %d of %d: %w", i+1, len(u.all), err)
				}
			}
		}
	}
}

// Collect gives back what deleted objects held, in the store that is written, when that is one that collects; see [S3.Collect].
func Collect(ctx context.Context, s Store, grace time.Duration, dryRun bool) (r Report, ok bool, err error) {
	if u, is := s.(*union); is {
		s = u.all[0]
	}
	if c, is := s.(*S3); is {
		r, err = c.Collect(ctx, grace, dryRun)
		return r, true, err
	}
	return r, false, nil
}
