package layer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Layers are held in facts, and their octets lie in a store. Services with facts of their own may write into one store, so each says there what it
// holds: a mark, catalogues/<id>, and a reference, held/<id>/<layer>, for each layer. A reference is written before its fact, and taken away after it.
//
// Nothing here is a transaction. Who begins to hold a layer writes the reference and looks then whether the layer is there; who removes one
// takes its descriptor away and looks then whether a reference has come. So one of the two sees the other: the first finds no layer, or the second puts the
// descriptor back. One that dies between leaves the descriptor in removed/, from where the next sweep of any of them puts it back.
const (
	markFolder   = "catalogues/"
	heldFolder   = "held/"
	identityFact = "catalogue:identity"
)

// catalogueMark is the content of a mark. One without References is of a program that left none: nothing can be removed beside it.
type catalogueMark struct {
	References bool `json:"references"`
}

func referenceKey(catalogue string, id ID) string { return heldFolder + catalogue + "/" + id.Hex() }

// identity is the name of the facts, made once.
func (c *Catalogue) identity(ctx context.Context) (string, error) {
	for range maxAttempts {
		f, err := c.facts.Get(ctx, identityFact)
		if err == nil {
			return string(f.Value), nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return "", err
		}
		if _, err := c.facts.Put(ctx, identityFact, []byte(sandbox.NewKey()), facts.Absent); err != nil && !errors.Is(err, facts.ErrConflict) {
			return "", err
		}
	}
	return "", fmt.Errorf("identity of the catalogue: %w", facts.ErrConflict)
}

// mark leaves the mark, whose time tells others that this service lives, with a reference for each layer that is held: before the first hold of each
// life, and with each sweep. The caller has mu.
func (c *Catalogue) mark(ctx context.Context) error {
	me, err := c.identity(ctx)
	if err == nil {
		err = c.refer(ctx, me)
	}
	if err == nil {
		var text []byte
		if text, err = json.Marshal(catalogueMark{References: true}); err == nil {
			err = store.Put(ctx, c.store, markFolder+me, bytes.NewReader(text))
		}
	}
	if err == nil && !c.marked { // others may have taken old references for lost as long as there was no mark
		err = c.refer(ctx, me)
	}
	if err != nil {
		return fmt.Errorf("mark of the catalogue in the store: %w", err)
	}
	c.marked = true
	return nil
}

// refer writes the references that are missing.
func (c *Catalogue) refer(ctx context.Context, me string) error {
	missing, err := c.own(ctx)
	if err != nil || len(missing) == 0 {
		return err
	}
	if err := c.store.List(ctx, heldFolder+me+"/", func(i store.Info) bool {
		delete(missing, ID(idPrefix+i.Key[len(heldFolder+me+"/"):]))
		return true
	}); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for id := range missing {
		g.Go(func() error { return store.Put(ctx, c.store, referenceKey(me, id), strings.NewReader("{}")) })
	}
	return g.Wait()
}

// own lists the layers that any project of these facts holds.
func (c *Catalogue) own(ctx context.Context) (map[ID]bool, error) {
	list, err := c.facts.List(ctx, "held:", "", 0)
	if err != nil {
		return nil, err
	}
	out := map[ID]bool{}
	for _, f := range list {
		out[ID(idPrefix+f.Key[strings.LastIndexByte(f.Key, ':')+1:])] = true
	}
	return out, nil
}

