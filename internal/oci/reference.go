package oci

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	dockerHub  = "docker.io"
	hubHost    = "index.docker.io" // what serves it
	maxRef     = 1024              // octets
	maxEnvPart = 63                // of a part of an environment's name
)

// Ref is a reference with nothing left out.
type Ref struct {
	Host   string // registry, as docker.io or localhost:5000
	Repo   string // as library/python
	Tag    string // "" when the digest alone names it
	Digest string // "sha256:<hex>", or ""
}

// ParseRef reads a reference as `docker pull` does: without a host it is docker.io's, without a tag latest. The error wraps
// sandbox.ErrInvalid.
func ParseRef(s string) (Ref, error) {
	bad := func(err error) (Ref, error) {
		return Ref{}, fmt.Errorf("image %.200q: want [host/]repository[:tag][@sha256:...], as python:3.12 (%w): %w", s, err, sandbox.ErrInvalid)
	}
	if len(s) > maxRef {
		return bad(fmt.Errorf("%d octets, at most %d", len(s), maxRef))
	}
	r := Ref{}
	base, digest, pinned := strings.Cut(s, "@")
	n, err := name.NewTag(base, name.WeakValidation)
	if err != nil {
		return bad(err)
	}
	r.Host, r.Repo = n.RegistryStr(), n.RepositoryStr()
	if r.Host == hubHost {
		r.Host = dockerHub
	}
	if !hostPattern.MatchString(r.Host) || !repoPattern.MatchString(r.Repo) {
		return bad(fmt.Errorf("host %.80q or repository %.80q has a character that none may have", r.Host, r.Repo))
	}
	if pinned {
		if !digestPattern.MatchString(digest) {
			return bad(fmt.Errorf("digest %.80q: want sha256 and 64 hexadecimal digits", digest))
		}
		r.Digest = digest // a tag beside it says nothing
		return r, nil
	}
	r.Tag = n.TagStr()
	if !tagPattern.MatchString(r.Tag) {
		return bad(fmt.Errorf("tag %.80q", r.Tag))
	}
	return r, nil
}

var (
	hostPattern   = regexp.MustCompile(`^([a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?$`)
	repoPattern   = regexp.MustCompile(`^[a-z0-9]+(([._]|__|-+|/)[a-z0-9]+)*$`)
	tagPattern    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
	digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	plainPart     = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)
	notPlain      = regexp.MustCompile(`[^a-z0-9._-]+`)
)

// String is the full form, which is the same for all ways to write one reference.
func (r Ref) String() string {
	if r.Digest != "" {
		return r.Host + "/" + r.Repo + "@" + r.Digest
	}
	return r.Host + "/" + r.Repo + ":" + r.Tag
}

// EnvName is the environment's name for the reference, as docker.io/library/python/3.12. Where a name of an environment can't
// hold what the reference says, a digest of it makes it unique.
func (r Ref) EnvName() string {
	parts := append([]string{r.Host}, strings.Split(r.Repo, "/")...)
	if len(parts) > 3 { // an environment's name has up to four parts
		parts = []string{parts[0], parts[1], strings.Join(parts[2:], "/")}
	}
	last := r.Tag
	if r.Digest != "" {
		// A tag can't begin so: it would be hashed below.
		last = "sha256-" + strings.TrimPrefix(r.Digest, "sha256:")[:48]
	}
	parts = append(parts, last)
	for i, p := range parts {
		if plainPart.MatchString(p) && (r.Digest != "" || i < len(parts)-1 || !strings.HasPrefix(p, "sha256-")) && !hashed.MatchString(p) {
			continue
		}
		sum := sha256.Sum256([]byte(p))
		short := strings.Trim(notPlain.ReplaceAllString(strings.ToLower(p), "."), "._-")
		short = strings.TrimRight(short[:min(len(short), maxEnvPart-14)], "._-")
		parts[i] = strings.TrimLeft(short+".h-"+hex.EncodeToString(sum[:5]), ".")
	}
	return strings.Join(parts, "/")
}

// hashed is a part that looks like one with a digest, so that nobody can choose another's name.
var hashed = regexp.MustCompile(`(^|\.)h-[0-9a-f]{10}$`)
