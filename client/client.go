// Package client is the Go SDK of dsec: sandboxes, commands with streams, sessions, files, ports, snapshots, layers, environments and
// jobs, with the same nouns as the Python SDK.
//
// An error means that the platform failed or refused; how a command ended is a [Result]. Every call takes a context, and one without a
// deadline gets the client's. A [Sandbox] made by [Client.RunContainer] is stopped by its Close.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
)

// Protocol is the version of the wire that this SDK speaks; a server that no longer serves it says which side to upgrade.
const Protocol = 1

// Where `dsec up` leaves its socket and first key when nothing else is said.
const (
	DefaultSocket  = "/run/dsec/dsec.sock"
	DefaultKeyFile = "/run/dsec/key"
)

// Errors of the platform, for errors.Is. The text says what was asked and what to do. A deadline that passed, here or at the server, is
// context.DeadlineExceeded, and a call that was given up context.Canceled.
var (
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrInvalid     = errors.New("invalid argument")
	ErrState       = errors.New("failed precondition")
	ErrExhausted   = errors.New("resource exhausted")
	ErrUnavailable = errors.New("unavailable")
	ErrDenied      = errors.New("permission denied")
	ErrUnsupported = errors.New("unsupported")
)

var codes = map[connect.Code]error{
	connect.CodeNotFound:           ErrNotFound,
	connect.CodeAlreadyExists:      ErrExists,
	connect.CodeInvalidArgument:    ErrInvalid,
	connect.CodeFailedPrecondition: ErrState,
	connect.CodeResourceExhausted:  ErrExhausted,
	connect.CodeUnavailable:        ErrUnavailable,
	connect.CodePermissionDenied:   ErrDenied,
	connect.CodeUnauthenticated:    ErrDenied,
	connect.CodeUnimplemented:      ErrUnsupported,
	connect.CodeDeadlineExceeded:   context.DeadlineExceeded,
	connect.CodeCanceled:           context.Canceled,
}

// Error is a failure told by the server.
type Error struct {
	Code    string // "not_found", "resource_exhausted", ...
	Message string
	kind    error
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.kind }

// Wrap gives an error of the generated service clients the text and kind of this package's.
func Wrap(err error) error { return wrap(err) }

func wrap(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		code := codeOf(err)
		return &Error{Code: code.String(), Message: ce.Message(), kind: codes[code]}
	}
	return err
}

// codeOf is the code of an error. A stream that was cut off in the middle of a message is a broken connection; the transport calls it an
// invalid argument.
func codeOf(err error) connect.Code {
	if !connect.IsWireError(err) && errors.Is(err, io.ErrUnexpectedEOF) {
		return connect.CodeUnavailable
	}
	return connect.CodeOf(err)
}

// Config says where the server is. Zero fields come from the environment (DSEC_URL, DSEC_KEY, DSEC_KEY_FILE), then from where
// `dsec up` leaves them.
type Config struct {
	URL     string        // http://host:port, https://host:port or unix:/path
	Key     string        // API key
	KeyFile string        // file that holds it
	Timeout time.Duration // of a call whose context has no deadline; default 2 min
	HTTP    *http.Client  // replaces the transport, as for a private CA
}

// Client talks to one gateway. It is safe for concurrent use.
type Client struct {
	base    string
	key     string
	timeout time.Duration
	http    *http.Client
	dial    func(ctx context.Context) (net.Conn, error)
	tls     bool

	recorded recorded // steps that were done before

	Info           dsecv1connect.InfoServiceClient
	Sandboxes      dsecv1connect.SandboxServiceClient
	Commands       dsecv1connect.CommandServiceClient
	FileService    dsecv1connect.FileServiceClient
	DisplayService dsecv1connect.DisplayServiceClient
	LayerService   dsecv1connect.LayerServiceClient
	ImageService   dsecv1connect.ImageServiceClient
	JobService     dsecv1connect.JobServiceClient
	Restores       dsecv1connect.RestoreServiceClient
	Logs           dsecv1connect.LogServiceClient
	Keys           dsecv1connect.IamServiceClient
	Calls          dsecv1connect.FnCallServiceClient
}

// Connect makes a client and checks with one call that the server is there, speaks this protocol and takes the key.
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	c, err := New(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	info, err := c.Info.GetInfo(ctx, connect.NewRequest(&dsecv1.GetInfoRequest{}))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w (is `dsec up` running?)", cfg.where(), wrap(err))
	}
	if m := info.Msg; Protocol < m.ProtocolMin || Protocol > m.Protocol {
		side := "this client"
		if Protocol > m.Protocol {
			side = "the server"
		}
		return nil, fmt.Errorf("server %s speaks protocols %d to %d, this client %d: upgrade %s", m.Version, m.ProtocolMin, m.Protocol, Protocol, side)
	}
	return c, nil
}

