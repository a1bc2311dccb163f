package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image/png"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/display"
	"github.com/dsec-dev/dsec/internal/iam"
)

// socket opens the WebSocket of a sandbox's screen; the answer is there in any case.
func (c *cluster) socket(t *testing.T, ref, query string, o *websocket.DialOptions) (*websocket.Conn, *http.Response, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return websocket.Dial(ctx, c.url+"/v1/screens/"+ref+"/rfb"+query, o)
}

// A real display server is reached through the gateway by a VNC client that speaks over a WebSocket: it shows a picture, and takes keys.
func TestScreenOverWebSocket(t *testing.T) {
	if _, err := exec.LookPath("Xvnc"); err != nil {
		t.Skip("no Xvnc: apt-get install tigervnc-standalone-server xterm")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr, port := l.Addr().String(), l.Addr().(*net.TCPAddr).Port
	l.Close()
	x := exec.Command("Xvnc", fmt.Sprintf(":%d", port), "-rfbport", fmt.Sprint(port), "-localhost", "-SecurityTypes", "None", "-geometry", "320x200", "-nolisten", "tcp")
	if err := x.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Process.Kill(); x.Wait() })
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if conn, err := net.Dial("tcp", addr); err == nil {
			conn.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatal("Xvnc does not listen")
		}
	}
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "desk"})
	host := c.host(sb.Id)
	host.mu.Lock()
	host.dials[0], host.dials[5901] = addr, addr
	host.mu.Unlock()
	for _, how := range []struct {
		ref, query string
		o          *websocket.DialOptions
		chosen     string
	}{
		{sb.Id, "", &websocket.DialOptions{Subprotocols: []string{"binary", "dsec.key." + c.key}}, "binary"},
		{"desk", "?port=5901", &websocket.DialOptions{Subprotocols: []string{"dsec.key." + c.key}}, "dsec.key." + c.key},
		{sb.Id, "?port=0", &websocket.DialOptions{HTTPHeader: http.Header{"X-Api-Key": {c.key}}}, ""},
		{sb.Id, "?dsec_key=" + c.key, nil, ""},
	} {
		ws, _, err := c.socket(t, how.ref, how.query, how.o)
		if err != nil {
			t.Fatalf("%+v: %v", how, err)
		}
		if ws.Subprotocol() != how.chosen {
			t.Errorf("%+v: the gateway chose %q", how, ws.Subprotocol())
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		s, err := display.Open(ctx, websocket.NetConn(ctx, ws, websocket.MessageBinary))
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := errors.Join(s.Type(ctx, "a"), s.Screenshot(ctx, &out)); err != nil {
			t.Fatal(err)
		}
		if img, err := png.Decode(&out); err != nil || img.Bounds().Dx() != 320 || img.Bounds().Dy() != 200 {
			t.Errorf("%v, %v", img.Bounds(), err)
		}
		s.Close()
	}
}

// half is a server that says its name and then nothing; it tells when its client is gone.
func half(t *testing.T) (addr string, gone chan struct{}) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	gone = make(chan struct{}, 16)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				io.WriteString(c, "RFB 003.008\n")
				io.Copy(io.Discard, c)
				gone <- struct{}{} // it keeps its own half open
			}()
		}
	}()
	return l.Addr().String(), gone
}

func wait(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatal("never: ", what)
	}
}

