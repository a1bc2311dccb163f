package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// S3Config says where a bucket is and who asks. The zero value of all but Endpoint and Bucket will do.
type S3Config struct {
	Endpoint  string // http://host:port or https://host
	Region    string // us-east-1
	Bucket    string // must exist
	Prefix    string // before all keys, without "/" at its ends
	PathStyle bool   // the bucket in the path, not in the host name; always so for an endpoint that is an address

	// Who asks: these two; or the profile of a file in the form of ~/.aws/credentials; or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or
	// ~/.aws/credentials; or nobody.
	AccessKey, SecretKey, SessionToken string
	CredentialsFile, Profile           string

	Timeout  time.Duration // of one attempt, beside the time that its octets need at 256 KiB/s; 20 s
	Retries  int           // attempts after the first; 4
	Parallel int           // requests at once; 32
	Cache    int64         // octets of chunks kept in memory; 64 MiB

	// Spool is the folder for drafts (default: the system's for temporary files), IndexDir one for copies of the packs' indexes ("": none).
	Spool, IndexDir string

	// Transport is for tests and benchmarks (nil: the usual one).
	Transport http.RoundTripper
}

const (
	// An object up to this size lies under its key as it is.
	rawMax = 256 << 10
	// A pack is closed when it has this size.
	packSize = 16 << 20
	// A manifest is written within this time from the moment when the packs it names were seen to be alive. It is part of the format:
	// Collect relies on it.
	publishLimit = time.Hour
	packFolder   = ".packs/"
	indexFolder  = ".index/"
	deadFolder   = ".dead/"
)

// S3 is a store in a bucket; docs/format/store.md says how. Objects above 256 KiB are cut by content into chunks which all objects of the
// store share; each is checked against its digest before an octet of it is given out. It holds no connection and no goroutine while idle.
//
// Locks: known.mu, chunks.mu; neither is taken under the other, nor held over I/O.
type S3 struct {
	cfg    S3Config
	core   *minio.Core
	prefix string // "" or ends in "/"
	cut    *cutting
	enc    *zstd.Encoder
	dec    *zstd.Decoder
	slots  chan struct{}
	known  known
	chunks chunkCache
	date   atomic.Int64 // the server's clock as it last told it, seconds
	now    func() time.Time

	requests, sent, received atomic.Int64
}

var _ Store = (*S3)(nil)

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)

// NewS3 opens the store; it asks the server nothing.
func NewS3(cfg S3Config) (*S3, error) {
	if cfg.Region == "" {
		cfg.Region = "us-east-1"
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 20 * time.Second
	}
	if cfg.Retries <= 0 {
		cfg.Retries = 4
	}
	if cfg.Parallel <= 0 {
		cfg.Parallel = 32
	}
	if cfg.Cache <= 0 {
		cfg.Cache = 64 << 20
	}
	host, secure := strings.CutPrefix(cfg.Endpoint, "https://")
	if !secure {
		var ok bool
		if host, ok = strings.CutPrefix(cfg.Endpoint, "http://"); !ok {
			return nil, fmt.Errorf("S3 endpoint %q: want http://HOST or https://HOST: %w", cfg.Endpoint, sandbox.ErrInvalid)
		}
	}
	if host = strings.TrimSuffix(host, "/"); host == "" || strings.ContainsAny(host, "/@?#") {
		return nil, fmt.Errorf("S3 endpoint: want http://HOST or https://HOST and no more: %w", sandbox.ErrInvalid)
	}
	if !bucketName.MatchString(cfg.Bucket) {
		return nil, fmt.Errorf("S3 bucket %.80q: not a bucket's name: %w", cfg.Bucket, sandbox.ErrInvalid)
	}
	s := &S3{cfg: cfg, cut: newCutting(chunkMin, chunkAvg, chunkMax), slots: make(chan struct{}, cfg.Parallel), now: time.Now}
	if cfg.Prefix != "" {
		if err := CheckKey(cfg.Prefix); err != nil {
			return nil, fmt.Errorf("S3 prefix: %w", err)
		}
		s.prefix = cfg.Prefix + "/"
	}
	creds, err := who(cfg)
	if err != nil {
		return nil, err
	}
	transport := cfg.Transport
	if transport == nil {
		transport = &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			MaxIdleConnsPerHost:   cfg.Parallel,
			IdleConnTimeout:       time.Minute,
			TLSHandshakeTimeout:   10 * time.Second,
			ResponseHeaderTimeout: cfg.Timeout,
			DisableCompression:    true,
		}
	}
	lookup := minio.BucketLookupAuto
	if cfg.PathStyle {
		lookup = minio.BucketLookupPath
	}
	// MaxRetries 1: what is tried again, and how often, is decided here.
	s.core, err = minio.NewCore(host, &minio.Options{Creds: creds, Secure: secure, Region: cfg.Region, BucketLookup: lookup, Transport: &clock{s, transport}, MaxRetries: 1})
	if err != nil {
		return nil, fmt.Errorf("S3 endpoint %q: %w: %w", cfg.Endpoint, err, sandbox.ErrInvalid)
	}
	if s.enc, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(4), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderCRC(false)); err != nil {
		return nil, err
	}
	if s.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(4), zstd.WithDecoderMaxMemory(maxChunkLen), zstd.WithDecodeAllCapLimit(true)); err != nil {
		return nil, err
	}
	if cfg.IndexDir != "" {
		if err := os.MkdirAll(cfg.IndexDir, 0o700); err != nil {
			return nil, fmt.Errorf("make folder for indexes: %w", err)
		}
	}
	s.chunks.limit = cfg.Cache
	s.known.reset()
	s.known.busy = make(chan struct{}, 1)
	s.sweepSpool()
	return s, nil
}

