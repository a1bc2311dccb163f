package gateway

import (
	"context"
	_ "embed"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/coder/websocket"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// displays is DisplayService.
type displays struct{ g *Gateway }

var _ dsecv1connect.DisplayServiceHandler = displays{}

func (s displays) Screenshot(ctx context.Context, r *connect.Request[dsecv1.ScreenshotRequest]) (*connect.Response[dsecv1.ScreenshotResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ScreenshotRequest, dsecv1.ScreenshotResponse] {
		return p.Displays.Screenshot
	})
}

func (s displays) Act(ctx context.Context, r *connect.Request[dsecv1.ScreenActRequest]) (*connect.Response[dsecv1.ScreenActResponse], error) {
	step(&r.Msg.Step)
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ScreenActRequest, dsecv1.ScreenActResponse] { return p.Displays.Act })
}

func (s displays) Console(ctx context.Context, r *connect.Request[dsecv1.ConsoleRequest]) (*connect.Response[dsecv1.ConsoleResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ConsoleRequest, dsecv1.ConsoleResponse] { return p.Displays.Console })
}

const (
	screensPath = "/v1/screens/"
	viewPath    = "/v1/view/" // files of the page
	rfbProtocol = "binary"    // the sub-protocol that VNC clients of browsers offer
	rfbEntry    = "core/rfb.js"
)

//go:embed screen.html
var screenPage []byte

//go:embed screen.js
var screenScript []byte

// screens shows a sandbox's screen in a browser: a page that asks for no key and tells nothing, the files of noVNC, which lie in a folder of
// the operator's, and a WebSocket that carries RFB between a caller with a key and the screen.
//
// The page has no origin of its own (sandbox in its policy): what sandboxes serve through /v1/ports/ shares ours, and must not come to the key
// that a person types into it.
type screens struct {
	g     *Gateway
	novnc fs.FS // nil: there is none
}

func newScreens(g *Gateway) *screens {
	s := &screens{g: g}
	if at := g.cfg.NoVNC; at != "" {
		s.novnc = os.DirFS(at)
	}
	return s
}

func (s *screens) routes(mux *http.ServeMux) {
	mux.HandleFunc("GET "+screensPath+"{sandbox}", s.page)
	mux.HandleFunc("GET "+viewPath+"screen.js", func(w http.ResponseWriter, r *http.Request) { s.static(w, "text/javascript", screenScript) })
	mux.HandleFunc("GET "+viewPath+"novnc/{file...}", s.file)
	mux.HandleFunc("GET "+screensPath+"{sandbox}/rfb", s.rfb)
}

func (s *screens) static(w http.ResponseWriter, kind string, body []byte) {
	h := w.Header()
	h.Set("Content-Type", kind+"; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-cache")
	h.Set("Access-Control-Allow-Origin", "*") // the page's, which has none, reads them
	w.Write(body)
}

func (s *screens) page(w http.ResponseWriter, r *http.Request) {
	if s.novnc != nil {
		if _, err := fs.Stat(s.novnc, rfbEntry); err == nil {
			h := w.Header()
			h.Set("Content-Security-Policy", "sandbox allow-scripts; default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
			h.Set("Referrer-Policy", "no-referrer")
			s.static(w, "text/html", screenPage)
			return
		}
	}
	s.g.ports.fail(w, r, fmt.Errorf("this gateway has no noVNC: run `make novnc`, or give [gateway] novnc the folder of its package @novnc/novnc (docs/ops/desktop.md). "+
		"VNC clients that speak over a WebSocket can use %s%.80s/rfb: %w", screensPath, r.PathValue("sandbox"), sandbox.ErrUnsupported))
}

// file serves a script of noVNC.
func (s *screens) file(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	err := fs.ErrNotExist
	var body []byte
	if s.novnc != nil && path.Ext(name) == ".js" && fs.ValidPath(name) && (strings.HasPrefix(name, "core/") || strings.HasPrefix(name, "vendor/")) {
		body, err = fs.ReadFile(s.novnc, name)
	}
	if err != nil {
		s.g.ports.fail(w, r, fmt.Errorf("%.80q of noVNC: %w", name, sandbox.ErrNotFound))
		return
	}
	s.static(w, "text/javascript", body)
}

// rfb carries RFB. The screen is connected to before the WebSocket is taken, so that what fails is an ordinary answer; asked for without a
// WebSocket it says whether the screen is there.
func (s *screens) rfb(w http.ResponseWriter, r *http.Request) {
	rt := &route{target: target{ref: r.PathValue("sandbox")}, start: time.Now()}
	rt.secret, rt.protocol = portKey(r)
	w.Header().Set("Access-Control-Allow-Origin", "*") // who has the key may read what went wrong
	ctx, err := s.g.admit(r.Context(), rt.secret, r.Header.Get(rpc.HeaderProject))
	if err == nil {
		rt.id, rt.peer, err = s.g.identify(ctx, rt.ref)
	}
	if err == nil {
		rt.port, err = rpc.ScreenPort(r.URL.Query().Get("port"))
	}
	r = r.WithContext(context.WithValue(ctx, routeKey{}, rt))
	if err != nil {
		s.g.ports.fail(w, r, err)
		return
	}
	if s.g.ports.conns.Add(1) > maxPortConns {
		err = fmt.Errorf("ports: %d requests in flight: %w", maxPortConns, sandbox.ErrExhausted)
	}
	defer s.g.ports.conns.Add(-1)
	var screen net.Conn
	if err == nil {
		screen, err = rt.peer.DialScreen(ctx, rt.id, rt.port)
	}
	if err != nil {
		s.g.ports.unanswered(w, r, err)
		return
	}
	defer screen.Close()
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	s.g.watch.serve(w, r, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { carry(w, r, rt, screen) }))
	s.g.edge.Done("screens", nil, rt.start)
}

// carry takes the WebSocket and copies in both directions until one side ends, or the caller's key does.
func carry(w http.ResponseWriter, r *http.Request, rt *route, screen net.Conn) {
	offers := []string{rfbProtocol}
	if rt.protocol != "" { // browsers refuse a server that chose none of those that they offered
		offers = append(offers, rt.protocol)
	}
	// The key is the caller's own word: no cookie says it, so it does not matter what page it comes from.
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: offers, InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return // it has answered
	}
	defer ws.CloseNow()
	c := websocket.NetConn(r.Context(), ws, websocket.MessageBinary)
	stop := context.AfterFunc(r.Context(), func() { screen.Close() })
	defer stop()
	rpc.Splice(c, struct{ net.Conn }{screen}) // who has left hears nothing more: a half that stays open would keep the sandbox from being idle
	ws.Close(websocket.StatusNormalClosure, "the screen is gone")
}
