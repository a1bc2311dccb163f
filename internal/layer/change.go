package layer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A descriptor changes when a layer gets another form, when one is dropped, and when it is written again to be young. Stores have no
// compare-and-swap that all of them know, so of two processes that do so at once the later one would undo what the earlier one did. Hence
// every change is made to what was read just before, and who adds a form looks afterwards, for longer than such a change takes, whether
// it is still there.
const (
	settleTime  = 250 * time.Millisecond
	settleLooks = 3
	settleMost  = 20 // looks in all
)

// settle makes sure that the layer has a form that was added; it returns the descriptor as it is then, or ErrExhausted where others leave it no peace.
func (c *Catalogue) settle(ctx context.Context, d Descriptor, form Form) (Descriptor, error) {
	for look, calm := 0, 0; look < settleMost; look++ {
		select {
		case <-time.After(settleTime):
		case <-ctx.Done():
			return d, nil // it was written
		}
		now, again, err := c.addAgain(ctx, d.ID, form)
		if errors.Is(err, sandbox.ErrNotFound) {
			return d, nil // removed since
		}
		if err != nil {
			return d, err
		}
		d = now
		if calm++; again {
			calm = 0
		}
		if calm == settleLooks {
			return d, nil
		}
	}
	return d, fmt.Errorf("layer %s: others change its descriptor all the time, so the form that was added may be lost to one of them; do it again: %w", d.ID, sandbox.ErrExhausted)
}

// addAgain puts a form in front when the layer has lost it.
func (c *Catalogue) addAgain(ctx context.Context, id ID, form Form) (d Descriptor, again bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d, err = c.Descriptor(ctx, id)
	if err != nil || slices.ContainsFunc(d.Forms, func(f Form) bool { return f.Digest == form.Digest }) {
		return d, false, err
	}
	d.Forms = inFront(form, d.Forms, c.now())
	return d, true, c.describe(ctx, d)
}

// touch writes a descriptor again, so that it is young, without the forms of old that are not whole.
func (c *Catalogue) touch(ctx context.Context, old Descriptor, whole []Form) (Descriptor, error) {
	now, err := c.Descriptor(ctx, old.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		now, err = old, nil // removed just now: it is wanted again
	}
	if err != nil {
		return Descriptor{}, err
	}
	is := func(list []Form, f Form) bool {
		return slices.ContainsFunc(list, func(o Form) bool { return o.Digest == f.Digest })
	}
	forms := slices.DeleteFunc(slices.Clone(now.Forms), func(f Form) bool { return is(old.Forms, f) && !is(whole, f) })
	if now.Forms = forms; len(forms) == 0 {
		now.Forms = whole
	}
	return now, c.describe(ctx, now)
}
