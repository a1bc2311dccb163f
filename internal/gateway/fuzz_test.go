package gateway

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func FuzzQueryKey(f *testing.F) {
	for _, s := range []string{"", "a=1", "dsec_key=k", "a=1&dsec_key=k&b=%zz", "dsec_key=a&dsec_key=b", "xdsec_key=1", "dsec_key", "&&dsec_key=%41&"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, q string) {
		var rest string
		key, ok := rawQuery(q, &rest)
		for part := range strings.SplitSeq(rest, "&") {
			if strings.HasPrefix(part, queryKey+"=") {
				t.Errorf("%q: the key is left in %q", q, rest)
			}
		}
		if !ok && rest != q {
			t.Errorf("%q became %q", q, rest)
		}
		if ok && key != "" {
			if again, found := rawQuery(rest, nil); found {
				t.Errorf("%q is found again", again)
			}
		}
	})
}

func FuzzTarget(f *testing.F) {
	f.Add("/v1/ports/x/80/a%2Fb", "80-x.box.test", "")
	f.Add("/v1/ports//", "1-habcdef-aaaaaaaaaaaaaaaa.x:1", "s")
	f.Add("/v1/ports/a/80", "[::1]:80", "")
	p := newPorts(&Gateway{cfg: Config{Domain: "box.test"}, log: discard})
	f.Fuzz(func(t *testing.T, path, host, header string) {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			return
		}
		r := &http.Request{Method: "GET", URL: u, Host: host, Header: http.Header{headerBox: {header}}}
		if g, ok := p.target(r); ok && g.prefix != "" && !strings.HasPrefix(u.EscapedPath()+"/", g.prefix+"/") {
			t.Errorf("%q: prefix %q", path, g.prefix)
		}
	})
}

func FuzzPageToken(f *testing.F) {
	f.Add("")
	f.Add(cursor{Host: "haaaaaaaa", Token: "x"}.String())
	f.Fuzz(func(t *testing.T, s string) {
		if c, err := parseCursor(s); err == nil && s != "" {
			if d, err := parseCursor(c.String()); err != nil || d != c {
				t.Errorf("%v, %v, %v", c, d, err)
			}
		}
	})
}
