package layer

import (
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// ID is a layer's identity: "sha256:" and 64 hexadecimal digits, of the canonical tree.
type ID string

const idPrefix = "sha256:"

// ParseID checks an ID; the error wraps sandbox.ErrInvalid.
func ParseID(s string) (ID, error) {
	h, ok := strings.CutPrefix(s, idPrefix)
	if b, err := hex.DecodeString(h); !ok || err != nil || len(b) != 32 || strings.ToLower(h) != h {
		return "", fmt.Errorf("layer id %.80q: want sha256:<64 hexadecimal digits>: %w", s, sandbox.ErrInvalid)
	}
	return ID(s), nil
}

// Hex is the ID without its prefix.
func (id ID) Hex() string { return strings.TrimPrefix(string(id), idPrefix) }

// Architectures of a layer: those of Go, or AnyArch when it holds no program.
const AnyArch = "any"

// Kinds of stored forms.
const (
	FormEROFS = "erofs" // one EROFS image with metadata and contents
	FormSplit = "split" // two: metadata, and the contents as its extra device, which can be read on demand
)

// Form is one way in which a layer is stored.
type Form struct {
	Kind   string `json:"kind"`   // FormEROFS or FormSplit
	Digest string `json:"digest"` // "sha256:<hex>" of the image, or of its metadata: the object blobs/<hex>
	Size   int64  `json:"size"`   // octets of that object
	Data   *Data  `json:"data,omitempty"`
	// Superseded is since when another form, further in front, is to be used instead; Sweep removes it some time after.
	Superseded *time.Time `json:"superseded,omitempty"`
}

// UnitSize is the unit in which contents are fetched and verified, in octets.
const UnitSize = 1 << 20

// Data describes the contents of a layer of FormSplit. A layer without contents has none.
type Data struct {
	Digest string `json:"digest"` // "sha256:<hex>" of the file: the object blobs/<hex>
	Size   int64  `json:"size"`   // octets, a multiple of 4096
	Units  string `json:"units"`  // "sha256:<hex>" of the object that holds each unit's sha256, 32 octets each
	// Hot is how many octets at the front are worth fetching when the layer is mounted; 0 when none are known.
	Hot int64 `json:"hot,omitempty"`
}

// UnitCount is the number of units; the last may be short.
func (d Data) UnitCount() int64 { return (d.Size + UnitSize - 1) / UnitSize }

// BlobKey is the store's key of the object with this digest.
func BlobKey(digest string) string { return "blobs/" + ID(digest).Hex() }

// Descriptor describes a layer.
type Descriptor struct {
	ID    ID     `json:"id"`
	Arch  string `json:"arch"` // "amd64", "arm64", ... or "any"
	Forms []Form `json:"forms"`
	// Parents are the layers, lowest first, on which a snapshot was taken. It holds only what was changed over them and can
	// be stacked on nothing else.
	Parents []ID `json:"parents,omitempty"`
	// Opaque says that the root hides all layers below, which overlayfs does not know of roots: they must not be stacked below it.
	Opaque  bool      `json:"opaque,omitempty"`
	Created time.Time `json:"created"`
	Source  string    `json:"source,omitempty"` // what it was built from, for people
	Entries int64     `json:"entries"`          // names in the tree
	Bytes   int64     `json:"bytes"`            // octets of all contents, each inode once
}

// Owner is a user and group.
type Owner struct {
	UID, GID uint32
}

// IDMap says that Count ids from Outside are the ids from Inside on.
type IDMap struct {
	Outside, Inside, Count uint32
}

// Limits bound what a build accepts.
type Limits struct {
	Entries int64 // names
	Bytes   int64 // octets of all contents
	Depth   int   // folders below each other
	Xattrs  int64 // octets of all attributes
	Holes   int64 // octets of all contents that are nothing but zeros, in pieces of 64 KiB and more: they cost their sender nothing
}

// defaultLimits are far above any real image and bound what a build holds in memory: about 350 octets a name.
var defaultLimits = Limits{Entries: 2 << 20, Bytes: 256 << 30, Depth: 1024, Xattrs: 64 << 20, Holes: 32 << 30}

func (l Limits) filled() Limits {
	d := defaultLimits
	if l.Entries > 0 {
		d.Entries = l.Entries
	}
	if l.Bytes > 0 {
		d.Bytes = l.Bytes
	}
	if l.Depth > 0 {
		d.Depth = l.Depth
	}
	if l.Xattrs > 0 {
		d.Xattrs = l.Xattrs
	}
	if l.Holes > 0 {
		d.Holes = l.Holes
	}
	return d
}

// Options direct a build. The zero value is right for most.
type Options struct {
	// Parents makes the layer a snapshot over these layers, lowest first; they are part of its ID.
	Parents []ID
	// Exclude are paths in the tree ("proc", "etc/resolv.conf") that are left out with all below them.
	Exclude []string
	// Owner replaces the owner of every entry.
	Owner *Owner
	// Unshift maps the ids found back to those of the tree, where the upper's are shifted.
	Unshift *IDMap
	Limits  Limits
	// Arch is what the programs in it are said to be for, as an image's config does; empty takes what most of them are for. A layer
	// without programs is for any machine all the same.
	Arch string
	// Source is kept in the descriptor.
	Source string
	// Unheld leaves the layer to nobody until Hold is called, for who has something to write before. No Sweep takes what is that young.
	Unheld bool
	// Form is the stored form; empty is the usual one.
	Form string
	// Hot are paths of files whose contents lie in front in FormSplit, in this order: what is read first when the layer is used.
	// Symbolic links in the layer are followed; what is not in it is passed over.
	Hot []string
}

// Built is what a build made.
type Built struct {
	ID      ID
	Arch    string
	Opaque  bool // the root hides all layers below
	Entries int64
	Bytes   int64
	Size    int64    // of the image, octets; of its metadata when it is split
	Skipped []string // the first entries that were left out, each with the reason
}
