package confine

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Flags that make namespaces, for clone(2) and unshare(2). CLONE_NEWTIME is part of the exit signal in clone(2).
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Kinds and numbers of ioctl commands: the low 16 bits. Direction and size are left out, so that a variant of a command
// for another layout of its argument is met too.
const (
	ioTIOCSTI      = 0x5412
	ioTIOCLINUX    = 0x541c
	ioFICLONE      = 0x9409
	ioFICLONERANGE = 0x940d
	ioFIDEDUPE     = 0x9436
	ioEXT4MoveExt  = 0x660f
	ioEXT4SwapBoot = 0x6611
	ioXFSSwapExt   = 'X'<<8 | 109
	ioXFSExchange  = 'X'<<8 | 129
	ioXFSStart     = 'X'<<8 | 130
	ioXFSCommit    = 'X'<<8 | 131
	ioF2FSMove     = 0xf5<<8 | 9
)

// all has every reason in one place; containers differ in data only.
func containerRules() []Rule {
	eperm := Refuse(unix.EPERM)
	enosys := Refuse(unix.ENOSYS)
	noFamily := Refuse(unix.EAFNOSUPPORT)
	is := func(arg int, v ...uint32) Cond { return Cond{Arg: arg, Values: v} }
	bits := func(arg int, v uint32) Cond { return Cond{Arg: arg, AnyBit: true, Values: []uint32{v}} }
	rules := []Rule{
		// Flags behind a pointer can't be judged; glibc and Go fall back to clone.
		{Call: unix.SYS_CLONE3, Do: enosys},
		{Call: unix.SYS_CLONE, When: []Cond{bits(0, newNamespaces)}, Do: eperm},
		{Call: unix.SYS_UNSHARE, When: []Cond{bits(0, newNamespaces|unix.CLONE_NEWTIME)}, Do: eperm},
		// Too many holes of its own; runtimes probe for it and fall back.
		{Call: unix.SYS_IO_URING_SETUP, Do: enosys},
		{Call: unix.SYS_IO_URING_ENTER, Do: enosys},
		{Call: unix.SYS_IO_URING_REGISTER, Do: enosys},

		// cp and dedup tools try these first and copy when they are not supported.
		{Call: unix.SYS_IOCTL, When: []Cond{{Arg: 1, Mask: 0xffff, Values: []uint32{ioFICLONE, ioFICLONERANGE, ioFIDEDUPE}}}, Do: Refuse(unix.EOPNOTSUPP)},
		// Input into somebody else's terminal.
		{Call: unix.SYS_IOCTL, When: []Cond{{Arg: 1, Mask: 0xffff, Values: []uint32{ioTIOCSTI, ioTIOCLINUX}}}, Do: eperm},
		// Swaps of block mappings: they change files that path rules protect, given write access to any other.
		{Call: unix.SYS_IOCTL, When: []Cond{{Arg: 1, Mask: 0xffff, Values: []uint32{ioEXT4MoveExt, ioEXT4SwapBoot, ioXFSSwapExt, ioXFSExchange,
			ioXFSStart, ioXFSCommit, ioF2FSMove}}}, Do: Event()},

		// Families by a list of what is allowed: it closes AF_ALG, AF_VSOCK (no namespace holds it), AF_PACKET, AF_RXRPC and what
		// comes. EPERM instead would end su and sudo, whose audit library takes only "no such family" as an answer.
		{Call: unix.SYS_SOCKET, When: []Cond{is(0, unix.AF_INET, unix.AF_INET6), is(2, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_L2TP)}, Do: Refuse(unix.EPROTONOSUPPORT)},
		{Call: unix.SYS_SOCKET, When: []Cond{is(0, unix.AF_UNIX, unix.AF_INET, unix.AF_INET6)}, Do: Allow()},
		{Call: unix.SYS_SOCKET, When: []Cond{is(0, unix.AF_NETLINK), is(2, unix.NETLINK_ROUTE)}, Do: Allow()},
		{Call: unix.SYS_SOCKET, Do: noFamily},
		{Call: unix.SYS_SOCKETPAIR, When: []Cond{is(0, unix.AF_UNIX)}, Do: Allow()},
		{Call: unix.SYS_SOCKETPAIR, Do: noFamily},
		// Kernel TLS, espintcp and UDP encapsulation: page cache written through sockets.
		{Call: unix.SYS_SETSOCKOPT, When: []Cond{is(1, unix.IPPROTO_TCP), is(2, unix.TCP_ULP)}, Do: Refuse(unix.ENOPROTOOPT)},
		{Call: unix.SYS_SETSOCKOPT, When: []Cond{is(1, unix.IPPROTO_UDP), is(2, unix.UDP_ENCAP)}, Do: Refuse(unix.ENOPROTOOPT)},

		// The usual personalities (Linux, 32 bits, an old uname, no randomisation, the old layout) and the question.
		{Call: unix.SYS_PERSONALITY, When: []Cond{is(0, ^uint32(0))}, Do: Allow()},
		{Call: unix.SYS_PERSONALITY, When: []Cond{bits(0, ^uint32(0x8|0x20000|0x40000|0x200000))}, Do: eperm},

		// A file by its handle goes around every path, and around the root.
		{Call: unix.SYS_OPEN_BY_HANDLE_AT, Do: Event()},
		{Call: unix.SYS_KEXEC_LOAD, Do: Event()},
		{Call: unix.SYS_KEXEC_FILE_LOAD, Do: Event()},
	}
	// What needs rights that no sandbox has, refused before the kernel looks at it.
	for _, nr := range refusedCalls() {
		rules = append(rules, Rule{Call: nr, Do: eperm})
	}
	return rules
}

