package vmm

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// That /dev/kvm opens says nothing: where KVM itself is emulated, as in a guest of a hypervisor without nested virtualization, every call
// succeeds, a kernel's code runs a thousand times too slow, and some instructions end the guest. So a small guest is run first: it enters long
// mode, loops, writes memory and runs the instructions that kernels need and emulators lack, telling after each step.

// Bounds of the probe.
const (
	probeBound   = 5 * time.Second // for the process that runs the guest; a hung one is killed
	maxNsPerInsn = 50              // native is below 5, an emulated one near 300
	probeLoop    = 400_000         // instructions of the loop
	// A loop that took too long is run again, since a busy machine may have taken the processor away meanwhile: the fastest counts.
	probeLoops     = 10
	probeLoopsTime = 1500 * time.Millisecond // and none after that
)

// ProbeArg is the first argument that makes this program run the probe's guest and print its verdict.
const ProbeArg = "kvm-probe"

// Probe says whether KVM runs guests here. The guest runs in a process of its own, which is killed when it does not end. self is this program
// with the arguments that lead to ProbeMain. The verdict is kept in file (empty: nowhere) as long as the machine is not started anew and its
// modules are the same.
func Probe(ctx context.Context, self []string, file string) Verdict {
	key := probeKey()
	if v, ok := cachedVerdict(file, key); ok {
		return v
	}
	v := probe(ctx, self)
	if file != "" && ctx.Err() == nil {
		StoreVerdict(file, v)
	}
	return v
}

type verdictFile struct {
	Key     string  `json:"key"`
	Verdict Verdict `json:"verdict"`
}

func cachedVerdict(file, key string) (Verdict, bool) {
	var f verdictFile
	text, err := os.ReadFile(file)
	if file == "" || err != nil || json.Unmarshal(text, &f) != nil || f.Key != key {
		return Verdict{}, false
	}
	return f.Verdict, true
}

// StoreVerdict keeps a verdict for Probe. A file that can't be written costs the next start a probe.
func StoreVerdict(file string, v Verdict) {
	text, err := json.Marshal(verdictFile{probeKey(), v})
	if err != nil {
		return
	}
	os.MkdirAll(filepath.Dir(file), 0o700)
	tmp := file + ".new"
	if os.WriteFile(tmp, text, 0o600) == nil {
		os.Rename(tmp, file)
	}
}

// probeKey is what a verdict holds for: this start of this kernel, with these modules and their parameters.
func probeKey() string {
	var b strings.Builder
	for _, pattern := range []string{"/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/osrelease", "/sys/module/kvm*/srcversion", "/sys/module/kvm*/parameters/*"} {
		list, _ := filepath.Glob(pattern)
		for _, f := range list {
			text, _ := os.ReadFile(f)
			fmt.Fprintf(&b, "%s=%s;", filepath.Base(f), strings.TrimSpace(string(text)))
		}
	}
	st, err := os.Stat("/dev/kvm")
	fmt.Fprint(&b, err == nil && st.Mode()&os.ModeCharDevice != 0)
	return b.String()
}

func probe(ctx context.Context, self []string) Verdict {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return Verdict{KVM: "absent", Reason: "/dev/kvm: " + errors.Unwrap(err).Error()}
	}
	ctx, cancel := context.WithTimeout(ctx, probeBound)
	defer cancel()
	cmd := exec.CommandContext(ctx, self[0], self[1:]...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	var v Verdict
	switch {
	case ctx.Err() != nil:
		return Verdict{KVM: "broken", Reason: "the probe's guest did not end: KVM hangs"}
	case err != nil:
		return Verdict{KVM: "broken", Reason: "the probe failed: " + err.Error()}
	case json.Unmarshal(out, &v) != nil:
		return Verdict{KVM: "broken", Reason: "the probe said nothing"}
	}
	return v
}

// ProbeMain runs the guest in this process and prints the verdict.
func ProbeMain() int {
	v, err := runProbe()
	if err != nil {
		v = Verdict{KVM: "broken", Reason: err.Error()}
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
			v.KVM = "absent"
		}
	}
	text, err := json.Marshal(v)
	if err != nil {
		return 1
	}
	os.Stdout.Write(text)
	return 0
}

