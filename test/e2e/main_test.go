// Package e2e runs the real binary on the real kernel: `dsec up`, and hosts and gateways as separate processes, with sandboxes made
// through the Go SDK, plain HTTP and the command line. A test named TestBnn holds a case of the list of faults that users of such
// systems reported.
//
// Tests share one `dsec up` unless they kill it or need other settings. Every service has a range of uids of its own, so that what is
// left of it can be counted exactly; the shared one is checked when all tests are over. It needs root.
//
// DSEC_E2E_BIN takes a binary that is built already, DSEC_E2E_CACHE the folder for the Debian tree (default: bin/e2e of the source),
// DSEC_SEED the seed of what is random, DSEC_TORTURE=1 runs the long forms.
package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// What the whole run uses; set before any test runs and not changed.
var (
	binary  string // the program under test
	scratch string // folder of this run, on a disk
	torture = os.Getenv("DSEC_TORTURE") != ""
	seed    = uint64(time.Now().UnixNano())
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("e2e: needs root; all tests skip")
		return m.Run()
	}
	if s := os.Getenv("DSEC_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			fmt.Println("DSEC_SEED:", err)
			return 2
		}
		seed = n
	}
	sweepRuns()
	var err error
	// /tmp may be a memory file system; pools are real disks.
	if scratch, err = os.MkdirTemp("/var/tmp", "dsec-e2e-"); err != nil {
		fmt.Println(err)
		return 2
	}
	defer os.RemoveAll(scratch)
	if err := lockRun(scratch); err != nil {
		fmt.Println(err)
		return 2
	}
	if binary, err = build(); err != nil {
		fmt.Println("build:", err)
		return 2
	}
	code := m.Run()
	if err := sharedEnd(); err != nil {
		fmt.Println("FAIL: the shared service at its end:", err)
		return 1
	}
	return code
}

func repository() string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return dir
}

func build() (string, error) {
	if b := os.Getenv("DSEC_E2E_BIN"); b != "" {
		return filepath.Abs(b)
	}
	out := filepath.Join(scratch, "dsec")
	for _, args := range [][]string{{"make", "-s", "guest"}, {"go", "build", "-o", out, "./cmd/dsec"}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = repository()
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", args, err, b)
		}
	}
	return out, nil
}

// random is a source that a test's name and the run's seed fix; it prints the seed when the test fails.
func random(t testing.TB) *rand.Rand {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed: DSEC_SEED=%d", seed)
		}
	})
	sum := sha256.Sum256([]byte(t.Name()))
	return rand.New(rand.NewPCG(seed, uint64(sum[0])<<8|uint64(sum[1])))
}

// debianPackages are what the cases that need a real distribution use.
var debianPackages = []string{"bash", "python3", "sudo", "libcap2-bin", "iputils-ping", "procps", "ncurses-bin", "strace", "gdb"}

// debianTar makes the tree once and keeps it for later runs: it takes most of a minute.
var debianTar = sync.OnceValues(func() (string, error) {
	dir := os.Getenv("DSEC_E2E_CACHE")
	if dir == "" {
		dir = filepath.Join(repository(), "bin", "e2e")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(strings.Join(debianPackages, ",")))
	file := filepath.Join(dir, fmt.Sprintf("debian-%x.tar", sum[:6]))
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	bin, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return "", errors.New("mmdebstrap is not installed (make deps installs it)")
	}
	args := []string{"--variant=minbase", "--format=tar", "--skip=output/dev", "--quiet", "--include=" + strings.Join(debianPackages, ","),
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		"--customize-hook=echo 'alice:x:1000:1000::/home/alice:/bin/bash' >> \"$1/etc/passwd\"",
		"--customize-hook=echo 'alice:x:1000:' >> \"$1/etc/group\"; echo 'alice:*:19000:0:99999:7:::' >> \"$1/etc/shadow\"",
		"--customize-hook=mkdir -p \"$1/home/alice\"; chown 1000:1000 \"$1/home/alice\"",
		"--customize-hook=echo 'alice ALL=(ALL) NOPASSWD: ALL' > \"$1/etc/sudoers.d/alice\"; chmod 0440 \"$1/etc/sudoers.d/alice\"",
		// su asks alice for a password unless PAM is told that this image trusts her.
		"--customize-hook=sed -i '1i auth sufficient pam_permit.so' \"$1/etc/pam.d/su\"",
		"bookworm", file + ".new"}
	if b, err := os.ReadFile("/etc/apt/sources.list"); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		args = append(args, "/etc/apt/sources.list")
	}
	cmd := exec.Command(bin, args...)
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mmdebstrap: %w\n%s", err, b)
	}
	return file, os.Rename(file+".new", file)
})

// busybox finds a static busybox.
func busybox() (string, error) {
	for _, p := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if out, err := exec.Command(p, "--list").Output(); err == nil && len(out) > 0 {
			return p, nil
		}
	}
	return "", errors.New("no static busybox (package busybox-static; make deps installs it)")
}
