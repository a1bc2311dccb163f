package trace

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// The programs are put together here, by hand, since no compiler is at hand where this is built. Offsets of the kernel's structures come
// from the type information of the running kernel. All programs begin alike: they leave unless the running task is in the group of a
// command of a sandbox that is watched, that is, unless the parent of its group is in the map of sandboxes.
//
// Register use throughout: R6 the program's arguments, then a scratch value that outlives calls; R7 the task; R8 the sandbox's entry in
// the map; R9 the record under way. The stack holds the group at -8, the sandbox's group at -16, and what a program says of its own below.

// An event in the ring: this header, and up to textSize octets.
const (
	evKind   = 0 // u32
	evPid    = 4 // u32, of the process, as the host numbers it
	evParent = 8 // u32
	evLen    = 12
	evTime   = 16 // ns, monotonic
	evGroup  = 24 // of the command
	evBox    = 32 // group of the sandbox
	evA      = 40 // exec: octets of all arguments; exit: CPU in ns; connect: type of the socket; open: inode
	evB      = 48 // exit: exit code as wait tells it
	evHead   = 64
	textSize = 512
)

const (
	kindExec = iota + 1
	kindExit
	kindOpen
	kindConnect
)

// What a sandbox's entry holds: level (u32), epoch (u32), which marks what was already told of a step.
const (
	levelLight = 1
	levelFull  = 2
)

const (
	groupSize = 40 // u64: programs started, processes ended, octets read, octets written, events lost
	ringSize  = 1 << 20
	maxBoxes  = 16384

	overlayMagic = 0x794c7630
	modeRead     = 1
	nameSize     = 256 // octets of one name, with its end
	pathDepth    = 20  // names of a path
)

// offsets of members, in octets.
type offsets struct {
	tgid, pid, parent, cgroups, mm, ioRead, ioWrite, signal, sigRan, ran, exitCode                int16
	dfl, level, argStart, argEnd                                                                  int16
	files, fdt, fd, fMode, fInode, fDentry, iMode, iSb, iIno, sbMagic, dParent, dName, call, arg1 int16
}

// kernelOffsets reads them; an error names what this kernel does not have.
func kernelOffsets(spec *btf.Spec) (o offsets, err error) {
	find := func(p *int16, names ...string) {
		if err != nil {
			return
		}
		var s *btf.Struct
		if e := spec.TypeByName(names[0], &s); e != nil {
			err = fmt.Errorf("type %s: %w", names[0], e)
			return
		}
		at := uint32(0)
		var t btf.Type = s
		for _, n := range names[1:] {
			m, off, ok := member(t, n)
			if !ok {
				err = fmt.Errorf("%s has no member %s", names[0], n)
				return
			}
			at, t = at+off, m
		}
		if at > 32000 {
			err = fmt.Errorf("%v lies at %d", names, at)
			return
		}
		*p = int16(at)
	}
	find(&o.tgid, "task_struct", "tgid")
	find(&o.pid, "task_struct", "pid")
	find(&o.parent, "task_struct", "real_parent")
	find(&o.cgroups, "task_struct", "cgroups")
	find(&o.mm, "task_struct", "mm")
	find(&o.ioRead, "task_struct", "ioac", "read_bytes")
	find(&o.ioWrite, "task_struct", "ioac", "write_bytes")
	find(&o.signal, "task_struct", "signal")
	find(&o.ran, "task_struct", "se", "sum_exec_runtime")
	find(&o.exitCode, "task_struct", "exit_code")
	find(&o.sigRan, "signal_struct", "sum_sched_runtime")
	find(&o.dfl, "css_set", "dfl_cgrp")
	find(&o.level, "cgroup", "level")
	find(&o.argStart, "mm_struct", "arg_start")
	find(&o.argEnd, "mm_struct", "arg_end")
	find(&o.fMode, "file", "f_mode")
	find(&o.fInode, "file", "f_inode")
	find(&o.fDentry, "file", "f_path", "dentry")
	find(&o.files, "task_struct", "files")
	find(&o.fdt, "files_struct", "fdt")
	find(&o.fd, "fdtable", "fd")
	find(&o.dParent, "dentry", "d_parent")
	find(&o.dName, "dentry", "d_name", "name")
	find(&o.call, "pt_regs", calls.number)
	find(&o.arg1, "pt_regs", calls.second)
	o.arg1 += calls.at
	find(&o.iMode, "inode", "i_mode")
	find(&o.iSb, "inode", "i_sb")
	find(&o.iIno, "inode", "i_ino")
	find(&o.sbMagic, "super_block", "s_magic")
	return o, err
}

