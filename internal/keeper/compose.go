package keeper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// root is a composed root file system, not attached anywhere.
type root struct {
	overlay int
	shm     int    // detached mount of the sandbox's own dev/shm
	mapping string // "idmap" or "shifted"
	shmKind string // "upper" or "tmpfs"
	laid    map[string]string
	parent  int // detached mount of the folder of upper and work
	volumes []int
}

// fds are the mounts' descriptors. Closing one that is still detached waits for the kernel (a grace period of RCU).
func (r *root) fds() []int { return only(append([]int{r.overlay, r.shm, r.parent}, r.volumes...)) }

// compose mounts the overlay of a birth and makes what every sandbox needs in it. parent is a detached mount of the folder that
// holds upper and work; it becomes the keeper's.
func (k *Keeper) compose(b *Birth, sl slot, parent int) (r *root, err error) {
	r = &root{overlay: -1, shm: -1, mapping: "idmap", parent: parent}
	defer func() {
		if err != nil {
			k.discard(r.fds())
			r = nil
		}
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("%w: the sandbox's disk limit is too small, or the host's pool is full: %w", err, sandbox.ErrExhausted)
		}
	}()
	lowers, err := k.lowers.take(b.UIDBase, b.Layers, sl.user)
	if err != nil {
		return r, err
	}
	defer func() {
		if !k.overlayByPath {
			lowers = k.lowers.put(b.UIDBase, b.Layers, lowers)
		}
		k.discard(lowers)
	}()
	upperName, workName := filepath.Base(b.UpperDir), filepath.Base(b.WorkDir)
	if err := idmap(parent, sl.idmap); err != nil {
		if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) {
			return r, fmt.Errorf("map ids of the upper: %w", err)
		}
		// A file system that can't be mapped keeps the host's ids; the capture maps them back.
		r.mapping = "shifted"
		if err := unix.Fchownat(parent, upperName, int(b.UIDBase), int(b.UIDBase), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return r, fmt.Errorf("own the upper: %w", err)
		}
	}
	im := k.images.get(b.Layers)
	if r.laid, err = furnishUpper(parent, upperName, b, im); err != nil {
		return r, fmt.Errorf("furnish the upper: %w", err)
	}
	if r.overlay, err = k.mountOverlay(b, lowers, parent, upperName, workName); err != nil {
		return r, err
	}
	if im == nil {
		k.images.learn(b.Layers, r.overlay, b.UIDBase)
		if r.laid, err = furnish(r.overlay, b); err != nil {
			return r, err
		}
	}
	if len(b.Volumes) > 0 {
		if r.volumes, err = k.composeVolumes(b, sl, r.overlay); err != nil {
			return r, err
		}
	}
	r.shm, err = unix.OpenTree(r.overlay, "dev/shm", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	r.shmKind = "upper"
	if err == unix.EINVAL { // before about 6.15 a detached mount can't be cloned
		r.shmKind = "tmpfs"
		r.shm, err = shmTmpfs(b)
	}
	if err != nil {
		return r, fmt.Errorf("/dev/shm: %w", err)
	}
	return r, nil
}

// idmap maps the ids of a detached mount by a user namespace.
func idmap(fd, userns int) error {
	return unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)})
}

func (k *Keeper) mountOverlay(b *Birth, lowers []int, parent int, upperName, workName string) (int, error) {
	attr := unix.MOUNT_ATTR_NODEV
	if b.NoSuid {
		attr |= unix.MOUNT_ATTR_NOSUID
	}
	if k.overlayByPath {
		return k.mountOverlayByPath(lowers, parent, upperName, workName, attr)
	}
	upper, err := unix.Openat(parent, upperName, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open upper: %w", err)
	}
	defer unix.Close(upper)
	work, err := unix.Openat(parent, workName, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open work: %w", err)
	}
	defer unix.Close(work)
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("overlay: %w", err)
	}
	defer unix.Close(fs)
	for i := len(lowers) - 1; i >= 0; i-- { // the kernel wants the top first
		if err := unix.FsconfigSetFd(fs, "lowerdir+", lowers[i]); err != nil {
			return -1, fsError(fs, "overlay lower", err)
		}
	}
	if err := unix.FsconfigSetFd(fs, "upperdir", upper); err != nil {
		return -1, fsError(fs, "overlay upper", err)
	}
	if err := unix.FsconfigSetFd(fs, "workdir", work); err != nil {
		return -1, fsError(fs, "overlay work", err)
	}
	return finishOverlay(fs, attr)
}

