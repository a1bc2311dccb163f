package fncall

import (
	"time"

	"golang.org/x/sys/unix"
)

// Verdict says how a run ended, in one word.
type Verdict string

const (
	OK        Verdict = "OK"        // exited with 0 within its limits
	RE        Verdict = "RE"        // exited with another code
	SIG       Verdict = "SIG"       // ended by a signal that is nobody's limit
	TLE       Verdict = "TLE"       // used up its CPU time or its wall time
	MLE       Verdict = "MLE"       // the kernel killed a process of it for the memory limit
	OLE       Verdict = "OLE"       // wrote more than it may, to a stream or to a file (SIGXFSZ)
	SEC       Verdict = "SEC"       // made a call that the filter kills for
	CE        Verdict = "CE"        // did not compile, within the compiler's own limits
	Cancelled Verdict = "CANCELLED" // its client gave it up
	SYS       Verdict = "SYS"       // the platform failed; says nothing of the program
)

// Precedence orders verdicts: of all that hold, the first is told.
var Precedence = []Verdict{SYS, Cancelled, CE, SEC, OLE, MLE, TLE, SIG, RE, OK}

// Facts are what is known of a run at its end, as the kernel tells it.
type Facts struct {
	Failure   string // of the platform; "" for none
	Cancelled bool
	NotBegun  string // why its program could not be executed, as a shell would say it; Code is 126 or 127 then
	Code      int    // exit code of the main process
	Signal    int    // that ended the main process; 0: it exited
	Filter    bool   // killed for a call that the filter kills for
	Output    bool   // a stream went over its limit
	OOM       bool   // the kernel killed a process of the call for memory
	CPUOver   bool   // killed for CPU time
	WallOver  bool   // killed for wall time
	CPU, Wall time.Duration
	Memory    int64 // octets at the most; -1: not known
	Processes bool  // a fork was refused by the limit
	Leftover  int   // processes that lived when the main one ended
}

// Judge gives the verdict of a run. limit tells which of two limits it was: cpu or wall, output or file_size.
func Judge(f Facts, l Limits) (v Verdict, limit string) {
	switch {
	case f.Failure != "":
		return SYS, ""
	case f.Cancelled:
		return Cancelled, ""
	case f.Filter:
		return SEC, ""
	case f.Output:
		return OLE, "output"
	case f.Signal == int(unix.SIGXFSZ):
		return OLE, "file_size"
	case f.OOM:
		return MLE, ""
	case f.CPUOver || l.CPU > 0 && f.CPU > l.CPU:
		return TLE, "cpu"
	case f.WallOver || l.Wall > 0 && f.Wall > l.Wall:
		return TLE, "wall"
	case f.Signal != 0:
		return SIG, ""
	case f.Code != 0:
		return RE, ""
	}
	return OK, ""
}
