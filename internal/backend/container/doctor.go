package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/upper"
)

// Check is one thing that the driver wants of a host, tried for real.
type Check struct {
	Feature string `json:"feature"`
	OK      bool   `json:"ok"`
	Needed  bool   `json:"needed"` // without it there are no container sandboxes; else there is a way round or a narrower offer
	Detail  string `json:"detail"` // what was seen
	Fix     string `json:"fix,omitempty"`
}

// doctor collects checks in a scratch folder.
type doctor struct {
	ctx     context.Context
	dir     string // scratch, on the file system of the state folder
	userns  int    // a user namespace with one mapping, or -1
	noErofs error  // why layers are unpacked; nil where they are mounted
	checks  []Check
}

// Doctor says what this host can do for container sandboxes; unpack is Config.Unpack. Scratch files lie below the state folder and are removed;
// nothing that lasts is changed. It needs root for most of its answers.
func Doctor(ctx context.Context, stateDir string, unpack bool) []Check {
	d := &doctor{ctx: ctx, userns: -1, noErofs: whyUnpack(unpack)}
	d.root()
	defer removeMade(stateDir)()
	if err := os.MkdirAll(stateDir, 0o700); err == nil {
		d.dir, err = os.MkdirTemp(stateDir, "doctor-")
		if err == nil {
			defer os.RemoveAll(d.dir)
		}
	}
	if d.dir == "" {
		d.add(Check{Feature: "state folder", Needed: true, Detail: stateDir + " can't be written", Fix: "give the host a state folder on a local disk"})
		return d.checks
	}
	d.userNamespace()
	defer func() {
		if d.userns >= 0 {
			unix.Close(d.userns)
		}
	}()
	d.erofs()
	d.onDemand()
	d.overlay()
	d.idmap()
	d.cgroups()
	d.confinement()
	d.network()
	d.uppers()
	d.limits()
	d.trace()
	d.tools()
	return d.checks
}

// removeMade removes again what of a path is not there yet, once it is made and as far as it is empty.
func removeMade(path string) func() {
	var made []string
	for p := filepath.Clean(path); ; p = filepath.Dir(p) {
		if _, err := os.Lstat(p); err == nil || p == filepath.Dir(p) {
			break
		}
		made = append(made, p)
	}
	return func() {
		for _, p := range made {
			if os.Remove(p) != nil { // somebody uses it by now
				return
			}
		}
	}
}

func (d *doctor) add(c Check) {
	if c.OK {
		c.Fix = ""
	}
	d.checks = append(d.checks, c)
}

// tried adds a check that is right when there was no error.
func (d *doctor) tried(feature string, needed bool, err error, good, fix string) bool {
	c := Check{Feature: feature, OK: err == nil, Needed: needed, Detail: good, Fix: fix}
	if err != nil {
		c.Detail = err.Error()
	}
	d.add(c)
	return c.OK
}

func (d *doctor) root() {
	var u unix.Utsname
	unix.Uname(&u)
	d.add(Check{Feature: "kernel", OK: true, Detail: unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:])})
	var err error
	if os.Geteuid() != 0 {
		err = errors.New("not root")
	} else if m, e := os.ReadFile("/proc/self/uid_map"); e == nil && strings.Join(strings.Fields(string(m)), " ") != "0 0 4294967295" {
		err = errors.New("root of a user namespace, not of the machine: overlays could not have redirect_dir and ids could not be mapped")
	}
	d.tried("root", true, err, "root of the initial user namespace", "run the host as root, not in a container")
}

