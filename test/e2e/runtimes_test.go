package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/client"
)

// jdk finds a JDK, the one of DSEC_E2E_JDK where that is set, and a folder that has all its files.
func jdk(t *testing.T) string {
	found, _ := filepath.Glob("/usr/lib/jvm/*/lib/jvm.cfg")
	if d := os.Getenv("DSEC_E2E_JDK"); d != "" {
		found = []string{d + "/lib/jvm.cfg"}
	}
	for _, f := range found {
		if st, err := os.Lstat(f); err == nil && st.Mode().IsRegular() {
			if _, err := os.Stat(filepath.Join(f, "../../bin/java")); err == nil {
				return filepath.Join(f, "../..")
			}
		}
	}
	// Debian's keeps its settings in /etc: a copy without links.
	for _, f := range found {
		from, to := filepath.Join(f, "../.."), filepath.Join(ownDir(t), "jdk")
		if err := os.Mkdir(to, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sh", "-c", `cp -rL "$0/bin" "$0/lib" "$0/conf" "$1/" 2>/dev/null; rm -f "$1/lib/src.zip" "$1/lib/ct.sym"; [ -e "$1/lib/jvm.cfg" ]`, from, to)
		if cmd.Run() == nil {
			return to
		}
	}
	t.Skip("skip: no JDK below /usr/lib/jvm")
	return ""
}

// A runtime sizes its heap and its threads by the sandbox's limits, not by the machine.
func TestRuntimesSeeTheLimits(t *testing.T) {
	t.Parallel()
	s := shared(t)
	limits := func(cpu float64) func(*client.Options) {
		return func(o *client.Options) { o.Memory, o.CPU = 1<<30, cpu }
	}
	number := func(t *testing.T, text, pattern string) int64 {
		t.Helper()
		m := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("no %s in %.2000s", pattern, text)
		}
		n, err := strconv.ParseInt(m[1], 10, 64)
		must(t, err)
		return n
	}
	t.Run("java", func(t *testing.T) {
		home := jdk(t)
		if b, err := s.dsec("layer", "build", "kit/java", "--dir", home, "--at", "/opt/java").CombinedOutput(); err != nil {
			t.Fatalf("layer build: %v\n%s", err, b)
		}
		for _, cpu := range []float64{0, 1} {
			sb := s.debianBox(t, func(o *client.Options) { o.Layers = []string{s.debian(t), "kit/java"} }, limits(cpu))
			for _, user := range []string{"root", "alice"} {
				r := exe(t, sb, client.Cmd{User: user, Argv: []string{"/opt/java/bin/java", "-XX:+PrintFlagsFinal", "-Xlog:os+container=info", "-XshowSettings:system", "-version"}})
				text := string(r.Stdout) + string(r.Stderr)
				if !r.OK() {
					t.Fatalf("%s", text)
				}
				heap := number(t, text, `MaxHeapSize\s+= (\d+)`)
				if heap < 200<<20 || heap > 300<<20 {
					t.Errorf("as %s: a heap of %d MiB in 1 GiB, want a quarter\n%s", user, heap>>20, text[:min(len(text), 1500)])
				}
				processors := number(t, text, `Effective CPU Count: (\d+)`)
				if cpu == 1 && processors != 1 {
					t.Errorf("as %s: %d processors with a limit of 1", user, processors)
				}
				t.Logf("as %s with %v CPU: heap %d MiB, %d processors", user, cpu, heap>>20, processors)
			}
		}
	})
	t.Run("node", func(t *testing.T) {
		node, err := exec.LookPath("node")
		if err != nil {
			t.Skip("skip: no node on this machine")
		}
		libs, err := exec.Command("sh", "-c", `ldd "$0" | awk '$3 ~ "^/" {print $3}'`, node).Output()
		must(t, err)
		s.named(t, "kit/node", func() (io.ReadCloser, error) {
			list := map[string]string{}
			for _, f := range append(strings.Fields(string(libs)), node) {
				b, err := os.ReadFile(f)
				if err != nil {
					return nil, err
				}
				list["opt/node/"+filepath.Base(f)] = string(b)
			}
			data := treeOf(list)
			return io.NopCloser(strings.NewReader(string(data))), nil
		})
		sb := s.debianBox(t, func(o *client.Options) { o.Layers = []string{s.debian(t), "kit/node"} }, limits(1))
		r := exe(t, sb, client.Cmd{Argv: []string{"sh", "-c", `chmod +x /opt/node/node; LD_LIBRARY_PATH=/opt/node /opt/node/node -e '
console.log("processors", require("os").availableParallelism(), "constrained", process.constrainedMemory() / 1048576 | 0, "heap", require("v8").getHeapStatistics().heap_size_limit / 1048576 | 0, process.version)'`}})
		if !r.OK() {
			t.Fatalf("%s", describe(r))
		}
		t.Logf("%s", r.Stdout)
		if n := number(t, string(r.Stdout), `heap (\d+)`); n > 1024 {
			t.Errorf("a heap of %d MiB in 1 GiB", n)
		}
		if n := number(t, string(r.Stdout), `constrained (\d+)`); n != 1024 {
			t.Errorf("node sees a limit of %d MiB", n)
		}
	})
	t.Run("go", func(t *testing.T) {
		for _, c := range []struct {
			cpu  float64
			want []string
		}{{1, []string{"1", "2"}}, {0, nil}} { // Go takes at least 2 where there are
			sb := s.attackBox(t, limits(c.cpu))
			got := strings.TrimSpace(string(exe(t, sb, client.Cmd{Argv: []string{"/opt/attack", "cpus"}}).Stdout))
			if c.want != nil && !strings.Contains(fmt.Sprint(c.want), got) || got == "" {
				t.Errorf("GOMAXPROCS %q with %v CPU", got, c.cpu)
			}
			t.Logf("GOMAXPROCS %s with %v CPU", got, c.cpu)
		}
	})
}
