package client

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
)

// A stream that is cut off in the middle of a message is a broken connection, which a caller may try again, and no bad argument.
func TestCutStreamIsUnavailable(t *testing.T) {
	calls := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls++
		w.Header().Set("Content-Type", "application/connect+proto")
		switch r.URL.Path {
		case dsecv1connect.CommandServiceAttachProcedure:
			if calls > 1 { // resumed: the end, as an error that stops the retries
				w.Write([]byte{2, 0, 0, 0, 30})
				w.Write([]byte(`{"error":{"code":"not_found"}}`))
				return
			}
			fallthrough
		default:
			w.Write([]byte{0, 0, 0, 0, 10, 1, 2})
		}
	}))
	defer srv.Close()
	c, err := New(Config{URL: srv.URL, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	sb := c.Sandbox("s")
	if _, err := sb.Files().ReadFile(context.Background(), "/x"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("read: %v, want unavailable", err)
	}
	calls = 0
	var b bytes.Buffer
	if _, err := sb.Process("p").Stream(context.Background(), &b, &b); !errors.Is(err, ErrNotFound) || calls != 2 {
		t.Errorf("stream: %v after %d calls, want it resumed", err, calls)
	}
	if _, err := sb.Files().Write(context.Background(), "/x", strings.NewReader("x"), WriteOptions{}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("write: %v, want unavailable", err)
	}
}
