package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/publicsuffix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	maxAttempts = 6
	firstPause  = 250 * time.Millisecond
	maxPause    = 30 * time.Second
	maxAsked    = 2 * time.Minute // longest Retry-After that is waited for
	maxAnswer   = 8 << 20         // octets of an answer that is no blob
	maxHosts    = 1024            // whose rate limits are remembered
	headerTime  = 60 * time.Second
)

// ErrRegistry says that a registry did not answer or answered with a failure of its own; the same call may work later.
var ErrRegistry = errors.New("registry failed")

// network is the way to all registries: it bounds answers, waits when a registry asks for it, and keeps to itself what no
// registry may see.
type network struct {
	base     http.RoundTripper
	insecure map[string]bool // hosts that may be talked to without TLS
	now      func() time.Time

	mu    sync.Mutex
	until map[string]time.Time // hosts that asked not to be called before
}

func newNetwork(insecure []string) *network {
	n := &network{insecure: map[string]bool{}, now: time.Now, until: map[string]time.Time{}}
	for _, h := range insecure {
		n.insecure[strings.ToLower(h)] = true
	}
	dialer := &net.Dialer{Timeout: 20 * time.Second, KeepAlive: 30 * time.Second, ControlContext: dialable}
	n.base = &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true, MaxIdleConns: 256, MaxIdleConnsPerHost: 16,
		IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 20 * time.Second, ResponseHeaderTimeout: headerTime, MaxResponseHeaderBytes: 256 << 10,
		DisableCompression: true,
	}
	return n
}

type loopbackKey struct{}

// dialable refuses addresses that no registry has: those of a cloud's metadata service among them. The machine's own are for
// references that name them, not for names that resolve to them or redirects.
func dialable(ctx context.Context, _, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	a := ap.Addr().Unmap()
	if err := nowhere(a); err != nil {
		return err
	}
	if a.IsLoopback() && ctx.Value(loopbackKey{}) == nil {
		return fmt.Errorf("address %s: the machine's own addresses are reached only by references that name them: %w", a, sandbox.ErrDenied)
	}
	return nil
}

func nowhere(a netip.Addr) error {
	if a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() {
		return fmt.Errorf("address %s: no registry is there: %w", a, sandbox.ErrDenied)
	}
	return nil
}

// loopback reports whether a host (with or without a port) is literally this machine.
func loopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

func (n *network) plain(host string) bool {
	h := host
	if bare, _, err := net.SplitHostPort(host); err == nil {
		h = bare
	}
	return loopback(host) || n.insecure[strings.ToLower(host)] || n.insecure[strings.ToLower(h)]
}

// site is the part of a host's name that one owner has.
func site(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	if s, err := publicsuffix.EffectiveTLDPlusOne(host); err == nil {
		if _, err := netip.ParseAddr(host); err != nil {
			return s
		}
	}
	return host
}

// bound is the way to one registry; credentials that are on their way elsewhere stop here.
type bound struct {
	n    *network
	host string // of the registry, with its port
}

func (b bound) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !b.n.plain(r.URL.Host) {
		return nil, fmt.Errorf("%s: without TLS only a loopback address or a host of images.insecure is asked: %w", r.URL.Host, sandbox.ErrDenied)
	}
	if r.Header.Get("Authorization") != "" && r.URL.Host != b.host && site(r.URL.Host) != site(b.host) {
		return nil, fmt.Errorf("registry %s sends credentials to %s, which is not of the same owner: %w", b.host, r.URL.Host, sandbox.ErrDenied)
	}
	if loopback(r.URL.Host) && !loopback(b.host) {
		return nil, fmt.Errorf("registry %s leads to %s, an address of this machine: %w", b.host, r.URL.Host, sandbox.ErrDenied)
	}
	if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil {
		if err := nowhere(a.Unmap()); err != nil { // a proxy would go there for us
			return nil, err
		}
	}
	ctx := r.Context()
	proxy, err := http.ProxyFromEnvironment(r)
	if err != nil {
		return nil, fmt.Errorf("proxy of the environment: %w", err)
	}
	// The operator's proxy may be on this machine.
	if proxy != nil || loopback(b.host) && loopback(r.URL.Host) {
		ctx = context.WithValue(ctx, loopbackKey{}, true)
	}
	return b.n.patient(r.WithContext(ctx))
}

// patient sends a request again when the registry is busy, as it asks to.
func (n *network) patient(r *http.Request) (*http.Response, error) {
	host := r.URL.Host
	pause := firstPause
	for attempt := 1; ; attempt++ {
		if err := n.wait(r.Context(), host); err != nil {
			return nil, err
		}
		res, err := n.base.RoundTrip(r)
		again := r.Method == http.MethodGet || r.Method == http.MethodHead || r.GetBody != nil
		switch {
		case err != nil:
			if !again || attempt >= 3 || r.Context().Err() != nil || errors.Is(err, sandbox.ErrDenied) || hopeless(err) {
				return nil, err
			}
		case res.StatusCode == http.StatusTooManyRequests, res.StatusCode == http.StatusServiceUnavailable, res.StatusCode == http.StatusBadGateway, res.StatusCode == http.StatusGatewayTimeout:
			asked := retryAfter(res.Header.Get("Retry-After"), n.now())
			if asked > maxAsked {
				res.Body.Close()
				return nil, fmt.Errorf("registry %s: asks to wait %v (%s): %w", host, asked.Round(time.Second), res.Status, sandbox.ErrExhausted)
			}
			if !again || attempt >= maxAttempts {
				return n.measured(r, res), nil
			}
			io.CopyN(io.Discard, res.Body, 64<<10)
			res.Body.Close()
			if asked > 0 {
				n.hold(host, asked)
				pause = min(pause, asked)
			}
		default:
			return n.measured(r, res), nil
		}
		if r.GetBody != nil {
			body, err := r.GetBody()
			if err != nil {
				return nil, err
			}
			r.Body = body
		}
		if err := sleep(r.Context(), pause); err != nil {
			return nil, err
		}
		pause = min(2*pause, maxPause)
	}
}

// hopeless are failures that come again at once.
func hopeless(err error) bool {
	var dns *net.DNSError
	return errors.As(err, &dns) && dns.IsNotFound || errors.Is(err, syscall.ECONNREFUSED) || strings.Contains(err.Error(), "certificate") ||
		strings.Contains(err.Error(), "server gave HTTP response to HTTPS client")
}

func retryAfter(s string, now time.Time) time.Duration {
	if n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 32); err == nil && n >= 0 {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(s); err == nil {
		return max(0, t.Sub(now))
	}
	return 0
}

func (n *network) hold(host string, d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.until) >= maxHosts {
		clear(n.until)
	}
	if t := n.now().Add(d); t.After(n.until[host]) {
		n.until[host] = t
	}
}

func (n *network) wait(ctx context.Context, host string) error {
	n.mu.Lock()
	t, ok := n.until[host]
	n.mu.Unlock()
	if !ok {
		return nil
	}
	return sleep(ctx, t.Sub(n.now()))
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// measured bounds what an answer may hold, except a blob's, whose reader counts itself.
func (n *network) measured(r *http.Request, res *http.Response) *http.Response {
	if r.Context().Value(blobKey{}) == nil {
		res.Body = &limited{res.Body, maxAnswer}
	}
	return res
}

type blobKey struct{}

type limited struct {
	io.ReadCloser
	left int64
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, fmt.Errorf("answer of more than %d octets: %w", maxAnswer, sandbox.ErrInvalid)
	}
	n, err := l.ReadCloser.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	return n, err
}
