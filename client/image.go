package client

import (
	"context"
	"io"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// PullImage makes an environment of an image of a registry and returns it; progress is told of its layers and may be nil. The answer of
// an image that is there comes at once.
func (c *Client) PullImage(ctx context.Context, q *dsecv1.PullRequest, progress func([]*dsecv1.PullProgress)) (*dsecv1.Image, error) {
	st, err := c.ImageService.Pull(ctx, connect.NewRequest(q))
	if err != nil {
		return nil, wrap(err)
	}
	defer st.Close()
	var image *dsecv1.Image
	for st.Receive() {
		m := st.Msg()
		if progress != nil && len(m.Progress) > 0 {
			progress(m.Progress)
		}
		if m.Image != nil {
			image = m.Image
		}
	}
	if err := st.Err(); err != nil {
		return nil, wrap(err)
	}
	if image == nil {
		return nil, wrap(connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF))
	}
	return image, nil
}

// MissingLayers returns which layers (by the digest of their plain tar) a push has to send.
func (c *Client) MissingLayers(ctx context.Context, diffIDs []string) ([]string, error) {
	r, err := call(ctx, c, c.ImageService.MissingLayers, &dsecv1.MissingLayersRequest{DiffIds: diffIDs})
	if err != nil {
		return nil, err
	}
	return r.DiffIds, nil
}

// PushImageLayer sends one layer of an image: a tar, plain or compressed, whose digest when plain is diffID.
func (c *Client) PushImageLayer(ctx context.Context, diffID string, tar io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st := c.ImageService.PushLayer(ctx)
	err := sendChunks(tar, func(b []byte, first bool) error {
		m := &dsecv1.PushLayerRequest{Data: b}
		if first {
			m.DiffId = diffID
		}
		return st.Send(m)
	})
	if err != nil {
		return err
	}
	_, err = st.CloseAndReceive()
	return wrap(err)
}

// PutImage makes an environment of an image's config whose layers were pushed. The digest is of its manifest and may be empty.
func (c *Client) PutImage(ctx context.Context, ref string, config []byte, digest string) (*dsecv1.Image, error) {
	r, err := call(ctx, c, c.ImageService.PutImage, &dsecv1.PutImageRequest{Ref: ref, Config: config, Digest: digest})
	if err != nil {
		return nil, err
	}
	return r.Image, nil
}

// ExportImage streams an environment as a tar that is both an OCI layout and what `docker load` takes. Ref is the tag it carries; may be
// empty.
func (c *Client) ExportImage(ctx context.Context, environment, ref string, w io.Writer) error {
	st, err := c.ImageService.Export(ctx, connect.NewRequest(&dsecv1.ExportImageRequest{Environment: environment, Ref: ref}))
	if err != nil {
		return wrap(err)
	}
	defer st.Close()
	for st.Receive() {
		if _, err := w.Write(st.Msg().Data); err != nil {
			return err
		}
	}
	return wrap(st.Err())
}
