// Package history judges what clients of dsec saw, against what the log tells and what was really done: it is the model of the promise
// that a step is never done twice by us and that nothing acknowledged is lost. Simulated histories (in this folder's tests) and those of
// real processes that are killed (test/e2e) go through the same [Check]. docs/design/history.md states the rules.
//
// It hides how the rules are decided. It trusts nobody: the log, the answers and the effects are compared with each other, and every rule
// has mutated histories that it must refuse.
package history

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Op is what a call asks for.
type Op string

const (
	Create   Op = "create"
	Command  Op = "command" // of its own or in a session; the call ends with the command
	Session  Op = "session" // opened, or joined
	Write    Op = "write"
	Append   Op = "append"
	Upload   Op = "upload"
	MakeDir  Op = "makedir"
	Move     Op = "move"
	Remove   Op = "remove"
	Snapshot Op = "snapshot"
	Stdin    Op = "stdin" // N is the offset behind the octets, Step the command
	Signal   Op = "signal"
	Verdict  Op = "verdict"
	Stop     Op = "stop"
	Restore  Op = "restore" // Step is the call's own ID, Value the new sandbox, or what else it came to
	Read     Op = "read"    // of the log: N records, whose digest is Value
)

// Reply is how a call came back.
type Reply string

const (
	Lost     Reply = ""         // it did not: anything may have happened
	Answered Reply = "answered" // with the step's result, recorded, joined or fresh
	Unknown  Reply = "unknown"  // the step was begun and its end not seen
	Conflict Reply = "conflict" // refused: the key was used for another request
	Refused  Reply = "refused"  // this call did nothing, and says so
)

// Call is one call of a client. Stamps are those of one counter: a call that returned before another was made has the lower stamps.
type Call struct {
	Client   int
	Box      string // key of its trajectory
	ID       string // of the sandbox: named in the call, or answered by a create
	Op       Op
	Step     string
	Request  string // all that decides what it does
	Invoked  int64
	Returned int64 // 0 when it never did
	Reply    Reply
	Value    string // the answer, in one form for all ways to get it
	N        int64
	Note     string // for a person
}

func (c *Call) String() string {
	s := fmt.Sprintf("%4d-%-4d client %d %s %s/%s %q", c.Invoked, c.Returned, c.Client, c.Op, c.Box, c.Step, c.Request)
	if c.Reply == Lost {
		return s + " -> no answer " + c.Note
	}
	return strings.TrimRight(fmt.Sprintf("%s -> %s %s %s", s, c.Reply, c.Value, c.Note), " ")
}

// Durability is what a box was promised.
type Durability string

const (
	Process Durability = "process"
	Host    Durability = "host"
	Store   Durability = "store"
)

// FaultKind is what was broken.
type FaultKind string

const (
	GatewayKilled FaultKind = "gateway killed"
	HostKilled    FaultKind = "host killed"
	KeeperKilled  FaultKind = "keeper killed"
	PowerLost     FaultKind = "power lost"   // host, keeper and what was not on the disk
	MachineLost   FaultKind = "machine lost" // with its disk; the log came back from the store
	StoreFailed   FaultKind = "store failed"
	FilesCut      FaultKind = "file connection cut"
)

// Fault is one failure, between two stamps: it began after From and had happened at To.
type Fault struct {
	Kind     FaultKind
	From, To int64
}

func (f Fault) String() string { return fmt.Sprintf("%4d-%-4d %s", f.From, f.To, f.Kind) }

// loses says whether the fault may take what was acknowledged with the durability.
func (f Fault) loses(d Durability) bool {
	switch f.Kind {
	case PowerLost:
		return d != Host && d != Store
	case MachineLost:
		return d != Store
	}
	return false
}

// severs says whether the fault may leave a step that was under way with an end that nobody saw.
func (f Fault) severs() bool { return f.Kind != GatewayKilled }

// Box is one trajectory at the end of the history.
type Box struct {
	Key        string
	Host       string // of its log; order in time is promised within one
	Durability Durability
	Log        []*dsecv1.LogRecord
	// Births counts sandboxes that really came to life for the key, by ID; nil where nobody could see that.
	Births map[string]int
	// Runs counts how often a step was really done, by sandbox and step; Seen are the sandboxes of which that is known.
	Runs map[Ran]int
	Seen map[string]bool
	// Files are those below Root in the sandbox that lives at the end, ID; a nil map is not compared. Folders end with a slash.
	ID    string
	Root  string
	Files map[string]string
}

// Ran names a step in a sandbox.
type Ran struct{ ID, Step string }

// History is everything that one run shows.
type History struct {
	Seed   uint64
	Calls  []*Call
	Faults []Fault
	Boxes  map[string]*Box
}

// Recorder takes a history down. Its methods are safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	stamp int64
	h     History
}

// NewRecorder begins a history.
func NewRecorder(seed uint64) *Recorder {
	return &Recorder{h: History{Seed: seed, Boxes: map[string]*Box{}}}
}

// Invoke notes that a call is made; what it answers is given to Return, or never.
func (r *Recorder) Invoke(c Call) *Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stamp++
	c.Invoked = r.stamp
	r.h.Calls = append(r.h.Calls, &c)
	return &c
}

// Return notes the answer of a call.
func (r *Recorder) Return(c *Call, reply Reply, value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stamp++
	c.Returned, c.Reply, c.Value = r.stamp, reply, value
}

// Now is a stamp, for the From of a fault.
func (r *Recorder) Now() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stamp++
	return r.stamp
}

// Fault notes a failure that began at from and is over.
func (r *Recorder) Fault(kind FaultKind, from int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stamp++
	r.h.Faults = append(r.h.Faults, Fault{kind, from, r.stamp})
}

// History is what was taken down; nothing may be added afterwards.
func (r *Recorder) History() *History {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &r.h
}

// CommandValue is the answer of a command, from a result or from the log.
func CommandValue(o *dsecv1.Outcome, stdout, stderr []byte) string {
	return fmt.Sprintf("%s %d out %s err %s", o.GetKind(), o.GetCode()+o.GetSignal(), brief(stdout), brief(stderr))
}

func brief(b []byte) string {
	if len(b) <= 24 {
		return fmt.Sprintf("%q", b)
	}
	return fmt.Sprintf("%d:%.6x", len(b), sha256.Sum256(b))
}

// LogDigest is the digest of a log's first records, as far as a reader can compare it: all that a record says but its output's octets.
func LogDigest(recs []*dsecv1.LogRecord) string {
	h := sha256.New()
	for _, r := range recs {
		fmt.Fprintln(h, r.GetEpoch(), r.GetSeq(), r.GetKind(), r.GetStep(), r.GetStream(), r.GetOffset(), r.GetLength(), r.GetState(), r.GetOutcome().GetKind(),
			r.GetOutcome().GetCode(), r.GetMonoNs(), r.GetTime().AsTime().Format(time.RFC3339Nano))
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}
