package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	stageVar = "DSEC_VM_STAGE"
	program  = "/init"
)

// halt says on the console why the machine can't go on and ends it. The host reads the console.
func halt(err error) {
	fmt.Fprintf(os.Stderr, "dsec-guest-vm: %v\n", err)
	unix.Sync()
	time.Sleep(50 * time.Millisecond) // for the serial port
	unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	for {
		time.Sleep(time.Hour)
	}
}

// firstStage leaves the initramfs, whose root can't be pivoted away from: a tmpfs becomes the root, with this program alone in it.
func firstStage() error {
	if err := unix.Mount("dev", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount /dev: %w", err)
	}
	if console, err := os.OpenFile("/dev/console", os.O_RDWR, 0); err == nil {
		for fd := range 3 {
			unix.Dup3(int(console.Fd()), fd, 0)
		}
	}
	if err := loadModules("/modules"); err != nil {
		return err
	}
	const root = "/newroot"
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("root", root, "tmpfs", 0, "mode=0755,size=64m"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	for _, d := range []string{"dev", "proc", "sys", "run", "upper", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	text, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	if err := os.WriteFile(root+program, text, 0o755); err != nil {
		return err
	}
	if err := os.Remove(program); err != nil { // its memory is given back when this stage ends
		return err
	}
	os.RemoveAll("/modules")
	if err := unix.Mount("/dev", root+"/dev", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move /dev: %w", err)
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return syscall.Exec(program, []string{"dsec-guest-vm"}, []string{stageVar + "=2", "PATH=/bin:/sbin:/usr/bin:/usr/sbin"})
}

// loadModules loads the kernel's modules that the host put there, in the order of their names. A kernel of our own has none.
func loadModules(dir string) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range list {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			fmt.Fprintf(os.Stderr, "dsec-guest-vm: module %s: %v\n", e.Name(), err) // what needs it says more
		}
	}
	return nil
}

// mounts are what the machine needs before the keeper.
func mounts() error {
	for _, m := range []struct {
		kind, at, data string
		flags          uintptr
	}{
		{"proc", "/proc", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"sysfs", "/sys", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"cgroup2", "/sys/fs/cgroup", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	} {
		if err := unix.Mount(m.kind, m.at, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	for name, value := range map[string]string{
		"kernel/printk":             "1 4 1 7",
		"vm/overcommit_memory":      "1",
		"kernel/panic_on_oops":      "1", // a machine that is not sound ends; its sandbox failed by the platform
		"net/ipv4/ping_group_range": "0 2147483647",
		// Else each network namespace has a device of each kind of tunnel.
		"net/core/fb_tunnels_only_for_init_net": "1",
	} {
		os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	}
	return nil
}

// findPort finds the host's serial port by its name.
func findPort() (string, error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		dirs, _ := filepath.Glob("/sys/class/virtio-ports/*")
		for _, d := range dirs {
			if name, err := os.ReadFile(d + "/name"); err == nil && strings.TrimSpace(string(name)) == "dsec.0" {
				return "/dev/" + filepath.Base(d), nil
			}
		}
		if time.Now().After(end) {
			return "", errors.New("no serial port of the host's (virtio-serial, name dsec.0)")
		}
	}
}

// disk is a block device, found by the serial that the host gave it, or by its place where the host could give none.
func disk(serial string) (string, error) {
	if list, ok := argument("dsec.mapped="); ok { // what is memory of ours, all of the host's machines share it
		if i := slices.Index(strings.Split(list, ","), serial); i >= 0 {
			return fmt.Sprintf("/dev/pmem%d", i), nil
		}
	}
	if list, ok := argument("dsec.disks="); ok {
		i := slices.Index(strings.Split(list, ","), serial)
		if i < 0 {
			return "", fmt.Errorf("no disk %q among %q", serial, list)
		}
		return "/dev/vd" + string(rune('a'+i)), nil
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		list, _ := filepath.Glob("/sys/block/vd*")
		slices.Sort(list)
		for _, d := range list {
			text, err := os.ReadFile(d + "/serial")
			if err == nil && strings.TrimSpace(string(text)) == serial {
				return "/dev/" + filepath.Base(d), nil
			}
		}
		if time.Now().After(end) {
			return "", fmt.Errorf("no disk with the serial %q among %q", serial, list)
		}
	}
}
