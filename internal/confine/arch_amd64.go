package confine

import "golang.org/x/sys/unix"

// knownCalls is one above the last number that was looked at (470, listns).
const knownCalls = 471

func nativeArch() (arch uint32, x32 bool) { return unix.AUDIT_ARCH_X86_64, true }

// refusedHere are calls that only this architecture has.
func refusedHere() []uint32 {
	return []uint32{unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_USELIB, unix.SYS__SYSCTL, unix.SYS_CREATE_MODULE, unix.SYS_GET_KERNEL_SYMS, unix.SYS_QUERY_MODULE}
}
