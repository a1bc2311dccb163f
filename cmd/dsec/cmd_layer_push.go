package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// ownStore is the store of the services, which push and pull reach themselves: the octets don't go through a gateway.
type ownStore struct {
	Local string `help:"Store of the services here, as their --store." default:"/var/lib/dsec/store" placeholder:"STORE"`
	Env   bool   `help:"REF is an environment: with all its layers."`
	Check bool   `help:"Compare layers that are there already with their digests, and bring again what is wrong."`
}

func (x *ownStore) open(ctx context.Context, c *cli, other string) (cl *client.Client, own, far store.Store, err error) {
	if err = ownFolder(x.Local); err != nil {
		return nil, nil, nil, err
	}
	if own, err = openStores([]string{x.Local}, ""); err == nil {
		far, err = openStores([]string{other}, "")
	}
	if err == nil {
		cl, err = c.client(ctx)
	}
	return cl, own, far, err
}

// copyMeter shows how far a copy is, on a terminal.
func copyMeter() func(store.CopyProgress) {
	began, next, on := time.Now(), time.Now().Add(time.Second), isTerminal(os.Stderr)
	return func(p store.CopyProgress) {
		if now := time.Now(); on && (now.After(next) || p.Objects == p.Total && now.Sub(began) > time.Second) {
			next = now.Add(200 * time.Millisecond)
			fmt.Fprintf(os.Stderr, "\r%d of %d objects, %s, %s/s ", p.Objects, p.Total, octetText(p.Octets), octetText(int64(float64(p.Octets)/now.Sub(began).Seconds())))
			if p.Objects == p.Total {
				fmt.Fprintln(os.Stderr)
			}
		}
	}
}

type layerPushCmd struct {
	Ref   string `arg:"" help:"Name, name@version or, of a layer, an ID."`
	Store string `arg:"" help:"A folder or s3://BUCKET/PREFIX?endpoint=URL."`
	ownStore
	Remove bool `help:"Take the name (or name@version) out of that store instead. A gateway that serves it removes layers that no other name holds."`
}

// Run copies what the other store lacks, then writes the name. Run again, it goes on where it broke off.
func (x *layerPushCmd) Run(ctx context.Context, c *cli) error {
	if x.Remove {
		return x.remove(ctx)
	}
	cl, own, far, err := x.open(ctx, c, x.Store)
	if err != nil {
		return err
	}
	p := layer.Pushed{Kind: layer.PushedLayer, Time: time.Now().UTC()}
	if x.Env {
		err = pushedEnvironment(ctx, cl, x.Ref, &p)
	} else {
		err = pushedLayer(ctx, cl, x.Ref, &p)
	}
	if err != nil {
		return err
	}
	all, done, err := layer.Copy(ctx, far, own, p.Layers, x.Check, copyMeter())
	if err != nil {
		return err
	}
	p.Layers = all
	if p.Name != "" {
		if err := layer.WritePushed(ctx, far, p); err != nil {
			return err
		}
	}
	return c.copied("pushed", x.Ref, len(all), done)
}

// copied says what a push or pull has done.
func (c *cli) copied(act, ref string, layers int, done store.CopyProgress) error {
	if c.Output == "json" {
		return json.NewEncoder(os.Stdout).Encode(map[string]any{act: ref, "layers": layers, "objects": done.Total, "skipped": done.Skipped, "octets": done.Octets})
	}
	fmt.Printf("%s %s: %s, %d of %d objects were there, %s read\n", act, ref, plural(layers, "layer"), done.Skipped, done.Total, octetText(done.Octets))
	return nil
}

func getLayer(ctx context.Context, cl *client.Client, ref, claim string) (*dsecv1.GetLayerResponse, error) {
	q := connect.NewRequest(&dsecv1.GetLayerRequest{Ref: ref})
	if claim != "" {
		q.Header().Set("Dsec-Claim", claim)
	}
	r, err := cl.LayerService.GetLayer(ctx, q)
	if err != nil {
		return nil, client.Wrap(err)
	}
	return r.Msg, nil
}

func (x *layerPushCmd) remove(ctx context.Context) error {
	if err := existing(x.Store); err != nil {
		return err
	}
	far, err := openStores([]string{x.Store}, "")
	if err != nil {
		return err
	}
	kind := layer.PushedLayer
	if x.Env {
		kind = layer.PushedEnvironment
	}
	if err := layer.RemovePushed(ctx, far, kind, x.Ref); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "removed %s from %s\n", x.Ref, x.Store)
	return nil
}

func pushedLayer(ctx context.Context, cl *client.Client, ref string, p *layer.Pushed) error {
	r, err := getLayer(ctx, cl, ref, "")
	if err != nil {
		return err
	}
	p.Layers = []layer.ID{layer.ID(r.Layer.GetId())}
	if r.Name == nil {
		return nil // by ID
	}
	p.Name, p.Version = r.Name.Name, r.Name.Current
	if _, n, ok := strings.Cut(ref, "@"); ok {
		_, err = fmt.Sscan(n, &p.Version)
	}
	return err
}