// member finds a member by name, also in members without one.
func member(t btf.Type, name string) (btf.Type, uint32, bool) {
	var members []btf.Member
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		members = t.Members
	case *btf.Union:
		members = t.Members
	default:
		return nil, 0, false
	}
	for _, m := range members {
		if m.Name == name {
			return m.Type, m.Offset.Bytes(), true
		}
		if m.Name == "" {
			if in, off, ok := member(m.Type, name); ok {
				return in, m.Offset.Bytes() + off, true
			}
		}
	}
	return nil, 0, false
}

type maps struct{ boxes, groups, seen, ring *ebpf.Map }

func newMaps() (m maps, err error) {
	make := func(p **ebpf.Map, s ebpf.MapSpec) {
		if err == nil {
			*p, err = ebpf.NewMap(&s)
		}
	}
	make(&m.boxes, ebpf.MapSpec{Name: "dsec_boxes", Type: ebpf.Hash, KeySize: 8, ValueSize: 8, MaxEntries: maxBoxes, Flags: 1}) // no memory ahead
	make(&m.groups, ebpf.MapSpec{Name: "dsec_groups", Type: ebpf.LRUHash, KeySize: 8, ValueSize: groupSize, MaxEntries: maxBoxes})
	make(&m.seen, ebpf.MapSpec{Name: "dsec_seen", Type: ebpf.LRUHash, KeySize: 16, ValueSize: 8, MaxEntries: 32768})
	make(&m.ring, ebpf.MapSpec{Name: "dsec_trace", Type: ebpf.RingBuf, MaxEntries: ringSize})
	if err != nil {
		return m, errors.Join(fmt.Errorf("make maps: %w", err), m.close())
	}
	return m, nil
}

func (m *maps) close() error {
	var errs []error
	for _, x := range []*ebpf.Map{m.boxes, m.groups, m.seen, m.ring} {
		if x != nil {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}

const (
	stGroup = -8
	stBox   = -16
	stKey   = -32 // two words
	stValue = -40
	stZero  = -80 // a group's entry
)

// begin leaves unless a watched sandbox's command runs; least is the level that the sandbox needs.
func begin(o offsets, m maps, least int32) asm.Instructions {
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnGetCurrentCgroupId.Call(),
		asm.StoreMem(asm.RFP, stGroup, asm.R0, asm.DWord),
		asm.FnGetCurrentTaskBtf.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.LoadMem(asm.R1, asm.R7, o.cgroups, asm.DWord),
		asm.LoadMem(asm.R1, asm.R1, o.dfl, asm.DWord),
		asm.LoadMem(asm.R1, asm.R1, o.level, asm.Word),
		asm.JLT.Imm(asm.R1, 2, "out"),
		asm.Sub.Imm(asm.R1, 1),
		asm.FnGetCurrentAncestorCgroupId.Call(),
		asm.StoreMem(asm.RFP, stBox, asm.R0, asm.DWord),
		asm.LoadMapPtr(asm.R1, m.boxes.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stBox),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R8, asm.R0),
		asm.LoadMem(asm.R1, asm.R8, 0, asm.Word),
		asm.JLT.Imm(asm.R1, least, "out"),
	}
}

// group leaves the group's counters in R0, made if need be; none leads to the label.
func group(m maps, name string) asm.Instructions {
	ins := asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.groups.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stGroup),
		asm.FnMapLookupElem.Call(),
		asm.JNE.Imm(asm.R0, 0, name+"_have"),
		asm.Mov.Imm(asm.R1, 0),
	}
	for i := int16(0); i < groupSize; i += 8 {
		ins = append(ins, asm.StoreMem(asm.RFP, stZero+i, asm.R1, asm.DWord))
	}
	return append(ins,
		asm.LoadMapPtr(asm.R1, m.groups.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stGroup),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, stZero),
		asm.Mov.Imm(asm.R4, 1), // unless another has made it
		asm.FnMapUpdateElem.Call(),
		asm.LoadMapPtr(asm.R1, m.groups.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stGroup),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R0, asm.R0).WithSymbol(name+"_have"),
	)
}

func count(field int16) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R1, 1), asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, field)}
}

