// Package layertest mounts layer images for tests of this module: through the kernel, as sandboxes see them.
package layertest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Mount mounts an EROFS image for the time of the test and returns the folder. It skips the test where that needs a
// privilege that is missing.
func Mount(t testing.TB, image string) string {
	t.Helper()
	return mount(t, image, "")
}

// MountSplit mounts an image of two files; without contents data is "".
func MountSplit(t testing.TB, meta, data string) string {
	t.Helper()
	return mount(t, meta, data)
}

func mount(t testing.TB, image, data string) string {
	t.Helper()
	needRoot(t)
	dir := filepath.Join(t.TempDir(), "dsec-mnt")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	err := mountFile(image, data, dir)
	if errors.Is(err, unix.ENOTBLK) || errors.Is(err, unix.ENODEV) { // before 6.12 a file is not a source
		image, data = loop(t, image), loop(t, data)
		if err = mountFile(image, data, dir); errors.Is(err, unix.ENODEV) {
			t.Skipf("skip: no EROFS here: %v", err)
		}
	}
	if err != nil {
		t.Fatalf("mount %s: %v", image, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// loop puts a loop device on a file, for the time of the test.
func loop(t testing.TB, file string) string {
	t.Helper()
	if file == "" {
		return ""
	}
	out, err := exec.Command("losetup", "--read-only", "--find", "--show", file).Output()
	if err != nil {
		t.Skipf("skip: no EROFS of files here, and no loop device: %v", err)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", dev, err, out)
		}
	})
	return dev
}

func mountFile(image, data, dir string) error {
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil { // else a read-only block device is refused
		return err
	}
	if err := unix.FsconfigSetString(fs, "source", image); err != nil {
		return err
	}
	if data != "" {
		if err := unix.FsconfigSetString(fs, "device", data); err != nil {
			return err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return err
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return unix.MoveMount(mnt, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// Overlay mounts an overlay of the lowers, the lowest first, with a fresh upper for the time of the test. It returns the
// merged folder and the upper.
func Overlay(t testing.TB, lowers ...string) (merged, upper string) {
	t.Helper()
	needRoot(t)
	base := scratch(t)
	merged, upper = filepath.Join(base, "merged"), filepath.Join(base, "upper")
	work := filepath.Join(base, "work")
	for _, d := range []string{merged, upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	highest := make([]string, 0, len(lowers))
	for i := len(lowers) - 1; i >= 0; i-- {
		highest = append(highest, lowers[i])
	}
	options := "lowerdir=" + strings.Join(highest, ":") + ",upperdir=" + upper + ",workdir=" + work + ",redirect_dir=on"
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		t.Fatalf("mount overlay (%s): %v", options, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(merged, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", merged, err)
		}
	})
	return merged, upper
}

// scratch is a folder that may hold an upper: not on an overlay.
func scratch(t testing.TB) string {
	dir := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC {
		t.Skip("skip: the temporary folder is on an overlay, which can't hold an upper")
	}
	return dir
}

// Fsck runs fsck.erofs on the image when it is installed, and checks the contents it extracts as well. Of an image of two files
// the second is named as well.
func Fsck(t testing.TB, image string, data ...string) {
	t.Helper()
	tool, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed; the kernel's mount alone is checked")
		return
	}
	args := []string{"--extract"}
	for _, d := range data {
		if d != "" {
			args = append(args, "--device="+d)
		}
	}
	if out, err := exec.Command(tool, append(args, image)...).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs %s: %v\n%s", image, err, out)
	}
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root to mount")
	}
}
