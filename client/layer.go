package client

import (
	"context"
	"io"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// ImportLayer makes a layer from a tar stream and publishes it when a name is given. The contents of hot paths lie in front, in that order:
// a host that reads the layer on demand fetches them first.
func (c *Client) ImportLayer(ctx context.Context, publish, source string, tar io.Reader, hot ...string) (*dsecv1.ImportResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st := c.LayerService.Import(ctx)
	err := sendChunks(tar, func(b []byte, first bool) error {
		m := &dsecv1.ImportRequest{Data: b}
		if first {
			m.Publish, m.Source, m.Hot = publish, source, hot
		}
		return st.Send(m)
	})
	if err != nil {
		return nil, err
	}
	r, err := st.CloseAndReceive()
	if err != nil {
		return nil, wrap(err)
	}
	return r.Msg, nil
}

// PublishEnvironment makes a new version of an environment from its layers and defaults.
func (c *Client) PublishEnvironment(ctx context.Context, e *dsecv1.Environment) (*dsecv1.Environment, error) {
	r, err := call(ctx, c, c.LayerService.PublishEnvironment, &dsecv1.PublishEnvironmentRequest{Environment: e})
	if err != nil {
		return nil, err
	}
	return r.Environment, nil
}

// Log streams the trajectory of a sandbox (by ID or name) from a sequence number; with follow until it has ended.
func (c *Client) Log(ctx context.Context, q *dsecv1.ReadLogRequest, fn func(*dsecv1.LogRecord) error) error {
	st, err := c.Logs.Read(ctx, connect.NewRequest(q))
	if err != nil {
		return wrap(err)
	}
	defer st.Close()
	for st.Receive() {
		for _, r := range st.Msg().Records {
			if err := fn(r); err != nil {
				return err
			}
		}
	}
	return wrap(st.Err())
}

// GetLayer describes a layer by ID, name or name@version.
func (c *Client) GetLayer(ctx context.Context, ref string) (*dsecv1.GetLayerResponse, error) {
	return call(ctx, c, c.LayerService.GetLayer, &dsecv1.GetLayerRequest{Ref: ref})
}