// reserve makes a record in R9 with its header filled; a full ring is counted at the group and ends the program.
func reserve(o offsets, m maps, kind int32, text int32) asm.Instructions {
	ins := asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.ring.FD()),
		asm.Mov.Imm(asm.R2, evHead+text),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnRingbufReserve.Call(),
		asm.Mov.Reg(asm.R9, asm.R0),
		asm.JNE.Imm(asm.R9, 0, "reserved"),
	}
	ins = append(ins, group(m, "lost")...)
	ins = append(ins, count(32)...)
	ins = append(ins,
		asm.Ja.Label("out"),
		asm.StoreImm(asm.R9, evKind, int64(kind), asm.Word).WithSymbol("reserved"),
		asm.LoadMem(asm.R1, asm.R7, o.tgid, asm.Word),
		asm.StoreMem(asm.R9, evPid, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R7, o.parent, asm.DWord),
		asm.LoadMem(asm.R1, asm.R1, o.tgid, asm.Word),
		asm.StoreMem(asm.R9, evParent, asm.R1, asm.Word),
		asm.StoreImm(asm.R9, evLen, 0, asm.Word),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.R9, evTime, asm.R0, asm.DWord),
		asm.LoadMem(asm.R1, asm.RFP, stGroup, asm.DWord),
		asm.StoreMem(asm.R9, evGroup, asm.R1, asm.DWord),
		asm.LoadMem(asm.R1, asm.RFP, stBox, asm.DWord),
		asm.StoreMem(asm.R9, evBox, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R1, 0),
		asm.StoreMem(asm.R9, evA, asm.R1, asm.DWord),
		asm.StoreMem(asm.R9, evB, asm.R1, asm.DWord),
		asm.StoreMem(asm.R9, evB+8, asm.R1, asm.DWord),
	)
	return ins
}

// submit hands the record over. The reader is woken when the ring is a quarter full: else it comes by itself, soon enough.
func submit(m maps) asm.Instructions {
	return asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.ring.FD()),
		asm.Mov.Imm(asm.R2, 0), // octets that wait
		asm.FnRingbufQuery.Call(),
		asm.Mov.Imm(asm.R2, 1), // no wake-up
		asm.JLT.Imm(asm.R0, ringSize/4, "quiet"),
		asm.Mov.Imm(asm.R2, 2), // wake
		asm.Mov.Reg(asm.R1, asm.R9).WithSymbol("quiet"),
		asm.FnRingbufSubmit.Call(),
	}
}

func finish() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return()}
}

func join(parts ...asm.Instructions) asm.Instructions {
	var all asm.Instructions
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// execProgram runs when a program was started: its arguments are those that the kernel just laid down, before it can change them.
func execProgram(o offsets, m maps) asm.Instructions {
	return join(begin(o, m, levelLight), group(m, "g"), count(0), reserve(o, m, kindExec, textSize), asm.Instructions{
		asm.LoadMem(asm.R6, asm.R7, o.mm, asm.DWord),
		asm.JEq.Imm(asm.R6, 0, "told"),
		asm.LoadMem(asm.R3, asm.R6, o.argStart, asm.DWord),
		asm.LoadMem(asm.R2, asm.R6, o.argEnd, asm.DWord),
		asm.Sub.Reg(asm.R2, asm.R3),
		asm.StoreMem(asm.R9, evA, asm.R2, asm.DWord),
		asm.JLE.Imm(asm.R2, textSize, "fits"),
		asm.Mov.Imm(asm.R2, textSize),
		asm.Mov.Reg(asm.R6, asm.R2).WithSymbol("fits"),
		asm.Mov.Reg(asm.R1, asm.R9),
		asm.Add.Imm(asm.R1, evHead),
		asm.FnProbeReadUser.Call(),
		asm.JNE.Imm(asm.R0, 0, "told"),
		asm.StoreMem(asm.R9, evLen, asm.R6, asm.Word),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("told"),
	}, submit(m), finish())
}

// exitProgram runs at the end of every thread: it adds up what was read and written, and tells of the end of a process.
func exitProgram(o offsets, m maps) asm.Instructions {
	return join(begin(o, m, levelLight), group(m, "g"), asm.Instructions{
		asm.LoadMem(asm.R1, asm.R7, o.ioRead, asm.DWord),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 16),
		asm.LoadMem(asm.R1, asm.R7, o.ioWrite, asm.DWord),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 24),
		asm.LoadMem(asm.R1, asm.R7, o.pid, asm.Word),
		asm.LoadMem(asm.R2, asm.R7, o.tgid, asm.Word),
		asm.JNE.Reg(asm.R1, asm.R2, "out"),
	}, count(8), reserve(o, m, kindExit, 0), asm.Instructions{
		asm.LoadMem(asm.R1, asm.R7, o.ran, asm.DWord),
		asm.LoadMem(asm.R3, asm.R7, o.signal, asm.DWord),
		asm.LoadMem(asm.R2, asm.R3, o.sigRan, asm.DWord), // of its threads that have ended
		asm.Add.Reg(asm.R1, asm.R2),
		asm.StoreMem(asm.R9, evA, asm.R1, asm.DWord),
		asm.LoadMem(asm.R1, asm.R7, o.exitCode, asm.Word),
		asm.StoreMem(asm.R9, evB, asm.R1, asm.DWord),
	}, submit(m), finish())
}

