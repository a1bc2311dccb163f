package keeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// A birth by an OCI runtime. The root and what else a sandbox has is composed as for any birth, laid into a bundle in a mount namespace that
// lives as long as the runtime's own start, and the runtime is executed there, in the sandbox's groups. It is told to detach: process 1
// becomes the keeper's child, since the keeper is a subreaper, and everything after its BIRTH is as for a process 1 that the keeper
// cloned. Where the kernel inside is not the host's (inner), three things differ: groups of commands are made by process 1 in a tree
// of that kernel's (GROUP), terminals are carried by it (START flag relay), and descriptors only go in.

const (
	bundles      = "oci" // in the run folder
	bundleMark   = "@BUNDLE@"
	startBound   = 25 * time.Second
	orphanEvery  = 2 * time.Second
	maxConfig    = 1 << 20
	innerReserve = 64 << 20 // octets that the runtime's own kernel may use beyond the sandbox's limit
	innerTasks   = 1024     // and tasks; it also has up to four for each of the sandbox's
)

func checkRuntime(r *Runtime) error {
	switch {
	case r.Kind != RuntimeCrun && r.Kind != RuntimeRunc && r.Kind != RuntimeRunsc:
		return fmt.Errorf("runtime %.40q: want crun, runc or runsc: %w", r.Kind, sandbox.ErrUnsupported)
	case !filepath.IsAbs(r.Program):
		return fmt.Errorf("runtime %s: program %.200q: want an absolute path: %w", r.Kind, r.Program, sandbox.ErrInvalid)
	case len(r.Config) == 0 || len(r.Config) > maxConfig:
		return fmt.Errorf("runtime %s: config.json of %d octets, want up to %d: %w", r.Kind, len(r.Config), maxConfig, sandbox.ErrInvalid)
	}
	return nil
}

// hostLimits are the limits that the host's kernel holds a sandbox to: a kernel of its own needs some for itself.
func hostLimits(b *Birth) sandbox.Resources {
	r := b.Resources
	if b.Runtime != nil && b.Runtime.Kind == RuntimeRunsc {
		r.Memory += innerReserve
		r.Pids = 4*r.Pids + innerTasks
	}
	return r
}

// bundle is the folder of a sandbox that a runtime started.
func (k *Keeper) bundle(id sandbox.ID) string { return filepath.Join(k.dir, bundles, string(id)) }

// outerGroup names the groups that runc wants to make of its own; they hold nothing but what process 1 leaves at once.
func (b *box) outerGroup() string { return b.grp.g.name + "-" + b.grp.id }

// bearByRuntime is bear from the composing on. What it made before an error is removed by destroy.
func (b *box) bearByRuntime(ctx context.Context, birth *Birth, sl slot, parent int) error {
	k := b.k
	k.runtimes.Do(k.adoptOrphans)
	r, err := k.compose(birth, sl, parent)
	if err != nil {
		return err
	}
	defer func() { k.discard(r.fds()) }()
	ns, lent := k.takeReserved(b.id), true
	if ns == nil {
		lent = false
		if ns, err = k.netns.take(ctx); err != nil {
			return err
		}
	}
	b.mu.Lock()
	b.netns, b.lent = ns, lent
	b.mu.Unlock()
	ctl, far, err := wire.Pair()
	if err != nil {
		return err
	}
	defer unix.Close(far)
	b.mu.Lock()
	b.ctl = ctl
	b.mu.Unlock()
	if b.inner { // with anything in it, runsc leaves /tmp as it is
		unmark, err := markTmp(r.overlay)
		if err != nil {
			return fmt.Errorf("mark /tmp: %w", imageFault(err))
		}
		defer unmark()
	}
	pid, err := b.startRuntime(ctx, birth, r, far)
	if err != nil {
		ctl.Close()
		return fmt.Errorf("start by %s: %w", birth.Runtime.Kind, err)
	}
	b.mu.Lock()
	b.pid = pid
	b.mu.Unlock()
	b.wait.Add(1)
	uid := birth.UIDBase + idsPerSandbox
	b.born = Born{Pid: pid, Mapping: r.mapping, Shm: r.shmKind, ProcessU: uid, Laid: r.laid}
	if err := b.ctl.SetDeadline(time.Now().Add(birthBound)); err != nil {
		return err
	}
	if b.inner {
		err = b.tellBirth(birth, idsPerSandbox, []string{wire.Op("pts", "/dev/pts"), wire.Op("remove", "/dev/fuse"), wire.Op("groups"),
			wire.Op("set", "memory.max", strconv.FormatInt(birth.Resources.Memory, 10)),
			wire.Op("set", "pids.max", strconv.FormatInt(birth.Resources.Pids, 10)), wire.Op("stay")}, nil)
	} else {
		if err := b.grp.attach(pid); err != nil { // runc has groups of its own
			return err
		}
		if err := b.grp.write(strconv.Itoa(pid), "", "init", "cgroup.procs"); err != nil {
			return fmt.Errorf("attach: %w", err)
		}
		err = b.tellJoin(birth, sl)
	}
	if err != nil {
		return err
	}
	err = b.awaitReady(ctx)
	b.takeEnds()
	return err
}

