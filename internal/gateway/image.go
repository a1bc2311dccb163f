package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/oci"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// images is ImageService.
type images struct{ g *Gateway }

var _ dsecv1connect.ImageServiceHandler = images{}

const (
	progressEvery = 200 * time.Millisecond
	exportChunk   = 256 << 10
)

func (g *Gateway) imageStore() (*oci.Images, error) {
	if g.images == nil {
		return nil, fmt.Errorf("images: this gateway has none: %w", sandbox.ErrUnsupported)
	}
	return g.images, nil
}

// imageError gives a registry's failure the code of something that may work later.
func imageError(err error) error {
	if errors.Is(err, oci.ErrRegistry) {
		return fmt.Errorf("%w: %w", err, rpc.ErrUnavailable)
	}
	return err
}

// imageEnvironment finds or makes the environment of an image that a create names.
func (g *Gateway) imageEnvironment(ctx context.Context, project, ref, policy string) (layer.Environment, error) {
	store, err := g.imageStore()
	if err != nil {
		return layer.Environment{}, err
	}
	i, err := store.Pull(ctx, project, oci.Pull{Ref: ref, Policy: policy})
	if err != nil {
		return layer.Environment{}, imageError(err)
	}
	return g.layers.Resolve(ctx, project, i.Environment)
}

func imageConfigProto(i *layer.ImageFacts) *dsecv1.ImageConfig {
	if i == nil {
		return nil
	}
	return &dsecv1.ImageConfig{Ref: i.Ref, Digest: i.Digest, Entrypoint: i.Entrypoint, Cmd: i.Cmd, Labels: i.Labels, Arch: i.Arch}
}

// maxImageFacts bounds what an environment says of its image, in octets.
const maxImageFacts = 256 << 10

func imageFacts(i *dsecv1.ImageConfig) (*layer.ImageFacts, error) {
	if i == nil {
		return nil, nil
	}
	if n := proto.Size(i); n > maxImageFacts {
		return nil, fmt.Errorf("environment.image: %d octets, at most %d: %w", n, maxImageFacts, sandbox.ErrInvalid)
	}
	return &layer.ImageFacts{Ref: i.GetRef(), Digest: i.GetDigest(), Arch: i.GetArch(), Entrypoint: i.GetEntrypoint(), Cmd: i.GetCmd(), Labels: i.GetLabels()}, nil
}

func imageProto(i *oci.Image) *dsecv1.Image {
	out := &dsecv1.Image{Ref: i.Ref, Digest: i.Digest, Environment: i.Environment, Config: imageConfigProto(&i.Config), Checked: rpc.Timestamp(i.Checked), Octets: i.Octets}
	for _, l := range i.Layers {
		out.Layers = append(out.Layers, string(l))
	}
	return out
}

func (s images) Pull(ctx context.Context, r *connect.Request[dsecv1.PullRequest], out *connect.ServerStream[dsecv1.PullResponse]) error {
	store, err := s.g.imageStore()
	if err != nil {
		return err
	}
	q := r.Msg
	if (q.GetUsername() == "") != (q.GetSecret() == "") {
		return fmt.Errorf("username and secret: give both or none: %w", sandbox.ErrInvalid)
	}
	var mu sync.Mutex
	latest := map[string]*dsecv1.PullProgress{}
	p := oci.Pull{Ref: q.GetRef(), Policy: q.GetPolicy(), Credential: oci.Credential{Username: q.GetUsername(), Secret: q.GetSecret()}, Progress: func(e oci.Event) {
		mu.Lock()
		defer mu.Unlock()
		latest[e.Layer] = &dsecv1.PullProgress{Layer: e.Layer, State: e.State, Done: e.Done, Total: e.Total}
	}}
	type result struct {
		image *oci.Image
		err   error
	}
	done := make(chan result, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		i, err := store.Pull(ctx, rpc.Project(ctx), p)
		done <- result{i, err}
	}()
	// Steps come from several layers at once; what is new of each goes out a few times a second.
	tell := func() error {
		mu.Lock()
		var list []*dsecv1.PullProgress
		for _, e := range latest {
			list = append(list, e)
		}
		clear(latest)
		mu.Unlock()
		if len(list) == 0 {
			return nil
		}
		slices.SortFunc(list, func(a, b *dsecv1.PullProgress) int { return strings.Compare(a.Layer, b.Layer) })
		return out.Send(&dsecv1.PullResponse{Progress: list})
	}
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := tell(); err != nil {
				cancel()
				<-done
				return err
			}
		case r := <-done:
			if r.err != nil {
				return imageError(r.err)
			}
			if err := tell(); err != nil {
				return err
			}
			return out.Send(&dsecv1.PullResponse{Image: imageProto(r.image), Existed: r.image.Existed})
		}
	}
}

