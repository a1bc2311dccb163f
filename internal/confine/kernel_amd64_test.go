package confine

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kernelCalls are made by a child under the container's filter. A refusal has to come from the filter, hence arguments that
// the kernel itself would answer otherwise.
var kernelCalls = []struct {
	name string
	nr   uintptr
	args [6]uintptr
	want unix.Errno
}{
	{"getppid", unix.SYS_GETPPID, [6]uintptr{}, 0},
	{"clone3", unix.SYS_CLONE3, [6]uintptr{}, unix.ENOSYS},
	{"unshare user", unix.SYS_UNSHARE, [6]uintptr{unix.CLONE_NEWUSER}, unix.EPERM},
	{"unshare time", unix.SYS_UNSHARE, [6]uintptr{unix.CLONE_NEWTIME}, unix.EPERM},
	{"unshare files", unix.SYS_UNSHARE, [6]uintptr{unix.CLONE_SYSVSEM}, 0},
	{"clone with a namespace", unix.SYS_CLONE, [6]uintptr{unix.CLONE_NEWUTS | uintptr(unix.SIGCHLD)}, unix.EPERM},
	{"io_uring", unix.SYS_IO_URING_SETUP, [6]uintptr{1}, unix.ENOSYS},
	{"FICLONE", unix.SYS_IOCTL, [6]uintptr{1, unix.FICLONE, 1}, unix.EOPNOTSUPP},
	{"FICLONE with high bits", unix.SYS_IOCTL, [6]uintptr{1, unix.FICLONE | 1<<40, 1}, unix.EOPNOTSUPP},
	{"FICLONERANGE", unix.SYS_IOCTL, [6]uintptr{1, unix.FICLONERANGE}, unix.EOPNOTSUPP},
	{"FIDEDUPERANGE", unix.SYS_IOCTL, [6]uintptr{1, unix.FIDEDUPERANGE}, unix.EOPNOTSUPP},
	{"TIOCSTI", unix.SYS_IOCTL, [6]uintptr{99, unix.TIOCSTI}, unix.EPERM},
	{"EXT4_IOC_MOVE_EXT", unix.SYS_IOCTL, [6]uintptr{99, 0xc028660f}, unix.EPERM},
	{"XFS_IOC_EXCHANGE_RANGE", unix.SYS_IOCTL, [6]uintptr{99, 0x40285881}, unix.EPERM},
	{"FIONREAD", unix.SYS_IOCTL, [6]uintptr{99, 0x541b}, unix.EBADF},
	{"socket unix", unix.SYS_SOCKET, [6]uintptr{unix.AF_UNIX, unix.SOCK_STREAM}, 0},
	{"socket inet", unix.SYS_SOCKET, [6]uintptr{unix.AF_INET, unix.SOCK_STREAM}, 0},
	{"socket inet6", unix.SYS_SOCKET, [6]uintptr{unix.AF_INET6, unix.SOCK_DGRAM}, 0},
	{"socket sctp", unix.SYS_SOCKET, [6]uintptr{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, unix.EPROTONOSUPPORT},
	{"netlink route", unix.SYS_SOCKET, [6]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, 0},
	{"netlink audit", unix.SYS_SOCKET, [6]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, unix.EAFNOSUPPORT},
	{"netlink xfrm", unix.SYS_SOCKET, [6]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM}, unix.EAFNOSUPPORT},
	{"socket packet", unix.SYS_SOCKET, [6]uintptr{unix.AF_PACKET, unix.SOCK_RAW}, unix.EAFNOSUPPORT},
	{"socket alg", unix.SYS_SOCKET, [6]uintptr{unix.AF_ALG, unix.SOCK_SEQPACKET}, unix.EAFNOSUPPORT},
	{"socket vsock", unix.SYS_SOCKET, [6]uintptr{unix.AF_VSOCK, unix.SOCK_STREAM}, unix.EAFNOSUPPORT},
	{"socket vsock with high bits", unix.SYS_SOCKET, [6]uintptr{unix.AF_VSOCK | 1<<32, unix.SOCK_STREAM}, unix.EAFNOSUPPORT},
	{"socketpair tipc", unix.SYS_SOCKETPAIR, [6]uintptr{unix.AF_TIPC, unix.SOCK_STREAM}, unix.EAFNOSUPPORT},
	{"TCP_ULP", unix.SYS_SETSOCKOPT, [6]uintptr{99, unix.IPPROTO_TCP, unix.TCP_ULP}, unix.ENOPROTOOPT},
	{"TCP_NODELAY", unix.SYS_SETSOCKOPT, [6]uintptr{99, unix.IPPROTO_TCP, unix.TCP_NODELAY}, unix.EBADF},
	{"UDP_ENCAP", unix.SYS_SETSOCKOPT, [6]uintptr{99, unix.IPPROTO_UDP, unix.UDP_ENCAP}, unix.ENOPROTOOPT},
	{"personality asked", unix.SYS_PERSONALITY, [6]uintptr{0xffffffff}, 0},
	{"personality without randomisation", unix.SYS_PERSONALITY, [6]uintptr{0x40000}, 0},
	{"personality 32", unix.SYS_PERSONALITY, [6]uintptr{0x8}, 0},
	{"personality back", unix.SYS_PERSONALITY, [6]uintptr{0}, 0},
	{"personality read implies exec", unix.SYS_PERSONALITY, [6]uintptr{0x400000}, unix.EPERM},
	{"ptrace", unix.SYS_PTRACE, [6]uintptr{unix.PTRACE_CONT, 1 << 30}, unix.ESRCH},
	{"process_vm_readv", unix.SYS_PROCESS_VM_READV, [6]uintptr{1 << 30, 0, 0, 0, 0, 1}, unix.EINVAL},
	{"mount", unix.SYS_MOUNT, [6]uintptr{}, unix.EPERM},
	{"umount", unix.SYS_UMOUNT2, [6]uintptr{0, 0x8000}, unix.EPERM},
	{"fsopen", unix.SYS_FSOPEN, [6]uintptr{0, 1 << 20}, unix.EPERM},
	{"open_tree", unix.SYS_OPEN_TREE, [6]uintptr{99, 0, 1 << 30}, unix.EPERM},
	{"setns", unix.SYS_SETNS, [6]uintptr{99}, unix.EPERM},
	{"bpf", unix.SYS_BPF, [6]uintptr{9999}, unix.EPERM},
	{"keyctl", unix.SYS_KEYCTL, [6]uintptr{9999}, unix.EPERM},
	{"userfaultfd", unix.SYS_USERFAULTFD, [6]uintptr{1 << 30}, unix.EPERM},
	{"perf_event_open", unix.SYS_PERF_EVENT_OPEN, [6]uintptr{}, unix.EPERM},
	{"open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, [6]uintptr{99}, unix.EPERM},
	{"kexec", unix.SYS_KEXEC_LOAD, [6]uintptr{0, 1 << 40}, unix.EPERM},
	{"finit_module", unix.SYS_FINIT_MODULE, [6]uintptr{99}, unix.EPERM},
	{"iopl", unix.SYS_IOPL, [6]uintptr{99}, unix.EPERM},
	{"syslog", unix.SYS_SYSLOG, [6]uintptr{9}, unix.EPERM},
	{"unknown call", 600, [6]uintptr{}, unix.ENOSYS},
	{"call -1 (a tracer's skip)", ^uintptr(0), [6]uintptr{}, unix.ENOSYS},
}

func TestMain(m *testing.M) {
	switch os.Getenv("DSEC_CONFINE_CHILD") {
	case "":
		os.Exit(m.Run())
	case "calls":
		childCalls()
	case "x32":
		install(false)
		syscall.RawSyscall(0x40000000|unix.SYS_GETPPID, 0, 0, 0)
	case "exec":
		install(false)
		fmt.Println(syscall.Exec(os.Args[1], os.Args[1:], os.Environ()))
	}
	os.Exit(0)
}

// install puts the filter on this thread, which stays locked.
func install(notify bool) int {
	runtime.LockOSThread()
	code, err := Container().Compile(notify)
	if err != nil {
		panic(err)
	}
	prog := unix.SockFprog{Len: uint16(len(code) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&code[0]))}
	flags := uintptr(unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW)
	if notify {
		flags |= unix.SECCOMP_FILTER_FLAG_NEW_LISTENER
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	fd, _, e := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		panic(e)
	}
	return int(fd)
}

