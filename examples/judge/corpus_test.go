package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func TestHeader(t *testing.T) {
	for _, c := range []struct {
		name, code, action string
		here               bool
	}{
		{"plain", "// run\n\npackage main\n", "run", true},
		{"behind a constraint", "//go:build !js\n// +build !js\n\n// run\n\npackage main\n", "run", true},
		{"a constraint behind it", "// run\n\n//go:build cgo\n\npackage main\n", "run", false},
		{"of another machine", "//go:build aix\n// run\n\npackage main\n", "run", false},
		{"with flags", "// run -race\n\npackage main\n", "run -race", true},
		{"words in a comment", "// errorcheck\n// run\n\npackage main\n", "errorcheck", true},
		{"none", "package main\n// run\n", "package main", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			action, when := header([]byte(c.code))
			if here := when == nil || when.Eval(built); action != c.action || here != c.here {
				t.Errorf("%q, here %v", action, here)
			}
		})
	}
}

func TestCollect(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	reasons, err := parseSkips(skips)
	if err != nil {
		t.Fatal(err)
	}
	for p := range reasons {
		write(p, "// run\npackage main\n")
	}
	write("a.go", "// run\npackage main\n")
	write("a.out", "hello\n")
	write("b.dir/main.go", "// run\npackage main\n")
	write("c.go", "// compile\npackage main\n")
	all, skipped, err := collect(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1 || all[0].path != "a.go" || string(all[0].want) != "hello\n" || len(skipped) != len(reasons)+1 {
		t.Errorf("%d programs, %d left out", len(all), len(skipped))
	}
	if err := os.Remove(filepath.Join(dir, "linkobj.go")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := collect(dir); err == nil {
		t.Error("a skip of a program that is not there went unnoticed")
	}
}

func TestSample(t *testing.T) {
	var all []*program
	for i := range 300 {
		p := &program{path: string(rune('a'+i%26)) + string(rune('a'+i/26)) + ".go"}
		if i%10 == 0 {
			p.want = []byte("x")
		}
		all = append(all, p)
	}
	got := sample(all, 60)
	golden := 0
	for _, p := range got {
		if len(p.want) > 0 {
			golden++
		}
	}
	if len(got) != 60 || golden != 20 || !cmp.Equal(got, sample(all, 60), cmp.AllowUnexported(program{})) {
		t.Errorf("%d programs, %d golden", len(got), golden)
	}
}

func TestVerdict(t *testing.T) {
	res := func(v string, code, sig int32, out string) *client.CallAnswer {
		return &client.CallAnswer{Verdict: v, Result: &client.CallResult{CallResult: &dsecv1.CallResult{Verdict: v, Code: code, Signal: sig}, Stdout: []byte(out)}}
	}
	for _, c := range []struct {
		r    *client.CallAnswer
		want string
		says string
	}{
		{res("OK", 0, 0, "a\n"), "a\n", "OK"},
		{res("OK", 0, 0, "a\n"), string(changed([]byte("a\n"))), "WA"},
		{res("OK", 0, 0, ""), string(changed(nil)), "WA"},
		{res("OK", 0, 0, "b"), "", "WA"},
		{res("RE", 3, 0, ""), "", "RE(3)"},
		{res("SIG", 139, 11, ""), "", "SIG(11)"},
		{&client.CallAnswer{Verdict: "CE", Compile: &client.CallResult{CallResult: &dsecv1.CallResult{}, Stderr: []byte("no")}}, "", "CE no"},
	} {
		if got := verdict(c.r, []byte(c.want)); got != c.says {
			t.Errorf("got %q, want %q", got, c.says)
		}
	}
}
