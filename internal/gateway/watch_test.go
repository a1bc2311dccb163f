package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/coder/websocket"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// overHTTP2 serves the gateway without TLS over HTTP/2 and returns its URL and a transport.
func (c *cluster) overHTTP2(t *testing.T) (string, *http.Transport) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := rpc.NewServer(c.g.Handler(), rpc.ServerConfig{Grace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() { cancel(); <-done })
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	return "http://" + l.Addr().String(), tr
}

type withKey struct {
	key  string
	next http.RoundTripper
}

func (k withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+k.key)
	return k.next.RoundTrip(r)
}

// The watch of a test looks often.
func (c *cluster) quickWatch(stall time.Duration) {
	c.g.watch.tick, c.g.watch.every, c.g.watch.stall = 10*time.Millisecond, 20*time.Millisecond, stall
}

// What a key has open ends when the key does: streams either way, over either protocol, bodies and tunnels to ports.
func TestStreamsEndWithTheirKey(t *testing.T) {
	for _, how := range []string{"revoked", "expired"} {
		t.Run(how, func(t *testing.T) {
			c := newCluster(t, 1)
			c.quickWatch(0)
			sb := c.mustCreate(t, &dsecv1.CreateRequest{})
			c.inside(t, sb, 80, func(w http.ResponseWriter, r *http.Request) {
				conn, err := websocket.Accept(w, r, nil)
				if err != nil {
					t.Error(err)
					return
				}
				conn.Read(context.Background())
			})
			h2, tr2 := c.overHTTP2(t)
			var expires time.Time
			if how == "expired" {
				expires = time.Now().Add(time.Hour)
			}
			ctx := context.Background()
			secret, key, err := c.keys.CreateKey(ctx, "default", "", expires)
			if err != nil {
				t.Fatal(err)
			}
			ended := map[string]chan error{}
			begin := func(name string, f func() error) {
				ch := make(chan error, 1)
				ended[name] = ch
				go func() { ch <- f() }()
			}
			waiting := make(chan struct{}, 10)
			attach := func(url string, rt http.RoundTripper) func() error {
				cl := dsecv1connect.NewCommandServiceClient(&http.Client{Transport: withKey{secret, rt}}, url)
				return func() error {
					s, err := cl.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{Sandbox: sb.Id, Id: "waits"}))
					if err != nil {
						return err
					}
					defer s.Close()
					for s.Receive() {
						waiting <- struct{}{}
					}
					return rpc.FromError(s.Err())
				}
			}
			begin("attach", attach(c.url, http.DefaultTransport))
			begin("attach over HTTP/2", attach(h2, tr2))
			write := func(url string, rt http.RoundTripper) func() error {
				cl := dsecv1connect.NewFileServiceClient(&http.Client{Transport: withKey{secret, rt}}, url)
				return func() error {
					s := cl.Write(ctx)
					if err := s.Send(&dsecv1.WriteRequest{At: &dsecv1.Path{Sandbox: sb.Id, Path: "/f"}, Data: []byte("x")}); err != nil {
						return err
					}
					waiting <- struct{}{}
					for { // a client that goes on until it is told to stop
						if s.Send(&dsecv1.WriteRequest{Data: []byte("x")}) != nil {
							break
						}
						time.Sleep(5 * time.Millisecond)
					}
					_, err := s.CloseAndReceive()
					return rpc.FromError(err)
				}
			}
			begin("write", write(c.url, http.DefaultTransport))
			begin("write over HTTP/2", write(h2, tr2))
			begin("put", func() error {
				conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
				if err != nil {
					return err
				}
				defer conn.Close()
				fmt.Fprintf(conn, "PUT /v1/files/%s?path=/g HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nContent-Length: 1000\r\n\r\nx", sb.Id, secret)
				waiting <- struct{}{}
				return answerOf(conn)
			})
			tunnel := make(chan error, 1)
			ws, _, err := websocket.Dial(ctx, c.url+"/v1/ports/"+sb.Id+"/80/", &websocket.DialOptions{HTTPHeader: http.Header{"X-Api-Key": {secret}}})
			if err != nil {
				t.Fatal(err)
			}
			go func() { _, _, err := ws.Read(ctx); tunnel <- err }()
			for range 5 {
				<-waiting
			}
			other := make(chan error, 1) // another key's stream goes on
			octx, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() {
				s, err := c.Commands.Attach(octx, connect.NewRequest(&dsecv1.AttachRequest{Sandbox: sb.Id, Id: "waits"}))
				if err == nil {
					s.Receive()
					waiting <- struct{}{}
					s.Receive()
					err = s.Err()
					s.Close()
				}
				other <- err
			}()
			<-waiting
			if how == "revoked" {
				err = c.keys.RevokeKey(ctx, key.ID)
			} else {
				err = c.expire(ctx, key.ID)
			}
			if err != nil {
				t.Fatal(err)
			}
			for name, ch := range ended {
				select {
				case err := <-ch:
					if name == "write" && err != nil && !errors.Is(err, rpc.ErrUnauthenticated) {
						break // over HTTP/1 a client that goes on writing may meet the closed connection before it reads the answer
					}
					if !errors.Is(err, rpc.ErrUnauthenticated) || !strings.Contains(err.Error(), how) {
						t.Errorf("%s ended with %v, want that its key is %s", name, err, how)
					}
				case <-time.After(time.Minute):
					t.Errorf("%s goes on after its key was %s", name, how)
				}
			}
			select {
			case <-tunnel:
			case <-time.After(time.Minute):
				t.Errorf("a tunnel goes on after its key was %s", how)
			}
			select {
			case err := <-other:
				t.Errorf("another key's stream ended too: %v", err)
			default:
			}
		})
	}
}