func childCalls() {
	install(false)
	var got []int
	for _, c := range kernelCalls {
		_, _, e := syscall.RawSyscall6(c.nr, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
		got = append(got, int(e))
	}
	json.NewEncoder(os.Stdout).Encode(got)
}

func child(what string, args ...string) *exec.Cmd {
	c := exec.Command("/proc/self/exe", args...)
	c.Env = append(os.Environ(), "DSEC_CONFINE_CHILD="+what)
	return c
}

func TestKernelCalls(t *testing.T) {
	c := child("calls")
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got []unix.Errno
	if err := json.Unmarshal(out, &got); err != nil || len(got) != len(kernelCalls) {
		t.Fatalf("%v: %s", err, out)
	}
	for i, c := range kernelCalls {
		if got[i] != c.want {
			t.Errorf("%s: %d (%v), want %d (%v)", c.name, got[i], got[i], c.want, c.want)
		}
	}
}

// elf32 is a program for i386 that exits with 7.
func elf32() []byte {
	code := []byte{0xb8, 1, 0, 0, 0, 0xbb, 7, 0, 0, 0, 0xcd, 0x80}
	le := binary.LittleEndian
	b := []byte("\x7fELF\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	b = le.AppendUint16(b, 2)
	b = le.AppendUint16(b, 3)
	for _, v := range []uint32{1, 0x8048054, 52, 0, 0} {
		b = le.AppendUint32(b, v)
	}
	for _, v := range []uint16{52, 32, 1, 0, 0, 0} {
		b = le.AppendUint16(b, v)
	}
	size := uint32(84 + len(code))
	for _, v := range []uint32{1, 0, 0x8048000, 0x8048000, size, size, 5, 0x1000} {
		b = le.AppendUint32(b, v)
	}
	return append(b, code...)
}

func TestKernelKillsForeignCalls(t *testing.T) {
	signal := func(err error) syscall.Signal {
		var ee *exec.ExitError
		if e, ok := err.(*exec.ExitError); ok {
			ee = e
		} else {
			return 0
		}
		return ee.Sys().(syscall.WaitStatus).Signal()
	}
	if s := signal(child("x32").Run()); s != syscall.SIGSYS {
		t.Errorf("x32 call: signal %v", s)
	}
	prog := filepath.Join(t.TempDir(), "i386")
	if err := os.WriteFile(prog, elf32(), 0o755); err != nil {
		t.Fatal(err)
	}
	err := exec.Command(prog).Run()
	if e, ok := err.(*exec.ExitError); !ok || e.ExitCode() != 7 {
		t.Skipf("needs a kernel that runs 32-bit programs: %v", err)
	}
	if s := signal(child("exec", prog).Run()); s != syscall.SIGSYS {
		t.Errorf("32-bit program: signal %v", s)
	}
}

// BenchmarkInstall measures seccomp(2) with the container's filter: each child of the loop would start with it.
func BenchmarkInstall(b *testing.B) {
	var took []time.Duration
	code, err := Container().Compile(false)
	if err != nil {
		b.Fatal(err)
	}
	prog := unix.SockFprog{Len: uint16(len(code) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&code[0]))}
	for b.Loop() {
		done := make(chan time.Duration)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its filter
			unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
			start := time.Now()
			syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, uintptr(unsafe.Pointer(&prog)))
			done <- time.Since(start)
		}()
		took = append(took, <-done)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "install-us/p50")
	b.ReportMetric(float64(len(code)/8), "insns")
}
