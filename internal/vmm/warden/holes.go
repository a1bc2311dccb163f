package warden

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/confine"
)

// A monitor gives back pages of its machine's memory in two steps: it makes a hole in the memory's file, then drops its mapping of them. A clone
// has a private mapping of a template, which is sealed: no hole can be made there, and QEMU (7.2 to 10) stops at the refusal, though the second
// step is all that is wanted. So the kernel asks here before a monitor makes a hole. In a file that is sealed the call is answered as done, without
// anything done: it could change nothing. Everywhere else it goes on.

// askAboutHoles puts the filter on the calling thread, for all that it will start, and returns its listener.
func askAboutHoles() (int, error) {
	code, err := confine.Policy{Arch: confine.Container().Arch, Rules: []confine.Rule{
		{Call: unix.SYS_FALLOCATE, When: []confine.Cond{{Arg: 1, AnyBit: true, Values: []uint32{unix.FALLOC_FL_PUNCH_HOLE}}}, Do: confine.Event()},
	}}.Compile(true)
	if err != nil {
		return -1, err
	}
	prog := unix.SockFprog{Len: uint16(len(code) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&code[0]))}
	fd, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW,
		uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return -1, fmt.Errorf("filter of the monitors: %w", e)
	}
	return int(fd), nil
}

// answerHoles answers as long as this process lives. On an error holes are refused from then on: a monitor that nobody answers would stand still.
func answerHoles(listener int) error {
	defer unix.Close(listener)
	for {
		var q [80]byte // struct seccomp_notif: u64 id, u32 pid, u32 flags, s32 nr, u32 arch, u64 ip, u64 args[6]
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&q)))
		if e == unix.EINTR || e == unix.ENOENT { // it ended meanwhile
			continue
		}
		if e != 0 {
			return fmt.Errorf("filter of the monitors: %w", e)
		}
		thread, file := binary.NativeEndian.Uint32(q[8:]), int32(binary.NativeEndian.Uint64(q[32:]))
		var a [24]byte // struct seccomp_notif_resp: u64 id, s64 val, s32 error, u32 flags
		copy(a[:8], q[:8])
		if !sealed(thread, file) {
			binary.NativeEndian.PutUint32(a[20:], unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE)
		}
		unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&a)))
	}
}

// sealed reports whether nobody can change a thread's file any more. The thread is a monitor's and may lie about its file by changing it: that
// gains it nothing, since its call is then either answered without anything done, or made with its own rights.
func sealed(thread uint32, file int32) bool {
	at := "/proc/" + strconv.FormatUint(uint64(thread), 10) + "/fd/" + strconv.Itoa(int(file))
	st, err := os.Stat(at)
	if err != nil || !st.Mode().IsRegular() {
		return false
	}
	fd, err := unix.Open(at, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return err == nil && seals&unix.F_SEAL_WRITE != 0
}
