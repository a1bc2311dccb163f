package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// screenDevices are what a machine with a screen has of it, where the kernel does: its text console, its picture, keyboard and pointer.
var screenDevices = []string{"/dev/tty1", "/dev/fb0", "/dev/dri/card0", "/dev/input/event*"}

type device struct {
	at     string
	number uint64
}

// giveScreen makes the devices of the machine's screen in the sandbox, for its root: the machine is that sandbox's alone.
func giveScreen(pid, owner int) error {
	if _, ok := argument("dsec.screen="); !ok {
		return nil
	}
	var list []device
	for _, p := range screenDevices {
		found, _ := filepath.Glob(p)
		for _, at := range found {
			var st unix.Stat_t
			if err := unix.Lstat(at, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR {
				list = append(list, device{at, st.Rdev})
			}
		}
	}
	ns, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("screen: %w", err)
	}
	defer unix.Close(ns)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		done <- makeDevices(ns, owner, list)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("screen: %w", err)
	}
	return nil
}

// makeDevices makes devices in the /dev of another namespace, which is read-only but for that moment. No process of a client runs there yet.
func makeDevices(ns, owner int, list []device) (err error) {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/dev", 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("open /dev for a moment: %w", err)
	}
	defer func() {
		if e := unix.MountSetattr(unix.AT_FDCWD, "/dev", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); e != nil {
			err = errors.Join(err, fmt.Errorf("close /dev: %w", e))
		}
	}()
	for _, d := range list {
		if err := os.MkdirAll(filepath.Dir(d.at), 0o755); err != nil {
			return err
		}
		if err := unix.Mknod(d.at, unix.S_IFCHR|0o600, int(d.number)); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make %s: %w", d.at, err)
		}
		if err := unix.Lchown(d.at, owner, owner); err != nil {
			return fmt.Errorf("make %s: %w", d.at, err)
		}
	}
	return nil
}
