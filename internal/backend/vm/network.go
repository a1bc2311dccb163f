package vm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// A machine's network device is a tap in a network namespace of its own. The namespace has a way out as a container of network "open" has
// it, under the same rules, and hides the machine behind that address: so all machines have the same address and hardware address inside, and
// a clone needs no other. The namespace lives as long as the monitor; what was made in it goes with it.

// Network lends ways out; *container.Backend has it.
type Network interface {
	NoNetworkOpen() string
	Lend(ctx context.Context, id sandbox.ID, ns *os.File) (container.Lent, error)
	Lending(id sandbox.ID, l container.Lent) error
	TakeBack(ctx context.Context, id sandbox.ID, l container.Lent) error
}

const (
	guestMAC     = "02:d5:02:00:00:02"
	guestAddress = "169.254.100.2/30"
	guestGateway = "169.254.100.1"
	tapName      = "dsec-tap"
	outName      = "eth0" // the namespace's own way out
)

func (b *Backend) noNetworkOpen() string {
	if b.net == nil {
		return "this host lends no networks to machines"
	}
	return b.net.NoNetworkOpen()
}

// way is a machine's network namespace with its tap.
type way struct{ ns, tap *os.File }

func (w *way) close() {
	for _, f := range []*os.File{w.tap, w.ns} {
		if f != nil {
			f.Close()
		}
	}
}

// openNetwork makes the sandbox's way out.
func (x *instance) openNetwork(ctx context.Context) (*way, error) {
	w, err := x.b.newWay(x.h.Slot)
	if err != nil {
		return nil, err
	}
	l, err := x.b.net.Lend(ctx, x.id, w.ns)
	if err == nil {
		x.h.Lent = &l
		// The device goes with the namespace, and that with the monitor: this is undone after the machine's end.
		x.undo.push("take back the network", func(ctx context.Context) error { return x.b.net.TakeBack(ctx, x.id, l) })
		err = inNamespace(w.ns, func() error {
			if err := hideBehind(); err != nil {
				return err
			}
			return x.b.boundNetwork()
		})
	}
	if err != nil {
		w.close()
		return nil, fmt.Errorf("network open: %w", err)
	}
	return w, nil
}

// boundNetwork bounds what goes through the thread's namespace to the machine and from it.
func (b *Backend) boundNetwork() error {
	if b.cfg.Rates.Network == 0 || b.driver.Features().NetRates {
		return nil
	}
	return errors.Join(boundDevice(tapName, b.cfg.Rates.Network), boundDevice(outName, b.cfg.Rates.Network))
}

// into gives a machine the way.
func (w *way) into(s *vmm.Spec) {
	s.Netns, s.Tap, s.TapName, s.MAC = w.ns, w.tap, tapName, guestMAC
}

// newWay makes a namespace with a tap in it, for the monitor of a slot. Where the monitor opens its tap by its name, it stays without anybody
// who holds it, as long as the namespace.
func (b *Backend) newWay(slot int) (w *way, err error) {
	w = &way{}
	defer func() {
		if err != nil {
			w.close()
			w, err = nil, fmt.Errorf("network of the machine: %w", err)
		}
	}()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			w.ns, err = os.Open("/proc/thread-self/ns/net")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return w, err
	}
	return w, inNamespace(w.ns, func() (err error) {
		if w.tap, err = makeTap(); err == nil && b.driver.Features().TapByName {
			err = leaveTap(w.tap, int(b.cfg.UIDBase)+slot)
			w.tap.Close()
			w.tap = nil
		}
		return err
	})
}

// leaveTap lets a tap stay when it is closed, for a user to open.
func leaveTap(tap *os.File, uid int) error {
	if err := unix.IoctlSetInt(int(tap.Fd()), unix.TUNSETOWNER, uid); err != nil {
		return fmt.Errorf("tap: its owner: %w", err)
	}
	if err := unix.IoctlSetInt(int(tap.Fd()), unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	return nil
}

// inNamespace runs f on a thread of the namespace, which ends with it.
func inNamespace(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// makeTap makes the tap in the thread's namespace, with the gateway's address.
func makeTap() (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	r, err := unix.NewIfreq(tapName)
	if err == nil {
		r.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, r)
	}
	if err == nil {
		err = setUpTap()
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("tap: %w", err)
	}
	return os.NewFile(uintptr(fd), tapName), nil
}

func setUpTap() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(tapName)
	if err != nil {
		return err
	}
	if err := h.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(guestGateway), Mask: net.CIDRMask(30, 32)}}); err != nil {
		return err
	}
	return h.LinkSetUp(l)
}

// hideBehind lets packets of the machine out under the namespace's own address, and nothing else through.
func hideBehind() error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return fmt.Errorf("forward: %w", err)
	}
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "dsec"})
	post := c.AddChain(&nftables.Chain{Name: "post", Table: t, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
	out := append([]byte(outName), make([]byte, 16-len(outName))...)
	c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: out}, &expr.Masq{}}})
	// The machine reaches what lies outside, nothing of the namespace itself.
	in := c.AddChain(&nftables.Chain{Name: "in", Table: t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	tap := append([]byte(tapName), make([]byte, 16-len(tapName))...)
	c.AddRule(&nftables.Rule{Table: t, Chain: in, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: tap}, &expr.Verdict{Kind: expr.VerdictDrop}}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	return nil
}
