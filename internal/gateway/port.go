package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	portsPath    = "/v1/ports/"
	headerBox    = "Dsec-Sandbox"
	headerPort   = "Dsec-Port"
	queryKey     = "dsec_key"
	protocolKey  = "dsec.key." // sub-protocol of a WebSocket, followed by the key: browsers can't set headers
	headerError  = "Dsec-Error"
	headerPrefix = "X-Forwarded-Prefix"

	maxPortConns = 8192
	portIdle     = 2 * time.Second // an idle connection counts as activity of its sandbox
	portHeaders  = 64 << 10        // octets of an answer's headers
)

// ports is the way to HTTP and WebSocket servers inside sandboxes. Below it lies the tunnel of rpc; nothing of what the application
// says is changed, and of what the caller says only our credentials are taken out.
type ports struct {
	g         *Gateway
	proxy     *httputil.ReverseProxy
	transport *http.Transport
	byHost    *regexp.Regexp
	conns     atomic.Int64
}

func newPorts(g *Gateway) *ports {
	p := &ports{g: g}
	if g.cfg.Domain != "" {
		p.byHost = regexp.MustCompile(`^([0-9]{1,5})-([a-z0-9-]+)\.` + regexp.QuoteMeta(g.cfg.Domain) + `$`)
	} else {
		p.byHost = regexp.MustCompile(`^([0-9]{1,5})-([a-z][a-z0-9]{5,19}-[a-z0-9]{16})\.`)
	}
	p.transport = &http.Transport{
		Proxy:                  nil, // whatever the environment says
		DialContext:            p.dial,
		DisableCompression:     true,
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    8,
		IdleConnTimeout:        portIdle,
		MaxResponseHeaderBytes: portHeaders,
		ExpectContinueTimeout:  time.Second,
	}
	p.proxy = &httputil.ReverseProxy{
		Transport:      p.transport,
		FlushInterval:  -1, // event streams
		Rewrite:        rewrite,
		ModifyResponse: answerProtocol,
		ErrorHandler:   p.unanswered,
		ErrorLog:       slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
	}
	return p
}

// target is a port that a request is for.
type target struct {
	ref, port string
	path      string // by path: what comes after the port, escaped; "" when the request's own path is meant
	prefix    string // by path: what comes before
}

// target finds out whether a request is for a port, by path, header or host name.
func (p *ports) target(r *http.Request) (target, bool) {
	if rest, ok := strings.CutPrefix(r.URL.EscapedPath(), portsPath); ok {
		ref, rest, _ := strings.Cut(rest, "/")
		port, path, slash := strings.Cut(rest, "/")
		t := target{ref: ref, port: port, path: "/" + path, prefix: portsPath + ref + "/" + port}
		if !slash && port == "" {
			t.prefix = ""
		}
		return t, true
	}
	if ref := r.Header.Get(headerBox); ref != "" {
		return target{ref: ref, port: r.Header.Get(headerPort)}, true
	}
	host := r.Host
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		host = host[:i]
	}
	if m := p.byHost.FindStringSubmatch(strings.ToLower(host)); m != nil {
		return target{ref: m[2], port: m[1]}, true
	}
	return target{}, false
}

// route is what the proxy needs of a request that was let in.
type route struct {
	target
	addr     string // for the transport: project labels and ID, joined by dots, and the port
	peer     *rpc.Peer
	id       sandbox.ID
	port     uint16
	secret   string
	start    time.Time
	protocol string // the sub-protocol that carried the key
}

type routeKey struct{}

func routeOf(r *http.Request) *route {
	rt, _ := r.Context().Value(routeKey{}).(*route)
	return rt
}

func (p *ports) serve(w http.ResponseWriter, r *http.Request, t target) {
	rt := &route{target: t, start: time.Now()}
	secret, protocol := portKey(r)
	rt.secret, rt.protocol = secret, protocol
	ctx, err := p.g.admit(r.Context(), secret, r.Header.Get(rpc.HeaderProject))
	if err == nil {
		err = p.resolve(ctx, rt)
	}
	r = r.WithContext(context.WithValue(ctx, routeKey{}, rt))
	if err != nil {
		p.fail(w, r, err)
		return
	}
	if p.conns.Add(1) > maxPortConns {
		p.conns.Add(-1)
		p.fail(w, r, fmt.Errorf("ports: %d requests in flight: %w", maxPortConns, sandbox.ErrExhausted))
		return
	}
	defer p.conns.Add(-1)
	// Over HTTP/1 the server would otherwise take the rest of the request for itself when the answer begins: an application could not
	// answer while it reads, and where the transport was still to see the request's end, the answer broke off in its middle.
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		p.fail(w, r, err)
		return
	}
	p.g.watch.serve(w, r, false, p.proxy)
	p.g.edge.Done("ports", nil, rt.start)
}