// userNamespace makes one by a child that never runs: it is stopped at its exec.
func (d *doctor) userNamespace() {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the tracer is a thread
		defer runtime.UnlockOSThread()
		pid, err := syscall.ForkExec("/proc/self/exe", []string{"dsec-doctor"}, &syscall.ProcAttr{
			Files: []uintptr{}, Sys: &syscall.SysProcAttr{
				Cloneflags: syscall.CLONE_NEWUSER, Ptrace: true,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: DefaultUIDBase, Size: 65536}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: DefaultUIDBase, Size: 65536}},
			},
		})
		if err != nil {
			done <- err
			return
		}
		d.userns, err = unix.Open(fmt.Sprintf("/proc/%d/ns/user", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		unix.Kill(pid, unix.SIGKILL)
		var ws unix.WaitStatus
		unix.Wait4(pid, &ws, 0, nil)
		done <- err
	}()
	d.tried("user namespaces", true, <-done, "made one with a mapping of 65,536 ids", "set user.max_user_namespaces above 0 and allow them in the kernel")
}

// options of a detached mount that lives as long as its descriptor.
type mountOption struct {
	key, value string
	fd         int // used when value is empty and fd > 0; both empty is a flag
}

// detachedMount makes a mount that is attached nowhere.
func detachedMount(kind string, options ...mountOption) (int, error) {
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen %s: %w", kind, err)
	}
	defer unix.Close(fs)
	for _, o := range options {
		switch {
		case o.value != "":
			err = unix.FsconfigSetString(fs, o.key, o.value)
		case o.fd > 0:
			err = unix.FsconfigSetFd(fs, o.key, o.fd)
		default:
			err = unix.FsconfigSetFlag(fs, o.key)
		}
		if err != nil {
			return -1, fmt.Errorf("%s option %s: %w", kind, o.key, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("mount %s: %w", kind, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", kind, err)
	}
	return fd, nil
}

func (d *doctor) erofs() {
	image := filepath.Join(d.dir, "layer.erofs")
	err := d.tinyLayer(image)
	if d.noErofs != nil {
		d.unpacked(errors.Join(err, d.tryUnpacked(image)))
		return
	}
	if err == nil {
		var fd int
		if fd, err = detachedMount("erofs", mountOption{key: "source", value: image}, mountOption{key: "ro"}); err == nil {
			unix.Close(fd)
		}
	}
	if errors.Is(err, unix.ENOTBLK) {
		_, loop := os.Stat("/dev/loop-control")
		d.add(Check{Feature: "layers (EROFS)", OK: loop == nil, Needed: true,
			Detail: "mounted through loop devices: this kernel mounts no EROFS from a file (6.12 does)", Fix: "load the module loop"})
		return
	}
	d.tried("layers (EROFS)", true, err, "mounted from a file without a loop device", "load the module erofs, or use a kernel from 5.19 on")
}

// unpacked tells of the way round a kernel without EROFS.
func (d *doctor) unpacked(err error) {
	d.add(Check{Feature: "layers (EROFS)", Detail: "not mounted (" + d.noErofs.Error() + "): each layer is unpacked into a folder of the state folder before its first use: " +
		"that create waits for it, the layer is fetched whole and takes its full size on this disk", Fix: "a kernel with EROFS, from 5.19 on (module erofs), and no host.unpack_layers"})
	d.tried("layers unpacked into folders", true, err, "unpacked one and mapped the ids of its mount", "a state folder on ext4, xfs or btrfs, and a kernel from 5.19 on")
}

// tryUnpacked does with an image what a host does where there is no EROFS.
func (d *doctor) tryUnpacked(image string) error {
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	defer f.Close()
	tree := filepath.Join(d.dir, "unpacked")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	into, err := os.Open(tree)
	if err != nil {
		return err
	}
	defer into.Close()
	im, err := openImage(blob.LayerFiles{Meta: f})
	if err == nil {
		err = im.Unpack(into, d.ctx.Err)
	}
	if err != nil {
		return err
	}
	m, err := keeper.FolderMount(tree)
	if err != nil || d.userns < 0 {
		return err
	}
	defer m.Close()
	return unix.MountSetattr(int(m.Fd()), "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(d.userns)})
}

// onDemand tries what the blob daemon needs; without it layers that are not local are fetched whole.
func (d *doctor) onDemand() {
	resend, err := blob.Probe()
	good := "made a FUSE file system; a daemon that is killed is replaced without an error in a read"
	if err == nil && !resend {
		good = "made a FUSE file system; reads that are under way when its daemon is killed fail (kernels from 6.9 on ask again)"
	}
	if d.noErofs != nil {
		good += "; not used while layers are unpacked"
	}
	d.tried("layers on demand (FUSE)", false, err, good, "load the module fuse; without it layers that are not local are fetched whole")
}

func (d *doctor) tinyLayer(file string) error {
	tree := filepath.Join(d.dir, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "folder"), 0o755); err != nil {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = layer.FromDir(d.ctx, tree, f, layer.Options{})
	return err
}

func (d *doctor) overlay() {
	var lower, up, work string
	for name, p := range map[string]*string{"lower": &lower, "upper": &up, "work": &work} {
		*p = filepath.Join(d.dir, name)
		if err := os.Mkdir(*p, 0o755); err != nil {
			d.tried("overlay", true, err, "", "give the host a state folder on a local disk")
			return
		}
	}
	base := []mountOption{{key: "upperdir", value: up}, {key: "workdir", value: work}, {key: "volatile"}, {key: "redirect_dir", value: "on"}}
	fd, err := detachedMount("overlay", append([]mountOption{{key: "lowerdir", value: lower}}, base...)...)
	if err == nil {
		err = unix.Mkdirat(fd, "made", 0o755) // a work folder that can't be made shows as a read-only mount
		unix.Close(fd)
	}
	if !d.tried("overlay", true, err, "with redirect_dir and volatile, writable on the state folder's file system",
		"load the module overlay; the state folder must not lie on an overlay or a network file system") {
		return
	}
	os.RemoveAll(filepath.Join(work, "work"))
	l, err := unix.Open(lower, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(l)
		if fd, err = detachedMount("overlay", append([]mountOption{{key: "lowerdir+", fd: l}}, base...)...); err == nil {
			unix.Close(fd)
		}
	}
	d.tried("overlay lowers by descriptor", false, err, "mounted one", "kernel 6.13; until then lowers go by path")
}

func (d *doctor) idmap() {
	if d.userns < 0 {
		return
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, d.dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == nil {
		err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(d.userns)})
		unix.Close(tree)
	}
	d.tried("id-mapped mounts of the state folder", false, err, "mapped one", "use ext4, xfs or btrfs on a kernel from 5.19 on; else owners are shifted on disk and mapped at capture")
	if d.noErofs != nil {
		return // tried with the folder
	}
	fd, err := detachedMount("erofs", mountOption{key: "source", value: filepath.Join(d.dir, "layer.erofs")}, mountOption{key: "ro"})
	if err != nil {
		return // told already, or through a loop device, which the keeper tries
	}
	defer unix.Close(fd)
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(d.userns)})
	d.tried("id-mapped layers", true, err, "mapped a mount of EROFS", "kernel 5.19 or later")
}

