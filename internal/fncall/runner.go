package fncall

import (
	"context"
	"os"
)

// Exec is one process tree to run.
type Exec struct {
	Layers []string // of its root, lowest first; mounted by the Runner
	Argv   []string
	Env    []string
	Stdin  []byte   // nil: /dev/null
	StdinF *os.File // instead of Stdin: read from its beginning
	Files  []File   // laid into the work folder, which is the current one
	Limits Limits
	Copy   []Copy
	Pooled bool
	// Hold is the file of Files, in the work folder itself, that the command opens when it is up; "": no limit of time waits for that. The
	// Runner may start the command before it is asked to run, and then keeps up to Standbys of these, of all kinds; 0: none.
	Hold     string
	Standbys int
	// Devices are paths of character devices of the host, which the program finds in its /dev.
	Devices []string
	// Card names what they belong to; Alone says that nothing else may have it while this runs, not even what was started ahead.
	Card  string
	Alone bool
}

// File is a file of a work folder. Its path is relative and clean.
type File struct {
	Path string
	Data []byte
	From *os.File // instead of Data: its octets from its beginning
	Exec bool
}

// Copy asks for a file after the run.
type Copy struct {
	Path string
	Max  int64
}

// Copied answers a Copy.
type Copied struct {
	Path string
	Data []byte
	From *os.File // instead of Data, for the receiver to close
	Exec bool
	Err  string // why there is none, for people; "" when there is
}

// Event is a refused system call.
type Event struct {
	Call  string
	Count int64
	Fatal bool
}

// Exit is how an Exec ended.
type Exit struct {
	Facts
	Stdout, Stderr       []byte
	StdoutCut, StderrCut bool
	Files                []Copied // as Exec.Copy
	Events               []Event  // the first ones
	EventsTotal          int64
	Ahead                bool // its command was started before it was asked for
}

// Runner runs process trees. An error is the platform's, and nothing of the call runs any more; ErrLost and ErrUnavailable may be tried
// again. The end of ctx kills the tree, and Facts.Cancelled tells.
type Runner interface {
	Exec(ctx context.Context, e *Exec) (*Exit, error)
	// Pair runs two at once, each one's standard output being the other's standard input; first is 0 or 1 for the one that ended first.
	Pair(ctx context.Context, a, b *Exec) (x, y *Exit, first int, err error)
	// Standbys is how many commands are up that nobody has asked for yet.
	Standbys(ctx context.Context) (int, error)
}
