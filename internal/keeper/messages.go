package keeper

import (
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bodies of requests, responses and events. Fields are only ever added at the end.
type (
	helloRequest struct {
		Version uint32
		Host    string // identity of the host, for the log
	}
	layerRequest struct {
		ID     string
		File   string // for people
		Direct bool   // read past the page cache of its files
	}
	layersResponse struct{ IDs []string }
	boxRequest     struct{ Box sandbox.ID }
	listResponse   struct{ Boxes []Alive }
	startRequest   struct {
		Box     sandbox.ID
		Command sandbox.Command
	}
	commandRequest struct {
		Box sandbox.ID
		Cmd string
	}
	knownResponse struct{ Known bool }
	stdinRequest  struct {
		Box    sandbox.ID
		Cmd    string
		Offset int64
		EOF    bool
		Data   []byte
	}
	stdinResponse struct{ Taken int64 }
	signalRequest struct {
		Box    sandbox.ID
		Cmd    string
		Signal int
	}
	resizeRequest struct {
		Box  sandbox.ID
		Cmd  string
		Size sandbox.Size
	}
	sessionRequest struct {
		Box     sandbox.ID
		Session sandbox.Session
	}
	filesRequest struct {
		Box  sandbox.ID
		User string
		Port uint16 // not 0: a connection to the port instead of a file server
	}
	deadlineRequest struct {
		Box   sandbox.ID
		Kind  DeadlineKind
		At    time.Time
		Cause sandbox.Cause
	}

	standbysResponse struct{ N int }

	outputEvent struct {
		Box    sandbox.ID
		Cmd    string
		Stream sandbox.StreamName
		Offset int64
		Late   bool
	}
	endEvent struct {
		Box     sandbox.ID
		Name    string // command or session
		Outcome sandbox.Outcome
	}
	endedEvent struct {
		Box   sandbox.ID
		Cause sandbox.Cause
	}
	deniedEvent struct {
		Box          sandbox.ID
		Cmd          string
		Call, Detail string
	}
)

// DeadlineKind is one of the two ends that are armed in the keeper.
type DeadlineKind uint8

const (
	DeadlineTotal DeadlineKind = 1 // the total TTL
	DeadlineLease DeadlineKind = 2 // the lease of the sandbox's job
)
