package keeper

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// cgroups drives the host's control groups, whatever their layout: each controller lies in the v2 tree or in a v1 hierarchy of
// its own. The v2 tree is always needed: birth into a group, kill, freeze and usage live there even without controllers.
//
//	<v2>/dsec-<instance>/{keeper,ls,be}            ls is latency sensitive, be yields: two levels, because weights among
//	<v2>/dsec-<instance>/{ls,be}/<id>/{init,cmd-N}  hundreds of siblings do not bound the tail
//	<v1 controller>/dsec-<instance>/{ls,be}/<id>
//
// Without controllers in v2 process 1 needs no group of its own: it is in <id>, and there is no init but under runtimes.
type cgroups struct {
	name string            // dsec-<instance>
	v2   string            // mount point
	v1   map[string]string // controller -> mount point, of those that are not in v2
	in2  map[string]bool   // controllers in v2
	swap bool              // v1: memory.memsw exists
	// mounts are where all hierarchies are mounted.
	mounts []string
	// ready are the controllers that a sandbox's limits use, on v1, with their mount points.
	limits []string
	// dirs are descriptors of the classes' folders, by class and controller ("" for v2): from there it is half the way to a file of a
	// sandbox. Filled by setup.
	dirs map[classDir]int
	// shown are v1 controllers, with their mount points, that limit nothing but that a JVM wants to see before it believes the others.
	// Those that share a limit's hierarchy are seen there.
	shown map[string]string
}

type classDir struct{ class, ctrl string }

const (
	classLS = "ls"
	classBE = "be"
)

// findCgroups reads the layout from a mountinfo file's text.
func findCgroups(name, mountinfo string) (*cgroups, error) {
	g := &cgroups{name: name, v1: map[string]string{}, in2: map[string]bool{}, shown: map[string]string{}}
	for line := range strings.SplitSeq(mountinfo, "\n") {
		pre, post, ok := strings.Cut(line, " - ")
		a, b := strings.Fields(pre), strings.Fields(post)
		if !ok || len(a) < 5 || len(b) < 3 || a[3] != "/" {
			continue
		}
		if b[0] == "cgroup" || b[0] == "cgroup2" {
			g.mounts = append(g.mounts, a[4])
		}
		switch b[0] {
		case "cgroup2":
			if g.v2 == "" {
				g.v2 = a[4]
			}
		case "cgroup":
			for c := range strings.SplitSeq(b[2], ",") {
				switch c {
				case "memory", "pids", "cpu", "cpuacct", "cpuset":
					g.v1[c] = a[4]
				}
			}
		}
	}
	if g.v2 == "" {
		return nil, fmt.Errorf("cgroup2 is not mounted (mount -t cgroup2 none /sys/fs/cgroup/unified): %w", sandbox.ErrUnsupported)
	}
	have, err := os.ReadFile(filepath.Join(g.v2, "cgroup.controllers"))
	if err != nil {
		return nil, err
	}
	for _, c := range strings.Fields(string(have)) {
		g.in2[c] = true
		delete(g.v1, c)
	}
	for _, c := range []string{"memory", "pids", "cpu"} {
		if !g.in2[c] {
			if g.v1[c] == "" {
				return nil, fmt.Errorf("cgroup controller %s is nowhere: %w", c, sandbox.ErrUnsupported)
			}
			g.limits = append(g.limits, c)
		}
	}
	for _, c := range []string{"cpuset", "cpuacct"} {
		at := g.v1[c]
		if at != "" && !slices.ContainsFunc(g.limits, func(l string) bool { return g.v1[l] == at }) && !g.pure() {
			g.shown[c] = at
		}
	}
	if m := g.v1["memory"]; m != "" {
		_, err := os.Stat(filepath.Join(m, "memory.memsw.limit_in_bytes"))
		g.swap = err == nil
	}
	return g, nil
}

// pure reports whether the limits lie in the v2 tree.
func (g *cgroups) pure() bool { return g.in2["memory"] }