const maxReserved = 256

// reserve takes a network namespace for a birth to come.
func (k *Keeper) reserve(ctx context.Context, id sandbox.ID) (int, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return -1, err
	}
	ns, err := k.netns.take(ctx)
	if err != nil {
		return -1, err
	}
	fd, err := unix.FcntlInt(uintptr(ns.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		ns.close()
		return -1, err
	}
	k.mu.Lock()
	full := len(k.reserved) >= maxReserved && k.reserved[id] == nil
	old := k.reserved[id]
	if !full {
		k.reserved[id] = ns
	}
	k.mu.Unlock()
	if old != nil {
		old.close()
	}
	if full {
		ns.close()
		unix.Close(fd)
		return -1, fmt.Errorf("%d network namespaces wait for a birth: %w", maxReserved, sandbox.ErrExhausted)
	}
	return fd, nil
}

// takeReserved is the namespace that was reserved, or nil.
func (k *Keeper) takeReserved(id sandbox.ID) *netns {
	k.mu.Lock()
	defer k.mu.Unlock()
	ns := k.reserved[id]
	delete(k.reserved, id)
	return ns
}

func (k *Keeper) unreserve(id sandbox.ID) {
	if ns := k.takeReserved(id); ns != nil {
		ns.close()
	}
}

// tellJoin sends BIRTH to a process 1 whose root the runtime made.
func (b *box) tellJoin(birth *Birth, sl slot) error {
	ops, fds := []string{wire.Op("pts", "/dev/pts")}, []int(nil)
	if len(birth.Events) > 0 {
		fd, err := b.k.eventsFile(birth.Events)
		if err != nil {
			return err
		}
		ops, fds = append(ops, wire.OpFD("events", len(fds))), append(fds, fd)
	}
	ops, fds = append(ops, wire.OpFD("userns", len(fds))), append(fds, sl.user)
	return b.tellBirth(birth, birth.UIDBase+idsPerSandbox, ops, fds)
}

