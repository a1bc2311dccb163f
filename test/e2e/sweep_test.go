package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"
)

// lockRun marks the run's folder as in use for as long as this process lives.
func lockRun(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	runLock = f
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
}

var runLock *os.File // held, not used

// sweepRuns ends what a run that was killed left on the machine: a panic of a test skips every cleanup.
func sweepRuns() {
	dirs, _ := filepath.Glob("/var/tmp/dsec-e2e-*")
	for _, dir := range dirs {
		f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			continue
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			sweepRun(dir)
		}
		f.Close()
	}
}

func sweepRun(dir string) {
	// The services before their keepers, which they would start again.
	for _, keepers := range []bool{false, true} {
		for _, p := range processes() {
			if strings.Contains(p.args, dir+"/") && strings.Contains(p.args, " keeper ") == keepers {
				_ = syscall.Kill(p.pid, syscall.SIGKILL)
			}
		}
		time.Sleep(200 * time.Millisecond)
	}
	states, _ := filepath.Glob(dir + "/*/state")
	deeper, _ := filepath.Glob(dir + "/*/*/state")
	for _, state := range append(states, deeper...) {
		s := &service{state: state}
		i := s.instance()
		if i == "" {
			continue
		}
		for _, pattern := range []string{"/sys/fs/cgroup/dsec-", "/sys/fs/cgroup/*/dsec-"} {
			tops, _ := filepath.Glob(pattern + i)
			for _, top := range tops {
				var groups []string
				_ = filepath.WalkDir(top, func(p string, d os.DirEntry, err error) error {
					if err == nil && d.IsDir() {
						groups = append(groups, p)
					}
					return nil
				})
				_ = os.WriteFile(top+"/cgroup.kill", []byte("1"), 0)
				time.Sleep(200 * time.Millisecond)
				sort.Sort(sort.Reverse(sort.StringSlice(groups)))
				for _, g := range groups {
					_ = os.Remove(g)
				}
			}
		}
		_ = exec.Command("nft", "delete", "table", "inet", "dsec_"+i).Run()
	}
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			_ = syscall.Unmount(f[4], syscall.MNT_DETACH)
		}
	}
	_ = os.RemoveAll(dir)
}
