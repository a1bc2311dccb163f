// Command dsec-guest-vm is process 1 of a virtual machine: it brings the machine up, runs a keeper with the machine's one sandbox in it,
// and answers the host over a serial port of virtio or over vsock (docs/format/vm.md). The host dials, it only listens. The same program is
// the keeper below it and the file server inside the sandbox.
//
// The workload is a sandbox of that keeper, in namespaces and a cgroup of its own: it can neither reach the port nor speak for this program.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/dsec-dev/dsec/internal/guest/fileserver"
	"github.com/dsec-dev/dsec/internal/keeper"
)

func main() {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "keeper":
		os.Exit(keeper.Main(os.Args[2:]))
	case len(os.Args) == 2 && os.Getpid() != 1:
		serveFiles(os.Args[1])
	case os.Getpid() == 1:
		if os.Getenv(stageVar) == "" {
			halt(firstStage())
		}
		halt(run())
	}
	fmt.Fprintln(os.Stderr, "dsec-guest-vm is process 1 of a virtual machine")
	os.Exit(2)
}

// serveFiles is the file server, as cmd/dsec-guest is it in containers.
func serveFiles(arg string) {
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(32 << 20)
	runtime.GOMAXPROCS(min(2, runtime.NumCPU()))
	syscall.Umask(0)
	signal.Ignore(syscall.SIGXFSZ)
	err := os.Chdir("/")
	conn := 0
	if err == nil {
		conn, err = strconv.Atoi(arg)
	}
	if err == nil {
		_, err = syscall.GetsockoptInt(conn, syscall.SOL_SOCKET, syscall.SO_TYPE)
	}
	if err == nil {
		syscall.CloseOnExec(conn)
		err = syscall.SetNonblock(conn, true)
	}
	if err == nil {
		err = fileserver.Serve(context.Background(), os.NewFile(uintptr(conn), "host"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dsec-guest-vm: files:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
