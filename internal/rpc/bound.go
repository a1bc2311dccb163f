package rpc

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A message over the limit is a mistake of its sender and stays one: "resource exhausted", which the library answers, would have it sent
// again and again.

// bounded refuses a unary call whose body is over the limit, now when its length is told, else when it has come so far.
func bounded(r *http.Request) error {
	if r.Method != http.MethodPost || !strings.HasPrefix(r.URL.Path, "/dsec.") || isStream(r.Header.Get("Content-Type")) {
		return nil
	}
	if r.ContentLength > MaxRequestMessage {
		return tooLarge(fmt.Sprintf("request of %d octets", r.ContentLength))
	}
	if r.ContentLength < 0 {
		r.Body = &boundedBody{r.Body, MaxRequestMessage}
	}
	return nil
}

func isStream(contentType string) bool {
	return strings.HasPrefix(contentType, "application/connect+") || strings.HasPrefix(contentType, "application/grpc")
}

func tooLarge(what string) error {
	return fmt.Errorf("%s: a message holds at most %d (40 MiB); send bulk as a stream (files: PUT /v1/files or FileService.Write, trees: PUT /v1/trees, layers: PUT /v1/layers or ImportLayer) and the input of a command in pieces with WriteStdin: %w",
		what, MaxRequestMessage, sandbox.ErrInvalid)
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return n - 1, Error(tooLarge("request")) // the code is kept by the library
	}
	return n, err
}

// overLimit finds the library's refusal of a message in a stream and makes it ours.
func overLimit(err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Code() == connect.CodeResourceExhausted && !connect.IsWireError(err) && strings.HasPrefix(ce.Message(), "message size ") {
		return tooLarge("message of a stream (" + ce.Message() + ")")
	}
	return err
}