func (d *doctor) cgroups() {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		d.tried("cgroups", true, err, "", "mount /proc")
		return
	}
	v2, v1, dynmods := "", map[string]string{}, false
	for line := range strings.Lines(string(info)) {
		before, after, _ := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(g) < 3 {
			continue
		}
		switch g[0] {
		case "cgroup2":
			v2 = f[4]
			dynmods = strings.Contains(g[2], "favordynmods")
		case "cgroup":
			for _, c := range strings.Split(g[2], ",") {
				v1[c] = f[4]
			}
		}
	}
	if v2 == "" {
		d.add(Check{Feature: "cgroups", Needed: true, Detail: "no cgroup2 mount", Fix: "mount -t cgroup2 cgroup2 /sys/fs/cgroup (or at /sys/fs/cgroup/unified beside v1)"})
		return
	}
	have, _ := os.ReadFile(filepath.Join(v2, "cgroup.controllers"))
	var where, missing []string
	for _, c := range []string{"memory", "pids", "cpu"} {
		switch {
		case strings.Contains(" "+strings.TrimSpace(string(have))+" ", " "+c+" "):
			where = append(where, c+" in v2")
		case v1[c] != "":
			where = append(where, c+" in v1")
		default:
			missing = append(missing, c)
		}
	}
	c := Check{Feature: "cgroups", OK: len(missing) == 0, Needed: true, Detail: strings.Join(where, ", ")}
	if !c.OK {
		c.Detail = "no controller for " + strings.Join(missing, ", ")
		c.Fix = "boot without cgroup_disable= and let no other manager hold the controllers"
	}
	d.add(c)
	scratch := filepath.Join(v2, fmt.Sprintf("dsec-doctor-%d", os.Getpid()))
	err = os.Mkdir(scratch, 0o755)
	if err == nil {
		defer os.Remove(scratch)
		for _, f := range []string{"cgroup.kill", "cgroup.freeze", "cgroup.events"} {
			if _, e := os.Stat(filepath.Join(scratch, f)); e != nil {
				err = fmt.Errorf("a group has no %s", f)
			}
		}
	}
	d.tried("kill and freeze of whole groups", true, err, "the group has cgroup.kill and cgroup.freeze", "kernel 5.14 or later, and a cgroup2 mount that can be written")
	detail := "off: the first process in a new group waits for up to 8 ms"
	if dynmods {
		detail = "on"
	}
	d.add(Check{Feature: "favordynmods", OK: dynmods, Detail: detail, Fix: "the host sets it at its start, on kernels from 6.0 on: mount -o remount,favordynmods " + v2})
}