// A refusal is an ordinary answer with its reason, also for who asks without a WebSocket. A caller that leaves, or whose key is revoked, frees the
// screen, even where its server keeps its half open.
func TestScreenRefusalsAndEnds(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	addr, gone := half(t)
	c.hosts[0].mu.Lock()
	c.hosts[0].dials[0] = addr
	c.hosts[0].mu.Unlock()
	if err := c.keys.CreateProject(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	other, _, err := c.keys.CreateKey(t.Context(), "other", "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		ref, query, key, code string
		status                int
	}{
		{sb.Id, "", "no", "unauthenticated", 401},
		{sb.Id, "", other, "not_found", 404},
		{"nobody", "", c.key, "not_found", 404},
		{sb.Id, "?port=70000", c.key, "invalid_argument", 400},
		{sb.Id, "?port=5901", c.key, "failed_precondition", 502},
	} {
		for _, upgrade := range []bool{false, true} {
			var resp *http.Response
			if upgrade {
				_, resp, err = c.socket(t, x.ref, x.query, &websocket.DialOptions{Subprotocols: []string{"binary", "dsec.key." + x.key}})
				if err == nil {
					t.Fatalf("%+v: taken", x)
				}
			} else {
				var h http.Header
				var status int
				status, _, h = c.ask(t, "GET", "/v1/screens/"+x.ref+"/rfb"+x.query, "", map[string]string{"X-API-Key": x.key}, "")
				resp = &http.Response{StatusCode: status, Header: h}
			}
			if resp == nil || resp.StatusCode != x.status || resp.Header.Get("Dsec-Error") != x.code {
				t.Errorf("%+v, upgrade %v: %+v, %v", x, upgrade, resp, err)
			}
		}
	}
	if status, _, _ := c.ask(t, "GET", "/v1/screens/"+sb.Id+"/rfb", "", map[string]string{"X-API-Key": c.key}, ""); status != 204 {
		t.Errorf("without a WebSocket: %d", status)
	}
	wait(t, "the screen that was only asked for is freed", gone)
	ws, _, err := c.socket(t, sb.Id, "?dsec_key="+c.key, nil)
	if err != nil {
		t.Fatal(err)
	}
	if kind, p, err := ws.Read(t.Context()); err != nil || kind != websocket.MessageBinary || string(p) != "RFB 003.008\n" {
		t.Errorf("%v %q %v", kind, p, err)
	}
	ws.Close(websocket.StatusNormalClosure, "")
	wait(t, "a caller that leaves frees the screen", gone)
	revoked, info, err := c.keys.CreateKey(t.Context(), iam.DefaultProject, "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if ws, _, err = c.socket(t, sb.Id, "?dsec_key="+revoked, nil); err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if err := c.keys.RevokeKey(t.Context(), info.ID); err != nil {
		t.Fatal(err)
	}
	wait(t, "a revoked key frees the screen", gone)
}

// The page needs noVNC and says so; with it only its scripts are served, and nothing that a page of a sandbox could reach into.
func TestScreenPage(t *testing.T) {
	c := newCluster(t, 1)
	status, text, h := c.ask(t, "GET", "/v1/screens/abc", "", nil, "")
	if status != 501 || h.Get("Dsec-Error") != "unimplemented" || !strings.Contains(text, "make novnc") {
		t.Errorf("without noVNC: %d %s %v", status, text, h)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"novnc/core/rfb.js": "export default 1;", "novnc/core/notes.txt": "no", "novnc/package.js": "no", "secret.js": "no"} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	mux := http.NewServeMux()
	c.g.cfg.NoVNC = filepath.Join(dir, "novnc")
	newScreens(c.g).routes(mux)
	get := func(path string) (int, http.Header, string) {
		w := &answer{h: http.Header{}, status: 200}
		r, err := http.NewRequest("GET", "http://x"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		mux.ServeHTTP(w, r)
		return w.status, w.h, w.b.String()
	}
	status, h, text = get("/v1/screens/abc?port=5901")
	csp := h.Get("Content-Security-Policy")
	if status != 200 || !strings.Contains(text, "../view/screen.js") || !strings.HasPrefix(csp, "sandbox allow-scripts; default-src 'none'") || strings.Contains(csp, "allow-same-origin") {
		t.Errorf("%d %q %q", status, csp, text)
	}
	if status, h, text = get("/v1/view/screen.js"); status != 200 || !strings.HasPrefix(h.Get("Content-Type"), "text/javascript") || !strings.Contains(text, "./novnc/core/rfb.js") {
		t.Errorf("script: %d %v", status, h)
	}
	if status, h, text = get("/v1/view/novnc/core/rfb.js"); status != 200 || text != "export default 1;" || h.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("noVNC: %d %v %q", status, h, text)
	}
	for _, bad := range []string{"core/notes.txt", "package.js", "core/none.js", "core/%2e%2e/%2e%2e/secret.js", "core/..%2f..%2fsecret.js", "core"} {
		if status, _, text := get("/v1/view/novnc/" + bad); status == 200 {
			t.Errorf("%s: %d %q", bad, status, text)
		}
	}
}

// answer is an http.ResponseWriter.
type answer struct {
	h      http.Header
	status int
	b      bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.h }
func (a *answer) Write(p []byte) (int, error) { return a.b.Write(p) }
func (a *answer) WriteHeader(s int)           { a.status = s }
