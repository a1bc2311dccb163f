// Package vmwire is what a host and the process 1 of a virtual machine say to each other over their streams (docs/format/vm.md). Its types
// are the JSON of requests and answers; what a guest answers is hostile input.
package vmwire

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
)

// Version of the requests.
const Version = 1

// Requests. Each opens a stream of its own; but for keeper, dial and upper the answer is an [Answer] as JSON, then the stream's end.
const (
	OpHello   = "hello"   // answered when the keeper inside serves
	OpRenew   = "renew"   // clock, random generators, identity: after each start from a saved state, before anything else runs
	OpPrepare = "prepare" // of a template: mount the layer, warm up
	OpBirth   = "birth"   // a Birth follows on the stream
	OpKeeper  = "keeper"  // the keeper's protocol, relayed
	OpDial    = "dial"    // a TCP connection to a port of the sandbox's loopback
	OpSpace   = "space"   // room on the writable disk
	OpSync    = "sync"    // write everything to the disks
	OpUpper   = "upper"   // the sandbox's own files as a tar archive
)

// MaxBirth bounds a birth in octets.
const MaxBirth = 8 << 20

// Request opens a stream.
type Request struct {
	Op      string `json:"op"`
	Port    uint16 `json:"port,omitempty"`
	Layer   string `json:"layer,omitempty"`
	Now     int64  `json:"now,omitempty"`     // nanoseconds since 1970
	Entropy []byte `json:"entropy,omitempty"` // fresh, for this machine alone
}

// Birth asks for the machine's sandbox.
type Birth struct {
	Birth   json.RawMessage `json:"birth"` // the keeper's Birth, without Layers, UpperDir and WorkDir
	Layer   string          `json:"layer"`
	Network *Network        `json:"network,omitempty"`
}

// Network is how the machine's network device is set up in the sandbox.
type Network struct {
	Address string `json:"address"` // with its prefix length, as in 169.254.100.2/30
	Gateway string `json:"gateway"`
	MTU     int    `json:"mtu"`
}

// Answer of a guest.
type Answer struct {
	Error   string            `json:"error,omitempty"`
	Errno   int               `json:"errno,omitempty"`
	Version int               `json:"version,omitempty"`
	Born    string            `json:"born,omitempty"` // the sandbox that lives here
	Laid    map[string]string `json:"laid,omitempty"`
	Free    int64             `json:"free,omitempty"` // octets
	Total   int64             `json:"total,omitempty"`
	Used    int64             `json:"used,omitempty"`
}

// Serial names the disk of a layer's image, or of its contents where they lie apart: at most 20 octets.
func Serial(layer string, data bool) string {
	sum := sha256.Sum256([]byte(layer))
	s := "m" + hex.EncodeToString(sum[:9])
	if data {
		s = "d" + s[1:]
	}
	return s
}
