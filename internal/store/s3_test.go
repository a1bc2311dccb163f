package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// server starts a small S3 server.
func server(t *testing.T) (*storetest.MemoryS3, string) {
	t.Helper()
	m := storetest.NewS3(t.TempDir())
	h := httptest.NewServer(m)
	t.Cleanup(h.Close)
	return m, h.URL
}

func s3Config(t *testing.T, url string) store.S3Config {
	return store.S3Config{Endpoint: url, Bucket: storetest.Bucket, Prefix: "some/where", PathStyle: true, AccessKey: storetest.AccessKey,
		SecretKey: storetest.SecretKey, Spool: t.TempDir(), IndexDir: t.TempDir(), Timeout: 5 * time.Second}
}

func newS3(t *testing.T, cfg store.S3Config) *store.S3 {
	t.Helper()
	s, err := store.NewS3(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestS3(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		_, url := server(t)
		return newS3(t, s3Config(t, url))
	}, storetest.Options{})
}

// The store itself gets over what a server does at times: refusals, connections that break before, in and after an answer, delays and wrong octets.
func TestS3OnABadServer(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		m, url := server(t)
		var mu sync.Mutex
		rng := rand.New(rand.NewPCG(uint64(len(t.Name())), 4))
		m.SetFault(func(op, key string) (f storetest.S3Fault) {
			mu.Lock()
			defer mu.Unlock()
			switch rng.IntN(40) {
			case 0:
				f.Status, f.Code = 503, "SlowDown"
			case 1:
				f.Status, f.Code = 500, "InternalError"
			case 2:
				f.Drop = true
			case 3:
				f.DropAfter = true
			case 4:
				f.Cut = rng.Int64N(300<<10) + 1
			case 5:
				f.Delay = time.Duration(rng.IntN(20)) * time.Millisecond
			case 6:
				if strings.Contains(key, "/.packs/") { // raw objects have no digest in this store; who reads them has
					f.Flip = rng.Int64N(64<<10) + 1
				}
			}
			return f
		})
		return newS3(t, s3Config(t, url))
	}, storetest.Options{})
}

// A real server: the one that DSEC_VERSITYGW names, or that `make torture` built.
func TestS3OnVersityGW(t *testing.T) {
	url := versitygw(t)
	n := 0
	storetest.Run(t, func(t *testing.T) store.Store {
		n++
		cfg := s3Config(t, url)
		cfg.Prefix = fmt.Sprintf("run/%d", n)
		return newS3(t, cfg)
	}, storetest.Options{})
	t.Run("Denied", func(t *testing.T) {
		cfg := s3Config(t, url)
		cfg.SecretKey = "anothersecretofthesamelength"
		_, err := newS3(t, cfg).Stat(t.Context(), "x")
		if !errors.Is(err, sandbox.ErrDenied) || strings.Contains(err.Error(), cfg.SecretKey) {
			t.Errorf("wrong secret: %v", err)
		}
	})
	t.Run("Collect", func(t *testing.T) {
		cfg := s3Config(t, url)
		cfg.Prefix = "collect"
		s := newS3(t, cfg)
		put(t, s, "a", string(storetest.Random(1, 1<<20)))
		if r, err := s.Collect(t.Context(), store.MinGrace, false); err != nil || r.Objects != 1 || r.Packs != 1 || r.Condemned != 0 {
			t.Errorf("%+v %v", r, err)
		}
	})
}

