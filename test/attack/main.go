//go:build linux && amd64

// Command attack tries, from inside a sandbox, what a hostile program tries, and compares each answer of the kernel with the one that
// the confinement promises. It prints a line for each attempt and ends with code 1 when any answer is another.
//
//	attack run [HOSTPID]     all attempts that need nothing from outside
//	attack reach ADDRESS..   connections that must be refused or find no way, never succeed or hang: tcp:HOST:PORT, unix:NAME (abstract)
//	attack leave NAME        leaves what a neighbour could find, and stays
//	attack look NAME         looks for what `leave` left in another sandbox
//	attack swap              one call that is also reported
//	attack cpus              prints what Go takes for the number of processors
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// attempt is something that is tried. want is what may come of it: names of errors, "ok" for success (of what has no effect), or
// whatever else the attempt answers.
type attempt struct {
	name string
	want string
	do   func() string
}

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	args := os.Args[2:]
	switch os.Args[1] {
	case "run":
		end(run(args))
	case "reach":
		end(reach(args))
	case "leave":
		leave(args[0])
	case "look":
		end(look(args[0]))
	case "cpus":
		fmt.Println(runtime.GOMAXPROCS(0))
	case "swap":
		end([]attempt{call("extent swap", "EPERM", unix.SYS_IOCTL, 0, 0xc028660f, 0)})
	case "x32":
		unix.RawSyscall(0x40000000|unix.SYS_GETPID, 0, 0, 0)
	case "int80":
		int80()
	default:
		os.Exit(2)
	}
}

func end(all []attempt) {
	bad := 0
	for _, a := range all {
		got := a.do()
		mark := "as promised"
		if !slices.Contains(strings.Split(a.want, " "), got) {
			mark = "WRONG, want " + a.want
			bad++
		}
		fmt.Printf("%-44s %-16s %s\n", a.name, got, mark)
	}
	fmt.Printf("%d attempts, %d wrong\n", len(all), bad)
	if bad > 0 {
		os.Exit(1)
	}
}

// answer names an error.
func answer(err error) string {
	if err == nil {
		return "ok"
	}
	var e syscall.Errno
	if errors.As(err, &e) {
		if n := unix.ErrnoName(e); n != "" {
			return n
		}
	}
	return strings.ReplaceAll(err.Error(), " ", "_")
}

// call is an attempt by a bare system call.
func call(name, want string, nr uintptr, args ...uintptr) attempt {
	return attempt{name, want, func() string {
		var a [6]uintptr
		copy(a[:], args)
		r, _, e := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		if e != 0 {
			return answer(e)
		}
		_ = r
		return "ok"
	}}
}

func try(name, want string, f func() error) attempt {
	return attempt{name, want, func() string { return answer(f()) }}
}

// open tries to open a file and tells what a success was.
func open(path string, flags int, want string) attempt {
	verb := "open "
	if flags&unix.O_WRONLY != 0 {
		verb = "write "
	}
	return try(verb+path, want, func() error {
		fd, err := unix.Open(path, flags|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
}

// masked is a file that shows nothing and takes everything to nowhere: absent, the null device in its place, an empty folder, or what
// nobody inside may open.
func masked(path string) attempt {
	return attempt{"masked " + path, "null empty closed ENOENT", func() string {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return answer(err)
		}
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3):
			return "null"
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			list, err := os.ReadDir(path)
			if err == nil && len(list) == 0 {
				return "empty"
			}
			return fmt.Sprintf("%d_entries", len(list))
		}
		closed := true
		for _, flags := range []int{unix.O_RDONLY, unix.O_WRONLY} {
			fd, err := unix.Open(path, flags|unix.O_NONBLOCK, 0)
			if err == nil {
				unix.Close(fd)
			}
			closed = closed && err == unix.EACCES
		}
		if closed {
			return "closed"
		}
		return "there"
	}}
}

func dial(address string) error {
	network, at, _ := strings.Cut(address, ":")
	if network == "unix" {
		at = "@" + at
	}
	// A refusal comes at once; on a host whose processors are all taken, packets may wait for seconds.
	c, err := (&net.Dialer{Timeout: 30 * time.Second}).Dial(network, at)
	if err != nil {
		if n, ok := err.(net.Error); ok && n.Timeout() {
			return errors.New("hangs")
		}
		return err
	}
	c.Close()
	return nil
}

func reach(list []string) (all []attempt) {
	for _, a := range list {
		all = append(all, try("reach "+a, "ECONNREFUSED ENETUNREACH EHOSTUNREACH EACCES", func() error { return dial(a) }))
	}
	return all
}

const shmKey = 0xd5ec

// leave holds an abstract socket, a SysV segment, files and a listener on all addresses.
func leave(name string) {
	for _, network := range [][2]string{{"unix", "@" + name}, {"tcp", ":7654"}} {
		l, err := net.Listen(network[0], network[1])
		if err != nil {
			panic(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
	}
	if _, err := unix.SysvShmGet(shmKey, 4096, unix.IPC_CREAT|0o666); err != nil {
		panic(err)
	}
	for _, d := range []string{"/tmp/", "/dev/shm/"} {
		if err := os.WriteFile(d+name, []byte(name), 0o666); err != nil {
			panic(err)
		}
	}
	addresses, _ := net.InterfaceAddrs()
	fmt.Println("left", addresses)
	time.Sleep(time.Hour)
}

func look(name string) []attempt {
	return []attempt{
		try("abstract socket of a neighbour", "ECONNREFUSED", func() error { return dial("unix:" + name) }),
		try("SysV memory of a neighbour", "ENOENT", func() error { _, err := unix.SysvShmGet(shmKey, 4096, 0); return err }),
		open("/tmp/"+name, unix.O_RDONLY, "ENOENT"),
		open("/dev/shm/"+name, unix.O_RDONLY, "ENOENT"),
		{"processes of a neighbour", "none", func() string {
			all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, p := range all {
				if b, _ := os.ReadFile(p); strings.Contains(string(b), "leave") {
					return p
				}
			}
			return "none"
		}},
	}
}

// died runs this program again and tells how it ended.
func died(arg string) string {
	err := exec.Command("/proc/self/exe", arg).Run()
	var e *exec.ExitError
	if errors.As(err, &e) {
		if ws := e.Sys().(syscall.WaitStatus); ws.Signaled() {
			return unix.SignalName(ws.Signal())
		}
	}
	return fmt.Sprint(err)
}
