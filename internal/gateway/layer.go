package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sort"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// layers is LayerService, served from the catalogue that all gateways share.
type layers struct{ g *Gateway }

var _ dsecv1connect.LayerServiceHandler = layers{}

// tarReader is the tar of a stream of messages with data; one message is held at a time.
type tarReader[T any, M interface {
	*T
	GetData() []byte
}] struct {
	in   *connect.ClientStream[T]
	what string // of the call, for its errors
	rest []byte
	err  error
}

// readTar goes on behind the first message, which was received.
func readTar[T any, M interface {
	*T
	GetData() []byte
}](in *connect.ClientStream[T], what string, first M) io.Reader {
	return &tarReader[T, M]{in: in, what: what, rest: first.GetData()}
}

func (r *tarReader[T, M]) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		if !r.in.Receive() {
			r.err = io.EOF
			if err := r.in.Err(); err != nil {
				r.err = fmt.Errorf("%s: the stream broke off: %w", r.what, err)
			}
			continue
		}
		r.rest = M(r.in.Msg()).GetData()
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (s layers) Import(ctx context.Context, in *connect.ClientStream[dsecv1.ImportRequest]) (*connect.Response[dsecv1.ImportResponse], error) {
	if !in.Receive() {
		if err := in.Err(); err != nil {
			return nil, err
		}
		return nil, errNoMessage
	}
	m := in.Msg()
	return response(s.g.importLayer(ctx, readTar(in, "import", m), m.GetPublish(), m.GetSource(), m.GetHot()))
}

// putLayer is Import as plain HTTP: the body is the tar.
func (g *Gateway) putLayer(w http.ResponseWriter, r *http.Request) {
	g.plain(w, r, "PUT /v1/layers", func(ctx context.Context) error {
		q := parseQuery(r, "name", "source")
		if q.err != nil {
			return q.err
		}
		out, err := g.importLayer(ctx, brokenBody{r.Body}, q.v.Get("name"), q.v.Get("source"), nil)
		if err != nil {
			return err
		}
		return writeJSON(w, out)
	})
}

// brokenBody tells a body that its sender broke off from a tar that is wrong.
type brokenBody struct{ r io.Reader }

func (b brokenBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("read body: %w: %w", err, context.Canceled)
	}
	return n, err
}

// importLayer makes a layer of a tar and, with a name, its current version.
func (g *Gateway) importLayer(ctx context.Context, body io.Reader, name, source string, hot []string) (*dsecv1.ImportResponse, error) {
	project := rpc.Project(ctx)
	if name != "" {
		if err := layer.CheckName("publish", name); err != nil {
			return nil, err
		}
	}
	if len(source) > 1024 {
		return nil, fmt.Errorf("source: %d octets, at most 1024: %w", len(source), sandbox.ErrInvalid)
	}
	began := time.Now()
	d, err := g.layers.ImportTar(ctx, project, body, layer.Options{Source: source, Hot: hot})
	if err != nil {
		return nil, err
	}
	// What follows the tar's end is read, or the client could not finish sending.
	if _, err := io.Copy(io.Discard, body); err != nil {
		return nil, err
	}
	out := &dsecv1.ImportResponse{Layer: layerProto(d), Existed: d.Created.Before(began)}
	if name != "" {
		v, err := g.layers.Publish(ctx, project, name, d.ID)
		if err != nil {
			return nil, err
		}
		out.Published = v.Ref()
		out.Layer.Names = []string{v.Ref()}
	}
	return out, nil
}

func layerProto(d layer.Descriptor) *dsecv1.Layer {
	l := &dsecv1.Layer{Id: string(d.ID), Arch: d.Arch, Created: rpc.Timestamp(d.Created), Source: d.Source, Entries: d.Entries, Octets: d.Bytes}
	for _, f := range d.Forms {
		l.Forms = append(l.Forms, &dsecv1.LayerForm{Kind: f.Kind, Digest: f.Digest, Size: f.Stored()})
	}
	for _, p := range d.Parents {
		l.Parents = append(l.Parents, string(p))
	}
	return l
}

func layerNames(versions []layer.Version) []*dsecv1.LayerName {
	var out []*dsecv1.LayerName
	for _, v := range versions { // by name and number
		if len(out) == 0 || out[len(out)-1].Name != v.Name {
			out = append(out, &dsecv1.LayerName{Name: v.Name})
		}
		n := out[len(out)-1]
		n.Versions = append(n.Versions, &dsecv1.LayerVersion{Version: int64(v.N), Layer: string(v.ID), Created: rpc.Timestamp(v.Created)})
		if v.Current {
			n.Current = int64(v.N)
		}
	}
	return out
}

