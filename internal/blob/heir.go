package blob

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A daemon is started again by its host. While the host is dead too, nobody would: reads that the dead daemon had taken would hold their
// processes, which not even a kill ends. So each daemon has an heir, a process that does nothing but wait for its death; when nobody has
// come to serve the connection some time after, the heir becomes the daemon. A daemon that ends by itself tells its heir to go.
const (
	heirFlag = "--heir"
	heirFD   = 4               // of the heir: what the daemon says at its end
	heirWait = 3 * time.Second // longer than a host that lives takes
)

// bequeath starts the heir of this process, which runs with args. The function that comes back sends it away.
func bequeath(args []string) (dismiss func(), err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the heir: %w", err)
	}
	defer r.Close()
	fd, err := unix.FcntlInt(fuseFD, unix.F_DUPFD_CLOEXEC, 5)
	if err != nil {
		w.Close()
		return nil, fmt.Errorf("start the heir: %w", err)
	}
	fuse := os.NewFile(uintptr(fd), "/dev/fuse")
	defer fuse.Close()
	own := os.Args[:len(os.Args)-len(args)]
	cmd := exec.Command("/proc/self/exe", slices.Concat(own[1:], []string{heirFlag}, args)...)
	cmd.Args[0] = own[0]
	cmd.Stdout, cmd.Stderr, cmd.Dir = os.Stdout, os.Stderr, "/"
	cmd.ExtraFiles = []*os.File{fuse, r}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("start the heir: %w", err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	return func() {
		w.Write([]byte{1})
		w.Close()
		select { // nothing is to be left of a daemon that has ended
		case <-ended:
		case <-time.After(time.Second):
		}
	}, nil
}

// inherit is the life of an heir. It returns when it is not needed.
func inherit(runDir string, args []string) error {
	unix.CloseOnExec(heirFD)
	var said [1]byte
	for {
		n, err := unix.Read(heirFD, said[:])
		if err == unix.EINTR {
			continue
		}
		if n > 0 || err != nil {
			return nil // it ended by itself
		}
		break
	}
	time.Sleep(heirWait)
	// Stop removes the nodes; another daemon has the lock. Between this look and the exec one may come: then the lock is waited for in vain.
	if _, err := os.Stat(filepath.Join(runDir, nodesName)); err != nil {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(runDir, lockName), os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	busy := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
	f.Close()
	if busy {
		return nil
	}
	own := os.Args[:len(os.Args)-len(args)-1]
	if err := syscall.Exec("/proc/self/exe", slices.Concat(own, args), os.Environ()); err != nil {
		return fmt.Errorf("follow a daemon that died: %w", err)
	}
	return nil
}