// markTmp puts a file into /tmp of a root that is not seen by anybody yet, and returns its removal.
func markTmp(root int) (func(), error) {
	const name = "/tmp/.dsec-birth"
	fd, err := inRoot(root, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	unix.Close(fd)
	tmp, err := inRoot(root, "/tmp", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return func() {
		unix.Unlinkat(tmp, filepath.Base(name), 0)
		unix.Close(tmp)
	}, nil
}

// startRuntime lays the bundle and runs the runtime. It returns the number of what the runtime says is the container's process.
func (b *box) startRuntime(ctx context.Context, birth *Birth, r *root, far int) (pid int, err error) {
	k, at := b.k, b.k.bundle(b.id)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return 0, err
	}
	folders := []string{"rootfs", "shm", "dev", "sys", "state"}
	for i := range r.volumes {
		folders = append(folders, "v"+strconv.Itoa(i))
	}
	for _, d := range folders {
		if err := mkdir(filepath.Join(at, d)); err != nil {
			return 0, err
		}
	}
	view := at
	if b.inner { // which has no more rights on the way there than its users
		if view, err = k.view(birth.Runtime.Program); err != nil {
			return 0, err
		}
	}
	quoted, err := json.Marshal(view)
	if err != nil {
		return 0, err
	}
	config := bytes.ReplaceAll(birth.Runtime.Config, []byte(bundleMark), quoted[1:len(quoted)-1])
	config = bytes.ReplaceAll(config, []byte("@CGROUP@"), []byte(b.outerGroup()))
	if err := errors.Join(os.WriteFile(filepath.Join(at, "config.json"), config, 0o600), os.WriteFile(filepath.Join(at, "netns"), nil, 0o600)); err != nil {
		return 0, err
	}
	programs := ""
	if b.inner {
		if programs, err = k.programs(); err != nil {
			return 0, err
		}
	}
	log, err := os.OpenFile(filepath.Join(at, "log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	group, err := b.grp.open("init")
	if err != nil {
		return 0, err
	}
	defer unix.Close(group)
	var child int
	err = onThread(func() error {
		if err := b.layBundle(view, programs, r); err != nil {
			return fmt.Errorf("lay the bundle: %w", err)
		}
		if birth.Runtime.Kind == RuntimeCrun && !k.cg.pure() {
			// It refuses a layout with both versions, and needs neither: the groups are made.
			if err := unix.Unmount(k.cg.v2, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("hide cgroup2 from crun: %w", err)
			}
		}
		for _, c := range k.cg.limits { // of this thread alone; what it forks is born there
			if err := b.grp.write(strconv.Itoa(unix.Gettid()), c, "tasks"); err != nil {
				return fmt.Errorf("enter the groups: %w", err)
			}
		}
		for _, shown := range k.cg.shown {
			if err := writeFile(filepath.Join(shown, k.cg.name, "tasks"), strconv.Itoa(unix.Gettid())); err != nil {
				return fmt.Errorf("enter the groups: %w", err)
			}
		}
		null := uintptr(k.tmpl.null)
		var err error
		child, err = syscall.ForkExec(birth.Runtime.Program, runtimeArgs(birth.Runtime, at, string(b.id)), &syscall.ProcAttr{
			Dir: at, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
			Files: []uintptr{null, log.Fd(), log.Fd(), uintptr(far), uintptr(k.helper)},
			Sys:   &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: group},
		})
		return err
	})
	if err != nil {
		return 0, err
	}
	if err := waitChild(ctx, child); err != nil {
		return 0, fmt.Errorf("%w%s", err, tailOf(log))
	}
	text, err := os.ReadFile(filepath.Join(at, "pid"))
	if err != nil {
		return 0, err
	}
	pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("it says that the container's process is %.20q: %w", text, sandbox.ErrInvalid)
	}
	return pid, nil
}

// runtimeArgs is the command line that starts a container and returns. Descriptor 3 is process 1's stream, 4 its program.
func runtimeArgs(r *Runtime, at, id string) []string {
	root := []string{r.Kind, "--root", at + "/state"}
	run := []string{"--bundle", at, "--pid-file", at + "/pid", "--detach"}
	switch r.Kind {
	case RuntimeCrun:
		return slices.Concat(root, []string{"--cgroup-manager=disabled", "run", "--preserve-fds", "2"}, run, []string{id})
	case RuntimeRunc:
		return slices.Concat(root, []string{"run", "--preserve-fds", "2"}, run, []string{id})
	}
	return slices.Concat(root, []string{"--ignore-cgroups", "--platform=systrap", "--overlay2=none", "--file-access=shared", "--in-sandbox-cgroup=v2",
		"--allow-suid", "--host-uds=none", "run", "--pass-fd", "3:3"}, run, []string{id})
}

// layBundle attaches what the bundle's folders stand for, in a mount namespace that the calling thread gets for it.
func (b *box) layBundle(at, programs string, r *root) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	attach := func(name string) func(fd int, err error) error {
		return func(fd int, err error) error {
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.MoveMount(fd, "", unix.AT_FDCWD, filepath.Join(at, name), unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
				return fmt.Errorf("attach %s: %w", name, err)
			}
			return nil
		}
	}
	if b.inner {
		if err := unix.Mount("dsec-bundle", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=64k"); err != nil {
			return err
		}
		names := []string{"rootfs", "programs"}
		for i := range r.volumes {
			names = append(names, "v"+strconv.Itoa(i))
		}
		for _, name := range names {
			if err := mkdir(filepath.Join(at, name)); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(at, "netns"), nil, 0o600); err != nil {
			return err
		}
	}
	lent := func(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }
	if err := attach("rootfs")(lent(r.overlay)); err != nil {
		return err
	}
	for i, v := range r.volumes {
		if err := attach("v" + strconv.Itoa(i))(lent(v)); err != nil {
			return err
		}
	}
	ns := fmt.Sprintf("/proc/self/fd/%d", b.netns.fd)
	if err := unix.Mount(ns, filepath.Join(at, "netns"), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the network namespace: %w", err)
	}
	if b.inner { // has a /dev, a /sys and groups of its own
		return attach("programs")(clonePlain(programs))
	}
	if err := errors.Join(attach("shm")(lent(r.shm)), attach("dev")(clonePlain(b.k.tmpl.dev)), attach("sys")(clonePlain(b.k.tmpl.sys))); err != nil {
		return err
	}
	for _, p := range b.k.cg.places() {
		// By path: of this namespace's own mounts, and so later ones than those at /sys/fs/cgroup, the first of which runc takes for all.
		at := b.grp.v2()
		if p.ctrl != "" {
			at = b.grp.v1(p.ctrl)
		}
		if err := attach("sys/fs/cgroup/" + p.at)(cloneRO(unix.AT_FDCWD, at)); err != nil {
			return err
		}
	}
	return nil
}

