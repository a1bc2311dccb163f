package measure

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// GroupRoot is where the version 2 hierarchy of control groups is mounted; it counts CPU time also where it has no controllers.
func GroupRoot() (string, error) {
	for _, p := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(p, &st) == nil && uint32(st.Type) == unix.CGROUP2_SUPER_MAGIC {
			return p, nil
		}
	}
	return "", errors.New("no cgroup2 is mounted at /sys/fs/cgroup or /sys/fs/cgroup/unified")
}

// Group is a control group that a candidate's processes are counted in, also those that have ended.
type Group struct{ Path string }

// NewGroup makes a group "dsec-bench-NAME-PID-N", another each time: a process that runs two servers counts each for itself.
func NewGroup(name string) (*Group, error) {
	root, err := GroupRoot()
	if err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(root, fmt.Sprintf("dsec-bench-%s-%d-", name, os.Getpid()))
	if err != nil {
		return nil, err
	}
	return &Group{path}, nil
}

// Open returns the group's folder, for SysProcAttr.CgroupFD.
func (g *Group) Open() (*os.File, error) { return os.Open(g.Path) }

// CPU is the time used by all that was ever in the group or below it.
func (g *Group) CPU() (time.Duration, error) {
	b, err := os.ReadFile(filepath.Join(g.Path, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "usage_usec "); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
			return time.Duration(n) * time.Microsecond, err
		}
	}
	return 0, fmt.Errorf("%s/cpu.stat: no usage_usec", g.Path)
}

// Pids are the processes in the group and below it.
func (g *Group) Pids() []int {
	var pids []int
	filepath.WalkDir(g.Path, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		b, _ := os.ReadFile(filepath.Join(p, "cgroup.procs"))
		for _, f := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
		return nil
	})
	return pids
}

// Remove kills what is left in the group and removes it.
func (g *Group) Remove() error { return RemoveGroups(g.Path) }

// RemoveGroups kills what is in a group and below, in any hierarchy, and removes all of it. Nothing there is no error.
func RemoveGroups(path string) error {
	os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0o200)
	var err error
	for range 100 {
		var dirs []string
		filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, p)
			}
			return nil
		})
		err = nil
		for i := len(dirs) - 1; i >= 0; i-- {
			if e := unix.Rmdir(dirs[i]); e != nil && e != unix.ENOENT {
				err = fmt.Errorf("remove group %s: %w", dirs[i], e)
			}
		}
		if err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}