func finishOverlay(fs, attr int) (int, error) {
	for _, o := range [][2]string{{"source", "dsec"}, {"redirect_dir", "on"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, fsError(fs, "overlay "+o[0], err)
		}
	}
	if err := unix.FsconfigSetFlag(fs, "volatile"); err != nil {
		return -1, fsError(fs, "overlay volatile", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "overlay", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return -1, fsError(fs, "overlay", err)
	}
	return fd, nil
}

// mountOverlayByPath is for kernels before about 6.13: the layers are attached for a moment in the layers' namespace and named.
func (k *Keeper) mountOverlayByPath(lowers []int, parent int, upperName, workName string, attr int) (fd int, err error) {
	err = k.layers.do(func() error {
		const scratch = "/scratch"
		if err := unix.Mount("dsec-scratch", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size=1m"); err != nil {
			return err
		}
		defer unix.Unmount(scratch, unix.MNT_DETACH)
		var names []string
		for i, m := range append(append([]int(nil), lowers...), parent) {
			at := scratch + "/" + strconv.Itoa(i)
			if err := unix.Mkdir(at, 0o700); err != nil {
				return err
			}
			if err := unix.MoveMount(m, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
				return fmt.Errorf("attach for the overlay: %w", err)
			}
			names = append([]string{at}, names...)
		}
		fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return err
		}
		defer unix.Close(fs)
		for _, o := range [][2]string{{"lowerdir", strings.Join(names[1:], ":")}, {"upperdir", names[0] + "/" + upperName}, {"workdir", names[0] + "/" + workName}} {
			if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
				return fsError(fs, "overlay "+o[0], err)
			}
		}
		fd, err = finishOverlay(fs, attr)
		return err
	})
	return fd, err
}

func shmTmpfs(b *Birth) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{{"mode", "1777"}, {"size", strconv.FormatInt(b.Resources.Memory/2, 10)},
		{"uid", strconv.Itoa(int(b.UIDBase))}, {"gid", strconv.Itoa(int(b.UIDBase))}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, fsError(fs, "tmpfs", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "tmpfs", err)
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID)
}

// templates are the shared, read-only /dev and /sys of all sandboxes; each gets a clone of their mounts.
type templates struct {
	dev, sys string // where they are attached in the keeper's namespace
	null     int    // /dev/null of the template, standard input of commands that have none
}

// fillDev makes what every /dev has, in the folder of the descriptor.
func fillDev(dir int) error {
	for _, n := range []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		if err := makeDevice(dir, n.name, unix.Mkdev(n.major, n.minor)); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
		"stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"} {
		if err := unix.Symlinkat(to, dir, name); err != nil {
			return fmt.Errorf("make /dev/%s: %w", name, err)
		}
	}
	for _, d := range []string{"pts", "shm", "mqueue"} {
		if err := unix.Mkdirat(dir, d, 0o755); err != nil {
			return fmt.Errorf("make /dev/%s: %w", d, err)
		}
	}
	return nil
}

// makeDevice makes a character device that everybody may read and write.
func makeDevice(dir int, name string, number uint64) error {
	if err := unix.Mknodat(dir, name, unix.S_IFCHR|0o666, int(number)); err != nil {
		return fmt.Errorf("make device %s: %w", name, err)
	}
	return unix.Fchmodat(dir, name, 0o666, 0) // whatever the umask
}

func makeTemplates(dir string, g *cgroups) (*templates, error) {
	t := &templates{dev: filepath.Join(dir, "dev"), sys: filepath.Join(dir, "sys"), null: -1}
	for _, d := range []string{t.dev, t.sys} {
		if err := mkdir(d); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount("dev", t.dev, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=64k"); err != nil {
		return nil, fmt.Errorf("mount /dev template: %w", err)
	}
	dev, err := unix.Open(t.dev, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	err = fillDev(dev)
	unix.Close(dev)
	if err != nil {
		return nil, err
	}
	// Of a detached mount: /proc/self/fd of a command would tell the path of one that is attached here.
	tree, err := clonePlain(t.dev)
	if err != nil {
		return nil, err
	}
	t.null, err = unix.Openat(tree, "null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	unix.Close(tree)
	if err != nil {
		return nil, err
	}
	if err := readOnly(t.dev, 0); err != nil {
		return nil, err
	}
	if err := unix.Mount("sys", t.sys, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=1m"); err != nil {
		return nil, fmt.Errorf("mount /sys template: %w", err)
	}
	if err := fillSys(t.sys, g); err != nil {
		return nil, fmt.Errorf("fill /sys template: %w", err)
	}
	for c, at := range g.shown {
		fd, err := cloneRO(unix.AT_FDCWD, filepath.Join(at, g.name))
		if err != nil {
			return nil, err
		}
		err = unix.MoveMount(fd, "", unix.AT_FDCWD, filepath.Join(t.sys, "fs/cgroup", c), unix.MOVE_MOUNT_F_EMPTY_PATH)
		unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("show cgroup of %s: %w", c, err)
		}
	}
	return t, readOnly(t.sys, unix.MOUNT_ATTR_NODEV)
}

func readOnly(path string, attr uint64) error {
	return unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_set: attr | unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC})
}

