package containertest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container"
)

// World is a host's network with an uplink to one machine outside, in namespaces of its own. No packet leaves them. On port 80
// both answer each connection with the address it came from.
type World struct {
	Host, Outside netip.Addr

	host, far int // namespaces
}

// NewWorld makes one.
func NewWorld(t testing.TB) *World {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	w := &World{Host: netip.MustParseAddr("203.0.113.1"), Outside: netip.MustParseAddr("203.0.113.2")}
	w.host = namespace(t)
	far := namespace(t)
	w.far = far
	in(t, w.host, func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "far", PeerNamespace: netlink.NsFd(far)}); err != nil {
			return err
		}
		if err := up("lo", netip.Prefix{}); err != nil {
			return err
		}
		if err := up("uplink", netip.PrefixFrom(w.Host, 24)); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: w.Outside.AsSlice()})
	})
	in(t, far, func() error { return up("far", netip.PrefixFrom(w.Outside, 24)) })
	for _, ns := range []int{w.host, far} {
		serve(t, ns)
	}
	return w
}

func namespace(t testing.TB) int {
	t.Helper()
	fd := -1
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		done <- err
	}()
	do(t, <-done)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// in runs f on a thread of the namespace, which ends with it.
func in(t testing.TB, ns int, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(ns, unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	do(t, <-done)
}

func up(name string, p netip.Prefix) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if p.IsValid() {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}}
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(l)
}

// Answer has the machine outside answer each connection to a port, which is closed then.
func (w *World) Answer(t testing.TB, port int, how func(net.Conn)) {
	t.Helper()
	answer(t, w.far, port, how)
}

func serve(t testing.TB, ns int) {
	t.Helper()
	answer(t, ns, 80, func(c net.Conn) { fmt.Fprintln(c, c.RemoteAddr().(*net.TCPAddr).IP) })
}

func answer(t testing.TB, ns, port int, how func(net.Conn)) {
	t.Helper()
	var l net.Listener
	in(t, ns, func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port))
		return err
	})
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			how(c)
			c.Close()
		}
	}()
}

// Config lets a driver take the world's host for its own.
func (w *World) Config(t testing.TB) container.NetworkConfig {
	t.Helper()
	file := filepath.Join(t.TempDir(), "resolv.conf")
	do(t, os.WriteFile(file, []byte("nameserver "+w.Outside.String()+"\n"), 0o600))
	return container.NetworkConfig{Namespace: w.host, ResolvConf: file}
}

// Devices are those of sandboxes, on the host's side.
func (w *World) Devices(t testing.TB) []string {
	t.Helper()
	var names []string
	in(t, w.host, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if strings.HasPrefix(l.Attrs().Name, "dsec") {
				names = append(names, l.Attrs().Name)
			}
		}
		return err
	})
	return names
}

// KeeperPid is the process of the instance's keeper.
func (e *Env) KeeperPid(t testing.TB) int {
	t.Helper()
	i := e.Backend.Keeper()
	if i.Pid == 0 {
		t.Fatal("no keeper answered yet")
	}
	return i.Pid
}