func (s layers) GetLayer(ctx context.Context, r *connect.Request[dsecv1.GetLayerRequest]) (*connect.Response[dsecv1.GetLayerResponse], error) {
	v, err := s.g.layers.Lookup(ctx, rpc.Project(ctx), r.Msg.GetRef())
	// `dsec layer pull` has put the layer into the store, which it shows by what it left beside it.
	if token := r.Header().Get("Dsec-Claim"); token != "" && errors.Is(err, sandbox.ErrNotFound) {
		if err = s.g.layers.Claim(ctx, rpc.Project(ctx), layer.ID(r.Msg.GetRef()), token); err == nil {
			v, err = s.g.layers.Lookup(ctx, rpc.Project(ctx), r.Msg.GetRef())
		}
	}
	if err != nil {
		return nil, err
	}
	d, err := s.g.layers.Descriptor(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	out := &dsecv1.GetLayerResponse{Layer: layerProto(d)}
	all, err := s.g.layers.Versions(ctx, v.Project)
	if err != nil {
		return nil, err
	}
	for _, o := range all {
		if o.ID == v.ID {
			out.Layer.Names = append(out.Layer.Names, o.Ref())
		}
	}
	for _, n := range layerNames(all) {
		if n.Name == v.Name {
			out.Name = n
		}
	}
	return connect.NewResponse(out), nil
}

// page cuts a sorted list; the token is the name of the last one that was answered.
func page[T any](list []T, name func(T) string, size int32, token string) ([]T, string, error) {
	n, err := pageSize(size)
	if err != nil {
		return nil, "", err
	}
	i := sort.Search(len(list), func(i int) bool { return name(list[i]) > token })
	list = list[i:]
	if len(list) <= int(n) {
		return list, "", nil
	}
	return list[:n], name(list[n-1]), nil
}

func (s layers) ListLayers(ctx context.Context, r *connect.Request[dsecv1.ListLayersRequest]) (*connect.Response[dsecv1.ListLayersResponse], error) {
	all, err := s.g.layers.Versions(ctx, rpc.Project(ctx))
	if err != nil {
		return nil, err
	}
	var list []*dsecv1.LayerName
	for _, n := range layerNames(all) {
		if strings.HasPrefix(n.Name, r.Msg.GetPrefix()) {
			list = append(list, n)
		}
	}
	list, next, err := page(list, (*dsecv1.LayerName).GetName, r.Msg.GetPageSize(), r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ListLayersResponse{Names: list, NextPageToken: next}), nil
}

func (s layers) PublishLayer(ctx context.Context, r *connect.Request[dsecv1.PublishLayerRequest]) (*connect.Response[dsecv1.PublishLayerResponse], error) {
	v, err := s.g.layers.Lookup(ctx, rpc.Project(ctx), r.Msg.GetLayer())
	if err != nil {
		return nil, err
	}
	p, err := s.g.layers.Publish(ctx, rpc.Project(ctx), r.Msg.GetName(), v.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PublishLayerResponse{Published: p.Ref()}), nil
}

func (s layers) RollbackLayer(ctx context.Context, r *connect.Request[dsecv1.RollbackLayerRequest]) (*connect.Response[dsecv1.RollbackLayerResponse], error) {
	project, name := rpc.Project(ctx), r.Msg.GetName()
	n, err := version(r.Msg.GetVersion())
	if err != nil {
		return nil, err
	}
	if err := s.g.layers.Rollback(ctx, project, name, n); err != nil {
		return nil, err
	}
	all, err := s.g.layers.Versions(ctx, project)
	if err != nil {
		return nil, err
	}
	out := &dsecv1.RollbackLayerResponse{}
	for _, n := range layerNames(all) {
		if n.Name == name {
			out.Name = n
		}
	}
	return connect.NewResponse(out), nil
}

func version(v int64) (int, error) {
	if v < 1 || v > 1<<31-1 {
		return 0, fmt.Errorf("version %d: want one from 1 on: %w", v, sandbox.ErrInvalid)
	}
	return int(v), nil
}

func (s layers) RemoveLayer(ctx context.Context, r *connect.Request[dsecv1.RemoveLayerRequest]) (*connect.Response[dsecv1.RemoveLayerResponse], error) {
	return response(&dsecv1.RemoveLayerResponse{}, s.g.layers.Remove(ctx, rpc.Project(ctx), r.Msg.GetRef()))
}

func environmentProto(e layer.Environment) *dsecv1.Environment {
	out := &dsecv1.Environment{
		Name: e.Name, Version: int64(e.N), Base: e.Spec.Base, Workspace: e.Spec.Workspace, Kits: e.Spec.Kits, Env: rpc.EnvVars(e.Spec.Env, nil),
		User: e.Spec.User, Cwd: strings.ToValidUTF8(e.Spec.Cwd, "\uFFFD"), Resources: rpc.ResourcesProto(e.Spec.Resources), Created: rpc.Timestamp(e.Created), Current: e.Current,
		Image: imageConfigProto(e.Spec.Image), VolatilePaths: e.Spec.Volatile,
	}
	for _, l := range e.Layers {
		out.Layers = append(out.Layers, string(l))
	}
	return out
}

func (s layers) PublishEnvironment(ctx context.Context, r *connect.Request[dsecv1.PublishEnvironmentRequest]) (*connect.Response[dsecv1.PublishEnvironmentResponse], error) {
	q := r.Msg.GetEnvironment()
	if q == nil {
		return nil, fmt.Errorf("environment: missing: %w", sandbox.ErrInvalid)
	}
	env, secret, err := rpc.Env("environment.env", q.GetEnv())
	if err != nil {
		return nil, err
	}
	if len(secret) > 0 {
		return nil, fmt.Errorf("environment.env %s: an environment keeps no secrets; give them with the create: %w", secret[0], sandbox.ErrInvalid)
	}
	res, err := rpc.Resources(q.GetResources())
	if err != nil {
		return nil, err
	}
	image, err := imageFacts(q.GetImage())
	if err != nil {
		return nil, err
	}
	e, err := s.g.layers.PublishEnvironment(ctx, rpc.Project(ctx), q.GetName(), layer.EnvironmentSpec{
		Base: q.GetBase(), Workspace: q.GetWorkspace(), Kits: q.GetKits(), Env: env, User: q.GetUser(), Cwd: q.GetCwd(), Resources: res, Image: image, Volatile: q.GetVolatilePaths(),
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PublishEnvironmentResponse{Environment: environmentProto(e)}), nil
}

func (s layers) GetEnvironment(ctx context.Context, r *connect.Request[dsecv1.GetEnvironmentRequest]) (*connect.Response[dsecv1.GetEnvironmentResponse], error) {
	e, err := s.g.layers.Resolve(ctx, rpc.Project(ctx), r.Msg.GetRef())
	if err != nil {
		return nil, err
	}
	all, err := s.g.layers.Environments(ctx, e.Project)
	if err != nil {
		return nil, err
	}
	out := &dsecv1.GetEnvironmentResponse{Environment: environmentProto(e)}
	for _, o := range all {
		if o.Name == e.Name {
			out.Versions = append(out.Versions, int64(o.N))
		}
	}
	return connect.NewResponse(out), nil
}

// ListEnvironments lists the current version of each.
func (s layers) ListEnvironments(ctx context.Context, r *connect.Request[dsecv1.ListEnvironmentsRequest]) (*connect.Response[dsecv1.ListEnvironmentsResponse], error) {
	all, err := s.g.layers.Environments(ctx, rpc.Project(ctx))
	if err != nil {
		return nil, err
	}
	var list []*dsecv1.Environment
	for _, e := range all {
		if e.Current && strings.HasPrefix(e.Name, r.Msg.GetPrefix()) {
			list = append(list, environmentProto(e))
		}
	}
	list, next, err := page(list, (*dsecv1.Environment).GetName, r.Msg.GetPageSize(), r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ListEnvironmentsResponse{Environments: list, NextPageToken: next}), nil
}

func (s layers) RollbackEnvironment(ctx context.Context, r *connect.Request[dsecv1.RollbackEnvironmentRequest]) (*connect.Response[dsecv1.RollbackEnvironmentResponse], error) {
	n, err := version(r.Msg.GetVersion())
	if err != nil {
		return nil, err
	}
	if err := s.g.layers.RollbackEnvironment(ctx, rpc.Project(ctx), r.Msg.GetName(), n); err != nil {
		return nil, err
	}
	e, err := s.g.layers.Resolve(ctx, rpc.Project(ctx), r.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.RollbackEnvironmentResponse{Environment: environmentProto(e)}), nil
}

func (s layers) RemoveEnvironment(ctx context.Context, r *connect.Request[dsecv1.RemoveEnvironmentRequest]) (*connect.Response[dsecv1.RemoveEnvironmentResponse], error) {
	return response(&dsecv1.RemoveEnvironmentResponse{}, s.g.layers.RemoveEnvironment(ctx, rpc.Project(ctx), r.Msg.GetRef()))
}
