package wire

import (
	"encoding/binary"
	"strconv"
	"strings"
)

// Birth flags.
const (
	BirthNoNewPrivs = 1 // commands get no_new_privs: setuid programs and file capabilities have no effect
)

// Rlimit is a limit of every command; values above what process 1 may set are lowered to that.
type Rlimit struct {
	Resource   uint32 // RLIMIT_*
	Soft, Hard uint64
}

// Birth is the body of BIRTH. The frame's descriptors are named in Ops by position.
type Birth struct {
	UID     uint32   // host uid and gid that process 1 runs as; not mapped in the sandbox
	Ops     []string // made with Op
	Filter  []byte   // sock_filter[] (8 octets each) for every command; empty: none
	Caps    uint64   // bounding set of commands; permitted and effective of those that run as root
	Flags   uint32   // Birth*
	Env     []string // base environment of commands; START's entries win
	Rlimits []Rlimit // empty: process 1's own limits with core 0
}

// Op makes one birth operation: a verb and its arguments, joined by NUL.
func Op(verb string, args ...string) string {
	return strings.Join(append([]string{verb}, args...), "\x00")
}

// OpFD is Op for an operation whose first argument is a descriptor's position in the BIRTH frame.
func OpFD(verb string, fd int, args ...string) string {
	return Op(verb, append([]string{strconv.Itoa(fd)}, args...)...)
}

// Append appends the body.
func (m Birth) Append(b []byte) []byte {
	b = appendU32(b, Version)
	b = appendU32(b, m.UID)
	b = appendList(b, m.Ops)
	b = appendStr(b, m.Filter)
	b = appendU64(b, m.Caps)
	b = appendU32(b, m.Flags)
	b = appendList(b, m.Env)
	b = appendU32(b, uint32(len(m.Rlimits)))
	for _, l := range m.Rlimits {
		b = appendU32(b, l.Resource)
		b = appendU64(b, l.Soft)
		b = appendU64(b, l.Hard)
	}
	return b
}

// DecodeBirth decodes BIRTH's body.
func DecodeBirth(body []byte) (Birth, error) {
	r := reader{b: body}
	if v := r.u32("version"); r.err == nil && v != Version {
		r.fail("version " + strconv.FormatUint(uint64(v), 10))
	}
	m := Birth{UID: r.u32("uid")}
	for range r.count(4, "ops") {
		m.Ops = append(m.Ops, string(r.blob("op")))
	}
	if f := r.blob("filter"); len(f) > 0 {
		m.Filter = append([]byte(nil), f...)
	}
	if len(m.Filter)%8 != 0 {
		r.fail("filter's length")
	}
	m.Caps = r.u64("caps")
	m.Flags = r.u32("flags")
	m.Env = r.list("env")
	for range r.count(20, "rlimits") {
		m.Rlimits = append(m.Rlimits, Rlimit{Resource: r.u32("rlimit"), Soft: r.u64("rlimit"), Hard: r.u64("rlimit")})
	}
	return m, r.end()
}

// Prepare is the body of PREPARE: operations that are done before BIRTH. The frame's descriptors are named in them by position.
type Prepare struct {
	Ops []string // made with Op
}

// Append appends the body.
func (m Prepare) Append(b []byte) []byte { return appendList(b, m.Ops) }

// DecodePrepare decodes PREPARE's body.
func DecodePrepare(body []byte) (Prepare, error) {
	r := reader{b: body}
	var m Prepare
	for range r.count(4, "ops") {
		m.Ops = append(m.Ops, string(r.blob("op")))
	}
	return m, r.end()
}

// Start flags.
const (
	StartTerminal = 1  // a new terminal is descriptors 0, 1 and 2; its master comes with STARTED
	StartHolder   = 2  // a session's holder; argv is ignored
	StartNoFilter = 4  // no seccomp filter
	StartCgroupNS = 8  // a cgroup namespace of its own: /proc/self/cgroup says "/"
	StartNoPidfd  = 32 // STARTED comes without the pidfd
	StartNotify   = 16 // install the filter with a listener, sent in LISTENER before STARTED
	StartRelay    = 64 // with StartTerminal: process 1 carries the terminal's octets from and to two pipes, and keeps its master
)

