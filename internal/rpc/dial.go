package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	dialTime  = 5 * time.Second
	idleConns = 512 // a host's; also what a burst of calls may open at once and keep
)

// PeerConfig is what a gateway needs to reach hosts.
type PeerConfig struct {
	Token  string // the cluster token
	CAFile string // PEM; for https addresses, beside the system's authorities
	// Local are hosts in this process, by address.
	Local map[string]*Local
}

// Peer is a host as its callers see it: clients of all that hosts serve, over connections that are kept.
type Peer struct {
	Addr string

	Info      dsecv1connect.InfoServiceClient
	Host      dsecv1connect.HostServiceClient
	Sandboxes dsecv1connect.SandboxServiceClient
	Commands  dsecv1connect.CommandServiceClient
	Jobs      dsecv1connect.JobServiceClient
	Files     dsecv1connect.FileServiceClient
	Calls     dsecv1connect.FnCallServiceClient
	Displays  dsecv1connect.DisplayServiceClient
	// The calls that stream; all streams share HTTP/2 connections.
	Logs        dsecv1connect.LogServiceClient
	Restores    dsecv1connect.HostRestoreServiceClient
	Moves       dsecv1connect.HostMoveServiceClient
	Streams     dsecv1connect.CommandServiceClient
	FileStreams dsecv1connect.FileServiceClient

	base   string
	token  string
	dial   func(ctx context.Context) (net.Conn, error)
	local  *Local
	short  *http.Transport
	stream *http.Transport
	busy   atomic.Int64 // calls over short
}

// RoundTrip sends a unary call. It goes over HTTP/1.1, which costs half the CPU of HTTP/2 while there are as many connections as
// calls; beyond a bound (tens of thousands of long polls may wait at once) the calls share HTTP/2 connections.
func (p *Peer) RoundTrip(r *http.Request) (*http.Response, error) {
	if p.busy.Add(1) > idleConns {
		p.busy.Add(-1)
		return p.stream.RoundTrip(r)
	}
	resp, err := p.short.RoundTrip(r)
	if err != nil {
		p.busy.Add(-1)
		return nil, err
	}
	resp.Body = &counted{ReadCloser: resp.Body, p: p}
	return resp, nil
}

type counted struct {
	io.ReadCloser
	p    *Peer
	done atomic.Bool
}

func (c *counted) Close() error {
	if !c.done.Swap(true) {
		c.p.busy.Add(-1)
	}
	return c.ReadCloser.Close()
}

// Dial prepares a peer at "unix:/path", "http://host:port" or "https://host:port". It opens no connection.
func Dial(addr string, cfg PeerConfig) (*Peer, error) {
	p := &Peer{Addr: addr, token: cfg.Token, local: cfg.Local[addr]}
	d := &net.Dialer{Timeout: dialTime, KeepAlive: 15 * time.Second}
	secure, target := false, ""
	if path, ok := strings.CutPrefix(addr, unixScheme); ok {
		if path == "" {
			return nil, fmt.Errorf("host address %q: want unix:/path: %w", addr, sandbox.ErrInvalid)
		}
		p.base = "http://dsec-host"
		p.dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "unix", path) }
	} else {
		u, err := url.Parse(addr)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			return nil, fmt.Errorf("host address %q: want unix:/path, http://host:port or https://host:port: %w", addr, sandbox.ErrInvalid)
		}
		secure, target = u.Scheme == "https", u.Host
		if u.Port() == "" {
			target = net.JoinHostPort(u.Hostname(), map[bool]string{false: "80", true: "443"}[secure])
		}
		p.base = u.Scheme + "://" + u.Host
		p.dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", target) }
	}
	var tlsCfg *tls.Config
	if secure {
		tlsCfg = &tls.Config{MinVersion: tls.VersionTLS12}
		tlsCfg.ServerName, _, _ = net.SplitHostPort(target)
		if cfg.CAFile != "" {
			pem, err := os.ReadFile(cfg.CAFile)
			if err != nil {
				return nil, fmt.Errorf("read authorities for %s: %w", addr, err)
			}
			pool, err := x509.SystemCertPool()
			if err != nil {
				pool = x509.NewCertPool()
			}
			if !pool.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("authorities %s: holds no PEM certificate: %w", cfg.CAFile, sandbox.ErrInvalid)
			}
			tlsCfg.RootCAs = pool
		}
		plain := p.dial
		tunnelTLS := tlsCfg.Clone()
		tunnelTLS.NextProtos = []string{"http/1.1"}
		tunnel := func(ctx context.Context) (net.Conn, error) {
			conn, err := plain(ctx)
			if err != nil {
				return nil, err
			}
			c := tls.Client(conn, tunnelTLS)
			if err := c.HandshakeContext(ctx); err != nil {
				conn.Close()
				return nil, err
			}
			return c, nil
		}
		p.short, p.stream = p.transports(plain, tlsCfg)
		p.dial = tunnel
	} else {
		p.short, p.stream = p.transports(p.dial, nil)
	}
	p.clients()
	return p, nil
}

