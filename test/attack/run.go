//go:build linux && amd64

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

func int80()

func run(args []string) (all []attempt) {
	root := os.Getuid() == 0
	add := func(a ...attempt) { all = append(all, a...) }
	add(process1(root)...)
	add(calls()...)
	add(sockets()...)
	add(ioctls()...)
	add(files(root)...)
	add(limits(root)...)
	if len(args) > 0 {
		pid, _ := strconv.Atoi(args[0])
		add(try("signal a process of the host", "ESRCH", func() error { return unix.Kill(pid, 0) }),
			try("pidfd of a process of the host", "ESRCH", func() error { _, err := unix.PidfdOpen(pid, 0); return err }),
			open(fmt.Sprintf("/proc/%d/environ", pid), unix.O_RDONLY, "ENOENT"))
	}
	add(attempt{"process 1 lives on", "dsec-init", func() string {
		b, _ := os.ReadFile("/proc/1/comm")
		return strings.TrimSpace(string(b))
	}})
	return all
}

// process1 is everything against it. Root inside may send it signals; they have no effect.
func process1(root bool) []attempt {
	signal := "EPERM"
	if root {
		signal = "ok"
	}
	var buf [64]byte
	local := []unix.Iovec{{Base: &buf[0], Len: 64}}
	remote := []unix.RemoteIovec{{Base: 0x400000, Len: 64}}
	all := []attempt{
		try("kill process 1", signal, func() error { return unix.Kill(1, unix.SIGKILL) }),
		try("stop process 1", signal, func() error { return unix.Kill(1, unix.SIGSTOP) }),
		try("kill process 1 by pidfd", signal, func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}),
		try("descriptor of process 1 by pidfd", "EPERM", func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			_, err = unix.PidfdGetfd(fd, 3, 0)
			return err
		}),
		try("trace process 1", "EPERM", func() error { return unix.PtraceAttach(1) }),
		try("seize process 1", "EPERM", func() error { return unix.PtraceSeize(1) }),
		try("read memory of process 1", "EPERM", func() error { _, err := unix.ProcessVMReadv(1, local, remote, 0); return err }),
		try("write memory of process 1", "EPERM", func() error { _, err := unix.ProcessVMWritev(1, local, remote, 0); return err }),
		try("limits of process 1", "EPERM", func() error { return unix.Prlimit(1, unix.RLIMIT_NOFILE, &unix.Rlimit{}, nil) }),
		try("priority of process 1", "EPERM EACCES", func() error { return unix.Setpriority(unix.PRIO_PROCESS, 1, 19) }),
		try("processors of process 1", "EPERM", func() error { var s unix.CPUSet; s.Set(0); return unix.SchedSetaffinity(1, &s) }),
	}
	for _, f := range []string{"mem", "environ", "maps", "auxv", "syscall", "stack", "ns/mnt", "ns/user", "root", "cwd", "exe", "fd", "map_files", "io"} {
		all = append(all, open("/proc/1/"+f, unix.O_RDONLY, "EACCES EPERM ENOENT"))
	}
	for _, f := range []string{"mem", "clear_refs", "oom_score_adj", "uid_map", "gid_map", "setgroups", "comm", "coredump_filter", "timerslack_ns", "loginuid", "autogroup"} {
		// Modes of some let root open them; what counts then is the write.
		all = append(all, try("write /proc/1/"+f, "EACCES EPERM ENOENT EINVAL", func() error {
			fd, err := unix.Open("/proc/1/"+f, unix.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			_, err = unix.Write(fd, []byte("0"))
			return err
		}))
	}
	return all
}

func str(s string) uintptr {
	b, _ := unix.BytePtrFromString(s)
	return uintptr(unsafe.Pointer(b))
}

