package store

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const s3Scheme = "s3://"

// s3Options are the settings that follow "?" in the name of an S3 store. Keys are not among them, so that the name can be shown.
var s3Options = []string{"endpoint", "region", "path_style", "credentials", "profile", "timeout"}

// Parse opens a store by its name: a folder's path, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path_style=true&credentials=FILE&profile=NAME,
// all after "?" as needed. local is a folder of this machine for drafts and copies of indexes; "" is the system's folder for temporary files, and no
// copies.
func Parse(name, local string) (Store, error) {
	if !strings.HasPrefix(name, s3Scheme) {
		if scheme, _, ok := strings.Cut(name, "://"); ok {
			return nil, fmt.Errorf("store %s://...: want a folder or s3://BUCKET/PREFIX: %w", scheme, sandbox.ErrInvalid)
		}
		if name == "" {
			return nil, fmt.Errorf("store: want a folder or s3://BUCKET/PREFIX: %w", sandbox.ErrInvalid)
		}
		return NewDir(name)
	}
	cfg, err := parseS3(name)
	if err != nil {
		return nil, err
	}
	if local != "" {
		sum := sha256.Sum256([]byte(cfg.Endpoint + "\n" + cfg.Bucket + "\n" + cfg.Prefix))
		cfg.IndexDir = filepath.Join(local, "index-"+hex.EncodeToString(sum[:6]))
		cfg.Spool = local
	}
	return NewS3(cfg)
}

func parseS3(name string) (S3Config, error) {
	u, err := url.Parse(name)
	if err != nil || u.User != nil || u.Fragment != "" {
		// The text is not repeated: it may hold what its writer took for the place of a secret.
		return S3Config{}, fmt.Errorf("store s3://...: want s3://BUCKET/PREFIX?endpoint=URL, credentials in the file that credentials= names: %w", sandbox.ErrInvalid)
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return S3Config{}, fmt.Errorf("store s3://%s: its settings can't be read: %w", u.Host, sandbox.ErrInvalid)
	}
	for k, v := range q {
		if !slices.Contains(s3Options, k) || len(v) != 1 {
			return S3Config{}, fmt.Errorf("store s3://%s: setting %.40q: want one each of %s: %w", u.Host, k, strings.Join(s3Options, ", "), sandbox.ErrInvalid)
		}
	}
	cfg := S3Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Endpoint: q.Get("endpoint"), Region: q.Get("region"),
		CredentialsFile: q.Get("credentials"), Profile: q.Get("profile")}
	switch q.Get("path_style") {
	case "", "false":
	case "true":
		cfg.PathStyle = true
	default:
		return S3Config{}, fmt.Errorf("store s3://%s: path_style: want true or false: %w", u.Host, sandbox.ErrInvalid)
	}
	if cfg.Endpoint == "" {
		if cfg.Region == "" {
			cfg.Region = "us-east-1"
		}
		cfg.Endpoint = "https://s3." + cfg.Region + ".amazonaws.com"
	}
	if t := q.Get("timeout"); t != "" {
		if cfg.Timeout, err = time.ParseDuration(t); err != nil || cfg.Timeout < time.Millisecond || cfg.Timeout > time.Hour {
			return S3Config{}, fmt.Errorf("store s3://%s: timeout %.40q: want a duration such as 20s: %w", u.Host, t, sandbox.ErrInvalid)
		}
	}
	return cfg, nil
}

// Absolute makes the name of a store one that means the same from any folder.
func Absolute(name string) (string, error) {
	if strings.HasPrefix(name, s3Scheme) {
		return name, nil
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return "", fmt.Errorf("store folder: %w", err)
	}
	return abs, nil
}