// setup makes the instance's tree and moves this process out of the way.
func (g *cgroups) setup() error {
	top := filepath.Join(g.v2, g.name)
	for _, d := range []string{top, top + "/keeper", top + "/" + classLS, top + "/" + classBE} {
		if err := mkdir(d); err != nil {
			return err
		}
	}
	if err := os.WriteFile(top+"/keeper/cgroup.procs", []byte("0"), 0); err != nil {
		return fmt.Errorf("move into own cgroup: %w", err)
	}
	var on []string
	for _, c := range []string{"cpu", "memory", "pids"} {
		if g.in2[c] {
			on = append(on, "+"+c)
		}
	}
	if len(on) > 0 {
		for _, d := range []string{g.v2, top, top + "/" + classLS, top + "/" + classBE} {
			if err := os.WriteFile(d+"/cgroup.subtree_control", []byte(strings.Join(on, " ")), 0); err != nil {
				return fmt.Errorf("enable %s in %s: %w", strings.Join(on, " "), d, err)
			}
		}
	}
	for _, c := range g.limits {
		for _, d := range []string{"", "/" + classLS, "/" + classBE} {
			if err := mkdir(filepath.Join(g.v1[c], g.name) + d); err != nil {
				return err
			}
		}
	}
	for _, at := range g.shown {
		if err := g.makeShown(at); err != nil {
			return err
		}
	}
	if err := g.openDirs(); err != nil {
		return err
	}
	// The class that yields gets 1/16 of the other's weight, as measured to keep an interactive command's tail at 10 ms.
	if g.in2["cpu"] {
		err := os.WriteFile(top+"/"+classBE+"/cpu.weight", []byte("6"), 0)
		return errors.Join(err, os.WriteFile(top+"/"+classLS+"/cpu.weight", []byte("100"), 0))
	}
	return os.WriteFile(filepath.Join(g.v1["cpu"], g.name, classBE, "cpu.shares"), []byte("64"), 0)
}

func (g *cgroups) openDirs() error {
	g.dirs = map[classDir]int{}
	for _, class := range []string{classLS, classBE} {
		for _, c := range append([]string{""}, g.limits...) {
			at := g.v2
			if c != "" {
				at = g.v1[c]
			}
			fd, err := unix.Open(filepath.Join(at, g.name, class), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("open cgroup %s: %w", class, err)
			}
			g.dirs[classDir{class, c}] = fd
		}
	}
	return nil
}

// makeShown makes the instance's group of a controller that is only shown. All sandboxes are in it (see join); processors and memory
// nodes are the hierarchy's, since a new group of cpuset has none.
func (g *cgroups) makeShown(at string) error {
	dir := filepath.Join(at, g.name)
	if err := mkdir(dir); err != nil {
		return err
	}
	for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
		text, err := os.ReadFile(filepath.Join(at, f))
		if errors.Is(err, os.ErrNotExist) {
			continue // the hierarchy of another controller
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f), bytes.TrimSpace(text), 0)
		}
		if err != nil {
			return fmt.Errorf("set %s: %w", f, err)
		}
	}
	return nil
}