func who(cfg S3Config) (*credentials.Credentials, error) {
	switch {
	case cfg.AccessKey != "" && cfg.SecretKey != "":
		return credentials.NewStaticV4(cfg.AccessKey, cfg.SecretKey, cfg.SessionToken), nil
	case cfg.AccessKey != "" || cfg.SecretKey != "":
		return nil, fmt.Errorf("S3 credentials: an access key needs its secret key: %w", sandbox.ErrInvalid)
	case cfg.CredentialsFile != "":
		c := credentials.NewFileAWSCredentials(cfg.CredentialsFile, cfg.Profile)
		if _, err := c.GetWithContext(nil); err != nil {
			// Its text could hold a line of the file.
			return nil, fmt.Errorf("S3 credentials: %s has no usable profile %q: %w", cfg.CredentialsFile, cfg.Profile, sandbox.ErrInvalid)
		}
		return c, nil
	}
	chain := []credentials.Provider{&credentials.EnvAWS{}}
	if home, err := os.UserHomeDir(); err == nil {
		chain = append(chain, &credentials.FileAWSCredentials{Filename: filepath.Join(home, ".aws", "credentials"), Profile: cfg.Profile})
	}
	return credentials.NewChainCredentials(chain), nil
}

// clock is a transport that notes what time the server has and counts.
type clock struct {
	s *S3
	http.RoundTripper
}

func (c *clock) RoundTrip(r *http.Request) (*http.Response, error) {
	c.s.requests.Add(1)
	c.s.sent.Add(max(r.ContentLength, 0))
	resp, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		if t, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
			c.s.date.Store(t.Unix())
		}
	}
	return resp, err
}

// Traffic is what a store has asked for so far.
type Traffic struct {
	Requests       int64
	Sent, Received int64 // octets of bodies
}

// Traffic returns the counts since NewS3.
func (s *S3) Traffic() Traffic {
	return Traffic{s.requests.Load(), s.sent.Load(), s.received.Load()}
}

// Path says that objects are no files of this machine.
func (s *S3) Path(string) (string, bool) { return "", false }

