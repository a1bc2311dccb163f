package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// The command line, as scripts: testdata/cli. `dsec` is the program under test with the address of the shared service in its environment;
// `field` prints a field of a JSON answer into a variable.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	s := shared(t)
	layer := s.small(t)
	must(t, os.MkdirAll(filepath.Join(scratch, "path"), 0o755))
	must(t, os.Symlink(binary, filepath.Join(scratch, "path", "dsec")))
	testscript.Run(t, testscript.Params{
		Dir: "testdata/cli",
		Setup: func(e *testscript.Env) error {
			e.Setenv("DSEC_URL", "unix:"+s.socket())
			e.Setenv("DSEC_KEY_FILE", filepath.Join(s.run, "key"))
			e.Setenv("LAYER", layer)
			e.Setenv("UNIQUE", "cli-"+strings.TrimPrefix(filepath.Base(e.WorkDir), "script-"))
			e.Setenv("PATH", filepath.Join(scratch, "path")+":"+os.Getenv("PATH"))
			e.Defer(func() {
				cmd := s.dsec("stop", "-l", "script="+e.Getenv("UNIQUE"))
				if b, err := cmd.CombinedOutput(); err != nil {
					t.Logf("stop: %v %s", err, b)
				}
			})
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			// code N command...: the exit code must be N.
			"code": func(ts *testscript.TestScript, neg bool, args []string) {
				err := ts.Exec(args[1], args[2:]...)
				got := 0
				if err != nil {
					got = -1
					if x, ok := err.(*exec.ExitError); ok {
						got = x.ExitCode()
					}
				}
				if fmt.Sprint(got) != args[0] {
					ts.Fatalf("exit code %d, want %s", got, args[0])
				}
			},
			// json: what was printed is JSON, one value a line or one in all.
			"json": func(ts *testscript.TestScript, neg bool, args []string) {
				in := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
				for n := 0; ; n++ {
					var v any
					if err := in.Decode(&v); err == io.EOF && n > 0 {
						return
					} else if err != nil {
						ts.Fatalf("value %d is not JSON: %v", n+1, err)
					}
				}
			},
			// setenv NAME file: the file's text without the last newline.
			"setenv": func(ts *testscript.TestScript, neg bool, args []string) {
				ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile(args[1])))
			},
			// field NAME path: a field of the JSON in stdout, as in 0.id or outcome.kind.
			"field": func(ts *testscript.TestScript, neg bool, args []string) {
				var v any
				if err := json.Unmarshal([]byte(strings.SplitN(ts.ReadFile("stdout"), "\n", 2)[0]), &v); err != nil {
					ts.Fatalf("not JSON: %v", err)
				}
				for _, k := range strings.Split(args[1], ".") {
					switch x := v.(type) {
					case map[string]any:
						v = x[k]
					case []any:
						var i int
						if _, err := fmt.Sscan(k, &i); err != nil || i >= len(x) {
							ts.Fatalf("%s: no entry %s", args[1], k)
						}
						v = x[i]
					}
				}
				ts.Setenv(args[0], fmt.Sprint(v))
			},
		},
	})
}
