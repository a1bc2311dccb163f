package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// inside starts a server that plays one in the sandbox, on a port.
func (c *cluster) inside(t *testing.T, sb *dsecv1.Sandbox, port uint16, h http.HandlerFunc) {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	host := c.host(sb.Id)
	host.mu.Lock()
	defer host.mu.Unlock()
	host.dials[port] = strings.TrimPrefix(s.URL, "http://")
}

// echo tells what the application got.
func echo(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	w.Header().Set("App", "1")
	fmt.Fprintf(w, "%s %s host=%s auth=%s key=%s own=%s%s prefix=%s ws=%s body=%s", r.Method, r.RequestURI, r.Host, r.Header.Get("Authorization"), r.Header.Get("X-Api-Key"),
		r.Header.Get("Dsec-Sandbox"), r.Header.Get("Dsec-Port"), r.Header.Get("X-Forwarded-Prefix"), r.Header.Get("Sec-Websocket-Protocol"), b)
}

func (c *cluster) ask(t *testing.T, method, target, host string, headers map[string]string, body string) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequest(method, c.url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.URL.Opaque, r.URL.RawQuery, _ = strings.Cut(target, "?") // as it is, without cleaning
	r.Host = host
	for k, v := range headers {
		r.Header.Set(k, v)
	}
	resp, err := http.DefaultTransport.RoundTrip(r) // follows no redirect
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), resp.Header
}

// An application may answer while the request is still on its way, and no answer breaks off for it. The body goes out in two parts, the
// second when the first is back.
func TestPortsAnswerWhileTheyRead(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	c.inside(t, sb, 8080, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.EnableFullDuplex()
		b := make([]byte, 4)
		for {
			if _, err := io.ReadFull(r.Body, b); err != nil {
				return
			}
			w.Write(b)
			rc.Flush()
		}
	})
	for _, length := range []int64{8, -1} {
		body, send := io.Pipe()
		defer send.Close()
		r, err := http.NewRequest("POST", c.url+"/v1/ports/"+sb.Id+"/8080/", body)
		if err != nil {
			t.Fatal(err)
		}
		r.ContentLength = length
		r.Header.Set("X-API-Key", c.key)
		go io.WriteString(send, "half")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		resp, err := http.DefaultTransport.RoundTrip(r.WithContext(ctx))
		if err != nil {
			t.Fatalf("length %d: %v", length, err)
		}
		defer resp.Body.Close()
		first := make([]byte, 4)
		if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "half" {
			t.Fatalf("length %d: first %q %v", length, first, err)
		}
		go func() { io.WriteString(send, "rest"); send.Close() }()
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "rest" {
			t.Errorf("length %d: rest %q %v", length, rest, err)
		}
	}
}

// Faults B46 and B47.
func TestPortsByPathHeaderAndHostName(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "web"})
	for _, port := range []uint16{8080, 49983, 44772, 22, 1} {
		c.inside(t, sb, port, echo)
	}
	key := map[string]string{"X-API-Key": c.key}
	with := func(kv ...string) map[string]string {
		m := map[string]string{"X-API-Key": c.key}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	for _, tc := range []struct {
		name, target, host string
		headers            map[string]string
		want               string
	}{
		{"path", "/v1/ports/" + sb.Id + "/8080/a/b?x=1&y=%2F", "gw", key, "POST /a/b?x=1&y=%2F host=gw auth= key= own= prefix=/v1/ports/" + sb.Id + "/8080"},
		{"path by name", "/v1/ports/web/49983/", "gw", key, "POST / host=gw"},
		{"odd path", "/v1/ports/web/8080/a//b/../c%2Fd;x", "gw", key, "POST /a//b/../c%2Fd;x host=gw"},
		{"no slash", "/v1/ports/web/44772", "gw", key, "POST / host=gw"},
		{"header", "/v1/files/x?path=1", "gw", with("Dsec-Sandbox", sb.Id, "Dsec-Port", "22"), "POST /v1/files/x?path=1 host=gw auth= key= own= prefix= "},
		{"host name", "/x", "8080-" + sb.Id + ".box.test:9999", key, "POST /x host=8080-" + sb.Id + ".box.test:9999"},
		{"host name of a name", "/healthz", "1-WEB.Box.Test", key, "POST /healthz host=1-WEB.Box.Test"},
		{"key by query", "/v1/ports/web/8080/?a=1&dsec_key=" + c.key + "&b=%zz", "gw", map[string]string{"Authorization": "Basic app", "X-API-Key": "the app's"}, "POST /?a=1&b=%zz host=gw auth=Basic app key=the app's"},
		{"key as bearer", "/v1/ports/web/8080/", "gw", map[string]string{"Authorization": "Bearer " + c.key}, "POST / host=gw auth= key= "},
		{"bearer of the application", "/v1/ports/web/8080/", "gw", with("Authorization", "Bearer app"), "POST / host=gw auth=Bearer app key= "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			code, body, h := c.ask(t, "POST", tc.target, tc.host, tc.headers, "data")
			if code != 200 || !strings.HasPrefix(body, tc.want) || !strings.HasSuffix(body, "body=data") || h.Get("App") != "1" {
				t.Errorf("%d %s", code, body)
			}
			if strings.Contains(body, c.key) {
				t.Error("the application sees the key")
			}
		})
	}
	other := c.mustCreate(t, &dsecv1.CreateRequest{})
	for _, tc := range []struct {
		name, target, host string
		headers            map[string]string
		code               int
		text               string
	}{
		{"no key", "/v1/ports/web/8080/", "gw", nil, 401, "API key"},
		{"wrong key", "/v1/ports/web/8080/", "gw", map[string]string{"X-API-Key": "x"}, 401, "API key"},
		{"wrong key by query", "/v1/ports/web/8080/?dsec_key=x", "gw", key, 401, "API key"},
		{"closed port", "/v1/ports/web/81/", "gw", key, 502, "nothing listens"},
		{"other sandbox", "/v1/ports/" + other.Id + "/8081/", "gw", key, 502, "nothing listens"},
		{"port 0", "/v1/ports/web/0/", "gw", key, 400, "port"},
		{"port 65536", "/v1/ports/web/65536/", "gw", key, 400, "port"},
		{"no port", "/v1/ports/web", "gw", key, 400, "port"},
		{"nothing", "/v1/ports/", "gw", key, 400, "port"},
		{"header without port", "/", "gw", with("Dsec-Sandbox", "web"), 400, "port"},
		{"unknown", "/v1/ports/nobody/80/", "gw", key, 404, "nobody"},
		{"unknown host name", "/", "80-nobody.box.test", key, 404, "nobody"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			code, body, h := c.ask(t, "GET", tc.target, tc.host, tc.headers, "")
			if code != tc.code || !strings.Contains(body, tc.text) || h.Get("Dsec-Error") == "" || h.Get("Location") != "" {
				t.Errorf("%d %s %v", code, body, h)
			}
		})
	}
}