// attempt runs f until it succeeds, fails for good or has no attempts left. n is how many octets f moves.
func (s *S3) attempt(ctx context.Context, n int64, f func(context.Context) error) error {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.slots }()
	limit := s.cfg.Timeout + time.Duration(n/(256<<10))*time.Second
	for i := 0; ; i++ {
		try, cancel := context.WithTimeout(ctx, limit)
		err := f(try)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
		err = told(err)
		if i == s.cfg.Retries || final(err) {
			return err
		}
		// 50 ms, doubled each time to 5 s at most, between half and all of it.
		wait := min(50*time.Millisecond<<i, 5*time.Second)
		wait = wait/2 + rand.N(wait/2)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// final tells an answer that another attempt won't change.
func final(err error) bool {
	for _, e := range []error{sandbox.ErrNotFound, sandbox.ErrDenied, sandbox.ErrInvalid, sandbox.ErrExhausted, sandbox.ErrLost} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// errRange is the refusal of a range that begins behind the end, as every range of an empty object does.
var errRange = fmt.Errorf("range behind the end: %w", sandbox.ErrInvalid)

// told maps a server's answer.
func told(err error) error {
	var r minio.ErrorResponse
	if !errors.As(err, &r) {
		return err
	}
	as := func(kind error) error { return fmt.Errorf("%s: %w", strings.TrimSuffix(r.Message, "."), kind) }
	switch r.Code {
	case "NoSuchKey":
		return fmt.Errorf("%w", sandbox.ErrNotFound)
	case "InvalidRange":
		return errRange
	case "NoSuchBucket":
		return as(sandbox.ErrInvalid)
	case "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AccountProblem", "AllAccessDisabled":
		return as(sandbox.ErrDenied)
	case "RequestTimeTooSkewed":
		return as(sandbox.ErrState)
	case "XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "EntityTooLarge":
		return as(sandbox.ErrExhausted)
	}
	switch r.StatusCode {
	case http.StatusNotFound:
		return fmt.Errorf("%w", sandbox.ErrNotFound)
	case http.StatusForbidden, http.StatusUnauthorized:
		return as(sandbox.ErrDenied)
	case http.StatusInsufficientStorage:
		return as(sandbox.ErrExhausted)
	}
	return fmt.Errorf("server answered %d %s: %s", r.StatusCode, r.Code, r.Message)
}

func (s *S3) put(ctx context.Context, key string, b []byte) error {
	sum := sha256.Sum256(b)
	hexSum := hex.EncodeToString(sum[:])
	return s.attempt(ctx, int64(len(b)), func(ctx context.Context) error {
		// The digest is part of the signature, so the server refuses octets that changed on the way.
		_, err := s.core.PutObject(ctx, s.cfg.Bucket, s.prefix+key, bytes.NewReader(b), int64(len(b)), "", hexSum,
			minio.PutObjectOptions{ContentType: "application/octet-stream", DisableContentSha256: true})
		return err
	})
}

// stored is what is under a name in the bucket.
type stored struct {
	body     []byte
	total    int64 // octets of the whole, however few were asked for
	modified time.Time
}

// get reads [off, off+n) or what there is of it; n < 0 is all, of at most limit octets.
func (s *S3) get(ctx context.Context, key string, off, n, limit int64) (out stored, err error) {
	err = s.attempt(ctx, max(n, 0), func(ctx context.Context) error {
		var opt minio.GetObjectOptions
		if n >= 0 {
			if err := opt.SetRange(off, off+n-1); err != nil {
				return err
			}
		}
		body, info, header, err := s.core.GetObject(ctx, s.cfg.Bucket, s.prefix+key, opt)
		if err != nil {
			return err
		}
		defer body.Close()
		out = stored{total: info.Size, modified: info.LastModified}
		if _, all, ok := strings.Cut(header.Get("Content-Range"), "/"); ok {
			if out.total, err = strconv.ParseInt(all, 10, 64); err != nil {
				return fmt.Errorf("content range %.40q", header.Get("Content-Range"))
			}
		}
		want := info.Size
		if n >= 0 {
			if want > n { // the range was not looked at
				return fmt.Errorf("server answered %d octets for %d", want, n)
			}
		} else if want > limit {
			return fmt.Errorf("%d octets, at most %d: %w", want, limit, sandbox.ErrInvalid)
		}
		if want < 0 {
			return errors.New("server told no length")
		}
		out.body = make([]byte, want)
		got, err := io.ReadFull(body, out.body)
		s.received.Add(int64(got))
		if err != nil {
			return fmt.Errorf("after %d of %d octets: %w", got, want, err)
		}
		return nil
	})
	return out, err
}

// remove deletes what is under the name, if anything.
func (s *S3) remove(ctx context.Context, key string) error {
	err := s.attempt(ctx, 0, func(ctx context.Context) error {
		return s.core.RemoveObject(ctx, s.cfg.Bucket, s.prefix+key, minio.RemoveObjectOptions{})
	})
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}

// list calls each for every name below the prefix and after the name until it returns false. A page that fails is asked for again.
func (s *S3) list(ctx context.Context, prefix, after string, each func(Info) bool) error {
	for failed := 0; ; {
		more, err := s.page(ctx, prefix, &after, &failed, each)
		if err == nil || !more {
			return err
		}
		if err = told(err); failed > s.cfg.Retries || final(err) || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(min(50*time.Millisecond<<failed, 5*time.Second)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// page lists on from after until the end or an error; more tells that going on makes sense.
func (s *S3) page(ctx context.Context, prefix string, after *string, failed *int, each func(Info) bool) (more bool, err error) {
	// A server that stops answering in the middle of a listing is noticed by the transport; the whole of it has no other bound.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opt := minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true}
	if *after != "" {
		opt.StartAfter = s.prefix + *after
	}
	for o := range s.core.Client.ListObjects(ctx, s.cfg.Bucket, opt) {
		if o.Err != nil {
			*failed++
			return true, o.Err
		}
		key := strings.TrimPrefix(o.Key, s.prefix)
		if key <= *after || strings.HasSuffix(key, "/") {
			continue // a server that does not know start-after, or shows folders
		}
		*after, *failed = key, 0
		if !each(Info{Key: key, Size: o.Size, Modified: o.LastModified}) {
			return false, nil
		}
	}
	return true, ctx.Err()
}