func (cfg Config) where() string {
	if cfg.URL != "" {
		return cfg.URL
	}
	return DefaultSocket
}

// New makes a client without calling the server.
func New(cfg Config) (*Client, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	c := &Client{key: cfg.Key, timeout: cfg.Timeout, http: cfg.HTTP}
	if c.timeout == 0 {
		c.timeout = 2 * time.Minute
	}
	network, address := "", ""
	if path, ok := strings.CutPrefix(cfg.URL, "unix:"); ok {
		c.base, network, address = unixBase, "unix", strings.TrimPrefix(path, "//")
	} else {
		u, err := url.Parse(cfg.URL)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return nil, fmt.Errorf("url %q: want http://host:port, https://host:port or unix:/path", cfg.URL)
		}
		c.base, network, address, c.tls = strings.TrimRight(cfg.URL, "/"), "tcp", u.Host, u.Scheme == "https"
	}
	c.dial = func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, address)
	}
	if c.http == nil {
		c.http = &http.Client{Transport: c.transport(network)}
	}
	opts := []connect.ClientOption{connect.WithInterceptors(headers{c})}
	c.Info = dsecv1connect.NewInfoServiceClient(c.http, c.base, opts...)
	c.Sandboxes = dsecv1connect.NewSandboxServiceClient(c.http, c.base, opts...)
	c.Commands = dsecv1connect.NewCommandServiceClient(c.http, c.base, opts...)
	c.DisplayService = dsecv1connect.NewDisplayServiceClient(c.http, c.base, opts...)
	c.FileService = dsecv1connect.NewFileServiceClient(c.http, c.base, opts...)
	c.LayerService = dsecv1connect.NewLayerServiceClient(c.http, c.base, opts...)
	c.ImageService = dsecv1connect.NewImageServiceClient(c.http, c.base, opts...)
	c.JobService = dsecv1connect.NewJobServiceClient(c.http, c.base, opts...)
	c.Restores = dsecv1connect.NewRestoreServiceClient(c.http, c.base, opts...)
	c.Logs = dsecv1connect.NewLogServiceClient(c.http, c.base, opts...)
	c.Keys = dsecv1connect.NewIamServiceClient(c.http, c.base, opts...)
	c.Calls = dsecv1connect.NewFnCallServiceClient(c.http, c.base, opts...)
	return c, nil
}

// unixBase stands for a gateway that is reached over a Unix socket.
const unixBase = "http://dsec"

// transport keeps many idle connections, since a trainer drives thousands of sandboxes through one gateway, and uses no proxy.
func (c *Client) transport(network string) *http.Transport {
	t := &http.Transport{MaxIdleConns: 1024, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 90 * time.Second, DisableCompression: true}
	if network == "unix" {
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) }
	}
	return t
}

func (cfg *Config) fill() error {
	if cfg.URL == "" {
		cfg.URL = os.Getenv("DSEC_URL")
	}
	if cfg.URL == "" {
		cfg.URL = "unix:" + DefaultSocket
	}
	if cfg.Key == "" && cfg.KeyFile == "" {
		cfg.Key, cfg.KeyFile = os.Getenv("DSEC_KEY"), os.Getenv("DSEC_KEY_FILE")
	}
	if cfg.Key != "" {
		return nil
	}
	file, stated := cfg.KeyFile, cfg.KeyFile != ""
	if !stated {
		file = defaultKeyFile(cfg.URL)
	}
	b, err := os.ReadFile(file)
	if err == nil {
		cfg.Key = strings.TrimSpace(string(b))
		return nil
	}
	if stated {
		return fmt.Errorf("key file: %w", err)
	}
	return nil // the server will say that a key is missing
}

// defaultKeyFile is beside the socket, where `dsec up` writes it.
func defaultKeyFile(u string) string {
	if path, ok := strings.CutPrefix(u, "unix:"); ok {
		return filepath.Join(filepath.Dir(path), "key")
	}
	return DefaultKeyFile
}

func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}

// headers puts key and protocol on every call.
type headers struct{ c *Client }

func (h headers) set(x http.Header) {
	x.Set("Dsec-Protocol", strconv.Itoa(Protocol))
	if h.c.key != "" {
		x.Set("Authorization", "Bearer "+h.c.key)
	}
}

func (h headers) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		h.set(r.Header())
		return next(ctx, r)
	}
}

func (h headers) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, s)
		h.set(conn.RequestHeader())
		return conn
	}
}

func (h headers) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// call makes a unary call with the client's deadline and errors.
func call[Q, S any](ctx context.Context, c *Client, f func(context.Context, *connect.Request[Q]) (*connect.Response[S], error), q *Q) (*S, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	r, err := f(ctx, connect.NewRequest(q))
	if err != nil {
		return nil, wrap(err)
	}
	return r.Msg, nil
}
