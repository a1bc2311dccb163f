package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/dsec-dev/dsec/client"
)

// certificate writes one for 127.0.0.1 that is its own authority, and its key.
func certificate(t testing.TB, dir string) (cert, key string, trust *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "dsec test"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &private.PublicKey, private)
	must(t, err)
	secret, err := x509.MarshalECPrivateKey(private)
	must(t, err)
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	must(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	must(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret}), 0o600))
	trust = x509.NewCertPool()
	b, err := os.ReadFile(cert)
	must(t, err)
	trust.AppendCertsFromPEM(b)
	return cert, key, trust
}

// freeAddress is one of this machine that nobody listens at.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().String()
}

// With a certificate the address speaks TLS alone: SDK, command line, streams and ports pass through it; who does not trust the certificate, plain
// HTTP and old versions of TLS do not. The socket beside it stays as it was.
func TestTLS(t *testing.T) {
	t.Parallel()
	dir, address := ownDir(t), freeAddress(t)
	must(t, os.MkdirAll(dir, 0o700))
	cert, key, trust := certificate(t, dir)
	s := own(t, "--listen", address, "--tls-cert", cert, "--tls-key", key)
	box := s.box(t) // by the socket
	overTLS := func(pool *x509.CertPool, h2 bool) *client.Client {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: h2}
		t.Cleanup(tr.CloseIdleConnections)
		c, err := client.New(client.Config{URL: "https://" + address, Key: s.key(), HTTP: &http.Client{Transport: tr}})
		must(t, err)
		return c
	}
	for _, h2 := range []bool{false, true} {
		sb := overTLS(trust, h2).Sandbox(box.ID)
		p, err := sb.Start(within(t), sh("echo out; exit 4"))
		must(t, err)
		var stdout strings.Builder
		if o, err := p.Stream(within(t), &stdout, io.Discard); err != nil || o.Code != 4 || stdout.String() != "out\n" {
			t.Errorf("HTTP/2 %v: %v, %v, %q", h2, o, err, stdout.String())
		}
		must(t, sb.Files().WriteFile(within(t), "/tmp/x", []byte(strings.Repeat("y", 300_000)), 0))
		if b, err := sb.Files().ReadFile(within(t), "/tmp/x"); err != nil || len(b) != 300_000 {
			t.Errorf("HTTP/2 %v: %d octets, %v", h2, len(b), err)
		}
	}
	if _, err := overTLS(x509.NewCertPool(), true).Sandbox(box.ID).Exec(within(t), "true"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that does not trust the certificate: %v", err)
	}
	if resp, err := http.Get("http://" + address + "/healthz"); err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("plain HTTP: %d", resp.StatusCode)
		}
	}
	if c, err := tls.Dial("tcp", address, &tls.Config{RootCAs: trust, MaxVersion: tls.VersionTLS11}); err == nil {
		c.Close()
		t.Error("TLS 1.1 was taken")
	}
	cmd := s.dsec("exec", box.ID, "--", "echo", "by the command line")
	cmd.Env = append(cmd.Env, "DSEC_URL=https://"+address, "SSL_CERT_FILE="+cert)
	if b, err := cmd.CombinedOutput(); err != nil || string(b) != "by the command line\n" {
		t.Errorf("%v: %s", err, b)
	}
	// A port inside, by WebSocket: a server of a few words that takes the upgrade and closes.
	_, err := box.Start(within(t), sh(`while :; do printf 'HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnone' | nc -l -p 8080 >/dev/null; done`))
	must(t, err)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trust}}
	defer tr.CloseIdleConnections()
	must(t, eventually(func() error {
		_, resp, err := websocket.Dial(within(t), fmt.Sprintf("wss://%s/v1/ports/%s/8080/x", address, box.ID),
			&websocket.DialOptions{HTTPHeader: http.Header{"X-Api-Key": {s.key()}}, HTTPClient: &http.Client{Transport: tr}})
		if resp == nil || resp.StatusCode != http.StatusNotFound {
			return fmt.Errorf("%v, %v; want the server's 404", resp, err)
		}
		return nil
	}))
}
