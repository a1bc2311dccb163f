package warden

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// groups are the cgroups of the monitors: <v2>/<name>/<id>, with the limits there where v2 has the controllers, else beside in v1.
type groups struct {
	name string
	v2   string
	in2  map[string]bool
	v1   map[string]string // controller -> mount point

	mu    sync.Mutex
	stale map[string]bool // monitors whose groups the kernel still holds
}

var controllers = []string{"memory", "pids", "cpu"}

func findGroups(name string) (*groups, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	g := &groups{name: name, in2: map[string]bool{}, v1: map[string]string{}, stale: map[string]bool{}}
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		a, b := strings.Fields(before), strings.Fields(after)
		if len(a) < 5 || len(b) < 3 || a[3] != "/" {
			continue
		}
		switch b[0] {
		case "cgroup2":
			if g.v2 == "" {
				g.v2 = a[4]
			}
		case "cgroup":
			for c := range strings.SplitSeq(b[2], ",") {
				if slices.Contains(controllers, c) {
					g.v1[c] = a[4]
				}
			}
		}
	}
	if g.v2 == "" {
		return nil, fmt.Errorf("cgroup2 is not mounted: %w", sandbox.ErrUnsupported)
	}
	have, err := os.ReadFile(filepath.Join(g.v2, "cgroup.controllers"))
	if err != nil {
		return nil, err
	}
	for _, c := range strings.Fields(string(have)) {
		g.in2[c] = true
		delete(g.v1, c)
	}
	return g, nil
}

func mkdir(p string) error {
	if err := os.Mkdir(p, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (g *groups) setup() error {
	top := filepath.Join(g.v2, g.name)
	if err := mkdir(top); err != nil {
		return err
	}
	var on []string
	for _, c := range controllers {
		if g.in2[c] {
			on = append(on, "+"+c)
		}
	}
	if len(on) > 0 {
		for _, d := range []string{g.v2, top} {
			if err := os.WriteFile(d+"/cgroup.subtree_control", []byte(strings.Join(on, " ")), 0); err != nil {
				return fmt.Errorf("enable %s in %s: %w", strings.Join(on, " "), d, err)
			}
		}
	}
	for _, at := range g.v1 {
		if err := mkdir(filepath.Join(at, g.name)); err != nil {
			return err
		}
	}
	return nil
}

func (g *groups) dir(ctrl, id string) string {
	if g.in2[ctrl] || ctrl == "" {
		return filepath.Join(g.v2, g.name, id)
	}
	return filepath.Join(g.v1[ctrl], g.name, id)
}

// make makes the groups of a monitor and returns the one that it is born into.
func (g *groups) make(p *Process) (*os.File, error) {
	g.mu.Lock()
	delete(g.stale, p.ID) // from here on they are this one's
	g.mu.Unlock()
	if err := os.Mkdir(g.dir("", p.ID), 0o755); err != nil {
		return nil, fmt.Errorf("make its cgroup: %w", err)
	}
	for _, at := range g.v1 {
		if err := mkdir(filepath.Join(at, g.name, p.ID)); err != nil {
			return nil, fmt.Errorf("make its cgroup: %w", err)
		}
	}
	set := func(ctrl, file2, file1, value string) error {
		if _, ok := g.v1[ctrl]; !g.in2[ctrl] && !ok {
			return nil
		}
		file := file1
		if g.in2[ctrl] {
			file = file2
		}
		if err := os.WriteFile(filepath.Join(g.dir(ctrl, p.ID), file), []byte(value), 0); err != nil {
			return fmt.Errorf("set %s of its cgroup: %w", file, err)
		}
		return nil
	}
	var errs []error
	if p.Memory > 0 {
		errs = append(errs, set("memory", "memory.max", "memory.limit_in_bytes", strconv.FormatInt(p.Memory, 10)))
	}
	if p.Pids > 0 {
		errs = append(errs, set("pids", "pids.max", "pids.max", strconv.FormatInt(p.Pids, 10)))
	}
	if p.CPU > 0 {
		const period = 100000
		quota := strconv.FormatInt(max(1000, p.CPU*period/1000), 10)
		if g.in2["cpu"] {
			errs = append(errs, set("cpu", "cpu.max", "", quota+" "+strconv.Itoa(period)))
		} else {
			errs = append(errs, set("cpu", "", "cpu.cfs_period_us", strconv.Itoa(period)), set("cpu", "", "cpu.cfs_quota_us", quota))
		}
	}
	if p.Weight > 0 {
		shares := max(2, p.Weight*1024/100)
		errs = append(errs, set("cpu", "cpu.weight", "cpu.shares", strconv.FormatInt(map[bool]int64{true: p.Weight, false: shares}[g.in2["cpu"]], 10)))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return os.Open(g.dir("", p.ID))
}

// join moves a monitor that has just been started into the groups of v1; it was born into that of v2.
func (g *groups) join(id string, pid int) error {
	for c := range g.v1 {
		err := os.WriteFile(filepath.Join(g.dir(c, id), "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("join the cgroup of %s: %w", c, err)
		}
	}
	return nil
}

// removeOf kills what is left in a monitor's groups and removes them. What a busy kernel holds for longer than anybody should wait goes when
// it lets go.
func (g *groups) removeOf(id string) {
	os.WriteFile(filepath.Join(g.dir("", id), "cgroup.kill"), []byte("1"), 0)
	for end := time.Now().Add(removeBound); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if g.rmdir(id) {
			return
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.stale[id] {
		g.stale[id] = true
		go g.removeLater(id)
	}
}

// removeBound is how long the end of a monitor waits for its groups.
var removeBound = 10 * time.Second

func (g *groups) removeLater(id string) {
	for gone := false; !gone; {
		time.Sleep(removeBound / 10)
		g.mu.Lock()
		if gone = !g.stale[id] || g.rmdir(id); gone {
			delete(g.stale, id)
		}
		g.mu.Unlock()
	}
}

// rmdir says whether a monitor has no groups any more.
func (g *groups) rmdir(id string) (gone bool) {
	gone = true
	for _, d := range g.dirs(id) {
		if err := os.Remove(d); err != nil && !errors.Is(err, os.ErrNotExist) {
			gone = false
		}
	}
	return gone
}

func (g *groups) dirs(id string) []string {
	out := []string{g.dir("", id)}
	for c := range g.v1 {
		out = append(out, g.dir(c, id))
	}
	return out
}

// sweep removes what an earlier warden left.
func (g *groups) sweep() error {
	list, err := os.ReadDir(filepath.Join(g.v2, g.name))
	if errors.Is(err, os.ErrNotExist) {
		return g.remove()
	}
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.IsDir() {
			g.removeOf(e.Name())
		}
	}
	return g.remove()
}

// remove removes the instance's own groups.
func (g *groups) remove() error {
	for _, d := range g.dirs("") {
		list, _ := os.ReadDir(d)
		for _, e := range list {
			if e.IsDir() {
				os.Remove(filepath.Join(d, e.Name()))
			}
		}
		if err := os.Remove(d); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove cgroup: %w", err)
		}
	}
	return nil
}