// beside lists the other catalogues that write into the store. It fails where one does not tell what it holds.
func (c *Catalogue) beside(ctx context.Context) ([]string, error) {
	me, err := c.identity(ctx)
	if err != nil {
		return nil, err
	}
	var list []string
	if err := c.store.List(ctx, markFolder, func(i store.Info) bool {
		if of := i.Key[len(markFolder):]; of != me {
			list = append(list, of)
		}
		return true
	}); err != nil {
		return nil, err
	}
	for _, of := range list {
		if err := c.tellsReferences(ctx, of); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// heldBeside tells whether one of the other catalogues holds the layer.
func (c *Catalogue) heldBeside(ctx context.Context, others []string, id ID) (bool, error) {
	for _, of := range others {
		_, err := c.store.Stat(ctx, referenceKey(of, id))
		if err == nil || !errors.Is(err, sandbox.ErrNotFound) {
			return err == nil, err
		}
	}
	return false, nil
}

// references are what is said in the store of who holds what.
type references struct {
	mine   map[ID]bool // by this catalogue
	others map[ID]bool
	alone  bool     // no other catalogue has a mark
	lost   []string // keys of catalogues whose mark somebody took away, of a day ago and older
}

// references reads them all.
func (c *Catalogue) references(ctx context.Context) (references, error) {
	r := references{mine: map[ID]bool{}, others: map[ID]bool{}}
	me, err := c.identity(ctx)
	if err != nil {
		return r, err
	}
	others, err := c.beside(ctx)
	if err != nil {
		return r, err
	}
	r.alone = len(others) == 0
	return r, c.store.List(ctx, heldFolder, func(i store.Info) bool {
		of, hex, _ := strings.Cut(i.Key[len(heldFolder):], "/")
		id, err := ParseID(idPrefix + hex)
		switch {
		case err != nil:
		case of == me:
			r.mine[id] = true
		case slices.Contains(others, of) || c.now().Sub(i.Modified) <= claimAge: // its mark may have come just now
			r.others[id] = true
		default:
			r.lost = append(r.lost, i.Key)
		}
		return true
	})
}

func (c *Catalogue) tellsReferences(ctx context.Context, of string) error {
	text, err := store.ReadAll(ctx, c.store, markFolder+of, maxDescriptor)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil // taken away meanwhile
	}
	if err != nil {
		return err
	}
	var m catalogueMark
	if err := json.Unmarshal(text, &m); err != nil || !m.References {
		return fmt.Errorf("another service that keeps layers in this store does not say which, as earlier versions did not, so none are removed: start it with this version, or delete %s if it is gone: %w",
			markFolder+of, sandbox.ErrState)
	}
	return nil
}

// holders are the layers that anybody holds: a project of these facts, another catalogue, or a name in the store itself.
type holders struct {
	own, all map[ID]bool
	references
}

// holders lists them; with tidy, references and claims that are over are removed. The caller has mu.
func (c *Catalogue) holders(ctx context.Context, tidy bool) (holders, error) {
	h := holders{all: map[ID]bool{}}
	var err error
	if h.own, err = c.own(ctx); err != nil {
		return h, err
	}
	if h.references, err = c.references(ctx); err != nil {
		return h, err
	}
	for _, m := range []map[ID]bool{h.own, h.others} {
		for id := range m {
			h.all[id] = true
		}
	}
	if err := c.pushed(ctx, tidy, func(id ID) { h.all[id] = true }); err != nil || !tidy {
		return h, err
	}
	return h, c.dropReferences(ctx, h)
}

func (c *Catalogue) dropReferences(ctx context.Context, h holders) error {
	me, err := c.identity(ctx)
	if err != nil {
		return err
	}
	over := h.lost
	for id := range h.mine {
		if !h.own[id] {
			over = append(over, referenceKey(me, id))
		}
	}
	for _, key := range over {
		if err := c.store.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// putBack restores those of the layers, whose descriptors were just taken away, that another catalogue has begun to hold.
func (c *Catalogue) putBack(ctx context.Context, gone []Descriptor) (back map[ID]bool, err error) {
	if len(gone) == 0 {
		return nil, nil
	}
	others, err := c.beside(ctx)
	all := errors.Is(err, sandbox.ErrState) // somebody came who does not tell
	if err != nil && !all {
		return nil, err
	}
	back = map[ID]bool{}
	for _, d := range gone {
		held, err := c.heldBeside(ctx, others, d.ID)
		if err == nil && (all || held) {
			back[d.ID], err = true, c.describe(ctx, d)
		}
		if err != nil {
			return nil, err
		}
	}
	return back, nil
}
