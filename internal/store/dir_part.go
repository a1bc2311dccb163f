package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// resumer is a store that goes on with a draft of an object that broke off.
type resumer interface {
	// resume returns a draft of the object with this sha256 (hex) and how many octets it has. Discard keeps it, unless forget was called.
	resume(ctx context.Context, sum string) (partDraft, int64, error)
}

type partDraft interface {
	Draft
	forget() // Discard removes it
}

// prover is a store whose objects are cheap to compare with the digest in their key.
type prover interface {
	// proves tells whether the object blobs/<sum> is there in whole.
	proves(ctx context.Context, key, sum string) (bool, error)
}

const partPrefix = "part-"

// machine tells this boot of this machine from others that share a folder: only here does a lock tell whether a draft's writer lives, and what a
// writer left is whole only until the machine ends.
func machine() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	h := fnv.New64a()
	h.Write(id)
	return hex.EncodeToString(h.Sum(nil))
}

// partStem begins the names of drafts of an object; "" where nobody could tell later whether their writers live.
func partStem(prefix, sum string) string {
	m := machine()
	if m == "" {
		return ""
	}
	return prefix + sum + "-" + m + "-"
}

func (d *Dir) resume(ctx context.Context, sum string) (partDraft, int64, error) {
	f, have, kept, err := resumeIn(ctx, filepath.Join(d.root, draftFolder), partStem(partPrefix, sum), anybodys)
	if err != nil {
		return nil, 0, err
	}
	return &dirPart{draft: &draft{File: f, dir: d, at: have, end: have}, sum: sum, gone: !kept}, have, nil
}

// resumeIn opens the draft that broke off in the folder and what of it is there, or a new one; kept says that it can be gone on with later.
func resumeIn(ctx context.Context, folder, stem string, trusted func(fs.FileInfo) bool) (f *os.File, have int64, kept bool, err error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, false, err
	}
	if stem != "" {
		f, have, err := takePart(folder, stem, trusted)
		if err != nil {
			return nil, 0, false, fmt.Errorf("resume draft: %w", err)
		}
		if f != nil {
			return f, have, true, nil
		}
	}
	err = patient(ctx, func() (err error) {
		f, err = os.CreateTemp(folder, stem+"*")
		return err
	})
	if err != nil {
		return nil, 0, false, fmt.Errorf("create draft: %w", full(err))
	}
	return f, 0, stem != "" && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil, nil
}

// anybodys trusts all files: the folder is the store's own.
func anybodys(fs.FileInfo) bool { return true }

// ours trusts files that nobody but this user can have written.
func ours(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid() && info.Mode().Perm()&0o077 == 0
}

// takePart takes over the longest draft whose writer has ended; nil when there is none.
func takePart(folder, stem string, trusted func(fs.FileInfo) bool) (taken *os.File, have int64, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, 0, err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), stem) {
			continue
		}
		name := filepath.Join(folder, e.Name())
		f, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue // published or removed meanwhile
		}
		info, err := f.Stat()
		if err != nil || !info.Mode().IsRegular() || !trusted(info) || taken != nil && info.Size() <= have || unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			f.Close()
			continue
		}
		// Its writer may have published or removed it before it let go.
		if now, err := os.Lstat(name); err != nil || !os.SameFile(now, info) {
			f.Close()
			continue
		}
		if taken != nil {
			taken.Close()
		}
		taken, have = f, info.Size()
	}
	return taken, have, nil
}

// orphaned tells whether a draft is of a process of this machine that is gone. What a copy can go on with is none.
func orphaned(folder, name string) bool {
	m := machine()
	if m == "" || !strings.HasPrefix(name, draftPrefix+m+"-") {
		return false
	}
	f, err := os.OpenFile(filepath.Join(folder, name), os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

// sweepParts removes drafts of an object that is there now.
func sweepParts(folder, stem string, trusted func(fs.FileInfo) bool) {
	if stem == "" {
		return
	}
	for { // each once: the file that was taken is removed
		f, _, err := takePart(folder, stem, trusted)
		if err != nil || f == nil {
			return
		}
		err = os.Remove(f.Name())
		f.Close()
		if err != nil {
			return
		}
	}
}

func (d *Dir) sweepParts(sum string) {
	sweepParts(filepath.Join(d.root, draftFolder), partStem(partPrefix, sum), anybodys)
}

// dirPart is a draft that is kept when it breaks off. Its lock goes with its descriptor.
type dirPart struct {
	*draft
	sum  string
	gone bool
}

func (p *dirPart) Publish(ctx context.Context, key string) error {
	err := p.draft.Publish(ctx, key)
	if err == nil {
		p.dir.sweepParts(p.sum)
	}
	return err
}

func (p *dirPart) forget() { p.gone = true }

func (p *dirPart) Discard() error { return p.draft.leave(p.gone) }

// leave discards a draft that is of no use any more, else leaves it to whoever goes on.
func (d *draft) leave(gone bool) error {
	if d.done {
		return nil
	}
	if gone || d.end == 0 {
		return d.Discard()
	}
	d.done = true
	return d.Close()
}

// proves reads the file: what lies on a disk for long may not be what was written.
func (d *Dir) proves(ctx context.Context, key, sum string) (bool, error) {
	r, err := d.Open(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer r.Close()
	h := sha256.New()
	if err := hashRange(ctx, h, r, 0, r.Size(), nil); err != nil {
		if errors.Is(err, sandbox.ErrLost) {
			return false, nil
		}
		return false, err
	}
	same := hex.EncodeToString(h.Sum(nil)) == sum
	if same {
		d.sweepParts(sum)
	}
	return same, nil
}