// calls are refused before the kernel looks at their arguments, so that these need make no sense.
func calls() []attempt {
	var attr [128]byte
	p := uintptr(unsafe.Pointer(&attr[0]))
	return []attempt{
		call("mount", "EPERM", unix.SYS_MOUNT, str("none"), str("/tmp"), str("tmpfs"), 0, 0),
		call("bind mount", "EPERM", unix.SYS_MOUNT, str("/"), str("/tmp"), 0, unix.MS_BIND, 0),
		call("remount /proc/sys for writing", "EPERM", unix.SYS_MOUNT, 0, str("/proc/sys"), 0, unix.MS_REMOUNT|unix.MS_BIND, 0),
		call("umount a mask", "EPERM", unix.SYS_UMOUNT2, str("/proc/kcore"), unix.MNT_DETACH),
		call("pivot_root", "EPERM", unix.SYS_PIVOT_ROOT, str("/"), str("/tmp")),
		call("move_mount", "EPERM", unix.SYS_MOVE_MOUNT, 0, 0, 0, 0, 0),
		call("open_tree", "EPERM", unix.SYS_OPEN_TREE, ^uintptr(99), str("/"), unix.OPEN_TREE_CLONE),
		call("fsopen", "EPERM", unix.SYS_FSOPEN, str("tmpfs"), 0),
		call("fsconfig", "EPERM", unix.SYS_FSCONFIG, 0, 0, 0, 0, 0),
		call("fsmount", "EPERM", unix.SYS_FSMOUNT, 0, 0, 0),
		call("fspick", "EPERM", unix.SYS_FSPICK, ^uintptr(99), str("/"), 0),
		call("mount_setattr", "EPERM", unix.SYS_MOUNT_SETATTR, ^uintptr(99), str("/"), 0, p, 32),
		call("unshare a user namespace", "EPERM", unix.SYS_UNSHARE, unix.CLONE_NEWUSER),
		call("unshare a mount namespace", "EPERM", unix.SYS_UNSHARE, unix.CLONE_NEWNS),
		call("unshare a network namespace", "EPERM", unix.SYS_UNSHARE, unix.CLONE_NEWNET),
		call("unshare a pid namespace", "EPERM", unix.SYS_UNSHARE, unix.CLONE_NEWPID),
		call("unshare a time namespace", "EPERM", unix.SYS_UNSHARE, unix.CLONE_NEWTIME),
		call("clone a user namespace", "EPERM", unix.SYS_CLONE, unix.CLONE_NEWUSER, 0),
		call("clone3", "ENOSYS", unix.SYS_CLONE3, p, 88),
		call("setns", "EPERM", unix.SYS_SETNS, 0, 0),
		call("bpf", "EPERM", unix.SYS_BPF, 0, p, 128),
		call("perf_event_open", "EPERM", unix.SYS_PERF_EVENT_OPEN, p, 0, 0, 0, 0),
		call("userfaultfd", "EPERM", unix.SYS_USERFAULTFD, 1),
		call("keyctl", "EPERM", unix.SYS_KEYCTL, 0, 0),
		call("add_key", "EPERM", unix.SYS_ADD_KEY, str("user"), str("x"), p, 1, ^uintptr(2)),
		call("request_key", "EPERM", unix.SYS_REQUEST_KEY, str("user"), str("x"), 0, 0),
		call("io_uring_setup", "ENOSYS", unix.SYS_IO_URING_SETUP, 8, p),
		call("open_by_handle_at", "EPERM", unix.SYS_OPEN_BY_HANDLE_AT, 0, p, 0),
		call("kexec_load", "EPERM", unix.SYS_KEXEC_LOAD, 0, 0, 0, 0),
		call("kexec_file_load", "EPERM", unix.SYS_KEXEC_FILE_LOAD, 0, 0, 0, 0, 0),
		call("init_module", "EPERM", unix.SYS_INIT_MODULE, 0, 0, 0),
		call("finit_module", "EPERM", unix.SYS_FINIT_MODULE, 0, 0, 0),
		call("delete_module", "EPERM", unix.SYS_DELETE_MODULE, str("x"), 0),
		call("reboot", "EPERM", unix.SYS_REBOOT, unix.LINUX_REBOOT_MAGIC1, unix.LINUX_REBOOT_MAGIC2, unix.LINUX_REBOOT_CMD_CAD_OFF),
		call("swapon", "EPERM", unix.SYS_SWAPON, str("/x"), 0),
		call("acct", "EPERM", unix.SYS_ACCT, 0),
		call("quotactl", "EPERM", unix.SYS_QUOTACTL, 0, 0, 0, 0),
		call("settimeofday", "EPERM", unix.SYS_SETTIMEOFDAY, p, 0),
		call("clock_settime", "EPERM", unix.SYS_CLOCK_SETTIME, 0, p),
		call("sethostname", "EPERM", unix.SYS_SETHOSTNAME, str("x"), 1),
		call("fanotify_init", "EPERM", unix.SYS_FANOTIFY_INIT, 0, 0),
		call("syslog (dmesg)", "EPERM", unix.SYS_SYSLOG, 3, p, 128),
		call("vhangup", "EPERM", unix.SYS_VHANGUP),
		call("iopl", "EPERM", unix.SYS_IOPL, 3),
		call("ioperm", "EPERM", unix.SYS_IOPERM, 0x70, 2, 1),
		call("personality READ_IMPLIES_EXEC", "EPERM", unix.SYS_PERSONALITY, 0x400000),
		call("a call of the future", "ENOSYS", 900),
		try("adjust the clock", "EPERM", func() error { _, err := unix.Adjtimex(&unix.Timex{Modes: 0x4000, Tick: 10000}); return err }),
		try("real-time scheduling", "EPERM", func() error {
			return unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
		}),
		try("a higher priority", "EACCES EPERM", func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -5) }),
		{"a call by the x32 table", "SIGSYS", func() string { return died("x32") }},
		{"a call by the 32-bit table", "SIGSYS", func() string { return died("int80") }},
	}
}