func (d *doctor) confinement() {
	notif := uint32(unix.SECCOMP_RET_USER_NOTIF)
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&notif)))
	var err error
	if e != 0 {
		err = e
	}
	d.tried("seccomp with listeners", true, err, "the kernel knows SECCOMP_RET_USER_NOTIF", "a kernel with CONFIG_SECCOMP_FILTER, from 5.0 on")
	abi, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	c := Check{Feature: "landlock", OK: e == 0, Detail: "ABI " + strconv.Itoa(int(abi)), Fix: "boot with landlock in lsm="}
	if e != 0 {
		c.Detail = e.Error()
	}
	d.add(c)
	_, err = os.Stat("/sys/kernel/security/apparmor")
	d.add(Check{Feature: "apparmor", OK: err == nil, Detail: seen(err == nil, "its files are there", "no files of it below /sys/kernel/security"), Fix: "optional: a distribution's kernel with AppArmor"})
}

func seen(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}

func (d *doctor) network() {
	ns, err := newNetns()
	if err == nil {
		unix.Close(ns)
	}
	d.tried("network namespaces", true, err, "made one", "set user.max_net_namespaces above 0")
	p := probeNetwork()
	c := Check{Feature: "network open", OK: p.reason == "", Detail: "routed veth and NAT by nf_tables", Fix: p.fix}
	if p.reason != "" {
		c.Detail = p.reason
	} else if s := p.features["spoofing"]; s != "" {
		c.Detail += "; " + s
	}
	d.add(c)
	if p.reason == "" {
		d.forward()
	}
}

// forward tells of other firewalls that drop what sandboxes of network open send.
func (d *doctor) forward() {
	n := &network{ns: -1, instance: "doctor"}
	ns, err := n.openNamespace()
	if err != nil {
		return
	}
	defer unix.Close(ns)
	n.ns = ns
	chains, _, err := n.droppingChains()
	if err != nil {
		d.tried("forwarding through other firewalls", false, err, "", "")
		return
	}
	c := Check{Feature: "forwarding through other firewalls", OK: true, Detail: "none drops what is forwarded"}
	var names []string
	for _, ch := range chains {
		names = append(names, ch.Table.Name+"/"+ch.Name)
	}
	if len(names) > 0 {
		c.Detail = "drop by policy in " + strings.Join(names, ", ") + ": accept rules for our devices go to the head of each"
	}
	if legacy, err := os.ReadFile("/proc/net/ip_tables_names"); err == nil && strings.Contains(string(legacy), "filter") {
		c.OK = false
		c.Detail += "; legacy iptables has a filter table, which can't be seen from here"
		c.Fix = "where its FORWARD policy is DROP: iptables-legacy -I FORWARD -i dsec+ -j ACCEPT; iptables-legacy -I FORWARD -o dsec+ -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
	}
	d.add(c)
}

