package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	maxManifest = 4 << 20 // octets, of a manifest or a config
	stallTime   = 60 * time.Second
	// handshakeTime is for the whole way to a registry's token, with waits that it asks for.
	handshakeTime = 5 * time.Minute
	slowOctets    = 64 << 10 // in stallTime: a connection that gives less is broken off
	maxBreaks     = 8        // of one blob without progress between them
	maxSlows      = 5
)

// Credential is what is shown to a registry.
type Credential struct {
	Username, Secret string
}

// source is where an image's octets come from.
type source interface {
	// manifest answers the octets that a tag ("" for none) or digest names; with a digest they are checked against it.
	manifest(ctx context.Context, tag, digest string) (raw []byte, mediaType string, err error)
	// blob opens a blob. Its octets are not checked.
	blob(ctx context.Context, digest string, size int64) (io.ReadCloser, error)
}

// endpoint is one place that serves a repository: the registry itself or a mirror.
type endpoint struct {
	host, repo string
	cred       Credential

	once   sync.Mutex
	client *http.Client
	base   string // scheme://host/v2/repo
}

// remote is an image's repository with its mirrors, in the order in which they are asked.
type remote struct {
	net       *network
	endpoints []*endpoint
	pause     time.Duration // before a broken blob is taken up again
	patience  time.Duration // for a manifest, once its answer has begun
}

// newRemote lists where a reference is looked for. A mirror is host[/prefix]; it sees its own credential only.
func newRemote(n *network, r Ref, mirrors []string, cred func(host string) (Credential, error)) (*remote, error) {
	m := &remote{net: n, pause: 500 * time.Millisecond, patience: stallTime}
	for _, place := range append(append([]string{}, mirrors...), r.Host) {
		host, prefix, _ := strings.Cut(strings.TrimSuffix(place, "/"), "/")
		e := &endpoint{host: host, repo: r.Repo}
		if prefix != "" {
			e.repo = prefix + "/" + r.Repo
		}
		var err error
		if e.cred, err = cred(host); err != nil {
			return nil, err
		}
		if e.host == dockerHub {
			e.host = hubHost
		}
		m.endpoints = append(m.endpoints, e)
	}
	return m, nil
}

// open makes the handshake with the registry once.
func (e *endpoint) open(ctx context.Context, n *network) (*http.Client, string, error) {
	e.once.Lock()
	defer e.once.Unlock()
	if e.client != nil {
		return e.client, e.base, nil
	}
	var opts []name.Option
	if n.plain(e.host) {
		opts = append(opts, name.Insecure)
	}
	repo, err := name.NewRepository(e.host+"/"+e.repo, append(opts, name.WeakValidation)...)
	if err != nil {
		return nil, "", fmt.Errorf("registry %s: %w: %w", e.host, sandbox.ErrInvalid, err)
	}
	auth := authn.Anonymous
	if e.cred != (Credential{}) {
		auth = authn.FromConfig(authn.AuthConfig{Username: e.cred.Username, Password: e.cred.Secret})
	}
	ctx, stop := context.WithTimeout(ctx, handshakeTime)
	defer stop()
	rt, err := transport.NewWithContext(ctx, repo.Registry, auth, bound{n, repo.RegistryStr()}, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, "", e.failed("log in", err)
	}
	// The transport corrects the scheme to what the handshake found.
	e.client, e.base = &http.Client{Transport: rt, CheckRedirect: redirect}, repo.Registry.Scheme()+"://"+repo.RegistryStr()+"/v2/"+repo.RepositoryStr()
	return e.client, e.base, nil
}

func redirect(r *http.Request, via []*http.Request) error {
	if len(via) >= 5 {
		return errors.New("more than 5 redirects")
	}
	return nil
}

// failed gives an error of the registry its kind. Of what the registry wrote only a short piece is kept.
func (e *endpoint) failed(what string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || known(err) {
		return fmt.Errorf("%s at registry %s: %w", what, e.host, err)
	}
	kind := ErrRegistry
	var te *transport.Error
	if errors.As(err, &te) {
		return e.status(what, te.StatusCode, strings.TrimSpace(firstDiagnostic(te)))
	}
	return fmt.Errorf("%s at registry %s: %.300s: %w", what, e.host, err.Error(), kind)
}

