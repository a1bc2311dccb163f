package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// endless is a body of n octets that is never whole in memory.
type endless struct{ n, at int64 }

func (e *endless) Read(b []byte) (int, error) {
	if e.at >= e.n {
		return 0, io.EOF
	}
	n := min(int64(len(b)), e.n-e.at)
	for i := range b[:n] {
		b[i] = byte((e.at + int64(i)) >> 8)
	}
	e.at += n
	return int(n), nil
}

func (c *cluster) http(t *testing.T, method, path string, body io.Reader) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequest(method, c.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: keyed(c.key)}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range resp.Trailer {
		resp.Header[k] = v
	}
	return resp.StatusCode, string(b), resp.Header
}

func TestPlainFiles(t *testing.T) {
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "box"})
	h := c.host(sb.Id)
	big := int64(5<<20 + 17)
	sum := sha256.New()
	io.Copy(sum, &endless{n: big})
	raw := "/a b\xff\n"
	for _, tc := range []struct{ ref, path string }{{sb.Id, "/plain"}, {"box", raw}} {
		at := "/v1/files/" + tc.ref + "?path=" + url.QueryEscape(tc.path)
		if code, body, _ := c.http(t, "PUT", at+"&mode=0750&parents", &endless{n: big}); code != 200 || !strings.Contains(body, fmt.Sprint(big)) || !strings.Contains(body, `"mode":488`) {
			t.Fatalf("%d %s", code, body)
		}
		code, body, hd := c.http(t, "GET", at, nil)
		if code != 200 || sha256.Sum256([]byte(body)) != [32]byte(sum.Sum(nil)) || hd.Get("Dsec-File-Size") != fmt.Sprint(big) || hd.Get("Dsec-File-Mode") != "640" {
			t.Fatalf("%d, %d octets, %v", code, len(body), hd)
		}
		if _, body, _ := c.http(t, "GET", at+"&offset=256&length=2", nil); body != "\x01\x01" {
			t.Errorf("range: %q", body)
		}
	}
	if code, body, _ := c.http(t, "PUT", "/v1/files/box?path=/empty", nil); code != 200 || !strings.Contains(body, "{") {
		t.Errorf("empty body: %d %s", code, body)
	}
	if b, ok := h.files["/empty"]; !ok || len(b) != 0 {
		t.Error("an empty file was not written")
	}
	for _, tc := range []struct {
		method, path string
		code         int
		text         string
	}{
		{"GET", "/v1/files/box?path=/missing", 404, "no such file"},
		{"GET", "/v1/files/box", 400, "path"},
		{"GET", "/v1/files/box?path=/a&lenght=3", 400, "lenght"},
		{"GET", "/v1/files/box?path=/a&path=/b", 400, "given 2 times"},
		{"GET", "/v1/files/box?path=/a&offset=x", 400, "offset"},
		{"PUT", "/v1/files/box?path=/a&mode=999", 400, "mode"},
		{"PUT", "/v1/files/box?path=/refused/a", 403, "permission denied"},
		{"GET", "/v1/files/nobody?path=/a", 404, "nobody"},
		{"DELETE", "/v1/files/box?path=/a", 404, "docs/http.md"},
	} {
		code, body, hd := c.http(t, tc.method, tc.path, nil)
		if code != tc.code || !strings.Contains(body, tc.text) {
			t.Errorf("%s %s: %d %s", tc.method, tc.path, code, body)
		}
		if hd.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s: %v", tc.method, tc.path, hd)
		}
	}
}

func TestPlainTrees(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	code, body, h := c.http(t, "GET", "/v1/trees/"+sb.Id+"?path=/src", nil)
	if code != 200 || body != "tar of /src" || !strings.Contains(h.Get("Dsec-Skipped"), "is a socket") {
		t.Errorf("%d %q %v", code, body, h)
	}
	if code, body, _ := c.http(t, "PUT", "/v1/trees/"+sb.Id+"?path=/dst", &endless{n: 3 << 20}); code != 200 || !strings.Contains(body, fmt.Sprint(3<<20)) {
		t.Errorf("%d %s", code, body)
	}
}

// A body that breaks off must not pass for a whole one, in either direction.
func TestBrokenBodies(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	h := c.hosts[0]
	h.files["/breaks"] = bytes.Repeat([]byte("x"), 1<<20)
	r, _ := http.NewRequest("GET", c.url+"/v1/files/"+sb.Id+"?path=/breaks", nil)
	resp, err := (&http.Client{Transport: keyed(c.key)}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("a file that could not be read to its end looks whole: %d octets", len(b))
	}
	resp.Body.Close()

	for name, send := range map[string]string{
		"length": "Content-Length: 1000000\r\n\r\n" + strings.Repeat("x", bodyChunk),
		"chunks": fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", bodyChunk, strings.Repeat("x", bodyChunk)),
	} {
		h.mu.Lock()
		before, begun := h.broken, h.begun
		h.mu.Unlock()
		conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "PUT /v1/files/%s?path=/%s HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\n%s", sb.Id, name, c.key, send)
		eventually(t, name+": the host gets the first piece", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.begun > begun
		})
		conn.Close()
		eventually(t, name+": the host sees that the body broke", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			if _, ok := h.files["/"+name]; ok {
				t.Fatal("half a body was taken for a whole one")
			}
			return h.broken > before
		})
	}
}

func TestWriteStream(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	in := c.Files.Write(context.Background())
	for i := range 40 {
		m := &dsecv1.WriteRequest{Data: bytes.Repeat([]byte{byte(i)}, 100<<10)}
		if i == 0 {
			m.At = &dsecv1.Path{Sandbox: sb.Id, Path: "/f"}
		}
		if err := in.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	r, err := in.CloseAndReceive()
	if err != nil || r.Msg.Written != 40*100<<10 {
		t.Fatalf("%v, %v", r, err)
	}
	in = c.Files.Write(context.Background())
	in.Send(&dsecv1.WriteRequest{At: &dsecv1.Path{Sandbox: sb.Id, Path: "/refused"}})
	if _, err := in.CloseAndReceive(); !errors.Is(rpc.FromError(err), sandbox.ErrDenied) {
		t.Errorf("%v", err)
	}
	in = c.Files.Write(context.Background())
	if _, err := in.CloseAndReceive(); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
		t.Errorf("no message: %v", err)
	}
	// A client that goes away in the middle.
	h := c.hosts[0]
	h.mu.Lock()
	begun := h.begun
	h.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	in = c.Files.Write(ctx)
	in.Send(&dsecv1.WriteRequest{At: &dsecv1.Path{Sandbox: sb.Id, Path: "/half"}, Data: []byte("half")})
	eventually(t, "the host gets the first piece", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.begun > begun
	})
	abandon(cancel, in)
	eventually(t, "the host sees that the stream broke", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if _, ok := h.files["/half"]; ok {
			t.Fatal("half a stream was taken for a whole one")
		}
		return h.broken > 0
	})
}
