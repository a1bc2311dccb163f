package warden

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// withMounts runs start in a mount namespace of its own, in which the files are mounted, and comes back. It runs on the spawning thread.
func withMounts(binds []Bind, files []*os.File, start func() error) error {
	trees := make([]int, 0, len(binds))
	defer func() {
		for _, t := range trees {
			unix.Close(t)
		}
	}()
	for _, b := range binds { // in the namespace that they are of
		t, err := unix.OpenTree(int(files[b.File].Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("file for %s can't be mounted: %w", filepath.Base(b.At), err)
		}
		trees = append(trees, t)
	}
	runtime.KeepAlive(files)
	own, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(own)
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a mount namespace of its own: %w", err)
	}
	defer func() {
		if err := unix.Setns(own, unix.CLONE_NEWNS); err != nil {
			panic(err) // the thread would start every later monitor among another's files
		}
	}()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("a mount namespace of its own: %w", err)
	}
	for i, b := range binds {
		if err := unix.MoveMount(trees[i], "", unix.AT_FDCWD, b.At, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount %s: %w", filepath.Base(b.At), err)
		}
	}
	return start()
}

// guardJails has a process live that kills what is left in the monitors' cgroups when this one has ended, whatever ended it.
func (w *warden) guardJails() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.guard != nil {
		return nil
	}
	r, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", `read x; echo 1 >"$0"`, filepath.Join(w.groups.v2, w.groups.name, "cgroup.kill"))
	cmd.Stdin, cmd.Env, cmd.Dir = r, nil, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		in.Close()
		return fmt.Errorf("guard of the jails: %w", err)
	}
	go cmd.Wait()
	w.guard = in
	return nil
}
