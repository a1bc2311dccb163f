package oci

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// KeptCredential is what a project shows to a registry, without the secret.
type KeptCredential struct {
	Host, Username string
	Created        time.Time
}

type keptCredential struct {
	Username string    `json:"username"`
	Secret   string    `json:"secret"`
	Created  time.Time `json:"created"`
}

// CanonicalHost is the name that references use for a registry.
func CanonicalHost(host string) (string, error) {
	host = strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(host, "https://"), "http://"), "/")
	host = strings.TrimSuffix(strings.TrimSuffix(host, "/v1"), "/v2")
	if host == hubHost || host == "registry-1.docker.io" {
		host = dockerHub
	}
	if len(host) > 255 || !hostPattern.MatchString(host) {
		return "", fmt.Errorf("registry %.100q: want host or host:port: %w", host, sandbox.ErrInvalid)
	}
	return host, nil
}

func credentialKey(project, host string) string { return "registry:" + project + ":" + host }

// PutCredential keeps what the project and those below it show to a registry. It is kept in the facts, readable to root alone.
func (im *Images) PutCredential(ctx context.Context, project, host string, c Credential) error {
	host, err := CanonicalHost(host)
	if err != nil {
		return err
	}
	if c.Username == "" || c.Secret == "" || len(c.Username) > 1024 || len(c.Secret) > 16<<10 || strings.ContainsAny(c.Username, ":\n\x00") {
		return fmt.Errorf("credential for %s: want a user name of up to 1024 octets without a colon and a secret of up to 16 KiB: %w", host, sandbox.ErrInvalid)
	}
	text, err := json.Marshal(keptCredential{c.Username, c.Secret, im.now().UTC()})
	if err != nil {
		return err
	}
	if _, err := im.facts.Put(ctx, credentialKey(project, host), text, facts.Any); err != nil {
		return fmt.Errorf("keep credential for %s: %w", host, err)
	}
	return nil
}

// Credentials lists for which registries the project itself has one.
func (im *Images) Credentials(ctx context.Context, project string) ([]KeptCredential, error) {
	prefix := credentialKey(project, "")
	list, err := im.facts.List(ctx, prefix, "", 0)
	if err != nil {
		return nil, fmt.Errorf("list credentials: %w", err)
	}
	var out []KeptCredential
	for _, f := range list {
		var k keptCredential
		if err := json.Unmarshal(f.Value, &k); err != nil {
			return nil, fmt.Errorf("credential for %s is broken", f.Key[len(prefix):])
		}
		out = append(out, KeptCredential{f.Key[len(prefix):], k.Username, k.Created})
	}
	return out, nil
}

// RemoveCredential forgets one.
func (im *Images) RemoveCredential(ctx context.Context, project, host string) error {
	host, err := CanonicalHost(host)
	if err != nil {
		return err
	}
	if err := im.facts.Delete(ctx, credentialKey(project, host), facts.Any); err != nil {
		return fmt.Errorf("credential for %s in project %s: %w", host, project, err)
	}
	return nil
}

// credential finds what a project shows to a host: its own, of one above it, the operator's.
func (im *Images) credential(ctx context.Context, project string) func(host string) (Credential, error) {
	return func(host string) (Credential, error) {
		for p := project; p != ""; p = parent(p) {
			f, err := im.facts.Get(ctx, credentialKey(p, host))
			if errors.Is(err, sandbox.ErrNotFound) {
				continue
			}
			if err != nil {
				return Credential{}, err
			}
			var k keptCredential
			if err := json.Unmarshal(f.Value, &k); err != nil {
				return Credential{}, fmt.Errorf("credential for %s is broken", host)
			}
			return Credential{k.Username, k.Secret}, nil
		}
		return im.cfg.Credentials[host], nil
	}
}

// ReadDockerConfig reads the credentials that a docker config.json holds itself; those of helper programs are not in it.
func ReadDockerConfig(file string) (map[string]Credential, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var c struct {
		Auths map[string]struct {
			Auth     string `json:"auth"`
			Username string `json:"username"`
			Password string `json:"password"`
		} `json:"auths"`
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s: is no docker config: %w", file, sandbox.ErrInvalid)
	}
	out := map[string]Credential{}
	for host, a := range c.Auths {
		host, err := CanonicalHost(host)
		if err != nil {
			continue // docker keeps tokens of other services here too
		}
		cred := Credential{a.Username, a.Password}
		if text, err := base64.StdEncoding.DecodeString(a.Auth); err == nil && a.Auth != "" {
			if u, s, ok := strings.Cut(string(text), ":"); ok {
				cred = Credential{u, strings.TrimRight(s, "\x00")}
			}
		}
		if cred.Username != "" && cred.Secret != "" {
			out[host] = cred
		}
	}
	return out, nil
}
