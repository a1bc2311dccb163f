package rpc

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// CreateHash is of a create request in canonical form, with which a host compares it to one sent again. The deadline is about the call, not
// about the sandbox.
func CreateHash(project string, q *dsecv1.CreateRequest) (string, error) {
	deadline := q.DeadlineMs
	q.DeadlineMs = 0
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(q)
	q.DeadlineMs = deadline
	if err != nil {
		return "", fmt.Errorf("create request: %w", err)
	}
	h := sha256.New()
	h.Write([]byte(project + "\x00"))
	h.Write(b)
	return hex.EncodeToString(h.Sum(nil)), nil
}