// join puts the parent of all sandboxes into the groups that are only shown, as the root of each cgroup namespace: where what is mounted
// and what /proc/self/cgroup names differ, Java finds no folder and fails when it is asked for its metrics.
func (g *cgroups) join(pid int) error {
	for c, at := range g.shown {
		if err := writeFile(filepath.Join(at, g.name, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("join the group of %s: %w", c, err)
		}
	}
	return nil
}

func mkdir(d string) error {
	if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// group is the groups of one sandbox.
type group struct {
	g     *cgroups
	class string
	id    string
	owner int // host uid of process 1, which puts commands into their groups
	res   sandbox.Resources
	next  int      // number of the next command group
	spare []spare  // empty command groups
	used  []string // names of groups whose command has ended while something in them lives
	epoch int      // counts what take and put have done
	files *kernelFiles
	quiet quiet
	flat  bool // process 1 is in the sandbox's group itself
	// spent are groups that were killed. Since 6.14 a child that is cloned into a group with an earlier kill dies at once: the
	// kernel compares the kill count of the parent's group with that of the new one.
	spent sync.Map

	peakMu sync.Mutex
	peakFD int // memory.peak of v2, whose writer starts a new maximum for himself; 0 before the first try, -1 where it can't be
}

const spareGroups = 4

// spare is an empty command group.
type spare struct {
	name string
	cpu  time.Duration // used in it so far; -1: not known
}

// quiet are figures of the sandbox that were read while nothing but process 1 lived in it. They hold as long as no command was begun
// since, that is, while the epoch is the same: a command need not read them again at its start.
type quiet struct {
	epoch        int
	oom, refused int64
}

func (b *group) v2(sub ...string) string {
	return filepath.Join(append([]string{b.g.v2, b.g.name, b.class, b.id}, sub...)...)
}

func (b *group) v1(ctrl string) string { return filepath.Join(b.g.v1[ctrl], b.g.name, b.class, b.id) }

// at is a path of the sandbox's group of a v1 controller, or of v2 for "", from a descriptor.
func (b *group) at(ctrl string, sub ...string) (dir int, path string) {
	if fd, ok := b.g.dirs[classDir{b.class, ctrl}]; ok {
		path = b.id
		for _, s := range sub {
			path += "/" + s
		}
		return fd, path
	}
	if ctrl != "" {
		return unix.AT_FDCWD, filepath.Join(append([]string{b.v1(ctrl)}, sub...)...)
	}
	return unix.AT_FDCWD, b.v2(sub...)
}

// atOf is at for a file of a controller, wherever that is.
func (b *group) atOf(ctrl string, sub ...string) (dir int, path string) {
	if b.g.in2[ctrl] {
		ctrl = ""
	}
	return b.at(ctrl, sub...)
}

func (b *group) write(value, ctrl string, sub ...string) error {
	dir, path := b.at(ctrl, sub...)
	return writeFileAt(dir, path, value)
}

func (b *group) mkdir(ctrl string, sub ...string) error {
	dir, path := b.at(ctrl, sub...)
	if err := unix.Mkdirat(dir, path, 0o755); err != nil {
		return fmt.Errorf("make cgroup %s: %w", path, err)
	}
	return nil
}

func (b *group) rmdir(ctrl string, sub ...string) error {
	dir, path := b.at(ctrl, sub...)
	return unix.Unlinkat(dir, path, unix.AT_REMOVEDIR)
}

// own lets process 1 clone into a group: to clone into one the kernel wants its and the common parent's cgroup.procs to be writable.
func (b *group) own(sub ...string) error {
	dir, path := b.at("", append(sub, "cgroup.procs")...)
	if err := unix.Fchownat(dir, path, b.owner, b.owner, 0); err != nil {
		return fmt.Errorf("own cgroup %s: %w", path, err)
	}
	return nil
}

// open opens a folder of the v2 tree.
func (b *group) open(sub ...string) (int, error) {
	dir, path := b.at("", sub...)
	fd, err := unix.Openat(dir, path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open cgroup %s: %w", path, err)
	}
	return fd, nil
}

// where is the folder in which a controller's files of the sandbox are.
func (b *group) where(ctrl string) string {
	if b.g.in2[ctrl] {
		return b.v2()
	}
	return b.v1(ctrl)
}

// make creates the groups, with one for a first command, before it is known for whom. The caller removes them with remove, also after an
// error.
func (b *group) make() error {
	if err := b.mkdir(""); err != nil {
		return err
	}
	if !b.flat {
		if err := b.mkdir("", "init"); err != nil {
			return err
		}
	}
	for _, c := range b.g.limits {
		if err := b.mkdir(c); err != nil {
			return err
		}
	}
	if b.g.pure() {
		return nil // see delegate
	}
	return b.mkdir("", commandGroup(0))
}

// cradle is the group in which process 1 is born. Where v2 has the limits, runtimes look for them at the leaf, which they find by what
// /proc/self/cgroup says below what is mounted: so the cgroup namespace is rooted at the sandbox's group, the one that is mounted. (Where
// each command has a namespace rooted at its own group, what is mounted is "/..", and Go's runtime gives up.) Process 1 is born there,
// makes the namespace and moves into its own group. On a hybrid the limits' groups have no leaves, and each command has a namespace of
// its own.
func (b *group) cradle() []string {
	if b.flat || b.g.pure() {
		return nil
	}
	return []string{"init"}
}

// settle makes the groups a sandbox's.
func (b *group) settle() error {
	if err := b.own(); err != nil {
		return err
	}
	if err := b.limit(); err != nil {
		return err
	}
	if b.g.pure() {
		return nil
	}
	return b.first()
}

// delegate lets there be groups of commands, once process 1 has left its cradle: a group whose children have controllers holds no process.
func (b *group) delegate() error {
	if !b.g.pure() {
		return nil
	}
	if err := b.write("+cpu +memory", "", "cgroup.subtree_control"); err != nil {
		return fmt.Errorf("enable controllers for commands: %w", err)
	}
	if err := b.mkdir("", commandGroup(0)); err != nil {
		return err
	}
	return b.first()
}

// first makes the group that waits for the first command the sandbox's.
func (b *group) first() error {
	name := commandGroup(0)
	if err := b.fit(name); err != nil {
		return err
	}
	b.next, b.spare = 1, append(b.spare, spare{name: name})
	return nil
}

// fit makes a command group the sandbox's.
func (b *group) fit(name string) error {
	if err := b.own(name); err != nil {
		return err
	}
	if b.g.pure() { // a JVM and Go read the leaf alone
		err := b.write(strconv.FormatInt(b.res.Memory, 10), "", name, "memory.max")
		if err := errors.Join(err, b.limitCPU(name)); err != nil {
			return fmt.Errorf("limit cgroup %s: %w", name, err)
		}
	}
	return nil
}

func commandGroup(n int) string { return "cmd-" + strconv.Itoa(n) }

func (b *group) limit() error {
	set := func(ctrl, file, value string) error {
		dir, path := b.atOf(ctrl, file)
		if err := writeFileAt(dir, path, value); err != nil {
			return fmt.Errorf("set %s to %s: %w", file, value, err)
		}
		return nil
	}
	mem := strconv.FormatInt(b.res.Memory, 10)
	pids := strconv.FormatInt(b.res.Pids+1, 10) // process 1 is ours
	var errs []error
	if b.g.in2["memory"] {
		errs = append(errs, set("memory", "memory.max", mem), set("memory", "memory.swap.max", "0"))
		if os.IsNotExist(errors.Unwrap(errs[len(errs)-1])) {
			errs = errs[:len(errs)-1] // a kernel without swap
		}
	} else {
		errs = append(errs, set("memory", "memory.limit_in_bytes", mem))
		if b.g.swap {
			errs = append(errs, set("memory", "memory.memsw.limit_in_bytes", mem))
		}
	}
	errs = append(errs, set("pids", "pids.max", pids))
	if b.g.in2["cpu"] {
		errs = append(errs, b.limitCPU())
	} else {
		if w := b.res.CPUWeight; w != 0 && w != 100 {
			errs = append(errs, set("cpu", "cpu.shares", strconv.FormatInt(max(2, w*1024/100), 10)))
		}
		if b.res.CPU > 0 {
			errs = append(errs, set("cpu", "cpu.cfs_quota_us", strconv.FormatInt(b.res.CPU*100, 10)))
		}
	}
	return errors.Join(errs...)
}

func (b *group) limitCPU(sub ...string) error {
	if w := b.res.CPUWeight; w != 0 && w != 100 {
		if err := b.write(strconv.FormatInt(w, 10), "", append(sub, "cpu.weight")...); err != nil {
			return err
		}
	}
	if b.res.CPU > 0 {
		return b.write(strconv.FormatInt(b.res.CPU*100, 10)+" 100000", "", append(sub, "cpu.max")...)
	}
	return nil
}

// attach puts process 1 into the v1 groups; into the v2 group it was born.
func (b *group) attach(pid int) error {
	for _, c := range b.g.limits {
		if err := b.write(strconv.Itoa(pid), c, "cgroup.procs"); err != nil {
			return fmt.Errorf("attach to %s: %w", b.v1(c), err)
		}
	}
	return nil
}

// take returns the name of an empty command group and the time that was used in it, -1 if that is not known. For the holder of box.mu.
func (b *group) take() (name string, cpu time.Duration, err error) {
	for i := 0; len(b.spare) == 0 && i < len(b.used) && i < 2*spareGroups; i++ {
		name := b.used[0]
		b.used = append(b.used[:0:0], b.used[1:]...)
		b.put(name)
	}
	b.epoch++
	if n := len(b.spare); n > 0 {
		g := b.spare[n-1]
		b.spare = b.spare[:n-1]
		return g.name, g.cpu, nil
	}
	name = commandGroup(b.next)
	if err := b.mkdir("", name); err != nil {
		return "", 0, err
	}
	b.next++
	if err := b.fit(name); err != nil {
		b.rmdir("", name)
		return "", 0, err
	}
	return name, 0, nil
}

// put gives a command group back; it is used again once nothing lives in it. For the holder of box.mu.
func (b *group) put(name string) { b.putKnown(name, b.populated(name), -1) }

// putKnown is put for who knows whether something lives in the group and, if nothing does, the time that was used in it.
func (b *group) putKnown(name string, populated bool, cpu time.Duration) {
	b.epoch++
	switch {
	case populated:
		b.used = append(b.used, name)
	case b.isSpent(name) || len(b.spare) >= spareGroups:
		b.files.drop(name)
		if b.rmdir("", name) != nil {
			b.used = append(b.used, name)
		} else {
			b.spent.Delete(name)
		}
	default:
		b.spare = append(b.spare, spare{name, cpu})
	}
}

func (b *group) populated(name string) bool {
	v, _ := b.key(kernelFile{group: name, file: "cgroup.events"}, "populated")
	return v != 0
}

func (b *group) isSpent(name string) bool {
	_, ok := b.spent.Load(name)
	return ok
}

func (b *group) kill(sub ...string) error {
	if len(sub) == 1 {
		b.spent.Store(sub[0], true)
	}
	return b.write("1", "", append(sub, "cgroup.kill")...)
}

// freeze stops or starts a group and waits until it stands still.
func (b *group) freeze(on bool, within time.Duration, sub ...string) error {
	value := "0"
	if on {
		value = "1"
	}
	if err := writeFile(b.v2(append(sub, "cgroup.freeze")...), value); err != nil {
		return fmt.Errorf("freeze %s: %w", b.id, err)
	}
	if !on {
		return nil
	}
	events := b.v2(append(sub, "cgroup.events")...)
	for end, pause := time.Now().Add(within), 50*time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		if v, err := readKey(events, "frozen"); err != nil || v == 1 {
			return err
		}
		if time.Now().After(end) {
			writeFile(b.v2(append(sub, "cgroup.freeze")...), "0")
			return fmt.Errorf("freeze %s: not all stand still after %v (a read from a store may be under way): %w", b.id, within, sandbox.ErrState)
		}
		time.Sleep(pause)
	}
}

// names are the groups within the sandbox's. For the holder of box.mu.
func (b *group) names() []string {
	n := slices.Clone(b.used)
	if !b.flat {
		n = append(n, "init")
	}
	if b.next == 0 {
		n = append(n, commandGroup(0)) // of a birth that did not come so far
	}
	for _, s := range b.spare {
		n = append(n, s.name)
	}
	return n
}

// remove removes all groups of the sandbox, names first; everything in them was killed before. It retries while the kernel still counts the dying.
func (b *group) remove(names []string, within time.Duration) error {
	b.closePeak()
	end := time.Now().Add(within)
	for _, c := range b.g.limits {
		if err := b.rmdir(c); err == nil || err == unix.ENOENT {
			continue
		}
		if err := rmdirRetry(b.v1(c), end); err != nil {
			return err
		}
	}
	// The names are known; what else there may be (a sandbox can make no group) is looked for only when the first try fails.
	for _, name := range names {
		b.rmdir("", name)
	}
	if err := b.rmdir(""); err == nil || err == unix.ENOENT {
		return nil
	}
	return rmTree(b.v2(), end)
}

// rmTree removes a group and its children, depth first.
func rmTree(dir string, end time.Time) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := rmTree(filepath.Join(dir, e.Name()), end); err != nil {
				return err
			}
		}
	}
	return rmdirRetry(dir, end)
}