func known(err error) bool {
	for _, k := range []error{sandbox.ErrDenied, sandbox.ErrInvalid, sandbox.ErrExhausted, sandbox.ErrNotFound, sandbox.ErrUnsupported, ErrRegistry} {
		if errors.Is(err, k) {
			return true
		}
	}
	return false
}

func firstDiagnostic(te *transport.Error) string {
	if len(te.Errors) == 0 {
		return ""
	}
	return fmt.Sprintf("%.40s %.160s", te.Errors[0].Code, te.Errors[0].Message)
}

func (e *endpoint) status(what string, code int, more string) error {
	kind := ErrRegistry
	switch code {
	case http.StatusUnauthorized, http.StatusForbidden:
		kind = sandbox.ErrDenied
		if e.cred == (Credential{}) {
			more = strings.TrimSpace("no credential was given for it (`dsec image login`) " + more)
		}
	case http.StatusNotFound:
		kind = sandbox.ErrNotFound
	case http.StatusTooManyRequests:
		kind = sandbox.ErrExhausted
	}
	if more != "" {
		more = " (" + more + ")"
	}
	return fmt.Errorf("%s at registry %s, repository %s: status %d%s: %w", what, e.host, e.repo, code, more, kind)
}

var accept = strings.Join([]string{typeOCIIndex, typeOCIManifest, typeDockerList, typeDockerManifest, "*/*;q=0.1"}, ", ")

func (m *remote) manifest(ctx context.Context, tag, digest string) ([]byte, string, error) {
	var errs []error
	for _, e := range m.endpoints {
		raw, kind, err := m.manifestOf(ctx, e, tag, digest)
		if err == nil {
			return raw, kind, nil
		}
		if ctx.Err() != nil {
			return nil, "", err
		}
		errs = append(errs, err)
	}
	// The registry itself comes last, and its word counts; mirrors that failed are told beside it.
	last := errs[len(errs)-1]
	for _, err := range errs[:len(errs)-1] {
		last = fmt.Errorf("%w; mirror: %v", last, err)
	}
	return nil, "", last
}

func (m *remote) manifestOf(ctx context.Context, e *endpoint, tag, digest string) ([]byte, string, error) {
	what := digest
	if what == "" {
		what = tag
	}
	act := "get manifest " + what
	client, base, err := e.open(ctx, m.net)
	if err != nil {
		return nil, "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/manifests/"+what, nil)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Accept", accept)
	// Until an answer begins, a registry may ask to wait.
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	res, err := client.Do(req.WithContext(ctx))
	if err != nil {
		return nil, "", e.failed(act, err)
	}
	defer res.Body.Close()
	watch := time.AfterFunc(m.patience, stop)
	defer watch.Stop()
	if res.StatusCode != http.StatusOK {
		return nil, "", e.failed(act, transport.CheckError(res, http.StatusOK))
	}
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxManifest+1))
	if err != nil && ctx.Err() != nil && req.Context().Err() == nil {
		err = fmt.Errorf("the manifest does not come within %v", m.patience)
	}
	if err != nil {
		return nil, "", e.failed(act, err)
	}
	if err := checkDocument("manifest", raw, digest); err != nil {
		return nil, "", e.failed(act, err)
	}
	return raw, res.Header.Get("Content-Type"), nil
}

