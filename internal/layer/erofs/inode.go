package erofs

import (
	"encoding/binary"
	"fmt"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Xattr is one extended attribute with its full name, as in "security.capability".
type Xattr struct {
	Name  string
	Value []byte
}

// Inode is a file of any type. Names that share one *Inode are hard links of it.
type Inode struct {
	Mode         uint32 // type and permission bits as in st_mode
	UID, GID     uint32
	Sec          int64 // time of modification
	Nsec         uint32
	Major, Minor uint32 // character and block devices
	Target       string // symbolic links
	Data         Content
	Xattrs       []Xattr           // Finish sorts them by name
	Children     map[string]*Inode // folders

	// Filled by Finish.
	links  uint32
	nid    uint64
	layout layout
}

// IsDir reports whether the inode is a folder.
func (in *Inode) IsDir() bool { return in.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsWhiteout reports whether the inode is an overlay's mark of a removed name.
func (in *Inode) IsWhiteout() bool {
	return in.Mode&unix.S_IFMT == unix.S_IFCHR && in.Major == 0 && in.Minor == 0
}

// Get returns the attribute's value.
func (in *Inode) Get(name string) ([]byte, bool) {
	for _, x := range in.Xattrs {
		if x.Name == name {
			return x.Value, true
		}
	}
	return nil, false
}

// Set adds or replaces an attribute.
func (in *Inode) Set(name string, value []byte) {
	for i := range in.Xattrs {
		if in.Xattrs[i].Name == name {
			in.Xattrs[i].Value = value
			return
		}
	}
	in.Xattrs = append(in.Xattrs, Xattr{name, value})
}

// Names returns the folder's names in the order of their octets.
func (in *Inode) Names() []string {
	names := make([]string, 0, len(in.Children))
	for n := range in.Children {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

// The namespaces of attributes that the format can name (EROFS_XATTR_INDEX_*). An access list is stored as in user space.
var namespaces = []struct {
	prefix string
	index  byte
	whole  bool // the prefix is the whole name
}{
	{"user.", 1, false},
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"trusted.", 4, false},
	{"security.", 6, false},
}

// Limits of one attribute and of all of an inode: the name's length has 8 bits, the value's 16, and i_xattr_icount 16.
const (
	maxXattrName  = 255
	maxXattrValue = 65535
	xattrHeader   = 12
	maxXattrs     = xattrHeader + 4*(65535-1)
)

// CheckXattr says whether the format can hold the attribute; the error wraps ErrUnsupported.
func CheckXattr(name string, value []byte) error {
	for _, ns := range namespaces {
		if ns.whole && name != ns.prefix || !ns.whole && (!strings.HasPrefix(name, ns.prefix) || len(name) == len(ns.prefix)) {
			continue
		}
		if !ns.whole && len(name)-len(ns.prefix) > maxXattrName {
			return fmt.Errorf("attribute %.40q: name of %d octets: %w", name, len(name), sandbox.ErrUnsupported)
		}
		if len(value) > maxXattrValue {
			return fmt.Errorf("attribute %q: value of %d octets, at most %d: %w", name, len(value), maxXattrValue, sandbox.ErrUnsupported)
		}
		return nil
	}
	return fmt.Errorf("attribute %.80q: no such namespace in an image: %w", name, sandbox.ErrUnsupported)
}

// encodeXattrs returns the inline attribute area, empty when there are none; its length is a multiple of 4.
func encodeXattrs(list []Xattr) ([]byte, error) {
	if len(list) == 0 {
		return nil, nil
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Name < list[j].Name })
	b := make([]byte, xattrHeader)
	for _, x := range list {
		if err := CheckXattr(x.Name, x.Value); err != nil {
			return nil, err
		}
		for _, ns := range namespaces {
			if !strings.HasPrefix(x.Name, ns.prefix) || ns.whole && x.Name != ns.prefix {
				continue
			}
			name := x.Name[len(ns.prefix):]
			b = append(b, byte(len(name)), ns.index)
			b = binary.LittleEndian.AppendUint16(b, uint16(len(x.Value)))
			b = append(b, name...)
			b = append(b, x.Value...)
			for len(b)%4 != 0 {
				b = append(b, 0)
			}
			break
		}
	}
	if len(b) > maxXattrs {
		return nil, fmt.Errorf("attributes of one file: %d octets, at most %d: %w", len(b), maxXattrs, sandbox.ErrUnsupported)
	}
	return b, nil
}

// fileType is the type octet of a folder's entry.
func fileType(mode uint32) byte {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 1
	case unix.S_IFDIR:
		return 2
	case unix.S_IFCHR:
		return 3
	case unix.S_IFBLK:
		return 4
	case unix.S_IFIFO:
		return 5
	case unix.S_IFSOCK:
		return 6
	case unix.S_IFLNK:
		return 7
	}
	return 0
}
