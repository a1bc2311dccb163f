package main

import (
	"os"
	"strings"
	"testing"
)

func TestAFileIsNoReference(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, dir := range []string{"python", "layout"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"app.tar", "alpine", "Upper"} {
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	wd, _ := os.Getwd()
	for _, c := range []struct {
		ref    string
		parses bool
		want   string
	}{
		{"python", true, ""}, {"alpine", true, ""}, {"nosuch.tar", true, ""}, {"./nosuch", false, ""},
		{"app.tar", true, "docker-archive:app.tar"}, {"./alpine", false, "docker-archive:./alpine"}, {"Upper", false, "docker-archive:Upper"},
		{wd + "/app.tar", false, "docker-archive:" + wd + "/app.tar"}, {wd + "/layout", true, "oci:" + wd + "/layout"}, {"./layout", false, "oci:./layout"},
	} {
		err := fileNotRef(c.ref, c.parses)
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q in it", c.ref, err, c.want)
		}
	}
}
