package sandboxfusion

import (
	"bytes"
	"io"
	"net/http"
	"strconv"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
)

// Over makes Calls of a gateway's handler in this process. The handler does what it does for every caller: keys, limits, metrics.
func Over(gateway http.Handler) Calls {
	return dsecv1connect.NewFnCallServiceClient(&http.Client{Transport: inside{gateway}}, "http://gateway")
}

// inside answers requests by calling a handler; both bodies are held whole, as unary calls do anyway.
type inside struct{ handler http.Handler }

func (t inside) RoundTrip(r *http.Request) (*http.Response, error) {
	w := &held{header: http.Header{}}
	in := r.Clone(r.Context())
	in.RequestURI = r.URL.RequestURI()
	if in.Body == nil {
		in.Body = http.NoBody
	}
	t.handler.ServeHTTP(w, in)
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return &http.Response{Status: strconv.Itoa(w.status) + " " + http.StatusText(w.status), StatusCode: w.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: w.header, Body: io.NopCloser(&w.body), ContentLength: int64(w.body.Len()), Request: r}, nil
}

type held struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (w *held) Header() http.Header { return w.header }
func (w *held) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
}
func (w *held) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(b)
}