// checkDocument bounds a manifest or config and compares it with its digest, when there is one.
func checkDocument(what string, raw []byte, digest string) error {
	if len(raw) > maxManifest {
		return fmt.Errorf("%s %s: more than %d octets: %w", what, digest, maxManifest, sandbox.ErrInvalid)
	}
	if digest != "" && digestOf(raw) != digest {
		return fmt.Errorf("%s %s: its octets have digest %s: %w", what, digest, digestOf(raw), sandbox.ErrInvalid)
	}
	return nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (m *remote) blob(ctx context.Context, digest string, size int64) (io.ReadCloser, error) {
	b := &blobReader{m: m, ctx: ctx, digest: digest, size: size}
	return b, b.connect() // so that what is not there is told at once
}

// blobReader reads a blob over connections that may break: it goes on where it was, at the next place when one fails.
type blobReader struct {
	m      *remote
	ctx    context.Context
	digest string
	size   int64 // as the manifest says; more is refused, less is a break

	at     int64
	place  int
	breaks int
	slows  int
	body   io.ReadCloser
	stop   context.CancelFunc
	watch  *time.Timer

	since time.Time // of the present stretch
	had   int64     // octets at its start
}

func (b *blobReader) connect() error {
	var first error
	for {
		err := b.ask(b.m.endpoints[b.place%len(b.m.endpoints)])
		if err == nil {
			return nil
		}
		if b.ctx.Err() != nil {
			return err
		}
		b.place++
		if first == nil || errors.Is(first, sandbox.ErrNotFound) {
			first = err
		}
		if b.breaks++; b.breaks >= maxBreaks || b.place%len(b.m.endpoints) == 0 && !errors.Is(err, ErrRegistry) {
			return first
		}
		if err := sleep(b.ctx, b.m.pause); err != nil {
			return err
		}
	}
}

func (b *blobReader) ask(e *endpoint) error {
	act := "get blob " + b.digest
	client, base, err := e.open(b.ctx, b.m.net)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.WithValue(b.ctx, blobKey{}, true))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/blobs/"+b.digest, nil)
	if err != nil {
		stop()
		return err
	}
	if b.at > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", b.at))
	}
	res, err := client.Do(req)
	if err != nil {
		stop()
		return e.failed(act, err)
	}
	fail := func(err error) error {
		res.Body.Close()
		stop()
		return err
	}
	watch := time.AfterFunc(stallTime, stop)
	switch {
	case res.StatusCode == http.StatusPartialContent && b.at > 0:
		if r := res.Header.Get("Content-Range"); !strings.HasPrefix(r, fmt.Sprintf("bytes %d-", b.at)) {
			watch.Stop()
			return fail(fmt.Errorf("%s at registry %s: asked from %d, got range %.40q: %w", act, e.host, b.at, r, ErrRegistry))
		}
	case res.StatusCode == http.StatusOK:
		// One that knows no ranges sends all of it again.
		if _, err := io.CopyN(io.Discard, &watched{res.Body, watch}, b.at); err != nil {
			watch.Stop()
			return fail(e.failed(act, err))
		}
	default:
		watch.Stop()
		return fail(e.failed(act, transport.CheckError(res, http.StatusOK)))
	}
	b.body, b.stop, b.watch = res.Body, stop, watch
	b.since, b.had = time.Now(), b.at
	return nil
}

// slow reports whether the present connection gives next to nothing.
func (b *blobReader) slow() bool {
	now := time.Now()
	if now.Sub(b.since) < stallTime {
		return false
	}
	slow := b.at-b.had < slowOctets
	b.since, b.had = now, b.at
	return slow
}

// watched puts off a timer with every read.
type watched struct {
	r io.Reader
	t *time.Timer
}

func (w *watched) Read(p []byte) (int, error) {
	w.t.Reset(stallTime)
	return w.r.Read(p)
}

func (b *blobReader) Read(p []byte) (int, error) {
	for {
		if err := b.ctx.Err(); err != nil {
			return 0, err
		}
		if b.body == nil {
			if err := sleep(b.ctx, b.m.pause); err != nil {
				return 0, err
			}
			if err := b.connect(); err != nil {
				return 0, err
			}
		}
		b.watch.Reset(stallTime)
		n, err := b.body.Read(p)
		if n > 0 {
			b.at += int64(n)
			b.breaks = 0
			if b.slow() {
				b.drop()
				b.place++
				if b.slows++; b.slows >= maxSlows {
					return 0, fmt.Errorf("blob %s: gives less than %d octets in %v: %w", b.digest, slowOctets, stallTime, ErrRegistry)
				}
			}
		}
		switch {
		case b.at > b.size:
			return 0, fmt.Errorf("blob %s: more than the %d octets that its manifest states: %w", b.digest, b.size, sandbox.ErrInvalid)
		case n > 0:
			return n, nil
		case err == io.EOF && b.at == b.size:
			return 0, io.EOF
		case err != nil:
			b.drop()
			b.place++
			if b.breaks++; b.breaks >= maxBreaks {
				return 0, fmt.Errorf("blob %s: broke off at octet %d of %d, %d times (%v): %w", b.digest, b.at, b.size, b.breaks, err, ErrRegistry)
			}
		}
	}
}

func (b *blobReader) drop() {
	if b.body != nil {
		b.watch.Stop()
		b.body.Close()
		b.stop()
		b.body = nil
	}
}

func (b *blobReader) Close() error {
	b.drop()
	return nil
}