// callProgram runs at the end of every system call: of those that opened an ordinary file of an overlay for reading, each file once a step,
// and of those that asked for a connection. Functions of the kernel can't be watched everywhere; calls can. A path is put together from
// its names, from the last one up to the overlay's root, which is the sandbox's: who has changed its own root is not asked.
func openProgram(o offsets, m maps) asm.Instructions {
	read := func(to int16, from asm.Register, at int16) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R3, from),
			asm.Add.Imm(asm.R3, int32(at)),
			asm.Mov.Imm(asm.R2, 8),
			asm.Mov.Reg(asm.R1, asm.RFP),
			asm.Add.Imm(asm.R1, int32(to)),
			asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, "out"),
		}
	}
	const word = -120
	ins := join(only(o, calls.opens...), begin(o, m, levelFull), asm.Instructions{
		asm.LoadMem(asm.R6, asm.R6, 8, asm.DWord), // the result
		asm.JSLT.Imm(asm.R6, 0, "out"),
		asm.LSh.Imm(asm.R6, 3),
		asm.LoadMem(asm.R1, asm.R7, o.files, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, "out"),
		asm.StoreMem(asm.RFP, word, asm.R1, asm.DWord),
		asm.LoadMem(asm.R9, asm.RFP, word, asm.DWord),
	}, read(word, asm.R9, o.fdt), asm.Instructions{asm.LoadMem(asm.R9, asm.RFP, word, asm.DWord)},
		read(word, asm.R9, o.fd), asm.Instructions{asm.LoadMem(asm.R9, asm.RFP, word, asm.DWord), asm.Add.Reg(asm.R9, asm.R6)},
		read(word, asm.R9, 0), asm.Instructions{asm.LoadMem(asm.R6, asm.RFP, word, asm.DWord), asm.JEq.Imm(asm.R6, 0, "out")}, // the file
		read(word, asm.R6, o.fMode), asm.Instructions{
			asm.LoadMem(asm.R1, asm.RFP, word, asm.Word),
			asm.And.Imm(asm.R1, modeRead),
			asm.JEq.Imm(asm.R1, 0, "out"),
		}, read(word, asm.R6, o.fInode), asm.Instructions{asm.LoadMem(asm.R9, asm.RFP, word, asm.DWord)},
		read(word, asm.R9, o.iMode), asm.Instructions{
			asm.LoadMem(asm.R1, asm.RFP, word, asm.Half),
			asm.And.Imm(asm.R1, 0o170000),
			asm.JNE.Imm(asm.R1, 0o100000, "out"),
		}, read(stKey, asm.R9, o.iIno),
		read(word, asm.R9, o.iSb), asm.Instructions{asm.LoadMem(asm.R9, asm.RFP, word, asm.DWord)},
		read(word, asm.R9, o.sbMagic), asm.Instructions{
			asm.LoadMem(asm.R1, asm.RFP, word, asm.DWord),
			asm.JNE.Imm(asm.R1, overlayMagic, "out"),
		}, read(word, asm.R6, o.fDentry), asm.Instructions{
			asm.LoadMem(asm.R6, asm.RFP, word, asm.DWord), // the name
			asm.LoadMem(asm.R1, asm.RFP, stGroup, asm.DWord),
			asm.StoreMem(asm.RFP, stKey+8, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, m.seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, stKey),
			asm.FnMapLookupElem.Call(),
			asm.LoadMem(asm.R1, asm.R8, 4, asm.Word), // the step
			asm.JEq.Imm(asm.R0, 0, "new"),
			asm.LoadMem(asm.R2, asm.R0, 0, asm.DWord),
			asm.JEq.Reg(asm.R1, asm.R2, "out"),
			asm.StoreMem(asm.RFP, stValue, asm.R1, asm.DWord).WithSymbol("new"),
			asm.LoadMapPtr(asm.R1, m.seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, stKey),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, stValue),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnMapUpdateElem.Call(),
		}, reserve(o, m, kindOpen, textSize+nameSize), asm.Instructions{
			asm.Mov.Imm(asm.R7, 0),                 // octets so far
			asm.StoreImm(asm.R9, evB, 1, asm.Word), // until the root is met
		})
	for i := range pathDepth {
		next := fmt.Sprintf("name%d", i+1)
		ins = join(ins, asm.Instructions{
			asm.Mov.Reg(asm.R3, asm.R6).WithSymbol(fmt.Sprintf("name%d", i)),
			asm.Add.Imm(asm.R3, int32(o.dParent)),
			asm.Mov.Imm(asm.R2, 8),
			asm.Mov.Reg(asm.R1, asm.RFP),
			asm.Add.Imm(asm.R1, word),
			asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, "told"),
			asm.LoadMem(asm.R1, asm.RFP, word, asm.DWord),
			asm.JNE.Reg(asm.R1, asm.R6, next+"up"),
			asm.StoreImm(asm.R9, evB, 0, asm.Word),
			asm.Ja.Label("told"),
			asm.Mov.Reg(asm.R3, asm.R6).WithSymbol(next + "up"),
			asm.Add.Imm(asm.R3, int32(o.dName)),
			asm.Mov.Imm(asm.R2, 8),
			asm.Mov.Reg(asm.R1, asm.RFP),
			asm.Add.Imm(asm.R1, word-8),
			asm.FnProbeReadKernel.Call(),
			asm.JNE.Imm(asm.R0, 0, "told"),
			asm.JGT.Imm(asm.R7, textSize-1, "told"),
			asm.Mov.Reg(asm.R1, asm.R9),
			asm.Add.Imm(asm.R1, evHead),
			asm.Add.Reg(asm.R1, asm.R7),
			asm.Mov.Imm(asm.R2, nameSize),
			asm.LoadMem(asm.R3, asm.RFP, word-8, asm.DWord),
			asm.FnProbeReadKernelStr.Call(),
			asm.JSLE.Imm(asm.R0, 0, "told"),
			asm.JGT.Imm(asm.R0, nameSize, "told"),
			asm.Add.Reg(asm.R7, asm.R0),
			asm.LoadMem(asm.R6, asm.RFP, word, asm.DWord),
		})
	}
	return join(ins, asm.Instructions{asm.StoreMem(asm.R9, evLen, asm.R7, asm.Word).WithSymbol("told")}, submit(m), finish())
}