func sockets() (all []attempt) {
	sock := func(name, want string, family, kind, proto int) {
		all = append(all, try("socket "+name, want, func() error {
			fd, err := unix.Socket(family, kind, proto)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}))
	}
	for name, family := range map[string]int{"AF_ALG": 38, "AF_VSOCK": 40, "AF_PACKET": 17, "AF_KEY": 15, "AF_RXRPC": 33, "AF_BLUETOOTH": 31, "AF_CAN": 29,
		"AF_TIPC": 30, "AF_SMC": 43, "AF_XDP": 44, "AF_KCM": 41, "AF_NFC": 39, "AF_RDS": 21, "AF_PPPOX": 24, "AF_QIPCRTR": 42, "AF_X25": 9, "AF_AX25": 3} {
		sock(name, "EAFNOSUPPORT", family, unix.SOCK_DGRAM, 0)
	}
	for name, proto := range map[string]int{"NETFILTER": 12, "XFRM": 6, "GENERIC": 16, "AUDIT": 9, "KOBJECT_UEVENT": 15, "CONNECTOR": 11, "SOCK_DIAG": 4} {
		sock("AF_NETLINK "+name, "EAFNOSUPPORT", unix.AF_NETLINK, unix.SOCK_RAW, proto)
	}
	sock("AF_NETLINK ROUTE", "ok", unix.AF_NETLINK, unix.SOCK_RAW, 0)
	sock("raw ICMP", "EPERM", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	sock("SCTP", "EPROTONOSUPPORT", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	all = append(all,
		try("socket pair of another family", "EAFNOSUPPORT", func() error { _, err := unix.Socketpair(unix.AF_TIPC, unix.SOCK_STREAM, 0); return err }),
		try("take the loopback down", "EPERM", func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			ifr, err := unix.NewIfreq("lo")
			if err != nil {
				return err
			}
			return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
		}),
		try("kernel TLS", "ENOPROTOOPT", func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls")
		}))
	return all
}

func ioctls() (all []attempt) {
	var arg [256]byte
	file := filepath.Join("/tmp", fmt.Sprint("attack-", os.Getuid()))
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		panic(err)
	}
	os.Remove(file)
	io := func(name, want string, command uintptr) {
		all = append(all, call("ioctl "+name, want, unix.SYS_IOCTL, f.Fd(), command, uintptr(unsafe.Pointer(&arg[0]))))
	}
	io("TIOCSTI", "EPERM", unix.TIOCSTI)
	io("TIOCLINUX", "EPERM", 0x541c)
	io("FICLONE, quietly", "ENOTSUP", 0x40049409)
	io("FICLONERANGE, quietly", "ENOTSUP", 0x4020940d)
	io("FIDEDUPERANGE, quietly", "ENOTSUP", 0xc0189436)
	io("EXT4_IOC_MOVE_EXT", "EPERM", 0xc028660f)
	io("EXT4_IOC_SWAP_BOOT", "EPERM", 0x6611)
	io("XFS_IOC_SWAPEXT", "EPERM", 0xc0c0586d)
	io("XFS_IOC_EXCHANGE_RANGE", "EPERM", 0x40285881)
	io("F2FS_IOC_MOVE_RANGE", "EPERM", 0xc020f509)
	io("FS_IOC_SETFLAGS immutable", "EPERM ENOTTY ENOTSUP EINVAL", 0x40086602) // EINVAL: of what earlier calls left in the argument
	return all
}