// Calls of KVM (include/uapi/linux/kvm.h).
const (
	kvmCreateVM      = 0xAE01
	kvmGetVcpuMmap   = 0xAE04
	kvmCreateVcpu    = 0xAE41
	kvmSetTSS        = 0xAE47
	kvmSetMemory     = 0x4020AE46
	kvmRun           = 0xAE80
	kvmGetRegs       = 0x8090AE81
	kvmSetRegs       = 0x4090AE82
	kvmGetSregs      = 0x8138AE83
	kvmSetSregs      = 0x4138AE84
	kvmGetCpuid      = 0xC008AE05
	kvmSetCpuid      = 0x4008AE90
	kvmExitIO        = 2
	kvmExitHlt       = 5
	kvmExitInternal  = 17
	guestSize        = 2 << 20
	guestCode        = 0x10000
	guestStack       = 0x9000
	guestException   = 0xee
	guestMinimumIDT  = 0x5000
	guestGDT         = 0x6000
	guestPages       = 0x1000
	guestIDTRegister = 0x5f00
)

type kvmSegment struct {
	Base                                            uint64
	Limit                                           uint32
	Selector                                        uint16
	Type, Present, DPL, DB, S, L, G, AVL, Unusable_ uint8
	_                                               uint8
}

type kvmTable struct {
	Base  uint64
	Limit uint16
	_     [3]uint16
}

type kvmSregs struct {
	CS, DS, ES, FS, GS, SS, TR, LDT     kvmSegment
	GDT, IDT                            kvmTable
	CR0, CR2, CR3, CR4, CR8, EFER, APIC uint64
	_                                   [4]uint64
}

type kvmRegs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP, R8, R9, R10, R11, R12, R13, R14, R15, RIP, RFLAGS uint64
}

// probeSteps are the guest's steps: each is machine code for 64 bits, followed by an `out` of its number.
var probeSteps = []struct {
	name string
	code []byte
}{
	{"long mode", nil},
	{"loop", []byte{0xb9, 0x40, 0x0d, 0x03, 0x00, 0xff, 0xc9, 0x75, 0xfc}}, // mov $200000,%ecx; 1: dec %ecx; jnz 1b
	{"stores", []byte{0xbf, 0, 0, 2, 0, 0xb9, 0, 0x20, 0, 0, 0x31, 0xc0, // mov $0x20000,%edi; mov $8192,%ecx; xor %eax,%eax
		0x48, 0x89, 0x07, 0x48, 0x83, 0xc7, 8, 0xff, 0xc9, 0x75, 0xf5}}, // 1: mov %rax,(%rdi); add $8,%rdi; dec %ecx; jnz 1b
	{"cmpxchg16b", []byte{0xbf, 0, 0, 3, 0, 0x31, 0xc0, 0x31, 0xd2, 0x31, 0xdb, 0x31, 0xc9, 0xf0, 0x48, 0x0f, 0xc7, 0x0f}},
	{"int3", []byte{0xbf, 0, 0x5f, 0, 0, 0x0f, 0x01, 0x1f, 0xcc}}, // mov $0x5f00,%edi; lidt (%rdi); int3
	{"fxsave", []byte{0xbf, 0, 0x10, 3, 0, 0x48, 0x0f, 0xae, 0x07, 0x48, 0x0f, 0xae, 0x0f}},
	{"xsave", []byte{0xbf, 0, 0x20, 3, 0, 0xb8, 3, 0, 0, 0, 0x31, 0xd2, 0x48, 0x0f, 0xae, 0x27, 0x48, 0x0f, 0xae, 0x2f}},
	{"swapgs", []byte{0xb9, 1, 1, 0, 0xc0, 0xb8, 0, 0, 3, 0, 0x31, 0xd2, 0x0f, 0x30, 0x0f, 0x01, 0xf8, 0x0f, 0x01, 0xf8}}, // wrmsr GS_BASE first
	{"cr3", []byte{0xba, 0xe8, 3, 0, 0, 0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8, 0xff, 0xca, 0x75, 0xf6}},                      // 1000 loads
}

