package rpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type writes struct {
	dsecv1connect.UnimplementedFileServiceHandler
}

func (writes) Write(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	for in.Receive() {
	}
	return connect.NewResponse(&dsecv1.WriteResponse{}), in.Err()
}

// A message over the limit is the sender's mistake, in every form in which it can come, and the error names the limit and the way.
func TestMessageOverTheLimit(t *testing.T) {
	e := &Edge{}
	mux := http.NewServeMux()
	opts := e.Options()
	mux.Handle(dsecv1connect.NewCommandServiceHandler(dsecv1connect.UnimplementedCommandServiceHandler{}, opts...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(writes{}, opts...))
	s := httptest.NewServer(e.Wrap(mux))
	defer s.Close()
	check := func(name string, err error) {
		t.Helper()
		err = FromError(err)
		if !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "40 MiB") || !strings.Contains(err.Error(), "/v1/files") {
			t.Errorf("%s: %v", name, err)
		}
	}
	big := bytes.Repeat([]byte("x"), MaxRequestMessage+1)
	cl := dsecv1connect.NewCommandServiceClient(s.Client(), s.URL)
	_, err := cl.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{Stdin: big}))
	check("with a length", err)
	body := io.MultiReader(strings.NewReader(`{"stdin":"`), &repeat{n: MaxRequestMessage}, strings.NewReader(`"}`))
	resp, err := s.Client().Post(s.URL+"/dsec.v1.CommandService/Start", "application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest || !bytes.Contains(answer, []byte("invalid_argument")) || !bytes.Contains(answer, []byte("40 MiB")) {
		t.Errorf("in pieces: %d %s", resp.StatusCode, answer)
	}
	w := dsecv1connect.NewFileServiceClient(s.Client(), s.URL).Write(t.Context())
	w.Send(&dsecv1.WriteRequest{Data: big})
	_, err = w.CloseAndReceive()
	check("in a stream", err)
	// The largest that is allowed is not refused for its size.
	_, err = cl.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{Stdin: big[:MaxRequestMessage-100]}))
	if !errors.Is(FromError(err), sandbox.ErrUnsupported) {
		t.Errorf("the largest: %v", err)
	}
}

type repeat struct{ n int64 }

func (r *repeat) Read(p []byte) (int, error) {
	if r.n == 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), r.n)
	for i := range p[:n] {
		p[i] = 'A'
	}
	r.n -= n
	return int(n), nil
}