// view is a folder that everybody reaches and that may be covered in a namespace of one start: neither the run folder nor the runtime's
// program lies below it.
func (k *Keeper) view(program string) (string, error) {
	for _, dir := range []string{"/mnt", "/srv", "/media", "/opt", "/tmp"} {
		st, err := os.Stat(dir)
		if err == nil && st.IsDir() && !strings.HasPrefix(k.dir+"/", dir+"/") && !strings.HasPrefix(program, dir+"/") {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no folder for a bundle's view: none of /mnt, /srv, /media, /opt, /tmp is there and free: %w", sandbox.ErrUnsupported)
}

// onThread runs f on a thread that ends with it, so that f may change what belongs to a thread.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // the process's first thread never ends: it waits for another one
			done <- onThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// waitChild waits until a runtime's command has ended well.
func waitChild(ctx context.Context, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-done:
		default:
			unix.Kill(pid, unix.SIGKILL)
		}
	})
	ws, err := reap(pid)
	close(done)
	stop()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("it does not come to an end: %w", ctx.Err())
	case err != nil:
		return err
	case ws.Signaled():
		return fmt.Errorf("it was ended by signal %d", ws.Signal())
	case ws.ExitStatus() != 0:
		return fmt.Errorf("it exited %d", ws.ExitStatus())
	}
	return nil
}

// tailOf is what a runtime wrote, for an error.
func tailOf(log *os.File) string {
	var buf [600]byte
	n, _ := log.ReadAt(buf[:], 0)
	text := strings.TrimSpace(string(buf[:n]))
	if text == "" {
		return ""
	}
	return ": " + strconv.Quote(text)
}

// programs is where process 1's program lies for a runtime that takes none by descriptor: a mount of the keeper's own, made when it is
// first needed, since the run folder may be noexec.
func (k *Keeper) programs() (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	at := filepath.Join(k.dir, "programs")
	if k.laid {
		return at, nil
	}
	if err := mkdir(at); err != nil {
		return "", err
	}
	if err := unix.Mount("dsec-programs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=1m"); err != nil {
		return "", fmt.Errorf("mount the programs: %w", err)
	}
	text, err := os.ReadFile("/proc/self/fd/" + strconv.Itoa(k.helper))
	if err == nil {
		err = os.WriteFile(filepath.Join(at, "dsec-init"), text, 0o755)
	}
	if err != nil {
		unix.Unmount(at, unix.MNT_DETACH)
		return "", err
	}
	k.laid = true
	return at, nil
}

// adoptOrphans makes what a runtime leaves behind the keeper's children, and takes the ends of those that nobody waits for.
func (k *Keeper) adoptOrphans() {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		k.log.Error("processes of runtimes can't be taken over", "err", err)
		return
	}
	go func() {
		was := map[int]bool{}
		for {
			select {
			case <-k.ended:
				return
			case <-time.After(orphanEvery):
			}
			// A child that was dead at the last look too is waited for by nobody.
			now := map[int]bool{}
			for _, pid := range k.deadOrphans() {
				if was[pid] {
					unix.Wait4(pid, nil, unix.WNOHANG, nil)
				} else {
					now[pid] = true
				}
			}
			was = now
		}
	}()
}

