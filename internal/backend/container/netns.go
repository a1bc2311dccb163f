package container

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// inNetns runs f on a thread of its own that sits in the network namespace, and waits for it. f must not start goroutines that
// rely on the namespace. A thread that can't go back is ended with its goroutine and never given to another one.
func inNetns(ns int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		back, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("open own network namespace: %w", err)
			return // stays locked: the thread ends with the goroutine, which costs little and is always right
		}
		defer unix.Close(back)
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		err = f()
		if e := unix.Setns(back, unix.CLONE_NEWNET); e != nil {
			done <- errors.Join(err, fmt.Errorf("leave network namespace: %w", e))
			return
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// newNetns makes an empty network namespace that lives as long as the descriptor or a device in it.
func newNetns() (int, error) {
	fd := -1
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread's namespace is gone with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("make network namespace: %w", err)
			return
		}
		var err error
		fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		done <- err
	}()
	if err := <-done; err != nil {
		return -1, err
	}
	return fd, nil
}