func files(root bool) (all []attempt) {
	add := func(a ...attempt) { all = append(all, a...) }
	for _, f := range []string{"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe", "/proc/sys/vm/overcommit_memory",
		"/proc/sys/net/ipv4/ip_forward", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/yama/ptrace_scope", "/proc/sys/kernel/unprivileged_bpf_disabled",
		"/sys/kernel/mm/transparent_hugepage/enabled", "/sys/devices/system/cpu/online", "/sys/kernel/uevent_helper", "/sys/power/state"} {
		add(open(f, unix.O_WRONLY, "EACCES EROFS ENOENT"))
	}
	for _, f := range []string{"kcore", "kmsg", "keys", "key-users", "kallsyms", "timer_list", "sysrq-trigger", "slabinfo", "vmallocinfo", "interrupts", "iomem",
		"kpagecount", "kpageflags", "kpagecgroup", "sched_debug", "latency_stats", "config.gz", "acpi", "scsi", "asound", "vmcore", "ioports", "pagetypeinfo",
		"timer_stats", "driver", "irq", "bus", "fs"} {
		add(masked("/proc/" + f))
	}
	for _, f := range []string{"mem", "kmem", "kvm", "fuse", "vsock", "vhost-net", "loop-control", "loop0", "kmsg", "sda", "vda", "userfaultfd", "net/tun", "console", "hpet", "snapshot"} {
		add(open("/dev/"+f, unix.O_RDONLY, "ENOENT"))
	}
	groups := func(path string) {
		for _, f := range []string{"cgroup.procs", "tasks", "memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us", "cgroup.kill",
			"cgroup.freeze", "cgroup.subtree_control", "release_agent", "notify_on_release", "cgroup.type", "cpuset.cpus", "cpuacct.usage"} {
			if _, err := os.Lstat(path + "/" + f); err == nil {
				add(open(path+"/"+f, unix.O_WRONLY, "EACCES EROFS EPERM"))
			}
		}
		add(try("make a group in "+path, "EROFS EACCES EPERM", func() error { return unix.Mkdir(path+"/x", 0o755) }))
	}
	groups("/sys/fs/cgroup")
	if list, err := os.ReadDir("/sys/fs/cgroup"); err == nil {
		for _, e := range list {
			if e.IsDir() && len(all) < 400 {
				groups("/sys/fs/cgroup/" + e.Name())
			}
		}
	}
	tmp, err := os.MkdirTemp("/tmp", "attack")
	if err != nil {
		panic(err)
	}
	add(
		try("make a device: memory", "EPERM", func() error { return unix.Mknod(tmp+"/mem", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))) }),
		try("make a device: disk", "EPERM", func() error { return unix.Mknod(tmp+"/disk", unix.S_IFBLK|0o666, int(unix.Mkdev(8, 0))) }),
		try("make a whiteout", "EPERM", func() error { return unix.Mknod(tmp+"/gone", unix.S_IFCHR|0o666, 0) }),
		try("make a FIFO", "ok", func() error { return unix.Mkfifo(tmp+"/fifo", 0o600) }),
		try("hard link to /dev", "EXDEV EROFS EPERM", func() error { return unix.Link("/dev/null", tmp+"/null") }),
		try("hard link to /proc", "EXDEV EPERM EACCES", func() error { return unix.Link("/proc/self/status", tmp+"/status") }),
		try("hard link across mounts", "EXDEV EPERM", func() error {
			if err := os.WriteFile(tmp+"/mine", nil, 0o600); err != nil {
				return err
			}
			return unix.Link(tmp+"/mine", "/dev/shm/mine-"+filepath.Base(tmp))
		}),
		try("rename across mounts", "EXDEV", func() error { return unix.Rename(tmp+"/mine", "/dev/shm/mine-"+filepath.Base(tmp)) }),
		try("file in /dev", "EROFS EACCES", func() error { return os.WriteFile("/dev/x", nil, 0o600) }),
		try("file in /sys", "EROFS EACCES", func() error { return os.WriteFile("/sys/x", nil, 0o600) }),
		try("an owner outside of the range", "EINVAL EPERM", func() error { return unix.Chown(tmp, 65536+1, -1) }),
		try("trusted attribute", "EPERM", func() error { return unix.Setxattr(tmp, "trusted.overlay.opaque", []byte("y"), 0) }),
		try("a uid outside of the range", "EINVAL EPERM", func() error { return unix.Setresuid(65537, 65537, 65537) }),
		attempt{"the root's parent", "itself", func() string {
			var a, b unix.Stat_t
			if unix.Stat("/", &a) != nil || unix.Stat("/../../..", &b) != nil || a.Ino != b.Ino || a.Dev != b.Dev {
				return "another"
			}
			return "itself"
		}},
		attempt{"descriptors of somebody else", "none", descriptors},
		attempt{"the host's paths in mountinfo", "none", mounts},
		attempt{"capabilities", "confined", capabilities},
	)
	if root {
		// By chroot below the working folder and climbing, root gets above its first root: to that of the sandbox, no further.
		add(attempt{"climb out of a chroot", "itself", func() string {
			var a, b unix.Stat_t
			if unix.Stat("/", &a) != nil || unix.Mkdir(tmp+"/jail", 0o700) != nil || unix.Chdir(tmp) != nil || unix.Chroot(tmp+"/jail") != nil {
				return "no_chroot"
			}
			for range 64 {
				unix.Chdir("..")
			}
			err := unix.Chroot(".")
			if err != nil || unix.Stat("/", &b) != nil || a.Ino != b.Ino || a.Dev != b.Dev {
				return "another " + answer(err)
			}
			return "itself"
		}})
	}
	return all
}

