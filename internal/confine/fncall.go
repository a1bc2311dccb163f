package confine

import "golang.org/x/sys/unix"

// FnCall is the policy of function calls, which is a container's with two differences. What a container refuses quietly because it takes
// rights that nobody inside has is told here, since no program for a judge makes such calls. And a call of another architecture is asked
// about: the answer is the end of the whole tree, and so known for certain, where a signal could be of the program's own making.
func FnCall() Policy {
	p := Policy{Foreign: Event(), Known: knownCalls, Rules: containerRules()}
	p.Arch, p.X32 = nativeArch()
	told := map[uint32]bool{}
	for _, nr := range refusedCalls() {
		told[nr] = true
	}
	// glibc's getlogin and vhangup's users aside, those that ordinary programs make without need.
	for _, nr := range []uint32{unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_VHANGUP, unix.SYS_SYSLOG} {
		delete(told, nr)
	}
	for i, r := range p.Rules {
		switch {
		case told[r.Call] && len(r.When) == 0:
			p.Rules[i].Do = Event()
		case r.Call == unix.SYS_UNSHARE, r.Call == unix.SYS_CLONE:
			p.Rules[i].Do = Event()
		}
	}
	p.Rules = append(p.Rules, Rule{Call: unix.SYS_CHROOT, Do: Event()}, Rule{Call: unix.SYS_NAME_TO_HANDLE_AT, Do: Refuse(unix.EPERM)})
	return p
}

// CallName names a system call of FnCall's events: by name where it has one here, else by its number.
func CallName(arch, call uint32, args [6]uint64) string {
	if Fatal(arch, call) {
		return "call of another architecture"
	}
	if name, ok := map[uint32]string{
		unix.SYS_MOUNT: "mount", unix.SYS_UMOUNT2: "umount2", unix.SYS_PIVOT_ROOT: "pivot_root", unix.SYS_MOVE_MOUNT: "move_mount",
		unix.SYS_OPEN_TREE: "open_tree", unix.SYS_FSOPEN: "fsopen", unix.SYS_FSCONFIG: "fsconfig", unix.SYS_FSMOUNT: "fsmount",
		unix.SYS_FSPICK: "fspick", unix.SYS_MOUNT_SETATTR: "mount_setattr", unix.SYS_SETNS: "setns", unix.SYS_BPF: "bpf",
		unix.SYS_INIT_MODULE: "init_module", unix.SYS_FINIT_MODULE: "finit_module", unix.SYS_DELETE_MODULE: "delete_module",
		unix.SYS_REBOOT: "reboot", unix.SYS_SWAPON: "swapon", unix.SYS_SWAPOFF: "swapoff", unix.SYS_ACCT: "acct", unix.SYS_QUOTACTL: "quotactl",
		unix.SYS_SETTIMEOFDAY: "settimeofday", unix.SYS_CLOCK_SETTIME: "clock_settime", unix.SYS_SETHOSTNAME: "sethostname",
		unix.SYS_SETDOMAINNAME: "setdomainname", unix.SYS_FANOTIFY_INIT: "fanotify_init", unix.SYS_UNSHARE: "unshare", unix.SYS_CLONE: "clone",
		unix.SYS_CHROOT: "chroot",
	}[call]; ok {
		return name
	}
	return EventName(call, args)
}

// Fatal reports whether FnCall ends a program for the call.
func Fatal(arch, call uint32) bool {
	native, x32 := nativeArch()
	return arch != native || x32 && call&0x40000000 != 0
}
