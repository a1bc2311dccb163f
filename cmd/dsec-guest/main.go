// Command dsec-guest is the file server inside a sandbox. Process 1 starts it as the user asked for, with a connected stream
// socket as descriptor 3, or as the one its argument names; it answers until the other end closes. It is small and static, and its
// imports are pinned by a test.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/dsec-dev/dsec/internal/guest/fileserver"
)

func main() {
	// It is charged to the sandbox's memory: it collects early and stays small. Two threads of Go code are enough; a call that the
	// kernel holds has a thread of its own anyway.
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(32 << 20)
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	syscall.Umask(0)               // modes are stated in each request
	signal.Ignore(syscall.SIGXFSZ) // a file size limit is an error of one call, not our end
	if err := os.Chdir("/"); err != nil {
		fail(err)
	}
	conn := 3
	if len(os.Args) >= 2 { // the keeper has only the three standard descriptors to give
		n, err := strconv.Atoi(os.Args[1])
		if err != nil {
			fail(err)
		}
		conn = n
	}
	if _, err := syscall.GetsockoptInt(conn, syscall.SOL_SOCKET, syscall.SO_TYPE); err != nil {
		fail(os.NewSyscallError("descriptor "+strconv.Itoa(conn)+" must be a connected socket", err))
	}
	syscall.CloseOnExec(conn)
	if len(os.Args) == 3 {
		signal.Ignore(syscall.SIGPIPE)
		if err := dial(conn, os.Args[2]); err != nil {
			fail(err)
		}
		return
	}
	// Set before NewFile, which then lets the runtime's poller wait for it.
	if err := syscall.SetNonblock(conn, true); err != nil {
		fail(err)
	}
	if err := fileserver.Serve(context.Background(), os.NewFile(uintptr(conn), "host")); err != nil {
		fail(err)
	}
}

func fail(err error) {
	os.Stderr.WriteString("dsec-guest: " + err.Error() + "\n")
	os.Exit(1)
}
