package keeper

import (
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// images remembers, of compositions of layers, what a birth needs to know to lay its files into the upper before there is an overlay:
// through the overlay each costs a copy up of its folder, and a removal where the image has one. Layers never change.
type images struct {
	mu    sync.Mutex
	known map[string]*image
}

// image is what a composition of layers has of what furnish looks after.
type image struct {
	missing []string // folders of furnished
	etc     struct{ mode, uid, gid uint32 }
	files   map[string]*string // of /etc: the text; nil for one that is no regular file
	hosts   string             // /etc/hosts, through links
}

const (
	knownImages = 64
	imageText   = 64 << 10 // of one file
)

func newImages() *images { return &images{known: map[string]*image{}} }

func (s *images) get(layers []string) *image {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[strings.Join(layers, "/")]
}

// learn looks at a fresh root of the layers. One in which something is out of the ordinary is furnished through its overlay each time.
func (s *images) learn(layers []string, root int, base uint32) {
	im := lookAt(root, base)
	if im == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.known {
		if len(s.known) < knownImages {
			break
		}
		delete(s.known, k)
	}
	s.known[strings.Join(layers, "/")] = im
}

func lookAt(root int, base uint32) *image {
	im := &image{files: map[string]*string{}}
	im.etc.mode = 0o755
	for _, d := range furnished {
		var st unix.Stat_t
		switch fd, err := inRoot(root, "/"+d.name, unix.O_PATH, 0); {
		case err == nil:
			err = unix.Fstat(fd, &st)
			unix.Close(fd)
			if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
				return nil
			}
		case err == unix.ENOENT && unix.Fstatat(root, d.name, &st, unix.AT_SYMLINK_NOFOLLOW) == unix.ENOENT:
			im.missing = append(im.missing, d.name)
		default:
			return nil
		}
	}
	// A link is for the slow way, which resolves it.
	etc, err := unix.Openat(root, "etc", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return im
	}
	if err != nil {
		return nil
	}
	defer unix.Close(etc)
	var st unix.Stat_t
	if n, err := unix.Flistxattr(etc, nil); err != nil || n > 0 || unix.Fstat(etc, &st) != nil {
		return nil
	}
	im.etc.mode, im.etc.uid, im.etc.gid = st.Mode&0o7777, st.Uid-base, st.Gid-base
	if im.etc.uid >= idsPerSandbox || im.etc.gid >= idsPerSandbox {
		return nil
	}
	for _, name := range laidFiles {
		err := unix.Fstatat(etc, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == unix.ENOENT:
		case err != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size > imageText:
			return nil
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			text := readIn(root, "/etc/"+name)
			if int64(len(text)) != st.Size {
				return nil
			}
			im.files[name] = &text
		default:
			im.files[name] = nil
		}
	}
	im.hosts = readIn(root, "/etc/hosts")
	if len(im.hosts) > imageText {
		return nil
	}
	return im
}

// furnish is what the function furnish does, in the empty upper.
func (im *image) furnish(upper int, b *Birth) (laid map[string]string, err error) {
	base := int(b.UIDBase)
	for _, d := range furnished {
		mode, uid, gid := d.mode, base, base
		switch {
		case d.name == "etc":
			mode, uid, gid = im.etc.mode, base+int(im.etc.uid), base+int(im.etc.gid)
		case !slices.Contains(im.missing, d.name):
			continue
		}
		if err := unix.Mkdirat(upper, d.name, mode&0o777); err != nil {
			return nil, err
		}
		if err := unix.Fchownat(upper, d.name, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, err
		}
		if mode != 0o755 {
			if err := unix.Fchmodat(upper, d.name, mode, 0); err != nil {
				return nil, err
			}
		}
	}
	etc, err := unix.Openat(upper, "etc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(etc)
	laid = map[string]string{}
	for _, name := range laidFiles {
		text := textOf(name, b, im.hosts)
		if have := im.files[name]; have != nil && *have == text {
			continue
		}
		if err := writeNew(etc, name, text, base); err != nil {
			return nil, err
		}
		laid["etc/"+name] = sum(text)
	}
	return laid, nil
}