func rmdirRetry(dir string, end time.Time) error {
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := unix.Rmdir(dir)
		switch {
		case err == nil || err == unix.ENOENT:
			return nil
		case err != unix.EBUSY && err != unix.EINTR || time.Now().After(end):
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(pause)
	}
}

// oomKills is the kernel's count of processes killed for the sandbox's memory limit.
func (b *group) oomKills() int64 {
	file := "memory.oom_control"
	if b.g.in2["memory"] {
		file = "memory.events"
	}
	v, _ := b.key(kernelFile{ctrl: "memory", file: file}, "oom_kill")
	return v
}

// forksRefused is the kernel's count of forks refused by the process limit.
func (b *group) forksRefused() int64 {
	v, _ := b.key(kernelFile{ctrl: "pids", file: "pids.events"}, "max")
	return v
}

// resetPeak starts a new maximum of the sandbox's memory for stepPeak, where the kernel can: v1, and v2 from 6.12 on.
func (b *group) resetPeak() bool {
	if !b.g.in2["memory"] {
		return b.with(peakV1, func(fd int) error {
			_, err := unix.Pwrite(fd, []byte("0"), 0)
			return err
		}) == nil
	}
	b.peakMu.Lock()
	defer b.peakMu.Unlock()
	if b.peakFD == 0 {
		b.peakFD = -1
		if fd, err := unix.Open(b.v2("memory.peak"), unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
			b.peakFD = fd
		}
	}
	if b.peakFD < 0 {
		return false
	}
	if _, err := unix.Write(b.peakFD, []byte("reset\n")); err != nil {
		unix.Close(b.peakFD)
		b.peakFD = -1
		return false
	}
	return true
}