func versitygw(t *testing.T) string {
	bin := os.Getenv("DSEC_VERSITYGW")
	if bin == "" {
		bin, _ = filepath.Abs("../../bin/e2e/versitygw")
	}
	if _, err := os.Stat(bin); err != nil {
		t.Skip("skip: no versitygw: make torture builds it, or DSEC_VERSITYGW names one")
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, storetest.Bucket), 0o700); err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	cmd := exec.Command(bin, "--port", "127.0.0.1:"+port, "--access", storetest.AccessKey, "--secret", storetest.SecretKey, "--quiet", "posix", dir)
	cmd.Dir = dir
	out, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	url := "http://127.0.0.1:" + port
	s := newS3(t, s3Config(t, url))
	for try := 0; ; try++ {
		_, err := s.Stat(t.Context(), "x")
		if errors.Is(err, sandbox.ErrNotFound) {
			return url
		}
		if try == 50 {
			text, _ := os.ReadFile(out.Name())
			t.Skipf("skip: versitygw does not serve here (no user xattrs?): %v\n%s", err, text)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func TestS3SharesChunks(t *testing.T) {
	m, url := server(t)
	s := newS3(t, s3Config(t, url))
	ctx := t.Context()
	a := storetest.Random(1, 20<<20)
	// b has something inserted near its front, c is the end of a.
	b := append(append(append([]byte(nil), a[:1000]...), "inserted"...), a[1000:]...)
	put(t, s, "a", string(a))
	first := m.Octets()
	put(t, s, "b", string(b))
	put(t, newS3(t, s3Config(t, url)), "c", string(a[5<<20:])) // another process
	if more := m.Octets() - first; more > 3<<20 {
		t.Errorf("a needs %d octets, the two like it %d more", first, more)
	}
	for key, want := range map[string][]byte{"a": a, "b": b, "c": a[5<<20:]} {
		got, err := store.ReadAll(ctx, s, key, 1<<30)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d octets, %v", key, len(got), err)
		}
	}
	text := bytes.Repeat([]byte("all work and no play\n"), 100_000)
	before := m.Octets()
	put(t, s, "text", string(text))
	if n := m.Octets() - before; n > int64(len(text)/10) {
		t.Errorf("%d octets of text take %d", len(text), n)
	}
}

func TestS3ReadsOnlyWhatIsTouched(t *testing.T) {
	m, url := server(t)
	s := newS3(t, s3Config(t, url))
	a := storetest.Random(1, 64<<20)
	put(t, s, "a", string(a))
	cold := newS3(t, s3Config(t, url))
	r, err := cold.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	before, asked := cold.Traffic(), m.Requests()["GET"]
	buf := make([]byte, 1<<20)
	var wg sync.WaitGroup
	for range 50 { // at once: each chunk comes once
		wg.Go(func() {
			b := make([]byte, 1<<20)
			if _, err := r.ReadAt(b, 10<<20); err != nil || !bytes.Equal(b, a[10<<20:11<<20]) {
				t.Errorf("differs: %v", err)
			}
		})
	}
	wg.Wait()
	if n := cold.Traffic().Received - before.Received; n > 4<<20 {
		t.Errorf("50 reads of one MiB fetched %d octets", n)
	}
	if n := m.Requests()["GET"] - asked; n > 3 {
		t.Errorf("%d requests", n)
	}
	before = cold.Traffic()
	if _, err := r.ReadAt(buf, 10<<20); err != nil || cold.Traffic() != before {
		t.Errorf("a read again asked the server: %+v %+v %v", before, cold.Traffic(), err)
	}
}

func TestS3NeverGivesWrongOctets(t *testing.T) {
	m, url := server(t)
	s := newS3(t, s3Config(t, url))
	a := storetest.Random(1, 4<<20)
	put(t, s, "a", string(a))
	var pack string
	for k := range m.Names("some/where/.packs/") {
		pack = k
	}
	if err := m.Damage(pack, 2<<20); err != nil {
		t.Fatal(err)
	}
	cold := newS3(t, s3Config(t, url))
	r, err := cold.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	lost := 0
	for off := int64(0); off < r.Size(); off += int64(len(buf)) {
		_, err := r.ReadAt(buf, off)
		switch {
		case errors.Is(err, sandbox.ErrLost):
			lost++
		case err != nil:
			t.Errorf("at %d: %v", off, err)
		case !bytes.Equal(buf, a[off:off+int64(len(buf))]):
			t.Errorf("at %d: wrong octets", off)
		}
	}
	if lost == 0 || lost > 20 {
		t.Errorf("%d reads found the damage", lost)
	}
	// Published again while nobody knows of the pack, it heals.
	m.Remove(strings.Replace(pack, ".packs", ".index", 1))
	put(t, newS3(t, s3Config(t, url)), "b", string(a))
	if got, err := store.ReadAll(t.Context(), newS3(t, s3Config(t, url)), "a", 1<<30); err != nil || !bytes.Equal(got, a) {
		t.Errorf("after it was stored again: %v", err)
	}
	if err := m.Damage("some/where/a", 40); err != nil {
		t.Fatal(err)
	}
	if _, err := newS3(t, s3Config(t, url)).Open(t.Context(), "a"); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("a damaged manifest: %v", err)
	}
}

