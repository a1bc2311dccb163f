package build

import (
	"context"
	"errors"
	"path"
	"regexp"
	"sort"
	"strings"

	"github.com/dsec-dev/dsec/client"
)

// Rule says where building leaves what nobody needs at run time.
type Rule struct {
	Name  string
	Paths []string // folders, whose new entries go; "~" is the home of root and of the builder
	Only  string   // pattern of the entries; all when empty
}

// Rules are applied after each run step: entries of these folders that the step made are removed. Compiled files (.pyc, build caches of
// compilers) stay, since they make the first start faster.
var Rules = []Rule{
	{Name: "tmp", Paths: []string{"/tmp", "/var/tmp"}},
	{Name: "apt-archives", Paths: []string{"/var/cache/apt/archives", "/var/cache/apt/archives/partial"}, Only: "*.deb"},
	{Name: "apt-cache", Paths: []string{"/var/cache/apt"}, Only: "*.bin"},
	{Name: "apt-lists", Paths: []string{"/var/lib/apt/lists", "/var/lib/apt/lists/partial"}},
	{Name: "apk", Paths: []string{"/var/cache/apk", "/etc/apk/cache"}},
	{Name: "dnf", Paths: []string{"/var/cache/dnf", "/var/cache/yum", "/var/cache/libdnf5"}},
	{Name: "pip", Paths: []string{"~/.cache/pip", "~/.cache/uv"}},
	{Name: "npm", Paths: []string{"~/.npm/_cacache", "~/.npm/_logs", "~/.cache/yarn", "/usr/local/share/.cache"}},
	{Name: "logs", Paths: []string{"/var/log", "/var/log/apt"}, Only: "*.log*"},
	{Name: "history", Paths: []string{"~"}, Only: ".*_history"},
}

func isRule(name string) bool {
	for _, r := range Rules {
		if r.Name == name {
			return true
		}
	}
	return false
}

func ruleNames() (out []string) {
	for _, r := range Rules {
		out = append(out, r.Name)
	}
	return out
}

// places are the folders of the rules that apply, each with its pattern.
func places(keep []string, homes []string) map[string][]string {
	off := map[string]bool{}
	for _, k := range keep {
		off[k] = true
	}
	out := map[string][]string{}
	for _, r := range Rules {
		if off[r.Name] {
			continue
		}
		for _, p := range r.Paths {
			for _, h := range homes {
				at := p
				if strings.HasPrefix(p, "~") {
					at = path.Clean(h + strings.TrimPrefix(p, "~"))
				}
				out[at] = append(out[at], r.Only)
				if at == p {
					break
				}
			}
		}
	}
	return out
}

// contents lists what the folders hold now.
func contents(ctx context.Context, sb *client.Sandbox, at map[string][]string) (map[string]bool, error) {
	have := map[string]bool{}
	for dir := range at {
		list, err := sb.FilesAs("root").List(ctx, dir, 1)
		if errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrState) || errors.Is(err, client.ErrInvalid) {
			continue // not there, or no folder
		}
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			have[path.Join(dir, e.Path)] = true
		}
	}
	return have, nil
}

// clean removes what came into the folders since before, and answers what.
func clean(ctx context.Context, sb *client.Sandbox, at map[string][]string, before map[string]bool) ([]string, error) {
	now, err := contents(ctx, sb, at)
	if err != nil {
		return nil, err
	}
	var gone []string
	for p := range now {
		if before[p] || at[p] != nil { // a folder of a rule stays, only what is in it goes
			continue
		}
		for _, only := range at[path.Dir(p)] {
			if ok, _ := path.Match(only, path.Base(p)); ok || only == "" {
				gone = append(gone, p)
				break
			}
		}
	}
	sort.Strings(gone)
	for _, p := range gone {
		if err := sb.FilesAs("root").Remove(ctx, p, true); err != nil && !errors.Is(err, client.ErrNotFound) {
			return nil, err
		}
	}
	return gone, nil
}

// Secret is what looks like one.
type Secret struct {
	Where string // a path, or the name of a variable
	Why   string
}

var (
	secretName  = regexp.MustCompile(`(?i)(token|secret|passw(or)?d|api_?key|access_?key|credential|private_?key)`)
	secretValue = regexp.MustCompile(`^(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_|glpat-|AKIA[0-9A-Z]{16}|xox[abprs]-|sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{20,}|ey[JK][A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.)`)
	keyFile     = regexp.MustCompile(`^(id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.*\.(pem|key|p12|pfx|ppk)|ssh_host_.*_key)$`)
)

// SecretVars reports variables that look like secrets.
func SecretVars(env map[string]string) (out []Secret) {
	for k, v := range env {
		switch {
		case secretValue.MatchString(v):
			out = append(out, Secret{"variable " + k, "its value has the form of a token"})
		case secretName.MatchString(k) && v != "":
			out = append(out, Secret{"variable " + k, "its name says so"})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Where < out[j].Where })
	return out
}

// suspicious says why a path may hold a secret, and whether its contents decide.
func suspicious(p string) (why string, look *regexp.Regexp) {
	base := path.Base(p)
	switch {
	case keyFile.MatchString(base):
		return "a private key", regexp.MustCompile(`PRIVATE KEY|^PuTTY-User-Key|^\x30\x82`)
	case base == ".netrc" || base == "_netrc":
		return "passwords of ftp and curl", regexp.MustCompile(`password`)
	case base == ".git-credentials":
		return "passwords of git", regexp.MustCompile(`://[^/\s]+:[^/\s]+@`)
	case base == ".npmrc" || base == ".yarnrc.yml":
		return "a token of npm", regexp.MustCompile(`(?i)_auth(token)?|npmAuthToken`)
	case base == ".pypirc":
		return "a password of PyPI", regexp.MustCompile(`password`)
	case base == ".pgpass":
		return "passwords of PostgreSQL", nil
	case strings.HasSuffix(p, "/.docker/config.json"):
		return "credentials of registries", regexp.MustCompile(`"auth"|"identitytoken"`)
	case strings.HasSuffix(p, "/.aws/credentials"):
		return "keys of AWS", nil
	case strings.HasSuffix(p, "/.kube/config"):
		return "credentials of Kubernetes", regexp.MustCompile(`token|client-key-data|password`)
	case strings.HasSuffix(p, "/application_default_credentials.json"):
		return "credentials of Google Cloud", nil
	case base == ".env":
		return "settings with secrets", regexp.MustCompile(`(?im)^\s*(export\s+)?[A-Z0-9_]*(TOKEN|SECRET|PASSWORD|API_?KEY)[A-Z0-9_]*\s*=\s*\S`)
	}
	return "", nil
}