func (s images) MissingLayers(ctx context.Context, r *connect.Request[dsecv1.MissingLayersRequest]) (*connect.Response[dsecv1.MissingLayersResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	list, err := store.Missing(ctx, rpc.Project(ctx), r.Msg.GetDiffIds())
	return response(&dsecv1.MissingLayersResponse{DiffIds: list}, err)
}

func (s images) PushLayer(ctx context.Context, in *connect.ClientStream[dsecv1.PushLayerRequest]) (*connect.Response[dsecv1.PushLayerResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	if !in.Receive() {
		if err := in.Err(); err != nil {
			return nil, err
		}
		return nil, errNoMessage
	}
	id := in.Msg().GetDiffId()
	l, err := store.PushLayer(ctx, rpc.Project(ctx), id, readTar(in, "push", in.Msg()))
	return response(&dsecv1.PushLayerResponse{DiffId: id, Layer: l}, err)
}

func (s images) PutImage(ctx context.Context, r *connect.Request[dsecv1.PutImageRequest]) (*connect.Response[dsecv1.PutImageResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	i, err := store.Put(ctx, rpc.Project(ctx), r.Msg.GetRef(), r.Msg.GetConfig(), r.Msg.GetDigest())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PutImageResponse{Image: imageProto(i)}), nil
}

// exporter sends what is written to it in messages of one size.
type exporter struct {
	out *connect.ServerStream[dsecv1.ExportImageResponse]
	buf []byte
}

func (e *exporter) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		k := min(len(p)-n, exportChunk-len(e.buf))
		e.buf = append(e.buf, p[n:n+k]...)
		n += k
		if len(e.buf) == exportChunk {
			if err := e.flush(); err != nil {
				return n, err
			}
		}
	}
	return len(p), nil
}

func (e *exporter) flush() error {
	if len(e.buf) == 0 {
		return nil
	}
	err := e.out.Send(&dsecv1.ExportImageResponse{Data: e.buf})
	e.buf = e.buf[:0]
	return err
}

func (s images) Export(ctx context.Context, r *connect.Request[dsecv1.ExportImageRequest], out *connect.ServerStream[dsecv1.ExportImageResponse]) error {
	store, err := s.g.imageStore()
	if err != nil {
		return err
	}
	e := &exporter{out: out, buf: make([]byte, 0, exportChunk)}
	if err := store.Export(ctx, rpc.Project(ctx), r.Msg.GetEnvironment(), r.Msg.GetRef(), e); err != nil {
		return err
	}
	return e.flush()
}

func (s images) GetImage(ctx context.Context, r *connect.Request[dsecv1.GetImageRequest]) (*connect.Response[dsecv1.GetImageResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	i, err := store.Get(ctx, rpc.Project(ctx), r.Msg.GetRef())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetImageResponse{Image: imageProto(i)}), nil
}

func (s images) ListImages(ctx context.Context, r *connect.Request[dsecv1.ListImagesRequest]) (*connect.Response[dsecv1.ListImagesResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	all, err := store.List(ctx, rpc.Project(ctx), r.Msg.GetPrefix())
	if err != nil {
		return nil, err
	}
	list, next, err := page(all, func(i *oci.Image) string { return i.Ref }, r.Msg.GetPageSize(), r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &dsecv1.ListImagesResponse{NextPageToken: next}
	for _, i := range list {
		out.Images = append(out.Images, imageProto(i))
	}
	return connect.NewResponse(out), nil
}

func (s images) RemoveImage(ctx context.Context, r *connect.Request[dsecv1.RemoveImageRequest]) (*connect.Response[dsecv1.RemoveImageResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	return response(&dsecv1.RemoveImageResponse{}, store.Remove(ctx, rpc.Project(ctx), r.Msg.GetRef()))
}

func (s images) PutCredential(ctx context.Context, r *connect.Request[dsecv1.PutCredentialRequest]) (*connect.Response[dsecv1.PutCredentialResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	err = store.PutCredential(ctx, rpc.Project(ctx), r.Msg.GetHost(), oci.Credential{Username: r.Msg.GetUsername(), Secret: r.Msg.GetSecret()})
	return response(&dsecv1.PutCredentialResponse{}, err)
}

func (s images) ListCredentials(ctx context.Context, _ *connect.Request[dsecv1.ListCredentialsRequest]) (*connect.Response[dsecv1.ListCredentialsResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	list, err := store.Credentials(ctx, rpc.Project(ctx))
	if err != nil {
		return nil, err
	}
	out := &dsecv1.ListCredentialsResponse{}
	for _, c := range list {
		out.Credentials = append(out.Credentials, &dsecv1.RegistryCredential{Host: c.Host, Username: c.Username, Created: rpc.Timestamp(c.Created)})
	}
	return connect.NewResponse(out), nil
}

func (s images) RemoveCredential(ctx context.Context, r *connect.Request[dsecv1.RemoveCredentialRequest]) (*connect.Response[dsecv1.RemoveCredentialResponse], error) {
	store, err := s.g.imageStore()
	if err != nil {
		return nil, err
	}
	return response(&dsecv1.RemoveCredentialResponse{}, store.RemoveCredential(ctx, rpc.Project(ctx), r.Msg.GetHost()))
}