func pushedEnvironment(ctx context.Context, cl *client.Client, ref string, p *layer.Pushed) error {
	r, err := cl.LayerService.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: ref}))
	if err != nil {
		return client.Wrap(err)
	}
	e := r.Msg.Environment
	p.Kind, p.Name, p.Version, p.Refs = layer.PushedEnvironment, e.Name, e.Version, map[string]layer.ID{}
	for _, id := range e.Layers {
		p.Layers = append(p.Layers, layer.ID(id))
	}
	for _, ref := range environmentRefs(e) {
		l, err := getLayer(ctx, cl, *ref, "")
		if err != nil {
			return err
		}
		p.Refs[*ref] = layer.ID(l.Layer.GetId())
	}
	p.Environment, err = protojson.Marshal(e)
	return err
}

// environmentRefs are the references that an environment is made of.
func environmentRefs(e *dsecv1.Environment) []*string {
	refs := []*string{&e.Base}
	if e.Workspace != "" {
		refs = append(refs, &e.Workspace)
	}
	for i := range e.Kits {
		refs = append(refs, &e.Kits[i])
	}
	return refs
}

type layerPullCmd struct {
	Ref   string `arg:"" help:"Name, name@version or, of a layer, an ID, as it was pushed."`
	Store string `arg:"" help:"A folder or s3://BUCKET/PREFIX?endpoint=URL."`
	ownStore
}

// Run copies what the services' store lacks, then has the gateway take the layers over and name them.
func (x *layerPullCmd) Run(ctx context.Context, c *cli) error {
	if err := existing(x.Store); err != nil {
		return err
	}
	cl, own, far, err := x.open(ctx, c, x.Store)
	if err != nil {
		return err
	}
	var p layer.Pushed
	if id, ierr := layer.ParseID(x.Ref); ierr == nil && !x.Env {
		p.Layers = []layer.ID{id}
	} else if p, err = layer.ReadPushed(ctx, far, x.kind(), x.Ref); err != nil {
		return err
	}
	all, done, err := layer.Copy(ctx, own, far, p.Layers, x.Check, copyMeter())
	if err != nil {
		return err
	}
	for _, id := range all {
		if err := claim(ctx, cl, own, id); err != nil {
			return err
		}
	}
	said, err := x.publish(ctx, cl, p)
	if err != nil {
		return err
	}
	return c.copied("pulled", said, len(all), done)
}

func (x *layerPullCmd) kind() string {
	if x.Env {
		return layer.PushedEnvironment
	}
	return layer.PushedLayer
}

// claim has the gateway take over a layer that is in its store.
func claim(ctx context.Context, cl *client.Client, own store.Store, id layer.ID) error {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return err
	}
	token := hex.EncodeToString(b[:])
	if err := layer.LeaveClaim(ctx, own, id, token); err != nil {
		return err
	}
	defer layer.DropClaim(context.WithoutCancel(ctx), own, id, token)
	_, err := getLayer(ctx, cl, string(id), token)
	if errors.Is(err, sandbox.ErrNotFound) || connect.CodeOf(err) == connect.CodeNotFound {
		return fmt.Errorf("the gateway does not see layer %s: give --local as the --store of `dsec up`: %w", id, err)
	}
	return err
}

// publish gives the names; one that means the layer already is left as it is.
func (x *layerPullCmd) publish(ctx context.Context, cl *client.Client, p layer.Pushed) (string, error) {
	name := func(name string, id layer.ID) (string, error) {
		if r, err := getLayer(ctx, cl, name, ""); err == nil && r.Layer.GetId() == string(id) {
			return fmt.Sprintf("%s@%d", name, r.Name.GetCurrent()), nil
		}
		r, err := cl.LayerService.PublishLayer(ctx, connect.NewRequest(&dsecv1.PublishLayerRequest{Name: name, Layer: string(id)}))
		if err != nil {
			return "", client.Wrap(err)
		}
		return r.Msg.Published, nil
	}
	switch {
	case p.Name == "":
		return x.Ref, nil
	case p.Kind == layer.PushedLayer:
		return name(p.Name, p.Layers[len(p.Layers)-1])
	}
	var e dsecv1.Environment
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(p.Environment, &e); err != nil {
		return "", fmt.Errorf("environment %s: %w", p.Name, err)
	}
	for _, ref := range environmentRefs(&e) {
		id, ok := p.Refs[*ref]
		if !ok {
			return "", fmt.Errorf("environment %s: layer %s was not pushed with it", p.Name, *ref)
		}
		if _, err := layer.ParseID(*ref); err == nil {
			continue
		}
		base, _, _ := strings.Cut(*ref, "@")
		to, err := name(base, id)
		if err != nil {
			return "", err
		}
		*ref = to
	}
	if r, err := cl.LayerService.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: p.Name})); err == nil && sameEnvironment(r.Msg.Environment, &e) {
		return fmt.Sprintf("%s@%d", e.Name, r.Msg.Environment.Version), nil
	}
	e.Version, e.Layers, e.Created, e.Current = 0, nil, nil, false
	out, err := cl.PublishEnvironment(ctx, &e)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s@%d", out.Name, out.Version), nil
}

// sameEnvironment compares two but for their versions and times.
func sameEnvironment(a, b *dsecv1.Environment) bool {
	text := func(e *dsecv1.Environment) string {
		e = proto.Clone(e).(*dsecv1.Environment)
		e.Version, e.Created, e.Current = 0, nil, false
		s, _ := marshal(e, true)
		return string(s)
	}
	return text(a) == text(b)
}
