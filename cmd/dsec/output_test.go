package main

import (
	"bytes"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// Nothing that a client or a sandbox named may steer a terminal or pretend to be a line of ours.
func TestTextForPeopleIsPlain(t *testing.T) {
	var hostile []string
	for r := rune(0); r < 0x100; r++ {
		hostile = append(hostile, "a"+string(r)+"b")
	}
	hostile = append(hostile, "a\x1b[31mb", "a\x9b31mb", "a\u202eb", "a\u2028b", "a\ufeffb", "a\xff\xfeb", "\x1b]0;title\x07", "line\nhxxxxx-0123456789abcdef  fake  running")
	bad := func(s, allowed string) bool {
		return !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) && !strings.ContainsRune(allowed, r) })
	}
	seen := map[string]string{}
	for _, h := range hostile {
		if got := cell(h); bad(got, "") {
			t.Errorf("cell(%q) = %q", h, got)
		} else if was, ok := seen[got]; ok {
			t.Errorf("%q and %q look the same: %s", h, was, got)
		} else {
			seen[got] = h
		}
		if got := plain(h); bad(got, "\t") {
			t.Errorf("plain(%q) = %q", h, got)
		}
		if got := lines(h); bad(got, "\t\n") {
			t.Errorf("lines(%q) = %q", h, got)
		}
		var b bytes.Buffer
		table(&b, []string{"ONE", "TWO"}, [][]string{{h, "x"}, {"y", h}})
		if n := strings.Count(b.String(), "\n"); n != 3 || bad(b.String(), "\n") {
			t.Errorf("a table with %q has %d lines: %q", h, n, b.String())
		}
	}
	for _, same := range []string{"", "a=b,c=d", "größe 日本", `back\slash "quoted"`} {
		if cell(same) != same || plain(same) != same {
			t.Errorf("%q shows as %q, %q", same, cell(same), plain(same))
		}
	}
}