func (p *Peer) transports(dial func(context.Context) (net.Conn, error), tlsCfg *tls.Config) (short, stream *http.Transport) {
	one := func(h2 bool) *http.Transport {
		protocols := new(http.Protocols)
		protocols.SetHTTP1(!h2)
		protocols.SetHTTP2(h2)
		protocols.SetUnencryptedHTTP2(h2 && tlsCfg == nil)
		t := &http.Transport{
			Proxy:               nil, // whatever the environment says
			DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			TLSClientConfig:     tlsCfg.Clone(),
			TLSHandshakeTimeout: dialTime,
			DisableCompression:  true,
			MaxIdleConns:        idleConns,
			MaxIdleConnsPerHost: idleConns,
			IdleConnTimeout:     idleTime - time.Minute, // before the server closes it under a call
			Protocols:           protocols,
			HTTP2: &http.HTTP2Config{
				SendPingTimeout:               pingAfter,
				PingTimeout:                   pingAnswer,
				MaxReceiveBufferPerStream:     streamWindow,
				MaxReceiveBufferPerConnection: connWindow,
			},
		}
		return t
	}
	return one(false), one(true)
}

func (p *Peer) clients() {
	opts := []connect.ClientOption{
		connect.WithInterceptors(&credentials{token: []string{p.token}, local: p.local}),
		connect.WithReadMaxBytes(MaxAnswerMessage),
		connect.WithAcceptCompression("gzip", nil, nil),
	}
	short, long := &http.Client{Transport: p}, &http.Client{Transport: p.stream}
	p.Info = dsecv1connect.NewInfoServiceClient(short, p.base, opts...)
	p.Host = dsecv1connect.NewHostServiceClient(short, p.base, opts...)
	p.Sandboxes = dsecv1connect.NewSandboxServiceClient(short, p.base, opts...)
	p.Commands = dsecv1connect.NewCommandServiceClient(short, p.base, opts...)
	p.Jobs = dsecv1connect.NewJobServiceClient(short, p.base, opts...)
	p.Streams = dsecv1connect.NewCommandServiceClient(long, p.base, opts...)
	p.Files = dsecv1connect.NewFileServiceClient(short, p.base, opts...)
	p.Displays = dsecv1connect.NewDisplayServiceClient(short, p.base, opts...)
	p.Calls = dsecv1connect.NewFnCallServiceClient(short, p.base, opts...)
	p.FileStreams = dsecv1connect.NewFileServiceClient(long, p.base, opts...)
	p.Logs = dsecv1connect.NewLogServiceClient(long, p.base, opts...)
	p.Moves = dsecv1connect.NewHostMoveServiceClient(long, p.base, opts...)
	p.Restores = dsecv1connect.NewHostRestoreServiceClient(short, p.base, opts...)
}

// Close closes connections that no call uses.
func (p *Peer) Close() {
	p.short.CloseIdleConnections()
	p.stream.CloseIdleConnections()
}

// credentials adds what each call between daemons carries, and takes the short way where there is one.
type credentials struct {
	token []string
	local *Local // may be nil
}

func (c *credentials) set(ctx context.Context, h http.Header) {
	h[HeaderProtocol] = protocolValue
	h[HeaderCluster] = c.token
	if p := Project(ctx); p != "" {
		h[HeaderProject] = []string{p}
	}
}

func (c *credentials) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		c.set(ctx, req.Header())
		if f, to := c.local.find(req.Spec().Procedure); to != nil {
			return f.call(ctx, to, req)
		}
		return next(ctx, req)
	}
}

func (c *credentials) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		c.set(ctx, conn.RequestHeader())
		return conn
	}
}

func (c *credentials) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// Unsent reports that a call failed before anything of it left this process: its connection could not be opened.
func Unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