// only leaves after all calls but these; the arguments stay in R1.
func only(o offsets, numbers ...int32) asm.Instructions {
	ins := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.DWord), // the registers
		asm.LoadMem(asm.R3, asm.R2, o.call, asm.DWord),
	}
	for _, n := range numbers[1:] {
		ins = append(ins, asm.JEq.Imm(asm.R3, n, "asked"))
	}
	return append(ins, asm.JNE.Imm(asm.R3, numbers[0], "out"), asm.Mov.Reg(asm.R1, asm.R1).WithSymbol("asked"))
}

// connectProgram tells of an address that was given to connect, as it is in the process's memory when the call has ended.
func connectProgram(o offsets, m maps) asm.Instructions {
	const size = 28 // of a sockaddr_in6
	return join(only(o, calls.connect), begin(o, m, levelFull), reserve(o, m, kindConnect, textSize), asm.Instructions{
		asm.LoadMem(asm.R1, asm.R6, 8, asm.DWord),
		asm.StoreMem(asm.R9, evB, asm.R1, asm.DWord), // the result
		asm.LoadMem(asm.R6, asm.R6, 0, asm.DWord),
		asm.LoadMem(asm.R3, asm.R6, o.arg1, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R9),
		asm.Add.Imm(asm.R1, evHead),
		asm.Mov.Imm(asm.R2, 8), // family, port and what an address of four octets needs
		asm.FnProbeReadUser.Call(),
		asm.JNE.Imm(asm.R0, 0, "told"),
		asm.StoreImm(asm.R9, evLen, 8, asm.Word),
		asm.LoadMem(asm.R3, asm.R6, o.arg1, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R9),
		asm.Add.Imm(asm.R1, evHead),
		asm.Mov.Imm(asm.R2, size),
		asm.FnProbeReadUser.Call(),
		asm.JNE.Imm(asm.R0, 0, "told"),
		asm.StoreImm(asm.R9, evLen, size, asm.Word),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("told"),
	}, submit(m), finish())
}