// probeCode lays the steps behind each other and returns where each begins. Behind them lie the handlers of int3 (iretq) and of all others.
func probeCode() (code []byte, at []int, int3, other int) {
	for i, s := range probeSteps {
		at = append(at, len(code))
		code = append(code, s.code...)
		code = append(code, 0xb0, byte(i+1), 0xe6, 0x10) // mov $i,%al; out %al,$0x10
	}
	code = append(code, 0xf4) // hlt
	for len(code)%16 != 0 {
		code = append(code, 0x90)
	}
	int3 = len(code)
	code = append(code, 0x48, 0xcf)
	for len(code)%16 != 0 {
		code = append(code, 0x90)
	}
	other = len(code)
	return append(code, 0xb0, guestException, 0xe6, 0x10, 0xf4), at, int3, other
}

func ioctl(fd int, call, arg uintptr) (int, error) {
	n, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), call, arg)
	if e != 0 {
		return -1, e
	}
	return int(n), nil
}

func runProbe() (v Verdict, err error) {
	if runtime.GOARCH != "amd64" {
		return v, fmt.Errorf("no probe for %s", runtime.GOARCH)
	}
	runtime.LockOSThread() // a vCPU belongs to a thread
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return v, fmt.Errorf("open /dev/kvm: %w", err)
	}
	defer unix.Close(kvm)
	vm, err := ioctl(kvm, kvmCreateVM, 0)
	if err != nil {
		return v, fmt.Errorf("make a machine: %w", err)
	}
	defer unix.Close(vm)
	ioctl(vm, kvmSetTSS, 0xfffbd000) // old Intel processors want it
	mem, err := unix.Mmap(-1, 0, guestSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return v, err
	}
	region := struct {
		Slot, Flags     uint32
		At, Size, Where uint64
	}{Size: guestSize, Where: uint64(uintptr(unsafe.Pointer(&mem[0])))}
	if _, err := ioctl(vm, kvmSetMemory, uintptr(unsafe.Pointer(&region))); err != nil {
		return v, fmt.Errorf("set memory: %w", err)
	}
	cpu, err := ioctl(vm, kvmCreateVcpu, 0)
	if err != nil {
		return v, fmt.Errorf("make a processor: %w", err)
	}
	defer unix.Close(cpu)
	size, err := ioctl(kvm, kvmGetVcpuMmap, 0)
	if err != nil {
		return v, err
	}
	state, err := unix.Mmap(cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return v, err
	}
	at, err := enterGuest(kvm, cpu, mem)
	if err != nil {
		return v, err
	}
	return watchGuest(cpu, state, at)
}

// enterGuest sets up long mode with the first 2 MiB mapped to themselves, and interrupts that come to our handlers.
func enterGuest(kvm, cpu int, mem []byte) (at []int, err error) {
	le := binary.LittleEndian
	cpuid := make([]byte, 8+40*256)
	le.PutUint32(cpuid, 256)
	if _, err := ioctl(kvm, kvmGetCpuid, uintptr(unsafe.Pointer(&cpuid[0]))); err != nil {
		return nil, fmt.Errorf("processor's abilities: %w", err)
	}
	if _, err := ioctl(cpu, kvmSetCpuid, uintptr(unsafe.Pointer(&cpuid[0]))); err != nil {
		return nil, fmt.Errorf("processor's abilities: %w", err)
	}
	le.PutUint64(mem[guestPages:], guestPages+0x1000|3)
	le.PutUint64(mem[guestPages+0x1000:], guestPages+0x2000|3)
	le.PutUint64(mem[guestPages+0x2000:], 0x83)
	code, at, int3, other := probeCode()
	copy(mem[guestCode:], code)
	le.PutUint64(mem[guestGDT+8:], 0x00af9b000000ffff)
	le.PutUint64(mem[guestGDT+16:], 0x00cf93000000ffff)
	for i := range 32 {
		h := uint64(guestCode + other)
		if i == 3 {
			h = uint64(guestCode + int3)
		}
		e := mem[guestMinimumIDT+16*i:]
		le.PutUint16(e, uint16(h))
		le.PutUint16(e[2:], 8)
		e[5] = 0x8e
		le.PutUint16(e[6:], uint16(h>>16))
	}
	le.PutUint16(mem[guestIDTRegister:], 32*16-1)
	le.PutUint64(mem[guestIDTRegister+2:], guestMinimumIDT)
	var s kvmSregs
	if _, err := ioctl(cpu, kvmGetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return nil, err
	}
	s.CS = kvmSegment{Limit: 0xffffffff, Selector: 8, Type: 11, Present: 1, S: 1, L: 1, G: 1}
	data := kvmSegment{Limit: 0xffffffff, Selector: 16, Type: 3, Present: 1, S: 1, DB: 1, G: 1}
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.GDT, s.IDT = kvmTable{Base: guestGDT, Limit: 23}, kvmTable{Base: guestMinimumIDT, Limit: 32*16 - 1}
	s.CR0, s.CR3, s.EFER = 0x80050033, guestPages, 1<<8|1<<10
	s.CR4 = 1<<5 | 1<<9 | 1<<10 | 1<<18 // PAE, FXSR, SIMD exceptions, XSAVE
	if _, err := ioctl(cpu, kvmSetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return nil, fmt.Errorf("enter long mode: %w", err)
	}
	return at, setRegs(cpu, guestCode)
}