func refusedCalls() []uint32 {
	return append(refusedHere(),
		unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_FSOPEN, unix.SYS_FSCONFIG,
		unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR, 467, // open_tree_attr
		unix.SYS_SETNS, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY,
		unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT,
		unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
		unix.SYS_FANOTIFY_INIT, unix.SYS_SYSLOG, unix.SYS_VHANGUP, unix.SYS_NFSSERVCTL)
}

// Container is the policy of container sandboxes: everything passes but what is named. ptrace and process_vm_* pass
// (debuggers, sanitizers): process 1 can't be traced from inside anyway.
func Container() Policy {
	p := Policy{Foreign: Kill(), Known: knownCalls, Rules: containerRules()}
	p.Arch, p.X32 = nativeArch()
	return p
}

// EventName names a call that a policy's Event refused.
func EventName(call uint32, args [6]uint64) string {
	switch call {
	case unix.SYS_OPEN_BY_HANDLE_AT:
		return "open_by_handle_at"
	case unix.SYS_KEXEC_LOAD:
		return "kexec_load"
	case unix.SYS_KEXEC_FILE_LOAD:
		return "kexec_file_load"
	case unix.SYS_IOCTL:
		switch args[1] & 0xffff {
		case ioEXT4MoveExt:
			return "ioctl EXT4_IOC_MOVE_EXT"
		case ioEXT4SwapBoot:
			return "ioctl EXT4_IOC_SWAP_BOOT"
		case ioXFSSwapExt:
			return "ioctl XFS_IOC_SWAPEXT"
		case ioXFSExchange, ioXFSStart, ioXFSCommit:
			return "ioctl XFS_IOC_EXCHANGE_RANGE"
		case ioF2FSMove:
			return "ioctl F2FS_IOC_MOVE_RANGE"
		}
		return fmt.Sprintf("ioctl %#x", uint32(args[1]))
	}
	return fmt.Sprintf("call %d", call)
}

// Capability sets of a container.
const (
	// Caps is the bounding set of commands, and what root gets: those that act on the sandbox's own files, ids and ports.
	// net_raw and audit_write are powerless (the namespaces belong to the host) but programs carry them as file capabilities,
	// and without them in the set their exec fails. sys_ptrace lets root debug what other users of the sandbox run; process 1 is
	// out of its reach, as its memory belongs to the initial user namespace.
	Caps uint64 = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_KILL |
		1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_NET_RAW |
		1<<unix.CAP_SYS_CHROOT | 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_AUDIT_WRITE | 1<<unix.CAP_SETFCAP
)

// Masks are the paths in a container's /proc that are hidden: they tell of the host or act on it. What is absent in a kernel is passed over.
func Masks() []string {
	return []string{"/proc/kcore", "/proc/vmcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/timer_stats", "/proc/kallsyms",
		"/proc/kmsg", "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/pagetypeinfo",
		"/proc/sched_debug", "/proc/latency_stats", "/proc/interrupts", "/proc/iomem", "/proc/ioports", "/proc/config.gz",
		"/proc/sysrq-trigger", "/proc/acpi", "/proc/asound", "/proc/scsi", "/proc/fs", "/proc/bus", "/proc/irq", "/proc/driver"}
}

// ReadOnly are the paths in a container's /proc that may be read only.
func ReadOnly() []string { return []string{"/proc/sys"} }

// Rlimit is a resource limit of commands.
type Rlimit struct {
	Resource   uint32
	Soft, Hard uint64
}

// Rlimits are the limits of a container's commands. Process 1 lowers them to its own hard limits, so nofile is 65,536 or
// what the host allows. Memory, processes and disk are limited by the sandbox's groups and quota.
func Rlimits() []Rlimit {
	const infinity = ^uint64(0)
	return []Rlimit{
		{Resource: unix.RLIMIT_CORE},
		{Resource: unix.RLIMIT_NOFILE, Soft: 65536, Hard: 65536},
		{Resource: unix.RLIMIT_NPROC, Soft: infinity, Hard: infinity},
		{Resource: unix.RLIMIT_STACK, Soft: 8 << 20, Hard: infinity},
		{Resource: unix.RLIMIT_MSGQUEUE, Soft: 819200, Hard: 819200},
		{Resource: unix.RLIMIT_RTPRIO},
	}
}