// Start is the body of START. The frame's descriptors: the cgroup directory where there is one, then stdin, stdout and
// stderr (no terminal), or the holder's control socket. See StartFDs.
type Start struct {
	User       string // name, uid, name:group or uid:gid; empty is root
	Cwd        string // empty: the user's home where it can be entered, else /
	Argv       []string
	Env        []string // "name=value"; added to Birth.Env, the same name replaces
	Flags      uint32   // Start*
	Rows, Cols uint16   // of the terminal; 0 is 24 and 80
}

// StartFDs orders the descriptors of a START frame. cgroup below 0 is none.
func StartFDs(cgroup int, others ...int) []int {
	if cgroup < 0 {
		return others
	}
	return append([]int{cgroup}, others...)
}

// Append appends the body.
func (m Start) Append(b []byte) []byte {
	b = appendStr(b, m.User)
	b = appendStr(b, m.Cwd)
	b = appendList(b, m.Argv)
	b = appendList(b, m.Env)
	b = appendU32(b, m.Flags)
	b = binary.LittleEndian.AppendUint16(b, m.Rows)
	return binary.LittleEndian.AppendUint16(b, m.Cols)
}

// DecodeStart decodes START's body.
func DecodeStart(body []byte) (Start, error) {
	r := reader{b: body}
	m := Start{User: r.str("user"), Cwd: r.str("cwd"), Argv: r.list("argv"), Env: r.list("env"), Flags: r.u32("flags"),
		Rows: r.u16("rows"), Cols: r.u16("cols")}
	return m, r.end()
}

// Signal is the body of SIGNAL; the frame's ID is the command's. A command that has ended takes it without effect.
type Signal struct {
	Signal int32
	Group  bool // its process group instead of the process
}

// Append appends the body.
func (m Signal) Append(b []byte) []byte {
	b = appendU32(b, uint32(m.Signal))
	if m.Group {
		return appendU32(b, 1)
	}
	return appendU32(b, 0)
}

// DecodeSignal decodes SIGNAL's body.
func DecodeSignal(body []byte) (Signal, error) {
	r := reader{b: body}
	m := Signal{Signal: int32(r.u32("signal")), Group: r.u32("group") != 0}
	return m, r.end()
}

// What a Group frame asks for.
const (
	GroupKill   = 1 // kills all in the group
	GroupMark   = 2 // notes what is in it
	GroupStrike = 3 // sends a signal to what is in it and was not at the last mark
	GroupCount  = 4 // counts what all groups hold
)

// Group is the body of GROUP: about a group of commands that process 1 made itself (the number in a START's flags). GROUPED answers how
// many processes it met.
type Group struct {
	Number uint32
	Act    uint32 // Group*
	Signal uint32 // of GroupStrike
}

// Append appends the body.
func (m Group) Append(b []byte) []byte {
	return appendU32(appendU32(appendU32(b, m.Number), m.Act), m.Signal)
}

// DecodeGroup decodes GROUP's body.
func DecodeGroup(body []byte) (Group, error) {
	r := reader{b: body}
	m := Group{Number: r.u32("group"), Act: r.u32("act"), Signal: r.u32("signal")}
	return m, r.end()
}

// DecodeGrouped decodes GROUPED's body.
func DecodeGrouped(body []byte) (uint32, error) {
	r := reader{b: body}
	n := r.u32("count")
	return n, r.end()
}

// Resize is the body of RESIZE: the size of a relayed terminal; the frame's ID is the command's.
type Resize struct{ Rows, Cols uint16 }

// Append appends the body.
func (m Resize) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, m.Rows), m.Cols)
}

// DecodeResize decodes RESIZE's body.
func DecodeResize(body []byte) (Resize, error) {
	r := reader{b: body}
	m := Resize{Rows: r.u16("rows"), Cols: r.u16("cols")}
	return m, r.end()
}

// Features in HELLO.
const (
	FeatureFDs       = 1
	FeatureTerminals = 2
	FeatureHolder    = 4
)

// Hello is the body of HELLO.
type Hello struct {
	Version  uint32
	Features uint32
}

// Append appends the body.
func (m Hello) Append(b []byte) []byte { return appendU32(appendU32(b, m.Version), m.Features) }

// DecodeHello decodes HELLO's body.
func DecodeHello(body []byte) (Hello, error) {
	r := reader{b: body}
	m := Hello{Version: r.u32("version"), Features: r.u32("features")}
	return m, r.end()
}