func (p *ports) resolve(ctx context.Context, rt *route) error {
	port, err := rpc.Port(rt.target.port)
	if err != nil {
		return fmt.Errorf("%w (want %s{sandbox}/{port}/..., or the headers %s and %s, or the host name <port>-<sandbox>.<domain>)", err, portsPath, headerBox, headerPort)
	}
	id, peer, err := p.g.identify(ctx, rt.ref)
	if err != nil {
		return err
	}
	rt.id, rt.port, rt.peer = id, port, peer
	// Connections are kept by this address. The project is part of it: the host checked it when the connection was made, and another
	// project must not come to use it.
	rt.addr = strings.ReplaceAll(rpc.Project(ctx), "/", ".") + "." + string(id) + ":" + strconv.Itoa(int(port))
	return nil
}

// identify finds the ID and the host of a sandbox that is named by ID or name.
func (g *Gateway) identify(ctx context.Context, ref string) (sandbox.ID, *rpc.Peer, error) {
	ref, peer, err := g.surely(ctx, ref)
	if err != nil {
		return "", nil, err
	}
	if id, err := sandbox.ParseID(ref); err == nil {
		return id, peer, nil
	}
	sb, _, err := g.find(ctx, g.fleet.Fleet(), finding{name: ref}) // a name, and one host alone
	if err != nil {
		return "", nil, err
	}
	if sb == nil {
		return "", nil, fmt.Errorf("sandbox %s: no living sandbox of the project has that name: %w", ref, sandbox.ErrNotFound)
	}
	id, err := sandbox.ParseID(sb.GetId())
	return id, peer, err
}

// dial opens a tunnel for an address that resolve made.
func (p *ports) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	name, portText, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	i := strings.LastIndexByte(name, '.')
	id, port := sandbox.ID(name[i+1:]), portText
	n, err := rpc.Port(port)
	if err != nil {
		return nil, err
	}
	peer, err := p.g.peerOf(ctx, id)
	if err != nil {
		return nil, err
	}
	return peer.DialPort(rpc.WithProject(ctx, strings.ReplaceAll(name[:i], ".", "/")), id, n)
}

// portKey finds the key of a request to a port, and the sub-protocol that carried it. What only we use comes first; X-Api-Key and
// Authorization may be the application's.
func portKey(r *http.Request) (secret, protocol string) {
	if k, ok := rawQuery(r.URL.RawQuery, nil); ok {
		return k, ""
	}
	for _, line := range r.Header["Sec-Websocket-Protocol"] {
		for one := range strings.SplitSeq(line, ",") {
			one = strings.TrimSpace(one)
			if k, ok := strings.CutPrefix(one, protocolKey); ok {
				return k, one
			}
		}
	}
	return keyOf(r.Header), ""
}

// rawQuery finds our key in a query and, with rest, gives all else octet for octet: the application may read its query in its own way.
func rawQuery(q string, rest *string) (key string, ok bool) {
	if !strings.Contains(q, queryKey+"=") {
		if rest != nil {
			*rest = q
		}
		return "", false
	}
	var kept []string
	for part := range strings.SplitSeq(q, "&") {
		if v, is := strings.CutPrefix(part, queryKey+"="); is {
			if !ok {
				key, _ = url.QueryUnescape(v)
			}
			ok = true
			continue
		}
		kept = append(kept, part)
	}
	if rest != nil {
		*rest = strings.Join(kept, "&")
	}
	return key, ok
}