// deadOrphans are children that have ended in a sandbox's group and are the process 1 of none.
func (k *Keeper) deadOrphans() (pids []int) {
	known := map[int]bool{}
	for _, b := range k.all() {
		b.mu.Lock()
		known[b.pid] = true
		b.mu.Unlock()
	}
	for _, pid := range children() {
		if known[pid] {
			continue
		}
		var buf [4096]byte
		text, err := readFile("/proc/"+strconv.Itoa(pid)+"/cgroup", buf[:])
		if err != nil || !strings.Contains(string(text), "/"+k.cg.name+"/"+classLS+"/") && !strings.Contains(string(text), "/"+k.cg.name+"/"+classBE+"/") {
			continue
		}
		if text, err = readFile("/proc/"+strconv.Itoa(pid)+"/stat", buf[:]); err == nil && strings.Contains(string(text), ") Z ") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// children are the keeper's, of whichever thread; none where the kernel does not list them.
func children() (pids []int) {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil
	}
	for _, t := range tasks {
		var buf [64 << 10]byte
		text, err := readFile("/proc/self/task/"+t.Name()+"/children", buf[:])
		if err != nil {
			continue // it ended meanwhile
		}
		for word := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// pauseInside has gVisor stop or start what runs in it. Its own processes are not frozen: a program that one of their signals meets in
// the middle of a switch ends by SIGSEGV when they go on.
func (b *box) pauseInside(on bool) error {
	verb := "resume"
	if on {
		verb = "pause"
	}
	at := b.k.bundle(b.id)
	log, err := os.OpenFile(filepath.Join(at, "log"), os.O_RDWR|os.O_TRUNC|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	null := uintptr(b.k.tmpl.null)
	r := b.birth.Runtime
	pid, err := syscall.ForkExec(r.Program, []string{r.Kind, "--root", at + "/state", verb, string(b.id)}, &syscall.ProcAttr{
		Dir: at, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Files: []uintptr{null, log.Fd(), log.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("%s %s: %w", verb, b.id, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*freezeBound)
	defer cancel()
	if err := waitChild(ctx, pid); err != nil {
		return fmt.Errorf("%s %s by %s: %w%s", verb, b.id, r.Kind, err, tailOf(log))
	}
	return nil
}

// takeEnds takes the ends of processes of a sandbox that a runtime left to the keeper, but for its process 1. It reports whether some of
// them live on.
func (b *box) takeEnds() (living bool) {
	for _, pid := range children() {
		if pid == b.pid || !b.holds(pid) {
			continue
		}
		if n, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); n == 0 && err == nil {
			living = true
		}
	}
	return living
}

// holds reports whether a process is or was in a group of the sandbox.
func (b *box) holds(pid int) bool {
	var buf [4096]byte
	text, err := readFile("/proc/"+strconv.Itoa(pid)+"/cgroup", buf[:])
	return err == nil && strings.Contains(string(text), "/"+b.grp.g.name+"/"+b.grp.class+"/"+b.grp.id+"/")
}

// dropBundle removes the folder of a sandbox and the empty groups that its runtime made.
func (k *Keeper) dropBundle(b *box, within time.Duration) error {
	end := time.Now().Add(within)
	for pause := time.Millisecond; b.takeEnds() && time.Now().Before(end); pause = min(2*pause, 20*time.Millisecond) {
		time.Sleep(pause)
	}
	if b.birth.Runtime.Kind == RuntimeRunc {
		for _, m := range k.cg.mounts {
			if err := rmTree(filepath.Join(m, b.outerGroup()), end); err != nil {
				return err
			}
		}
	}
	return removeBundle(k.bundle(b.id))
}

// removeBundle removes a bundle's folder. Nothing is mounted in it here; were there anything, it would be left alone.
func removeBundle(at string) error {
	if err := os.RemoveAll(filepath.Join(at, "state")); err != nil {
		return err
	}
	entries, err := os.ReadDir(at)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, os.Remove(filepath.Join(at, e.Name())))
	}
	return errors.Join(err, os.Remove(at))
}

// sweepBundles removes the folders of a dead keeper's sandboxes.
func sweepBundles(dir string) error {
	entries, err := os.ReadDir(filepath.Join(dir, bundles))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, removeBundle(filepath.Join(dir, bundles, e.Name())))
	}
	return err
}

// removeOuter removes the groups that runtimes made of their own for sandboxes of a dead keeper.
func (g *cgroups) removeOuter(end time.Time) error {
	for _, m := range g.mounts {
		left, _ := filepath.Glob(filepath.Join(m, g.name+"-*"))
		for _, dir := range left {
			if err := rmTree(dir, end); err != nil {
				return err
			}
		}
	}
	return nil
}