func TestKeptConnectionIsNotForOtherProjects(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	c.inside(t, sb, 80, echo)
	if code, body, _ := c.ask(t, "GET", "/v1/ports/"+sb.Id+"/80/", "gw", map[string]string{"X-API-Key": c.key}, ""); code != 200 {
		t.Fatal(body)
	}
	if err := c.keys.CreateProject(context.Background(), "other"); err != nil {
		t.Fatal(err)
	}
	foreign, _, err := c.keys.CreateKey(context.Background(), "other", "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if code, body, _ := c.ask(t, "GET", "/v1/ports/"+sb.Id+"/80/", "gw", map[string]string{"X-API-Key": foreign}, ""); code != 404 {
		t.Errorf("%d %s", code, body)
	}
}

func TestEventStreamComesAtOnce(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	go_on := make(chan struct{})
	c.inside(t, sb, 80, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "first\n")
		w.(http.Flusher).Flush()
		<-go_on
		fmt.Fprint(w, "second\n")
	})
	r, _ := http.NewRequest("GET", c.url+"/v1/ports/"+sb.Id+"/80/", nil)
	resp, err := (&http.Client{Transport: keyed(c.key)}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	if l, err := br.ReadString('\n'); l != "first\n" {
		t.Fatal(l, err)
	}
	close(go_on)
	if l, err := br.ReadString('\n'); l != "second\n" {
		t.Fatal(l, err)
	}
}

