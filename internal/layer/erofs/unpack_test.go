package erofs_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// unpackBack compares the tree that Unpack writes with what was written into the image. It lies in memory, which holds every attribute.
func (im *image) unpackBack(t *testing.T, want []string) {
	t.Helper()
	dir := memory(t, "")
	img := im.open(t)
	if err := unpack(t, img, dir); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, describe(t, dir)); d != "" {
		t.Errorf("unpacked, want -, got +:\n%s", d)
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		t.Fatal(err)
	}
	octets, _ := img.Unpacked() // this file system counts names and attributes as inodes too
	if used := int64(disk.Blocks-disk.Bfree) * disk.Bsize; used > octets {
		t.Errorf("it takes %d octets, %d were told: are holes holes?", used, octets)
	}
}

func unpack(t *testing.T, im *erofs.Image, dir string) error {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return im.Unpack(f, func() error { return nil })
}

// memory is a fresh file system in memory for the time of the test.
func memory(t *testing.T, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("unpacked", dir, "tmpfs", 0, "mode=0700"+options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// What a file system can't take is an error with the path; a full disk is told from an attribute that it has no place for.
func TestUnpackIntoTooLittle(t *testing.T) {
	im := newImage(t, true)
	big := file(t, im, slices.Repeat([]byte("content "), 200<<10/8))
	tagged := file(t, im, []byte("x"))
	for _, n := range []string{"a", "b", "c"} {
		tagged.Set("trusted."+n, []byte(strings.Repeat(n, 3000)))
	}
	im.finishOnly(t, dir(map[string]*erofs.Inode{"sub": dir(map[string]*erofs.Inode{"big": big}), "tagged": tagged}))
	img := im.open(t)
	if err := unpack(t, img, memory(t, ",size=64k")); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), `"/sub/big"`) {
		t.Errorf("a full disk: %v", err)
	}
	if err := unpack(t, img, memory(t, ",nr_inodes=4")); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a disk without inodes: %v", err)
	}
	disk := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(disk, &st); err != nil || st.Type != unix.EXT4_SUPER_MAGIC {
		return // xfs and btrfs hold them
	}
	if err := unpack(t, img, disk); !errors.Is(err, sandbox.ErrUnsupported) || errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), `"/tagged": attribute "trusted.b"`) {
		t.Errorf("more attributes than ext4 holds: %v", err)
	}
}

// A folder may lie deeper than any path may be long, and its files have names elsewhere.
func TestUnpackDeep(t *testing.T) {
	im := newImage(t, false)
	f := file(t, im, []byte("everywhere"))
	at := dir(map[string]*erofs.Inode{"last": f})
	for range 3000 {
		at = dir(map[string]*erofs.Inode{"down": at, "f": f})
	}
	at.Children["links"] = dir(nil) // the name that the work would like to have
	im.finishOnly(t, at)
	to := filepath.Join(memory(t, ""), "deep")
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unpack(t, im.open(t), to); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(to, "f"), &st); err != nil || st.Nlink != 3001 {
		t.Errorf("%d names, want 3001, %v", st.Nlink, err)
	}
	if names, err := os.ReadDir(to); err != nil || len(names) != 3 {
		t.Errorf("%v, want down, f and links: %v", names, err)
	}
}
