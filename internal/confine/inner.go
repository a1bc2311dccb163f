package confine

import "golang.org/x/sys/unix"

// OwnKernel is the policy of sandboxes whose kernel is not the host's (gVisor). What a container's policy refuses is that kernel's to
// judge. But it knows no user namespace below its first, and process 1 is an ordinary process to it: these rules stand for what the
// host's kernel does by itself for process 1 of a container.
func OwnKernel() Policy {
	eperm := Refuse(unix.EPERM)
	first := func(call uint32, arg int) Rule {
		return Rule{Call: call, When: []Cond{{Arg: arg, Values: []uint32{1}}}, Do: eperm}
	}
	p := Policy{Foreign: Refuse(unix.ENOSYS), Rules: []Rule{
		first(unix.SYS_KILL, 0), first(unix.SYS_TKILL, 0), first(unix.SYS_TGKILL, 0), first(unix.SYS_TGKILL, 1),
		first(unix.SYS_RT_SIGQUEUEINFO, 0), first(unix.SYS_RT_TGSIGQUEUEINFO, 0), first(unix.SYS_RT_TGSIGQUEUEINFO, 1),
		first(unix.SYS_PIDFD_OPEN, 0), first(unix.SYS_PROCESS_VM_READV, 0), first(unix.SYS_PROCESS_VM_WRITEV, 0),
		first(unix.SYS_PTRACE, 1), first(unix.SYS_PRLIMIT64, 0), first(unix.SYS_KCMP, 0), first(unix.SYS_KCMP, 1),
	}}
	p.Arch, p.X32 = nativeArch()
	return p
}