// descriptors tells of one that leads anywhere but to the command's own streams and what this program, or Go (which reads the limit of
// processors), opened.
func descriptors() string {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return answer(err)
	}
	for _, e := range list {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil {
			continue
		}
		known := slices.ContainsFunc([]string{"pipe:", "/null", "/dev/null", "/dev/pts/", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[pidfd]", "/proc/", "/tmp/attack-",
			"/sys/fs/cgroup/"},
			func(p string) bool { return strings.HasPrefix(to, p) })
		if !known {
			return e.Name() + "->" + to
		}
	}
	return "none"
}

func mounts() string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return answer(err)
	}
	for line := range strings.Lines(string(b)) {
		for _, word := range []string{"/var/", "/run/", "layers/", "keeper"} {
			if strings.Contains(line, word) {
				return strings.ReplaceAll(strings.TrimSpace(line), " ", "_")
			}
		}
	}
	return "none"
}

// capabilities of the bounding set are those that act on the sandbox's own files and ids.
func capabilities() string {
	for _, c := range []int{unix.CAP_SYS_ADMIN, unix.CAP_SYS_MODULE, unix.CAP_SYS_RAWIO, unix.CAP_MKNOD, unix.CAP_NET_ADMIN, unix.CAP_SYS_TIME, unix.CAP_SYS_BOOT,
		unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_SYSLOG, unix.CAP_SYS_RESOURCE, unix.CAP_DAC_READ_SEARCH, unix.CAP_MAC_ADMIN, unix.CAP_IPC_OWNER, unix.CAP_SYS_NICE} {
		if v, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err != nil || v != 0 {
			return fmt.Sprintf("has_%d", c)
		}
	}
	return "confined"
}

func limits(root bool) []attempt {
	return []attempt{
		try("raise the limit of open files", "EPERM", func() error {
			var r unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
				return err
			}
			return unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: r.Max, Max: r.Max + 1}, nil)
		}),
		try("raise the limit of core dumps", "EPERM", func() error { return unix.Prlimit(0, unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}, nil) }),
		try("be passed over by the memory killer", "EACCES EPERM", func() error { return os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0) }),
	}
}