// stepPeak is the maximum since resetPeak, if that did anything, else since the birth; -1 when it can't be read.
func (b *group) stepPeak() int64 {
	b.peakMu.Lock()
	defer b.peakMu.Unlock()
	if b.peakFD <= 0 {
		return b.peak()
	}
	var buf [32]byte
	n, err := unix.Pread(b.peakFD, buf[:], 0)
	if err != nil {
		return -1
	}
	v, err := strconv.ParseInt(string(bytes.TrimSpace(buf[:n])), 10, 64)
	if err != nil {
		return -1
	}
	return v
}

func (b *group) closePeak() {
	b.peakMu.Lock()
	defer b.peakMu.Unlock()
	if b.peakFD > 0 {
		unix.Close(b.peakFD)
	}
	b.peakFD = -1
}

var peakV1 = kernelFile{ctrl: "memory", file: "memory.max_usage_in_bytes"}

// peak is the maximum since the birth on v2, since the last reset on v1.
func (b *group) peak() int64 {
	k := peakV1
	if b.g.in2["memory"] {
		k.file = "memory.peak"
	}
	var buf [64]byte
	text, err := b.pread(k, buf[:])
	if err != nil {
		return -1
	}
	v, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	if err != nil {
		return -1
	}
	return v
}

// cpu is the time used by a command group since it was made.
func (b *group) cpu(name string) time.Duration {
	v, _ := b.key(kernelFile{group: name, file: "cpu.stat"}, "usage_usec")
	return time.Duration(v) * time.Microsecond
}

// allCPU is the time used by the sandbox.
func (b *group) allCPU() time.Duration {
	v, _ := readKey(b.v2("cpu.stat"), "usage_usec")
	return time.Duration(v) * time.Microsecond
}

func (b *group) stats() sandbox.Stats {
	s := sandbox.Stats{MemoryPeak: b.peak(), CPU: b.allCPU(), Disk: -1, OOMKills: b.oomKills()}
	file := "memory.usage_in_bytes"
	if b.g.in2["memory"] {
		file = "memory.current"
	}
	s.Memory, _ = readNumber(filepath.Join(b.where("memory"), file))
	s.Pids, _ = readNumber(filepath.Join(b.where("pids"), "pids.current"))
	s.Pids = max(0, s.Pids-1)
	return s
}

// Small files of the kernel are read and written without the poller and without a finalizer: this is the hot path.