// Started is the body of STARTED. The frame's descriptors: the process's pidfd, then the terminal's master where one
// was asked for.
type Started struct {
	PID      uint32 // in the sandbox
	UID, GID uint32 // in the sandbox: the host's are those plus the range's base
}

// Append appends the body.
func (m Started) Append(b []byte) []byte {
	return appendU32(appendU32(appendU32(b, m.PID), m.UID), m.GID)
}

// DecodeStarted decodes STARTED's body.
func DecodeStarted(body []byte) (Started, error) {
	r := reader{b: body}
	m := Started{PID: r.u32("pid"), UID: r.u32("uid"), GID: r.u32("gid")}
	return m, r.end()
}

// Stage says where a birth or a start failed.
type Stage uint32

// Stages of FAILED.
const (
	StageBirth    Stage = 1
	StageUser     Stage = 2
	StageCwd      Stage = 3
	StageProgram  Stage = 4
	StageExec     Stage = 5
	StageCgroup   Stage = 6
	StageTerminal Stage = 7
	StageConfine  Stage = 8
)

// Fault reports whether the failure is the platform's; otherwise it is the request's (no such user, folder or program).
func (s Stage) Fault() bool {
	switch s {
	case StageUser, StageCwd, StageProgram, StageExec:
		return false
	}
	return true
}

// Failed is the body of FAILED; the frame's ID is the command's, or 0 for birth.
type Failed struct {
	Stage Stage
	Errno uint32 // 0: the text says all
	Text  string // names the object and the reason; octets of the request come back as they were
}

// Append appends the body.
func (m Failed) Append(b []byte) []byte {
	return appendStr(appendU32(appendU32(b, uint32(m.Stage)), m.Errno), m.Text)
}

// DecodeFailed decodes FAILED's body.
func DecodeFailed(body []byte) (Failed, error) {
	r := reader{b: body}
	m := Failed{Stage: Stage(r.u32("stage")), Errno: r.u32("errno"), Text: r.str("text")}
	return m, r.end()
}

// ExitedRefused, a flag in EXITED's header: since the EXITED before, the process limit of groups that process 1 makes refused a fork.
const ExitedRefused = 1

// Exited is the body of EXITED.
type Exited struct {
	Status      int32  // as wait(2) gives it: use syscall.WaitStatus
	UserMicros  uint64 // of the process and the children it waited for
	SysMicros   uint64
	MaxResident uint64 // octets
}

// Append appends the body.
func (m Exited) Append(b []byte) []byte {
	b = appendU32(b, uint32(m.Status))
	return appendU64(appendU64(appendU64(b, m.UserMicros), m.SysMicros), m.MaxResident)
}

// DecodeExited decodes EXITED's body.
func DecodeExited(body []byte) (Exited, error) {
	r := reader{b: body}
	m := Exited{Status: int32(r.u32("status")), UserMicros: r.u64("user"), SysMicros: r.u64("system"), MaxResident: r.u64("resident")}
	return m, r.end()
}

// Drop is the body of DROP: numbers from HELD that the holder closes. It answers nothing.
type Drop struct{ Numbers []uint32 }

// Append appends the body.
func (m Drop) Append(b []byte) []byte { return appendNumbers(b, m.Numbers) }

// DecodeDrop decodes DROP's body.
func DecodeDrop(body []byte) (Drop, error) {
	n, err := decodeNumbers(body)
	return Drop{Numbers: n}, err
}

// Held is the body of HELD: the numbers, in the HOLD frame's order, under which the descriptors are now open in the
// holder (/proc/<holder>/fd/<number>).
type Held struct{ Numbers []uint32 }

// Append appends the body.
func (m Held) Append(b []byte) []byte { return appendNumbers(b, m.Numbers) }

// DecodeHeld decodes HELD's body.
func DecodeHeld(body []byte) (Held, error) {
	n, err := decodeNumbers(body)
	return Held{Numbers: n}, err
}

func appendNumbers(b []byte, n []uint32) []byte {
	b = appendU32(b, uint32(len(n)))
	for _, v := range n {
		b = appendU32(b, v)
	}
	return b
}

func decodeNumbers(body []byte) ([]uint32, error) {
	r := reader{b: body}
	var n []uint32
	for range r.count(4, "numbers") {
		n = append(n, r.u32("number"))
	}
	return n, r.end()
}