// Fault B47: close codes, host name, credentials and large messages of WebSockets.
func TestWebSocket(t *testing.T) {
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "ws"})
	type seen struct {
		host, uri, protocols string
		status               websocket.StatusCode
		reason               string
	}
	got := make(chan seen, 1)
	c.inside(t, sb, 80, func(w http.ResponseWriter, r *http.Request) {
		s := seen{host: r.Host, uri: r.RequestURI, protocols: r.Header.Get("Sec-Websocket-Protocol")}
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"chat"}})
		if err != nil {
			s.reason = err.Error()
			got <- s
			return
		}
		conn.SetReadLimit(32 << 20)
		if code := r.URL.Query().Get("close"); code != "" {
			var n int
			fmt.Sscan(code, &n)
			conn.Close(websocket.StatusCode(n), "from inside")
			got <- s
			return
		}
		if r.URL.Query().Has("drop") {
			conn.CloseNow()
			got <- s
			return
		}
		for {
			kind, b, err := conn.Read(r.Context())
			if err != nil {
				var ce websocket.CloseError
				if errors.As(err, &ce) {
					s.status, s.reason = ce.Code, ce.Reason
				} else {
					s.status = -1
				}
				break
			}
			if err := conn.Write(r.Context(), kind, b); err != nil {
				break
			}
		}
		got <- s
	})
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	dial := func(query string, headers http.Header, protocols ...string) (*websocket.Conn, *http.Response, error) {
		conn, resp, err := websocket.Dial(ctx, c.url+"/v1/ports/ws/80/sock"+query, &websocket.DialOptions{HTTPHeader: headers, Subprotocols: protocols, Host: "80-ws.box.test"})
		if err == nil {
			conn.SetReadLimit(32 << 20)
		}
		return conn, resp, err
	}
	byHeader := http.Header{"X-Api-Key": {c.key}}
	open := func(query string, headers http.Header, protocols ...string) *websocket.Conn {
		t.Helper()
		conn, _, err := dial(query, headers, protocols...)
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}

	// Ways to give the key; host name and what the application sees.
	for _, tc := range []struct {
		name, query string
		headers     http.Header
		protocols   []string
		wantURI     string
		wantOffered string
		wantChosen  string
	}{
		{"header", "?a=1", byHeader, nil, "/sock?a=1", "", ""},
		{"query", "?dsec_key=" + c.key + "&a=1", nil, nil, "/sock?a=1", "", ""},
		{"sub-protocol", "", nil, []string{"dsec.key." + c.key}, "/sock", "", "dsec.key." + c.key},
		{"sub-protocol beside another", "", nil, []string{"chat", "dsec.key." + c.key}, "/sock", "chat", "chat"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			conn := open(tc.query, tc.headers, tc.protocols...)
			if conn.Subprotocol() != tc.wantChosen {
				t.Errorf("chosen %q", conn.Subprotocol())
			}
			conn.Close(4001, "bye")
			s := <-got
			if s.host != "80-ws.box.test" || s.uri != tc.wantURI || s.protocols != tc.wantOffered || s.status != 4001 || s.reason != "bye" {
				t.Errorf("%+v", s)
			}
		})
	}
	t.Run("refused", func(t *testing.T) {
		for _, tc := range []struct {
			query     string
			headers   http.Header
			protocols []string
		}{{"", nil, nil}, {"", http.Header{"X-Api-Key": {"x"}}, nil}, {"?dsec_key=x", nil, nil}, {"", nil, []string{"dsec.key.x"}}} {
			_, resp, err := dial(tc.query, tc.headers, tc.protocols...)
			if err == nil || resp.StatusCode != 401 || resp.Header.Get("Location") != "" {
				t.Errorf("%v %v", resp, err)
			}
		}
		_, resp, err := websocket.Dial(ctx, c.url+"/v1/ports/ws/81/", &websocket.DialOptions{HTTPHeader: byHeader})
		if err == nil || resp.StatusCode != 502 {
			t.Errorf("closed port: %v %v", resp, err)
		}
	})
	t.Run("codes of the client", func(t *testing.T) {
		for _, code := range []websocket.StatusCode{1000, 4001, websocket.StatusNoStatusRcvd} {
			conn := open("", byHeader)
			conn.Close(code, "")
			if s := <-got; s.status != code {
				t.Errorf("sent %d, seen %d", code, s.status)
			}
		}
		conn := open("", byHeader)
		conn.CloseNow() // drops TCP
		if s := <-got; s.status != -1 {
			t.Errorf("a dropped connection is seen as code %d", s.status)
		}
	})
	t.Run("codes of the server", func(t *testing.T) {
		for _, code := range []websocket.StatusCode{1000, 4001, 1011} {
			conn := open(fmt.Sprintf("?close=%d", code), byHeader)
			_, _, err := conn.Read(ctx)
			if websocket.CloseStatus(err) != code {
				t.Errorf("sent %d, seen %v", code, err)
			}
			<-got
		}
		conn := open("?drop", byHeader)
		if _, _, err := conn.Read(ctx); err == nil || websocket.CloseStatus(err) != -1 {
			t.Errorf("dropped: %v", err)
		}
		<-got
	})
	t.Run("16 MB and ping", func(t *testing.T) {
		conn := open("", byHeader)
		sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
		go conn.Write(ctx, websocket.MessageBinary, sent)
		_, b, err := conn.Read(ctx)
		if err != nil || !bytes.Equal(b, sent) {
			t.Fatalf("%d octets, %v", len(b), err)
		}
		go conn.Read(ctx)
		if err := conn.Ping(ctx); err != nil {
			t.Error(err)
		}
		conn.CloseNow()
		<-got
	})
	if s := c.log.String(); strings.Contains(s, "level=ERROR") || strings.Contains(s, "level=WARN") {
		t.Errorf("logged:\n%s", s)
	}
}

// A server that closes without a word while the client still sends: a plain end, no hang.
func TestServerThatEndsWhileTheClientSends(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			http.ReadRequest(bufio.NewReader(conn))
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: odd\r\n\r\n")
			conn.Close()
		}
	}()
	c.hosts[0].dials[80] = l.Addr().String()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(conn, "GET /v1/ports/%s/80/ HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nConnection: Upgrade\r\nUpgrade: odd\r\n\r\n", sb.Id, c.key)
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%v, %v", resp, err)
	}
	go func() {
		for {
			if _, err := conn.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}()
	if _, err := io.ReadAll(br); errors.Is(err, context.DeadlineExceeded) || err != nil && strings.Contains(err.Error(), "timeout") {
		t.Errorf("hangs: %v", err)
	}
}
