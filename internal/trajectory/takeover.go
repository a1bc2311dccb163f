package trajectory

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Lost is what the store has of the log of a host that is gone, fetched into a folder. It is only read.
type Lost struct {
	*Log
	st   store.Store
	host string
	dir  string
}

// TakeOver shuts a lost host out of the store and fetches its log into a folder of its own, which is removed by Drop. ErrNotFound: the store
// has nothing of such a host.
func TakeOver(ctx context.Context, st store.Store, host, dir string, logger *slog.Logger) (_ *Lost, err error) {
	if err := store.CheckKey("logs/" + host); err != nil {
		return nil, err
	}
	some := false
	err = st.List(ctx, "logs/"+host+"/", func(store.Info) bool { some = true; return false })
	if err == nil && !some {
		err = fmt.Errorf("the store has no log of it: %w", sandbox.ErrNotFound)
	}
	if err == nil {
		err = Fence(ctx, st, host)
	}
	if err != nil {
		return nil, fmt.Errorf("take over the log of host %s: %w", host, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	fsys, err := DirFS(dir)
	if err == nil {
		err = Recall(ctx, st, host, fsys)
	}
	if err != nil {
		return nil, err
	}
	cfg := Default(dir)
	cfg.SegmentBytes, cfg.Reserve = 64<<10, 0 // nothing is written
	l, err := Open(cfg, logger)
	if err != nil {
		return nil, err
	}
	return &Lost{Log: l, st: st, host: host, dir: dir}, nil
}

// Drop closes the log and removes the folder.
func (l *Lost) Drop() error { return errors.Join(l.Close(), os.RemoveAll(l.dir)) }

// Take claims one trajectory of the lost host for a host, which goes on with it. It answers whose it is: of two that claim it at once one
// has it or none, and then both may try again.
func (l *Lost) Take(ctx context.Context, id ID, by string) (owner string, err error) {
	sum := sha256.Sum256([]byte(id.String()))
	prefix := fmt.Sprintf("logs/%s/taken/%x/", l.host, sum[:16])
	others := func() (list []string, mine bool, err error) {
		err = l.st.List(ctx, prefix, func(in store.Info) bool {
			if name := strings.TrimPrefix(in.Key, prefix); name == by {
				mine = true
			} else {
				list = append(list, name)
			}
			return true
		})
		return list, mine, err
	}
	list, mine, err := others()
	if err == nil && !mine && len(list) == 0 {
		if err = store.Put(ctx, l.st, prefix+by, bytes.NewReader([]byte(id.String()+"\n"))); err == nil {
			if list, mine, err = others(); err == nil && len(list) > 0 { // another came at the same time
				err = l.st.Delete(ctx, prefix+by)
				mine = false
			}
		}
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("claim trajectory %v of host %s: %w", id, l.host, err)
	case mine:
		return by, nil
	}
	return list[0], nil
}

// Import appends records of another log with their times and epochs; seq must be what follows. It is done with durability process.
func (l *Log) Import(ctx context.Context, id ID, recs []Record) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p := placing{id: id, recs: recs, keep: true}
	for i := range recs {
		if err := recs[i].check(); err != nil {
			return fmt.Errorf("import into %v: %w", id, err)
		}
		p.crcs = append(p.crcs, bodyCRC(&recs[i]))
	}
	_, first, err := l.write(&p)
	if err == nil && first != recs[0].Seq {
		err = fmt.Errorf("record %d came to be %d: %w", recs[0].Seq, first, sandbox.ErrState)
	}
	if err != nil {
		return fmt.Errorf("import into %v: %w", id, err)
	}
	return nil
}

// Keep makes an input of another log one of this log. What the other has lost is kept by its hash alone.
func (l *Log) Keep(from interface {
	OpenInput(in *Input) (io.ReadCloser, error)
}, in *Input, d sandbox.Durability) (*Input, error) {
	if in == nil || in.Kept != KeptBlob {
		return in, nil
	}
	r, err := from.OpenInput(in)
	if err == nil {
		defer r.Close()
		w := l.NewInputWriter()
		if _, err = io.Copy(w, r); err == nil {
			return w.Finish(d)
		}
		w.Abort()
	}
	if errors.Is(err, sandbox.ErrLost) {
		return &Input{Kept: KeptHash, Size: in.Size, SHA256: in.SHA256}, nil
	}
	return nil, err
}

// Fenced looks whether the log's place in the store was taken by another. The log takes nothing more then.
func (l *Log) Fenced(ctx context.Context) (bool, error) {
	if l.cfg.Store == nil {
		return false, nil
	}
	if err := l.epochMu.lock(ctx); err != nil {
		return false, err
	}
	owned := l.owned
	l.epochMu.unlock()
	if !owned { // it has promised nothing through the store yet
		return false, nil
	}
	err := l.checkEpoch(ctx)
	if errors.Is(err, errFenced) {
		return true, nil
	}
	return false, err
}