// fillSys copies the few files of /sys that runtimes size themselves by, and makes the places of the cgroups.
func fillSys(dir string, g *cgroups) error {
	for _, d := range []string{"block", "bus", "class", "dev", "devices", "firmware", "fs", "kernel", "module", "power"} {
		if err := mkdir(filepath.Join(dir, d)); err != nil {
			return err
		}
	}
	files := []string{"devices/system/cpu/online", "devices/system/cpu/possible", "devices/system/cpu/present", "devices/system/cpu/kernel_max",
		"devices/system/node/online", "devices/system/node/possible", "kernel/mm/transparent_hugepage/enabled",
		"kernel/mm/transparent_hugepage/hpage_pmd_size", "kernel/mm/transparent_hugepage/shmem_enabled"}
	for _, f := range files {
		text, err := os.ReadFile("/sys/" + f)
		if err != nil {
			continue // this host has none
		}
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, f), text, 0o444); err != nil {
			return err
		}
	}
	cpus, _ := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*")
	for _, c := range cpus {
		if err := os.MkdirAll(filepath.Join(dir, "devices/system/cpu", filepath.Base(c)), 0o755); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "fs/cgroup"), 0o755); err != nil {
		return err
	}
	places := g.places()
	for c := range g.shown {
		places = append(places, place{at: c})
	}
	for _, m := range places {
		if err := os.MkdirAll(filepath.Join(dir, "fs/cgroup", m.at), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// place is where a hierarchy of the sandbox's cgroups is seen inside, below /sys/fs/cgroup.
type place struct{ at, ctrl string }

func (g *cgroups) places() []place {
	if g.pure() {
		return []place{{at: ""}}
	}
	p := []place{{at: "unified"}}
	for _, c := range g.limits {
		p = append(p, place{c, c})
	}
	return p
}

// cloneRO returns a detached read-only clone of a folder's mount.
func cloneRO(dir int, path string) (int, error) {
	fd, err := unix.OpenTree(dir, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("clone %s: %w", path, err)
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC})
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("make %s read-only: %w", path, err)
	}
	return fd, nil
}

// clonePlain returns a detached clone of a folder's mount, with what is mounted below.
func clonePlain(path string) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return -1, fmt.Errorf("clone %s: %w", path, err)
	}
	return fd, nil
}

// probeOverlay reports whether lowers can be given by descriptor.
func probeOverlay(dir string) bool {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return true // the first birth tells why
	}
	defer unix.Close(fs)
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true
	}
	defer unix.Close(fd)
	return unix.FsconfigSetFd(fs, "lowerdir+", fd) == nil
}

func checkBirth(b *Birth) error {
	if _, err := sandbox.ParseID(string(b.ID)); err != nil {
		return err
	}
	switch {
	case len(b.Layers) == 0 || len(b.Layers) > 400:
		return fmt.Errorf("layers: %d given, want 1 to 400: %w", len(b.Layers), sandbox.ErrInvalid)
	case filepath.Dir(b.UpperDir) != filepath.Dir(b.WorkDir) || b.UpperDir == b.WorkDir:
		return fmt.Errorf("upper %q and work %q: want two folders with one parent: %w", b.UpperDir, b.WorkDir, sandbox.ErrInvalid)
	case b.UIDBase == 0 || b.UIDBase > 1<<31-2*idsPerSandbox:
		return fmt.Errorf("uid base %d: want above 0 and at most 2^31-131072: %w", b.UIDBase, sandbox.ErrInvalid)
	case len(b.Seccomp)%8 != 0:
		return fmt.Errorf("seccomp filter of %d octets: want a multiple of 8: %w", len(b.Seccomp), sandbox.ErrInvalid)
	case sandbox.CheckVolumes(b.Volumes) != nil:
		return sandbox.CheckVolumes(b.Volumes)
	case b.Runtime != nil && checkRuntime(b.Runtime) != nil:
		return checkRuntime(b.Runtime)
	case b.Resources.Memory <= 0 || b.Resources.Pids <= 0:
		return fmt.Errorf("resources: memory and pids must be set: %w", sandbox.ErrInvalid)
	}
	for _, l := range append(append([]string{b.Hostname}, b.Hosts...), b.Resolv...) {
		if strings.ContainsAny(l, "\n\x00") {
			return fmt.Errorf("host name or line %.80q: holds a line break: %w", l, sandbox.ErrInvalid)
		}
	}
	return sandbox.CheckEnv("env", b.Env)
}
