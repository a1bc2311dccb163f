package host

import (
	"container/list"
	"context"
	"sync"
)

// histories keeps what was read of ended sandboxes, a few of them.
type histories struct {
	mu   sync.Mutex
	all  map[*box]*list.Element
	used list.List // of *loadedHistory, the latest in front
}

type loadedHistory struct {
	b *box
	h *history
}

const maxHistories = 64

func (l *histories) get(b *box) *history {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.all[b]
	if e == nil {
		return nil
	}
	l.used.MoveToFront(e)
	return e.Value.(*loadedHistory).h
}

func (l *histories) put(b *box, h *history) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = map[*box]*list.Element{}
	}
	if l.all[b] != nil {
		return
	}
	l.all[b] = l.used.PushFront(&loadedHistory{b, h})
	for l.used.Len() > maxHistories {
		last := l.used.Remove(l.used.Back()).(*loadedHistory)
		delete(l.all, last.b)
	}
}

func (l *histories) drop(b *box) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.all[b]; e != nil {
		l.used.Remove(e)
		delete(l.all, b)
	}
}

// load is what was asked of the sandbox: of an ended one, read from the log.
func (b *box) load(ctx context.Context) (*history, error) {
	b.mu.Lock()
	hist, over := b.history, b.state.Ended()
	b.mu.Unlock()
	if !over {
		return hist, nil
	}
	if hist := b.h.loaded.get(b); hist != nil {
		return hist, nil
	}
	st, err := b.h.tell(ctx, b.traj, wholeStory, b.end())
	if err != nil {
		return nil, err
	}
	for _, s := range st.steps {
		if s.act != tagCommand {
			continue
		}
		for _, stream := range bothStreams {
			ss, err := b.h.deps.Log.StreamState(b.traj, s.stream(), stream)
			if err != nil {
				return nil, err
			}
			s.next[stream] = ss.End
		}
	}
	b.h.loaded.put(b, st.history)
	return st.history, nil
}