// expire lets a key run out now.
func (c *cluster) expire(ctx context.Context, id string) error {
	f, err := c.facts.Get(ctx, "iam/keys/"+id)
	if err != nil {
		return err
	}
	var key iam.Key
	if err := json.Unmarshal(f.Value, &key); err != nil {
		return err
	}
	key.Expires = time.Now().UTC()
	b, err := json.Marshal(key)
	if err != nil {
		return err
	}
	_, err = c.facts.Put(ctx, "iam/keys/"+id, b, f.Revision)
	return err
}

// answerOf reads the answer of a plain request that is sent by hand, as an error.
func answerOf(conn net.Conn) error {
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	for _, code := range []string{"unauthenticated", "deadline_exceeded"} {
		if strings.Contains(string(b), `"`+code+`"`) {
			return rpc.FromCode(code, string(b))
		}
	}
	return fmt.Errorf("%d %s", resp.StatusCode, b)
}

// A body of which nothing comes, or which nobody takes, is ended and says why; a stream of events may be still for as long as it likes.
func TestStalledBodiesEnd(t *testing.T) {
	c := newCluster(t, 1)
	c.quickWatch(200 * time.Millisecond)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	h := c.hosts[0]
	h.files["/big"] = make([]byte, 64<<20)

	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "PUT /v1/files/%s?path=/g HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nContent-Length: 1000000\r\n\r\n%s", sb.Id, c.key, strings.Repeat("x", bodyChunk))
	if err := answerOf(conn); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no octet of the body came") {
		t.Errorf("a body that stalls: %v", err)
	}
	eventually(t, "the host sees that the body broke", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.broken == 1
	})

	call, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer call.Close()
	fmt.Fprintf(call, "POST /dsec.v1.CommandService/Start HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{", c.key)
	if err := answerOf(call); err == nil {
		t.Error("a call whose body stalls was answered as if it had come")
	}

	h2, tr2 := c.overHTTP2(t)
	up := dsecv1connect.NewFileServiceClient(&http.Client{Transport: withKey{c.key, tr2}}, h2).Write(context.Background())
	if err := up.Send(&dsecv1.WriteRequest{At: &dsecv1.Path{Sandbox: sb.Id, Path: "/f"}, Data: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an upload that stalls is ended", func() bool { return waitBroken(h, 2) })
	if _, err := up.CloseAndReceive(); !errors.Is(rpc.FromError(err), context.DeadlineExceeded) {
		t.Errorf("an upload that stalls: %v", err)
	}

	// A reader that takes nothing: the connection ends before the file has.
	slow, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	fmt.Fprintf(slow, "GET /v1/files/%s?path=/big HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-API-Key: %s\r\n\r\n", sb.Id, c.key)
	eventually(t, "the reader is served", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.reads == 1
	})
	eventually(t, "the reader that stalls is ended", func() bool {
		c.g.watch.mu.Lock()
		defer c.g.watch.mu.Unlock()
		return len(c.g.watch.open) == 0
	})
	if n, _ := io.Copy(io.Discard, slow); n >= 64<<20 {
		t.Errorf("a reader that stalls got all %d octets", n)
	}

	// No bodies, but streams that wait.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s, err := c.Commands.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{Sandbox: sb.Id, Id: "waits"}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Receive()
	more := make(chan error, 1)
	go func() { s.Receive(); more <- s.Err() }()
	select {
	case err := <-more:
		t.Errorf("a command without output was cut off: %v", err)
	case <-time.After(time.Second):
	}
}

func waitBroken(h *fakeHost, n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.broken >= n
}