// rewrite makes the request that the application gets.
func rewrite(pr *httputil.ProxyRequest) {
	rt := routeOf(pr.In)
	out := pr.Out
	out.URL.Scheme, out.URL.Host = "http", rt.addr
	out.Host = pr.In.Host // the same for HTTP and WebSocket
	if rt.prefix != "" {
		if path, err := url.PathUnescape(rt.path); err == nil {
			out.URL.Path, out.URL.RawPath = path, rt.path
		}
		out.Header.Set(headerPrefix, rt.prefix)
	}
	rawQuery(pr.In.URL.RawQuery, &out.URL.RawQuery)
	pr.SetXForwarded()
	h := out.Header
	for _, own := range []string{headerBox, headerPort, rpc.HeaderProject, rpc.HeaderProtocol, rpc.HeaderCluster} {
		h.Del(own)
	}
	if h.Get("X-Api-Key") == rt.secret {
		h.Del("X-Api-Key")
	}
	if bearer(h) == rt.secret {
		h.Del("Authorization")
	}
	if rt.protocol != "" {
		var kept []string
		for _, line := range h["Sec-Websocket-Protocol"] {
			for one := range strings.SplitSeq(line, ",") {
				if one = strings.TrimSpace(one); one != "" && !strings.HasPrefix(one, protocolKey) {
					kept = append(kept, one)
				}
			}
		}
		h.Del("Sec-Websocket-Protocol")
		if len(kept) > 0 {
			h.Set("Sec-Websocket-Protocol", strings.Join(kept, ", "))
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		h.Set("User-Agent", "") // or the transport would send its own
	}
}

// answerProtocol names the sub-protocol that carried the key when the application chose none: browsers refuse a connection whose server
// chose none of those that they offered.
func answerProtocol(resp *http.Response) error {
	rt := routeOf(resp.Request)
	if rt != nil && rt.protocol != "" && resp.StatusCode == http.StatusSwitchingProtocols && resp.Header.Get("Sec-Websocket-Protocol") == "" {
		resp.Header.Set("Sec-Websocket-Protocol", rt.protocol)
	}
	return nil
}

// unanswered is for a request that was let in. A host says "not found" of a sandbox and of a port alike; the former is 404, the latter 502.
func (p *ports) unanswered(w http.ResponseWriter, r *http.Request, err error) {
	if rt := routeOf(r); errors.Is(err, sandbox.ErrNotFound) && rt != nil && rt.peer != nil {
		ctx, cancel := context.WithTimeout(r.Context(), readyWait)
		defer cancel()
		if _, gone := rt.peer.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: string(rt.id)})); gone == nil {
			err = fmt.Errorf("%v: %w", err, sandbox.ErrState)
		}
	}
	p.fail(w, r, err)
}

// fail answers a request that did not reach the application, as text and with the code in a header, so that a caller can tell it from the
// application's own answers.
func (p *ports) fail(w http.ResponseWriter, r *http.Request, err error) {
	status := http.StatusBadGateway
	switch {
	case errors.Is(err, rpc.ErrUnauthenticated):
		status = http.StatusUnauthorized
		w.Header().Set("WWW-Authenticate", `Bearer realm="dsec"`)
	case errors.Is(err, sandbox.ErrDenied):
		status = http.StatusForbidden
	case errors.Is(err, sandbox.ErrNotFound):
		status = http.StatusNotFound
	case errors.Is(err, sandbox.ErrInvalid):
		status = http.StatusBadRequest
	case errors.Is(err, sandbox.ErrUnsupported):
		status = http.StatusNotImplemented
	case errors.Is(err, sandbox.ErrExhausted):
		status = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", "1")
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	}
	start := time.Now()
	if rt := routeOf(r); rt != nil {
		start = rt.start
	}
	code := rpc.CodeName(err)
	// The application's end of a connection is its own affair; what we could not do is logged.
	level := slog.LevelDebug
	if errors.Is(err, rpc.ErrUnavailable) {
		level = slog.LevelWarn
	}
	p.g.log.LogAttrs(r.Context(), level, "port not reached", slog.String("code", code), slog.String("err", err.Error()))
	p.g.edge.Done("ports", err, start)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set(headerError, code)
	w.WriteHeader(status)
	if status == http.StatusBadGateway {
		err = fmt.Errorf("the server inside did not answer: %w", err)
	}
	fmt.Fprintf(w, "dsec: %s\n", strings.ToValidUTF8(err.Error(), "\uFFFD"))
}
