package client

import (
	"context"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// CreateKey makes an API key for the caller's project or one below it. The answer holds the only copy of its text.
func (c *Client) CreateKey(ctx context.Context, q *dsecv1.CreateKeyRequest) (*dsecv1.CreateKeyResponse, error) {
	return call(ctx, c, c.Keys.CreateKey, q)
}

// ListKeys returns the keys of the caller's project and of those below it, without their texts.
func (c *Client) ListKeys(ctx context.Context) ([]*dsecv1.ApiKey, error) {
	r, err := call(ctx, c, c.Keys.ListKeys, &dsecv1.ListKeysRequest{})
	if err != nil {
		return nil, err
	}
	return r.Keys, nil
}

// RevokeKey ends a key at once on this gateway, and within seconds on others.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	_, err := call(ctx, c, c.Keys.RevokeKey, &dsecv1.RevokeKeyRequest{Id: id})
	return err
}