func setRegs(cpu int, at uint64) error {
	r := kvmRegs{RIP: at, RSP: guestStack, RFLAGS: 2}
	_, err := ioctl(cpu, kvmSetRegs, uintptr(unsafe.Pointer(&r)))
	return err
}

// loopTimes keeps the fastest of the loop's runs.
type loopTimes struct {
	n    int
	all  time.Duration
	best float64 // ns an instruction
}

// add says whether the loop should be run once more.
func (l *loopTimes) add(took time.Duration) bool {
	ns := float64(took.Nanoseconds()) / probeLoop
	if l.n++; l.n == 1 || ns < l.best {
		l.best = ns
	}
	l.all += took
	return l.best > maxNsPerInsn && l.n < probeLoops && l.all < probeLoopsTime
}

// watchGuest runs the steps. One that KVM can't do is noted, and the guest goes on behind it.
func watchGuest(cpu int, state []byte, at []int) (v Verdict, err error) {
	le := binary.LittleEndian
	step, last := 0, time.Now() // step is the one under way
	end := last.Add(probeBound - time.Second)
	var loops loopTimes
	failed := func() error {
		v.Failed = append(v.Failed, probeSteps[step].name)
		step++
		if step >= len(at) {
			return nil
		}
		last = time.Now()
		return setRegs(cpu, uint64(guestCode+at[step]))
	}
	for step < len(at) {
		_, err := ioctl(cpu, kvmRun, 0)
		if err == unix.EINTR || err == unix.EAGAIN {
			if time.Now().After(end) {
				return Verdict{KVM: "broken", Failed: []string{probeSteps[step].name}, Reason: "the probe's guest hangs in its step " + probeSteps[step].name}, nil
			}
			continue
		}
		if err != nil {
			return v, fmt.Errorf("run: %w", err)
		}
		switch reason := le.Uint32(state[8:]); reason {
		case kvmExitIO:
			off := le.Uint64(state[40:])
			if off >= uint64(len(state)) {
				return v, errors.New("KVM tells of an output that is nowhere")
			}
			n := int(state[off])
			if n != step+1 {
				if err := failed(); err != nil {
					return v, err
				}
				continue
			}
			if probeSteps[step].name == "loop" {
				again := loops.add(time.Since(last))
				v.NsPerInsn = loops.best
				if again {
					last = time.Now()
					if err := setRegs(cpu, uint64(guestCode+at[step])); err != nil {
						return v, err
					}
					continue
				}
			}
			step, last = n, time.Now()
		case kvmExitHlt, kvmExitInternal:
			if err := failed(); err != nil {
				return v, err
			}
		default:
			return v, fmt.Errorf("KVM stops its guest with reason %d in the step %s", reason, probeSteps[step].name)
		}
	}
	switch {
	case len(v.Failed) > 0:
		v.KVM, v.Reason = "broken", fmt.Sprintf("KVM is there but can't run %s (an instruction takes %.0f ns)", strings.Join(v.Failed, ", "), v.NsPerInsn)
	case v.NsPerInsn > maxNsPerInsn:
		v.KVM, v.Reason = "emulated", fmt.Sprintf("KVM is there but emulates: an instruction takes %.0f ns", v.NsPerInsn)
	default:
		v.KVM = "native"
	}
	return v, nil
}
