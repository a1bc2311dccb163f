package rpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// One port speaks Connect and gRPC, over HTTP/1.1 and HTTP/2 without TLS.
func TestProtocolsOnOnePort(t *testing.T) {
	h := &host{status: func(context.Context) error { return nil }, logs: func(_ context.Context, send func(*dsecv1.ReadLogResponse) error) error {
		return send(&dsecv1.ReadLogResponse{Records: []*dsecv1.LogRecord{{Seq: 7}}})
	}}
	_, tcp := serve(t, h, &Edge{}, nil)
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	for name, tc := range map[string]struct {
		tr   *http.Transport
		opts []connect.ClientOption
	}{
		"connect over HTTP/1.1":   {&http.Transport{}, nil},
		"JSON over HTTP/1.1":      {&http.Transport{}, []connect.ClientOption{connect.WithProtoJSON()}},
		"gRPC-Web over HTTP/1.1":  {&http.Transport{}, []connect.ClientOption{connect.WithGRPCWeb()}},
		"connect over HTTP/2":     {&http.Transport{Protocols: h2}, nil},
		"gRPC over HTTP/2":        {&http.Transport{Protocols: h2}, []connect.ClientOption{connect.WithGRPC()}},
		"compressed request sent": {&http.Transport{Protocols: h2}, []connect.ClientOption{connect.WithSendGzip()}},
	} {
		t.Run(name, func(t *testing.T) {
			defer tc.tr.CloseIdleConnections()
			opts := append(tc.opts, connect.WithInterceptors(&credentials{token: []string{token}}))
			if _, err := dsecv1connect.NewHostServiceClient(&http.Client{Transport: tc.tr}, tcp, opts...).Status(context.Background(), connect.NewRequest(&dsecv1.HostStatusRequest{Recent: true})); err != nil {
				t.Error(err)
			}
			st, err := dsecv1connect.NewLogServiceClient(&http.Client{Transport: tc.tr}, tcp, opts...).Read(context.Background(), connect.NewRequest(&dsecv1.ReadLogRequest{}))
			if err != nil || !st.Receive() || st.Msg().Records[0].Seq != 7 {
				t.Errorf("%v, %v", err, st.Err())
			}
			st.Close()
			_, err = dsecv1connect.NewHostServiceClient(&http.Client{Transport: tc.tr}, tcp, tc.opts...).Status(context.Background(), connect.NewRequest(&dsecv1.HostStatusRequest{}))
			if !errors.Is(FromError(err), ErrUnauthenticated) {
				t.Errorf("without token: %v", err)
			}
		})
	}
}

func writePair(t *testing.T, dir string, serial int64) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "dsec test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kd, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: kd}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestTLS(t *testing.T) {
	cert, key := writePair(t, t.TempDir(), 1)
	guard, err := ClusterGuard(token)
	if err != nil {
		t.Fatal(err)
	}
	edge := &Edge{Guard: guard}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewHostServiceHandler(&host{status: func(context.Context) error { return nil }}, edge.Options()...))
	mux.Handle(TunnelPattern, edge.Tunnel(func(context.Context, sandbox.ID, uint16) (net.Conn, error) {
		a, b := net.Pipe()
		go func() { b.Write([]byte("inside")); b.Close() }()
		return a, nil
	}))
	s, err := NewServer(edge.Wrap(mux), ServerConfig{CertFile: cert, KeyFile: key})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	defer func() { cancel(); <-done }()
	addr := "https://" + l.Addr().String()
	p, err := Dial(addr, PeerConfig{Token: token, CAFile: cert})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{})); err != nil {
		t.Error(err)
	}
	p.busy.Add(idleConns)
	if _, err := p.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{})); err != nil {
		t.Errorf("over HTTP/2: %v", err)
	}
	c, err := p.DialPort(ctx, "habcdef-aaaaaaaaaaaaaaaa", 80)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16)
	n, _ := c.Read(b)
	if string(b[:n]) != "inside" {
		t.Errorf("%q", b[:n])
	}
	c.Close()
	strange, err := Dial(addr, PeerConfig{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := strange.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{})); !errors.Is(FromError(err), ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate of nobody we know: %v", err)
	}
	if _, err := NewServer(mux, ServerConfig{CertFile: cert, KeyFile: "/nonexistent"}); err == nil {
		t.Error("a missing key is taken")
	}
}

func TestCertificateIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	cert, key := writePair(t, dir, 1)
	c := &certificate{cert: cert, key: key}
	serial := func() int64 {
		p, err := c.get(&tls.ClientHelloInfo{})
		if err != nil {
			t.Fatal(err)
		}
		x, err := x509.ParseCertificate(p.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return x.SerialNumber.Int64()
	}
	if serial() != 1 {
		t.Fatal("not the first")
	}
	writePair(t, dir, 2)
	os.Chtimes(cert, time.Now(), time.Now().Add(time.Minute))
	if serial() != 1 {
		t.Error("looked at the file on every handshake")
	}
	c.looked = time.Time{}
	if serial() != 2 {
		t.Error("a renewed certificate is not taken")
	}
	os.WriteFile(cert, []byte("half"), 0o600)
	os.Chtimes(cert, time.Now(), time.Now().Add(2*time.Minute))
	c.looked = time.Time{}
	if serial() != 2 {
		t.Error("half a file replaced a certificate that works")
	}
}

// Streams that nobody reads, in both directions, do not hold up others on their connection.
func TestSlowStreamsDoNotBlockOthers(t *testing.T) {
	stalled := make(chan struct{}, 100)
	release := make(chan struct{})
	h := &host{status: func(context.Context) error { return nil }, logs: func(ctx context.Context, send func(*dsecv1.ReadLogResponse) error) error {
		m := &dsecv1.ReadLogResponse{Records: []*dsecv1.LogRecord{{Data: make([]byte, 64<<10)}}}
		for i := range 100 {
			if i == 2 {
				stalled <- struct{}{}
			}
			if err := send(m); err != nil {
				return err
			}
		}
		return nil
	}}
	f := &slowFiles{stalled: stalled, release: release}
	guard, err := ClusterGuard(token)
	if err != nil {
		t.Fatal(err)
	}
	edge := &Edge{Guard: guard}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewHostServiceHandler(h, edge.Options()...))
	mux.Handle(dsecv1connect.NewLogServiceHandler(h, edge.Options()...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(f, edge.Options()...))
	s, err := NewServer(edge.Wrap(mux), ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	run, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(run, l) }()
	defer func() { end(); <-done }()
	p := peer(t, "http://"+l.Addr().String(), token)
	work, stop := context.WithCancel(ctx)
	defer stop()
	defer close(release)
	const streams = 40
	for range streams {
		st, err := p.Logs.Read(work, connect.NewRequest(&dsecv1.ReadLogRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		go func() {
			w := p.FileStreams.Write(work)
			for w.Send(&dsecv1.WriteRequest{Data: make([]byte, 64<<10)}) == nil {
			}
		}()
	}
	for range 2 * streams {
		<-stalled
	}
	time.Sleep(50 * time.Millisecond) // until the windows are full
	p.busy.Add(idleConns)
	defer p.busy.Add(-idleConns)
	if _, err := p.Files.Move(ctx, connect.NewRequest(&dsecv1.MoveRequest{ToRaw: make([]byte, 2<<20)})); err != nil {
		t.Error(err)
	}
}

type slowFiles struct {
	dsecv1connect.UnimplementedFileServiceHandler
	stalled, release chan struct{}
}

func (f *slowFiles) Write(ctx context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	in.Receive()
	f.stalled <- struct{}{}
	select {
	case <-f.release:
	case <-ctx.Done():
	}
	return nil, ctx.Err()
}

func (f *slowFiles) Move(_ context.Context, r *connect.Request[dsecv1.MoveRequest]) (*connect.Response[dsecv1.MoveResponse], error) {
	return connect.NewResponse(&dsecv1.MoveResponse{Existed: len(r.Msg.ToRaw) == 2<<20}), nil
}
