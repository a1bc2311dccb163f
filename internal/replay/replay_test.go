package replay

import (
	"crypto/sha256"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func stream(s string) Stream {
	return Stream{Data: []byte(s), Total: int64(len(s)), SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(s)))}
}

func done(out string) Done { return Done{Kind: "exited", Stdout: stream(out)} }

func TestCompare(t *testing.T) {
	cut := func(s string, total int64) Done {
		return Done{Kind: "exited", Stdout: Stream{Data: []byte(s), Total: total, Truncated: true, SHA256: s}}
	}
	for name, c := range map[string]struct {
		was, now Done
		want     Report
	}{
		"the same":         {done("a\nb\n"), done("a\nb\n"), Report{Verdict: Equal}},
		"one digit":        {done("3 passed, 1 failed\n"), done("3 passed, 2 failed\n"), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout line 1 @@\n- 3 passed, 1 failed\n+ 3 passed, 2 failed\n"}},
		"a dropped line":   {done("a\nb\nc\n"), done("a\nc\n"), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout line 2 @@\n  a\n- b\n"}},
		"no last newline":  {done("a\n"), done("a"), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout line 1 @@\n- a\n+ a\\ no newline\n"}},
		"exit code":        {Done{Kind: "exited"}, Done{Kind: "exited", Code: 2}, Report{Verdict: Different, Reason: "exited with 0, now exited with 2"}},
		"signal":           {Done{Kind: "exited", Code: 137}, Done{Kind: "signalled", Signal: 9}, Report{Verdict: Different, Reason: "exited with 137, now ended by signal 9"}},
		"a duration":       {done("ok  \tp\t0.012s\n"), done("ok  \tp\t0.348s\n"), Report{Verdict: EqualAfter, Normalisers: []string{"duration"}}},
		"a date":           {done("built 2026-01-02\n"), done("built 2026-01-03\n"), Report{Verdict: EqualAfter, Normalisers: []string{"date"}}},
		"two normalisers":  {done("10:00:01 at 0xc000012345 x\n"), done("11:59:59 at 0xc0000abcde x\n"), Report{Verdict: EqualAfter, Normalisers: []string{"address", "time"}}},
		"tab or newline":   {done(`a\t1.5s`), done(`a\n2.5s`), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout line 1 @@\n- a\\t1.5s\\ no newline\n+ a\\n2.5s\\ no newline\n"}},
		"one of two":       {done("10:00:01 at 0xc000012345\n"), done("10:00:01 at 0xc0000abcde\n"), Report{Verdict: EqualAfter, Normalisers: []string{"address"}}},
		"token and digit":  {done("10:00:01 got 5\n"), done("10:00:02 got 6\n"), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout line 1 @@\n- 10:00:01 got 5\n+ 10:00:02 got 6\n"}},
		"octets":           {done("\x00\x01"), done("\x00\x02"), Report{Verdict: Different, Reason: "stdout differs", Diff: "@@ stdout octet 1 @@\n- 00000000  00 01\n+ 00000000  00 02\n"}},
		"unknown":          {Done{Kind: "unknown"}, done(""), Report{Verdict: NotComparable, Reason: "its end was not seen"}},
		"timed out":        {Done{Kind: "timed_out"}, done(""), Report{Verdict: NotComparable, Reason: "it timed out"}},
		"times out now":    {done(""), Done{Kind: "timed_out", Stdout: stream("")}, Report{Verdict: Different, Reason: "exited with 0, now timed out"}},
		"cut, same":        {cut("abc", 1000), cut("abc", 1000), Report{Verdict: Equal}},
		"cut, other total": {cut("abc", 1000), cut("abc", 1001), Report{Verdict: NotComparable, Reason: "stdout: 1000 octets, now 1001, not all of which were kept or looked at"}},
		"cut, other hash":  {cut("abc", 1000), cut("abd", 1000), Report{Verdict: Different, Reason: "stdout: 1000 octets with another hash", Diff: "@@ stdout line 1 @@\n- abc\\ no newline\n+ abd\\ no newline\n"}},
		"paths": {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a", Type: "file", Mode: 0o644, Size: 1, SHA256: "x"}}},
			Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a", Type: "file", Mode: 0o644, Size: 1, SHA256: "y"}}},
			Report{Verdict: Different, Paths: 1, Reason: "changed paths differ", Diff: "- /a file 0644 1 octets sha256:x\n+ /a file 0644 1 octets sha256:y\n"}},
		"paths of one side":        {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a"}}}, Done{Kind: "exited", Blind: "too many"}, Report{Verdict: Equal, PathsBlind: "too many"}},
		"paths that can't be told": {Done{Kind: "exited", Blind: "another step ran"}, Done{Kind: "exited", PathsKnown: true}, Report{Verdict: Equal, PathsBlind: "another step ran"}},
		"the same paths": {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a", Gone: true}}, Volatile: []string{"/c"}},
			Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a", Gone: true}}, Volatile: []string{"/b", "/c"}}, Report{Verdict: Equal, Paths: 1, Volatile: []string{"/b", "/c"}}},
		"a temporary path": {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/tmp/tmp.AbCdEfGhIj", Type: "file"}}}, Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/tmp/tmp.0123456789", Type: "file"}}},
			Report{Verdict: EqualAfter, Paths: 1, Normalisers: []string{"temporary name"}}},
		"a temporary path with something else in it": {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/tmp/tmp.AbCdEfGhIj", Type: "file"}}}, Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/tmp/tmp.0123456789", Type: "dir"}}},
			Report{Verdict: Different, Paths: 1, Reason: "changed paths differ", Diff: "+ /tmp/tmp.0123456789 dir 0000 0 octets\n- /tmp/tmp.AbCdEfGhIj file 0000 0 octets\n"}},
		"a path that was not changed": {Done{Kind: "exited", PathsKnown: true, Paths: []Path{{Name: "/a", Gone: true}}}, Done{Kind: "exited", PathsKnown: true},
			Report{Verdict: Different, Paths: 1, Reason: "changed paths differ", Diff: "- /a removed\n"}},
	} {
		if d := cmp.Diff(c.want, New().Compare(c.was, c.now)); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

func TestNormalise(t *testing.T) {
	for in, want := range map[string]string{
		"2026-11-29T18:44:01.123456Z x":                        "<time> x",
		"2026-11-29 18:44:01,123 INFO":                         "<time> INFO",
		"at 18:44:01 and 7:01:02.5 PM":                         "at <time> and <time>",
		"Sun Nov 29 18:44:01 UTC 2026":                         "<time>",
		"Sun, 29 Nov 2026 18:44:01 GMT":                        "<time>",
		"1764441841.123 epoch":                                 "<time> epoch",
		"1764441841 apples":                                    "1764441841 apples",
		"on 2026-11-29 it":                                     "on <date> it",
		"-rw-r--r-- 1 root root 12 Nov 29 18:44 f":             "-rw-r--r-- 1 root root 12 <date> f",
		"/tmp/tmp.AbC123xYz0 and /tmp/tmpab12cd_9":             "/tmp/<temporary name> and <temporary name>",
		"/tmp/go-build123456789/b001":                          "/tmp/<temporary name>/b001",
		"object at 0x7f12abcd90":                               "object at <address>",
		"flags 0x1f":                                           "flags 0x1f",
		"sshd[1234]: hello":                                    "<pid>hello",
		"pid 77, pid=78 PID: 79":                               "<pid>, <pid> <pid>",
		"list[0] = a[12], process 3 of 7":                      "list[0] = a[12], process 3 of 7",
		`{"Action":"pass","Elapsed":0.25}`:                     `{"Action":"pass",<duration>}`,
		`{"Output":"ok  \tp/v5\t10.707s\n3.5s\n"}`:             `{"Output":"ok  \tp/v5\t<duration>\n<duration>\n"}`,
		`{"Elapsed":3.8810000000000002,"n":"\t07:00:01"}`:      `{<duration>,"n":"\t<time>"}`,
		"real\t0m1.234s":                                       "real\t<duration>",
		"1h2m3.5s 12ms 3 seconds 0.01s 5µs":                    "<duration> <duration> <duration> <duration> <duration>",
		"== 3 passed in 0.12s ==":                              "== 3 passed in <duration> ==",
		"512m of 3 apples, version 1.2.3, 10 tests, 5 sheep":   "512m of 3 apples, version 1.2.3, 10 tests, 5 sheep",
		"12345 67890 abc123 9f86d081884c7d659a2feaa0c55ad015a": "12345 67890 abc123 9f86d081884c7d659a2feaa0c55ad015a",
	} {
		if got, _ := New().normalise([]byte(in)); string(got) != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got, _ := New("date").normalise([]byte("18:44:01 2026-11-29")); string(got) != "18:44:01 <date>" {
		t.Errorf("%q", got)
	}
	if got := New("none such").Compare(done("1s"), done("2s")); got.Verdict != Different {
		t.Errorf("%v", got)
	}
}

func TestDiffIsBounded(t *testing.T) {
	a, b := strings.Repeat("x\n", 5000), strings.Repeat("y\n", 5000)
	d := New().Compare(done(a), done(b)).Diff
	if len(strings.Split(d, "\n")) > diffLines+5 || !strings.Contains(d, "more lines differ") {
		t.Errorf("%d octets: %.200s", len(d), d)
	}
	if d := New().Compare(done("\x1b[31m"+strings.Repeat("z", 5000)), done("")).Diff; len(d) > 400 || strings.Contains(d, "\x1b") {
		t.Errorf("%q", d)
	}
}

func FuzzCompare(f *testing.F) {
	f.Add("10:00:01 a\nb 0.1s\n", "10:00:02 a\nb 0.2s\n", 0)
	f.Add("\xff\x00", "", 3)
	f.Add("pid 1[2", "<time>", 1)
	f.Fuzz(func(t *testing.T, a, b string, code int) {
		c := New()
		if r := c.Compare(done(a), done(a)); r.Verdict != Equal {
			t.Fatalf("a text differs from itself: %v", r)
		}
		x, y := done(a), done(b)
		y.Code = code
		r, back := c.Compare(x, y), c.Compare(y, x)
		if r.Verdict != back.Verdict || !reflect.DeepEqual(r.Normalisers, back.Normalisers) {
			t.Fatalf("%v one way, %v the other", r, back)
		}
		if (r.Verdict == Equal) != (a == b && code == 0) {
			t.Fatalf("%q and %q: %v", a, b, r)
		}
		if r.Verdict == Different && r.Reason == "" || r.Verdict == EqualAfter && len(r.Normalisers) == 0 {
			t.Fatalf("no reason: %v", r)
		}
	})
}