// An object whose text looks like a manifest is none, whoever made it.
func TestS3ObjectsThatLookLikeManifests(t *testing.T) {
	_, url := server(t)
	s := newS3(t, s3Config(t, url))
	inner := append([]byte("DSECMAN1"), bytes.Repeat([]byte{0, 0, 0, 0, 0, 16, 0, 0}, 30)...)
	put(t, s, "evil", string(inner))
	if got, err := store.ReadAll(t.Context(), s, "evil", 1<<20); err != nil || !bytes.Equal(got, inner) {
		t.Errorf("%q %v", got, err)
	}
	if i, err := s.Stat(t.Context(), "evil"); err != nil || i.Size != int64(len(inner)) {
		t.Errorf("%+v %v", i, err)
	}
}

func TestS3PublishResumes(t *testing.T) {
	m, url := server(t)
	s := newS3(t, s3Config(t, url))
	a := storetest.Random(1, 70<<20)
	var mu sync.Mutex
	packs := 0
	m.SetFault(func(op, key string) (f storetest.S3Fault) {
		mu.Lock()
		defer mu.Unlock()
		if op == "PUT" && strings.Contains(key, "/.packs/") {
			if packs++; packs > 3 {
				f.Status, f.Code = 403, "AccessDenied"
			}
		}
		return f
	})
	if err := store.Put(t.Context(), s, "a", bytes.NewReader(a)); !errors.Is(err, sandbox.ErrDenied) {
		t.Fatalf("got %v", err)
	}
	if _, err := s.Stat(t.Context(), "a"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("half of it is visible: %v", err)
	}
	before := m.Octets()
	if before < 30<<20 {
		t.Fatalf("only %d octets arrived", before)
	}
	m.SetFault(nil)
	again := newS3(t, s3Config(t, url))
	put(t, again, "a", string(a))
	if sent := again.Traffic().Sent; sent > int64(len(a))-before+1<<20 {
		t.Errorf("%d octets were there, %d of %d sent again", before, sent, len(a))
	}
	if got, err := store.ReadAll(t.Context(), s, "a", 1<<30); err != nil || !bytes.Equal(got, a) {
		t.Errorf("differs: %v", err)
	}
}

func TestS3ADeadServerEndsReads(t *testing.T) {
	m, url := server(t)
	cfg := s3Config(t, url)
	s := newS3(t, cfg)
	put(t, s, "a", string(storetest.Random(1, 1<<20)))
	cfg.Timeout, cfg.Retries = 2*time.Second, 1 // of which the living server needs a little
	s = newS3(t, cfg)
	r, err := s.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	m.SetFault(func(op, key string) storetest.S3Fault { return storetest.S3Fault{Delay: time.Minute} })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := store.ReadAt(ctx, r, make([]byte, 10), 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a deadline: %v", err)
	}
	if _, err := r.ReadAt(make([]byte, 10), 0); err == nil {
		t.Error("without: no error")
	}
	m.SetFault(nil)
	if _, err := r.ReadAt(make([]byte, 10), 0); err != nil {
		t.Errorf("alive again: %v", err)
	}
}

