package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/keeper"
)

// dial connects the host to a port of the sandbox's loopback: 127.0.0.1 first, then ::1.
func (m *machine) dial(st *mux.Stream, port uint16) {
	m.mu.Lock()
	born := m.born
	m.mu.Unlock()
	if born == nil || port == 0 {
		st.Reset("no such port")
		return
	}
	c, err := dialIn(born.Pid, port)
	if err != nil {
		text := err.Error()
		if errors.Is(err, syscall.ECONNREFUSED) {
			text = "refused"
		}
		st.Reset(text)
		return
	}
	if st.Accept() != nil {
		c.Close()
		return
	}
	keeper.Splice(st, c.(*net.TCPConn))
}

func dialIn(pid int, port uint16) (c net.Conn, err error) {
	err = inNetns(pid, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		// One attempt at a time and no other goroutine: the socket is made on this thread.
		for _, host := range []string{"127.0.0.1", "::1"} {
			var fd int
			if fd, err = connect(ctx, host, port); err == nil {
				f := os.NewFile(uintptr(fd), "tcp")
				defer f.Close()
				c, err = net.FileConn(f)
				return err
			}
		}
		return err
	})
	return c, err
}

func connect(_ context.Context, host string, port uint16) (int, error) {
	family, to := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}})
	if host == "::1" {
		a := &unix.SockaddrInet6{Port: int(port)}
		a.Addr[15] = 1
		family, to = unix.AF_INET6, a
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, err
	}
	tv := unix.NsecToTimeval(int64(10 * time.Second)) // bounds connect
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	for {
		err = unix.Connect(fd, to)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil && err != unix.EISCONN {
		unix.Close(fd)
		return -1, err
	}
	tv = unix.Timeval{}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	return fd, unix.SetNonblock(fd, true)
}

// inNetns runs f on a thread in the network namespace of a process. The thread ends with it.
func inNetns(pid int, f func() error) error {
	ns, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("network namespace of the sandbox: %w", err)
	}
	defer unix.Close(ns)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// loopbackUp brings up the machine's own loopback.
func loopbackUp() {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if r, err := unix.NewIfreq("lo"); err == nil {
		r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
	}
}

// enterNetwork moves the machine's network device into the sandbox and sets it up there: nothing else of the machine is on a network.
func enterNetwork(pid int, n *vmwire.Network) error {
	link, err := networkDevice()
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(n.Address)
	if err != nil {
		return fmt.Errorf("network address %q: %w", n.Address, err)
	}
	gateway := net.ParseIP(n.Gateway)
	if gateway == nil {
		return fmt.Errorf("gateway %q: no address", n.Gateway)
	}
	if err := netlink.LinkSetNsPid(link, pid); err != nil {
		return fmt.Errorf("move the network device: %w", err)
	}
	return inNetns(pid, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName(link.Attrs().Name)
		if err != nil {
			return err
		}
		if link.Attrs().Name != "eth0" {
			if err := h.LinkSetName(link, "eth0"); err != nil {
				return fmt.Errorf("name the network device: %w", err)
			}
		}
		if n.MTU > 0 {
			if err := h.LinkSetMTU(link, n.MTU); err != nil {
				return fmt.Errorf("set the MTU: %w", err)
			}
		}
		if err := h.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("set the address: %w", err)
		}
		if err := h.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring the network up: %w", err)
		}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway}); err != nil {
			return fmt.Errorf("set the route: %w", err)
		}
		return nil
	})
}

// networkDevice is the first device that is not the loopback.
func networkDevice() (netlink.Link, error) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		links, err := netlink.LinkList()
		if err != nil {
			return nil, err
		}
		for _, l := range links {
			if l.Type() == "device" && l.Attrs().Flags&net.FlagLoopback == 0 && len(l.Attrs().HardwareAddr) == 6 {
				return l, nil
			}
		}
		if time.Now().After(end) {
			return nil, errors.New("the machine has no network device")
		}
	}
}
