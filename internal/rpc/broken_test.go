package rpc

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
)

// A host that dies in the middle of a message: the caller is told that it is unavailable, not that his argument was wrong.
func TestCutStreamIsUnavailable(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/connect+proto")
		w.Write([]byte{0, 0, 0, 0, 10, 1, 2})
	}))
	defer srv.Close()
	st, err := dsecv1connect.NewFileServiceClient(srv.Client(), srv.URL).Read(context.Background(), connect.NewRequest(&dsecv1.ReadRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
	}
	if err := FromError(st.Err()); !errors.Is(err, ErrUnavailable) {
		t.Errorf("%v, want ErrUnavailable", err)
	}
}