func TestS3TellsWhatIsWrong(t *testing.T) {
	_, url := server(t)
	for name, c := range map[string]struct {
		change func(*store.S3Config)
		want   error
	}{
		"key":      {func(c *store.S3Config) { c.AccessKey = "someoneelse" }, sandbox.ErrDenied},
		"bucket":   {func(c *store.S3Config) { c.Bucket = "no-such" }, sandbox.ErrInvalid},
		"endpoint": {func(c *store.S3Config) { c.Endpoint = "http://127.0.0.1:1"; c.Retries = 1 }, nil},
	} {
		cfg := s3Config(t, url)
		c.change(&cfg)
		err := store.Put(t.Context(), newS3(t, cfg), "x", strings.NewReader("x"))
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		for _, secret := range []string{cfg.SecretKey, cfg.AccessKey} {
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("%s: the error shows a credential: %v", name, err)
			}
		}
	}
	for _, c := range []store.S3Config{{}, {Endpoint: "127.0.0.1:9000", Bucket: "bucket"}, {Endpoint: "http://user:pass@host", Bucket: "bucket"}, {Endpoint: "http://h", Bucket: "B/x"},
		{Endpoint: "http://h", Bucket: "bucket", Prefix: "../x"}, {Endpoint: "http://h", Bucket: "bucket", AccessKey: "only"},
		{Endpoint: "http://h", Bucket: "bucket", CredentialsFile: "/no/such"}} {
		if _, err := store.NewS3(c); !errors.Is(err, sandbox.ErrInvalid) || strings.Contains(err.Error(), "pass") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	file := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(file, []byte("[default]\naws_access_key_id = x\naws_secret_access_key = y\n[dsec]\naws_access_key_id = "+storetest.AccessKey+
		"\naws_secret_access_key = "+storetest.SecretKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := s3Config(t, url)
	cfg.AccessKey, cfg.SecretKey, cfg.CredentialsFile, cfg.Profile = "", "", file, "dsec"
	put(t, newS3(t, cfg), "x", "from a file")
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("DSECMAN1"))
	f.Add([]byte("DSECIDX1"))
	f.Fuzz(func(t *testing.T, b []byte) { store.DecodeAny(b) })
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// Objects that another program put into the bucket are read as they are; names that are no keys are passed over. There may be no prefix.
func TestS3BesideOtherPrograms(t *testing.T) {
	_, url := server(t)
	cfg := s3Config(t, url)
	cfg.Prefix = ""
	s := newS3(t, cfg)
	foreign := storetest.Random(1, 3<<20)
	for name, b := range map[string][]byte{"theirs/big": foreign, "theirs/small": foreign[:100], "no%20key": {}, "%2Edot": {}} {
		r, err := http.NewRequest("PUT", url+"/"+storetest.Bucket+"/"+name, bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential="+storetest.AccessKey+"/x")
		resp, err := http.DefaultClient.Do(r)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %v", resp, err)
		}
		resp.Body.Close()
	}
	put(t, s, "ours", string(foreign))
	var got []string
	if err := s.List(t.Context(), "", func(i store.Info) bool { got = append(got, fmt.Sprint(i.Key, " ", i.Size)); return true }); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"ours 3145728", "theirs/big 3145728", "theirs/small 100"}, got); d != "" {
		t.Error(d)
	}
	r, err := s.Open(t.Context(), "theirs/big")
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 500_000)
	if n, err := r.ReadAt(b, 1<<20); n != len(b) || err != nil || !bytes.Equal(b, foreign[1<<20:1<<20+len(b)]) {
		t.Errorf("%d %v", n, err)
	}
	if n, err := r.ReadAt(b, 3<<20-10); n != 10 || err != io.EOF {
		t.Errorf("at its end: %d %v", n, err)
	}
	if i, err := s.Stat(t.Context(), "theirs/big"); err != nil || i.Size != 3<<20 {
		t.Errorf("%+v %v", i, err)
	}
}