// uppers tries each way to limit a sandbox's disk with a small pool.
func (d *doctor) uppers() {
	fixes := map[string]string{
		upper.DriverPool:    "install btrfs-progs, load the modules btrfs and loop, kernel 6.7 for exact quotas",
		upper.DriverProject: "mount the state folder's file system with prjquota",
		upper.DriverImage:   "install e2fsprogs, load the module loop",
		upper.DriverTmpfs:   "",
	}
	any := false
	for _, driver := range []string{upper.DriverPool, upper.DriverProject, upper.DriverImage, upper.DriverTmpfs} {
		err := d.tryPool(driver)
		any = any || err == nil
		d.tried("disk limits by "+driver, false, err, "held when written past", fixes[driver])
	}
	c := Check{Feature: "disk limits", OK: any, Needed: true, Detail: "see above; the first that works is taken", Fix: "make one of the above work"}
	if !any {
		c.Detail = "none works"
	}
	d.add(c)
}

func (d *doctor) tryPool(driver string) error {
	ctx, cancel := context.WithTimeout(d.ctx, time.Minute)
	defer cancel()
	dir := filepath.Join(d.dir, "pool-"+driver)
	p, err := upper.Open(ctx, upper.Config{State: dir, Driver: driver, Size: 256 << 20}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	return errors.Join(p.Close(), os.RemoveAll(dir))
}

func (d *doctor) limits() {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err == nil {
		d.add(Check{Feature: "open files", OK: l.Max >= 65536, Detail: fmt.Sprintf("at most %d: enough for about %d sandboxes", l.Max, l.Max/8),
			Fix: "LimitNOFILE=1048576 in the service, or ulimit -n"})
	}
	for _, v := range []struct {
		file, name, why string
		want            int
	}{
		{"/proc/sys/kernel/pid_max", "pid_max", "processes of the whole machine", 131072},
		{"/proc/sys/user/max_user_namespaces", "user.max_user_namespaces", "two for each uid slot", 8192},
		{"/proc/sys/user/max_net_namespaces", "user.max_net_namespaces", "one for each sandbox", 8192},
		{"/proc/sys/user/max_mnt_namespaces", "user.max_mnt_namespaces", "one for each sandbox", 8192},
		{"/proc/sys/fs/inotify/max_user_instances", "fs.inotify.max_user_instances", "per user inside", 128},
	} {
		b, err := os.ReadFile(v.file)
		n, e := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil || e != nil {
			continue
		}
		d.add(Check{Feature: v.name, OK: n >= v.want, Detail: fmt.Sprintf("%d (%s)", n, v.why),
			Fix: fmt.Sprintf("sysctl -w %s=%d", strings.ReplaceAll(strings.TrimPrefix(v.file, "/proc/sys/"), "/", "."), v.want)})
	}
}

func (d *doctor) tools() {
	for _, tool := range []struct{ name, why string }{
		{"mmdebstrap", "builds base layers of a Debian suite"},
		{"mkfs.btrfs", "makes the pool of uppers"},
		{"mkfs.ext4", "makes uppers where there is no btrfs"},
	} {
		path, err := exec.LookPath(tool.name)
		c := Check{Feature: tool.name, OK: err == nil, Detail: path, Fix: "install it: it " + tool.why}
		if err != nil {
			c.Detail = "not found"
		}
		d.add(c)
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err == nil {
		f.Close()
	}
	d.add(Check{Feature: "kvm", OK: err == nil, Detail: seen(err == nil, "device present, not probed", "no device that can be opened") + " (of no use to containers)", Fix: "for virtual machines only"})
}
