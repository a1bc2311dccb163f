package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/internal/calm"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of a listener.
const (
	maxConns     = 16384
	maxHeader    = 64 << 10 // octets
	headerTime   = 10 * time.Second
	idleTime     = 5 * time.Minute
	pingAfter    = 30 * time.Second
	pingAnswer   = 15 * time.Second
	streamsAConn = 1000
	defaultGrace = 10 * time.Second
	longestUnix  = 107 // octets of a socket's path (linux/un.h: 108 with the NUL)
	unixScheme   = "unix:"
	// A stream whose reader is slow fills its own window; the connection's holds as many of them as there may be streams, or slow
	// readers would block the others on the connection.
	streamWindow   = 256 << 10
	connWindow     = streamsAConn * streamWindow
	shutdownStream = 500 * time.Millisecond
)

// Listen opens "unix:/path" with mode 0600 or a TCP address "host:port" (also with the prefix http:// or https://). A socket that a
// dead process left behind is replaced; one that answers is ErrExists.
func Listen(addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, unixScheme); ok {
		return listenUnix(path)
	}
	addr = strings.TrimPrefix(strings.TrimPrefix(addr, "http://"), "https://")
	l, err := net.Listen("tcp", addr)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) { // which says again what was done
			err = op.Err
		}
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// listenUnix binds in a folder that only its owner may enter, sets the mode, and only then moves the socket to its place: there is
// no moment in which another user could connect, and the process's umask is left alone.
func listenUnix(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("listen on %s: another process answers there: %w", path, sandbox.ErrExists)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".dsec")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer os.RemoveAll(dir)
	tmp := filepath.Join(dir, "s")
	if len(tmp) > longestUnix || len(path) > longestUnix {
		return nil, fmt.Errorf("listen on %s: the path is too long for a socket (%d octets at most); choose a shorter folder: %w", path, longestUnix-len(tmp)+len(path), sandbox.ErrInvalid)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(tmp, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	st, err := os.Lstat(tmp)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &unixListener{Listener: calm.Listener{Listener: l}, path: path, made: st}, nil
}

// unixListener removes its socket when closed, unless another one lies there by then.
type unixListener struct {
	net.Listener
	path string
	made os.FileInfo
	once sync.Once
}

func (l *unixListener) Close() error {
	l.once.Do(func() {
		if st, err := os.Lstat(l.path); err == nil && os.SameFile(st, l.made) {
			os.Remove(l.path)
		}
	})
	return l.Listener.Close()
}

func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// ServerConfig says how a handler is served.
type ServerConfig struct {
	// CertFile and KeyFile (PEM) switch TLS on for TCP listeners; a Unix socket never has it. They are read again when they change.
	CertFile, KeyFile string
	// Grace is how long calls in flight may take to end once Run's context is done; 0 is 10 s.
	Grace time.Duration
	Log   *slog.Logger
}

// Server serves one handler: HTTP/1.1 and HTTP/2 on the same port, HTTP/2 also without TLS.
type Server struct {
	cfg  ServerConfig
	http *http.Server
	stop context.CancelFunc // ends the streams
	tls  *tls.Config
	open atomic.Int64 // connections, without those that became tunnels
}

// NewServer opens nothing. A certificate that can't be loaded is an error.
func NewServer(h http.Handler, cfg ServerConfig) (*Server, error) {
	if cfg.Grace == 0 {
		cfg.Grace = defaultGrace
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	base, stop := context.WithCancel(context.Background())
	s := &Server{cfg: cfg, stop: stop}
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
		Protocols:         p,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          streamsAConn,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingAnswer,
			MaxReceiveBufferPerStream:     streamWindow,
			MaxReceiveBufferPerConnection: connWindow,
		},
		BaseContext: func(net.Listener) context.Context { return base },
		ConnState:   s.count,
		ErrorLog:    slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	if cfg.CertFile != "" || cfg.KeyFile != "" {
		c := &certificate{cert: cfg.CertFile, key: cfg.KeyFile}
		if _, err := c.get(nil); err != nil {
			stop()
			return nil, err
		}
		s.tls = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"h2", "http/1.1"}}
	}
	return s, nil
}

// count refuses connections over the bound by closing them. It is done here and not by a wrapped listener, since a wrapped connection
// could neither be half closed nor spliced by the kernel.
func (s *Server) count(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		if s.open.Add(1) > maxConns {
			c.Close()
		}
	case http.StateClosed, http.StateHijacked:
		s.open.Add(-1)
	}
}

// Run serves on the listeners until ctx is done, then lets calls end within the grace, and closes. Streams and tunnels, which have no
// end of their own, are cut after half a second. It returns nil when ctx ended it.
func (s *Server) Run(ctx context.Context, listeners ...net.Listener) error {
	defer s.stop()
	failed := make(chan error, len(listeners))
	var wg sync.WaitGroup
	for _, l := range listeners {
		wg.Go(func() {
			var err error
			if _, ok := l.Addr().(*net.UnixAddr); ok || s.tls == nil {
				err = s.http.Serve(l)
			} else {
				err = s.http.Serve(tls.NewListener(l, s.tls))
			}
			if !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("serve on %s: %w", l.Addr(), err)
			}
		})
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	cut := time.AfterFunc(shutdownStream, s.stop)
	defer cut.Stop()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Grace)
	defer cancel()
	if s.http.Shutdown(grace) != nil {
		s.http.Close()
	}
	for _, l := range listeners {
		l.Close()
	}
	wg.Wait()
	return err
}

// certificate reads a key pair again when its file has changed, so that a renewal needs no restart.
type certificate struct {
	cert, key string

	mu     sync.Mutex
	seen   time.Time
	loaded *tls.Certificate
	looked time.Time
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loaded != nil && time.Since(c.looked) < 10*time.Second {
		return c.loaded, nil
	}
	c.looked = time.Now()
	st, err := os.Stat(c.cert)
	if err == nil && c.loaded != nil && st.ModTime().Equal(c.seen) {
		return c.loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		if c.loaded != nil { // half-way through a renewal: the old one goes on
			return c.loaded, nil
		}
		return nil, fmt.Errorf("load TLS certificate %s and key %s: %w", c.cert, c.key, err)
	}
	c.loaded = &pair
	if st != nil {
		c.seen = st.ModTime()
	}
	return c.loaded, nil
}
