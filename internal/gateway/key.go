package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// keys is IamService.
type keys struct{ g *Gateway }

var _ dsecv1connect.IamServiceHandler = keys{}

// CreateKey makes a key for the call's project or one below it, which comes into being with it.
func (s keys) CreateKey(ctx context.Context, r *connect.Request[dsecv1.CreateKeyRequest]) (*connect.Response[dsecv1.CreateKeyResponse], error) {
	own, project := rpc.Project(ctx), r.Msg.GetProject()
	if project == "" {
		project = own
	}
	if !iam.Within(own, project) {
		return nil, fmt.Errorf("project %.200q: lies outside %s, for which this key is: %w", project, own, sandbox.ErrDenied)
	}
	ttl, err := rpc.Milliseconds("ttl_ms", r.Msg.GetTtlMs())
	if err != nil {
		return nil, err
	}
	var expires time.Time
	switch {
	case ttl < 0:
		return nil, fmt.Errorf("ttl_ms %d: must not be negative; 0 never expires: %w", r.Msg.GetTtlMs(), sandbox.ErrInvalid)
	case ttl > 0:
		expires = time.Now().Add(ttl)
	}
	if project != own {
		if err := s.g.keys.CreateProject(ctx, project); err != nil {
			return nil, err
		}
	}
	secret, k, err := s.g.keys.CreateKey(ctx, project, r.Msg.GetNote(), expires)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CreateKeyResponse{Key: secret, Info: keyProto(k)}), nil
}

func (s keys) ListKeys(ctx context.Context, _ *connect.Request[dsecv1.ListKeysRequest]) (*connect.Response[dsecv1.ListKeysResponse], error) {
	list, err := s.g.keys.ListKeys(ctx, rpc.Project(ctx))
	if err != nil {
		return nil, err
	}
	out := &dsecv1.ListKeysResponse{}
	for _, k := range list {
		if k.Revoked.IsZero() {
			out.Keys = append(out.Keys, keyProto(k))
		}
	}
	return connect.NewResponse(out), nil
}

func (s keys) RevokeKey(ctx context.Context, r *connect.Request[dsecv1.RevokeKeyRequest]) (*connect.Response[dsecv1.RevokeKeyResponse], error) {
	own, err := s.g.keys.ListKeys(ctx, rpc.Project(ctx))
	if err != nil {
		return nil, err
	}
	for _, k := range own {
		if k.ID == r.Msg.GetId() {
			err := s.g.keys.RevokeKey(ctx, k.ID)
			if errors.Is(err, sandbox.ErrState) { // two at once
				err = s.g.keys.RevokeKey(ctx, k.ID)
			}
			return response(&dsecv1.RevokeKeyResponse{}, err)
		}
	}
	return nil, fmt.Errorf("key %.40q: not one of project %s: %w", r.Msg.GetId(), rpc.Project(ctx), sandbox.ErrNotFound)
}

func keyProto(k iam.Key) *dsecv1.ApiKey {
	return &dsecv1.ApiKey{Id: k.ID, Project: k.Project, Note: k.Note, Created: rpc.Timestamp(k.Created), Expires: rpc.Timestamp(k.Expires)}
}
