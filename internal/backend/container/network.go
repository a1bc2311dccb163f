package container

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// NetworkConfig is how sandboxes of network "open" reach the host's networks.
type NetworkConfig struct {
	// Ranges are candidates for the private IPv4 range that sandboxes get addresses from; the first one that clashes with no
	// route and no address of the host is taken, and kept in the state folder from then on. Empty: DefaultRanges.
	Ranges []netip.Prefix
	// Off refuses "open" without a probe.
	Off bool
	// Namespace is a descriptor of the network namespace that counts as the host's; 0 is the caller's own. Tests use it.
	Namespace int
	// ResolvConf is the host's resolver file; empty: /etc/resolv.conf.
	ResolvConf string
}

// DefaultRanges are tried in order: two corners of RFC 1918 that few networks use, a part of the shared space of RFC 6598, and
// the benchmark space of RFC 2544.
var DefaultRanges = []netip.Prefix{
	netip.MustParsePrefix("10.214.0.0/16"),
	netip.MustParsePrefix("172.29.0.0/16"),
	netip.MustParsePrefix("100.124.0.0/16"),
	netip.MustParsePrefix("198.19.0.0/16"),
}

// gatewayOffset and slotOffset place addresses in the range: the gateway is the first address, the sandbox of uid slot n has the
// address slotOffset+n. So an address needs no allocator and no record of its own.
const (
	gatewayOffset = 1
	slotOffset    = 256
)

// network gives sandboxes of mode "open" a routed veth: the sandbox has one /32 address and a default route, the host a /32 route
// back; no bridge (the kernel's takes 1,023 ports), no shared segment, so sandboxes see no frame of each other. What is allowed
// stands in one nftables table of this instance (network_nft.go), in place before the first veth.
//
// A veth is never deleted on its own (16-20 ms in synchronize_net, one after another): it goes with its namespace. Its ifindex is
// kept in the sandbox's handle and Destroy waits for its end, so that slot, address and name are free when they are given again.
type network struct {
	cfg      NetworkConfig
	instance string
	prefix   string // of every device of ours: "dsec" and 4 digits of the instance's hash
	slots    int
	state    string // folder
	log      *slog.Logger
	reason   string // why "open" is refused; empty when it works
	features map[string]string

	mu      sync.Mutex
	ready   bool
	ns      int // descriptor of the host's network namespace
	handle  *netlink.Handle
	rng     netip.Prefix
	gateway netip.Addr
	mtu     int
	forward *dnsForwarder // nil unless sandboxes can't reach the host's resolvers themselves
	noFib   bool
}

// errNoOpen wraps the reason why the host offers no network "open".
func (n *network) refuse() error {
	return fmt.Errorf("network open: %s: %w", n.reason, sandbox.ErrUnsupported)
}

func newNetwork(cfg NetworkConfig, instance, state string, slots int, log *slog.Logger) (*network, error) {
	if len(cfg.Ranges) == 0 {
		cfg.Ranges = DefaultRanges
	}
	if cfg.ResolvConf == "" {
		cfg.ResolvConf = "/etc/resolv.conf"
	}
	for _, r := range cfg.Ranges {
		if !r.Addr().Is4() || r.Masked() != r {
			return nil, fmt.Errorf("network range %s: want an IPv4 prefix without host bits: %w", r, sandbox.ErrInvalid)
		}
		if size := 1 << (32 - r.Bits()); size < slotOffset+slots+1 {
			return nil, fmt.Errorf("network range %s: holds %d addresses, %d sandboxes need %d: %w", r, size, slots, slotOffset+slots+1, sandbox.ErrInvalid)
		}
	}
	h := fnv.New32a()
	h.Write([]byte(instance))
	n := &network{
		cfg: cfg, instance: instance, state: state, slots: slots, log: log, ns: -1,
		prefix:   fmt.Sprintf("dsec%04x", h.Sum32()&0xffff),
		features: map[string]string{},
	}
	if cfg.Off {
		n.reason = "turned off in the configuration"
		return n, nil
	}
	p := probeNetwork()
	n.noFib = p.noFib
	n.reason = p.reason
	for k, v := range p.features {
		n.features[k] = v
	}
	return n, nil
}

// told are the features for the doctor and the status.
func (n *network) told() map[string]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.features)
}

// setUp takes the range and lays the rules; the first "open" sandbox and recovery call it. It is idempotent.
func (n *network) setUp() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ready {
		return nil
	}
	if n.reason != "" {
		return n.refuse()
	}
	ns, err := n.openNamespace()
	if err != nil {
		return err
	}
	handle, err := handleIn(ns)
	if err != nil {
		unix.Close(ns)
		return err
	}
	n.ns, n.handle = ns, handle
	if err := n.setUpLocked(); err != nil {
		n.closeLocked()
		return fmt.Errorf("network open: %w", err)
	}
	n.ready = true
	return nil
}

func (n *network) openNamespace() (int, error) {
	if n.cfg.Namespace > 0 {
		return unix.FcntlInt(uintptr(n.cfg.Namespace), unix.F_DUPFD_CLOEXEC, 0)
	}
	return unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

func handleIn(ns int) (h *netlink.Handle, err error) {
	err = inNetns(ns, func() error {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	return h, err
}

func (n *network) setUpLocked() error {
	rng, err := n.claimRange()
	if err != nil {
		return err
	}
	n.rng, n.gateway = rng, addrAt(rng, gatewayOffset)
	n.mtu = n.uplinkMTU()
	if err := n.layRules(); err != nil {
		return err
	}
	if err := n.turnOnForwarding(); err != nil {
		return err
	}
	res := readResolvers(n.cfg.ResolvConf)
	if needsForwarder(res.servers, n.isLocal) {
		n.forward, err = newDNSForwarder(n.ns, n.handle, n.gateway, n.cfg.ResolvConf, n.prefix, n.log)
		if err != nil {
			return err
		}
		n.features["resolver"] = "sandboxes ask " + n.gateway.String() + ", which asks the host's resolvers: these listen where a sandbox can't reach"
	}
	return nil
}

func (n *network) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closeLocked()
}

// closeLocked leaves rules, range and devices: sandboxes outlive the host daemon.
func (n *network) closeLocked() {
	if n.forward != nil {
		n.forward.close()
		n.forward = nil
	}
	if n.handle != nil {
		n.handle.Close()
		n.handle = nil
	}
	if n.ns >= 0 {
		unix.Close(n.ns)
		n.ns = -1
	}
	n.ready = false
}

// addrAt is the address at an offset from the start of a range.
func addrAt(r netip.Prefix, offset int) netip.Addr {
	b := r.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(offset)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func hostNet(a netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(a, a.BitLen())) }

// claimRange picks the range and marks it with an "unreachable" route, which also keeps packets to addresses that no sandbox has
// from leaving through the uplink. Whose mark a route is, is told by the own nftables table that names the range.
func (n *network) claimRange() (netip.Prefix, error) {
	own, err := n.tableRange()
	if err != nil {
		return netip.Prefix{}, err
	}
	candidates := n.cfg.Ranges
	if b, err := os.ReadFile(n.rangeFile()); err == nil {
		if p, err := netip.ParsePrefix(strings.TrimSpace(string(b))); err == nil && p.Addr().Is4() && 32-p.Bits() >= 0 && 1<<(32-p.Bits()) > slotOffset+n.slots {
			candidates = append([]netip.Prefix{p}, candidates...)
		}
	}
	var clashes []string
	for _, c := range candidates {
		if c != own {
			why, err := n.clash(c)
			if err != nil {
				return netip.Prefix{}, err
			}
			if why != "" {
				clashes = append(clashes, why)
				continue
			}
		}
		// Without NLM_F_REPLACE: of two instances that start at once, one gets "exists".
		err := n.handle.RouteAdd(&netlink.Route{Dst: ipNet(c), Type: unix.RTN_UNREACHABLE})
		if errors.Is(err, unix.EEXIST) && c != own {
			clashes = append(clashes, c.String()+" is taken by another instance")
			continue
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return netip.Prefix{}, fmt.Errorf("claim range %s: %w", c, err)
		}
		if err := os.WriteFile(n.rangeFile(), []byte(c.String()+"\n"), 0o600); err != nil {
			return netip.Prefix{}, fmt.Errorf("record range: %w", err)
		}
		return c, nil
	}
	return netip.Prefix{}, fmt.Errorf("no private range is free (%s); set another in the configuration: %w", strings.Join(clashes, "; "), sandbox.ErrExhausted)
}

func (n *network) rangeFile() string { return filepath.Join(n.state, "network-range") }

// clash names the route or address of the host that overlaps a range, in any routing table (VPNs use their own).
func (n *network) clash(c netip.Prefix) (string, error) {
	routes, err := n.handle.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return "", fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		ones, _ := r.Dst.Mask.Size()
		a, ok := netip.AddrFromSlice(r.Dst.IP.To4())
		if !ok || ones == 0 {
			continue
		}
		if p := netip.PrefixFrom(a, ones); p.Overlaps(c) {
			return fmt.Sprintf("%s overlaps the route to %s", c, p), nil
		}
	}
	addrs, err := n.handle.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return "", fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		ones, _ := a.Mask.Size()
		ip, ok := netip.AddrFromSlice(a.IP.To4())
		if ok && netip.PrefixFrom(ip, ones).Overlaps(c) {
			return fmt.Sprintf("%s overlaps the address %s/%d", c, ip, ones), nil
		}
	}
	return "", nil
}

// isLocal reports whether an address is one of the host's own.
func (n *network) isLocal(a netip.Addr) bool {
	addrs, err := n.handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return true // a forwarder works for every resolver
	}
	for _, x := range addrs {
		if ip, ok := netip.AddrFromSlice(x.IP); ok && ip.Unmap() == a.Unmap() {
			return true
		}
	}
	return false
}

// uplinkMTU is the smallest MTU of the devices that default routes use: an overlay's 1,450 must hold inside too, since not every
// network lets the ICMP pass that path MTU discovery needs.
func (n *network) uplinkMTU() int {
	mtu := 1500
	routes, err := n.handle.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: nil}, netlink.RT_FILTER_DST)
	if err != nil {
		return mtu
	}
	for _, r := range routes {
		if l, err := n.handle.LinkByIndex(r.LinkIndex); err == nil && l.Attrs().MTU >= 576 {
			mtu = min(mtu, l.Attrs().MTU)
		}
	}
	return mtu
}

// turnOnForwarding sets net.ipv4.ip_forward where it is off. It stays on: others may rely on it from then on.
func (n *network) turnOnForwarding() error {
	const file = "/proc/sys/net/ipv4/ip_forward"
	return inNetns(n.ns, func() error {
		if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == "1" {
			return nil
		}
		if err := os.WriteFile(file, []byte("1\n"), 0); err != nil {
			return fmt.Errorf("turn on net.ipv4.ip_forward: %w", err)
		}
		n.features["ip_forward"] = "was off and was turned on for sandboxes of network open"
		return nil
	})
}

func (n *network) device(slot int) string { return n.prefix + "s" + strconv.Itoa(slot) }

// hardware addresses are fixed by the slot and locally administered, so that permanent neighbours stand on both sides and no ARP
// is needed: nothing to spoof, and the kernel's neighbour table (1,024 entries by default) does not overflow.
func hardware(side byte, slot int) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0xd5, side, byte(slot >> 16), byte(slot >> 8), byte(slot)}
}

// enter gives the namespace of a sandbox its device and returns the ifindex of the host's side. On an error the caller drops the
// namespace, and all that was made goes with it.
func (n *network) enter(ctx context.Context, sandboxNS int, slot int) (ifindex int, err error) {
	if err := n.setUp(); err != nil {
		return 0, err
	}
	addr, name := addrAt(n.rng, slotOffset+slot), n.device(slot)
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{
			Name: name, MTU: n.mtu, TxQLen: 1000, NumTxQueues: 1, NumRxQueues: 1, HardwareAddr: hardware(0, slot),
		},
		PeerName: "eth0", PeerNamespace: netlink.NsFd(sandboxNS), PeerHardwareAddr: hardware(1, slot),
		PeerMTU: uint32(n.mtu), PeerNumTxQueues: 1, PeerNumRxQueues: 1,
	}
	if err := n.addLink(ctx, veth); err != nil {
		return 0, err
	}
	ifindex = veth.Attrs().Index
	if err := n.hostSide(name, ifindex, addr, slot); err != nil {
		return ifindex, fmt.Errorf("network device %s, host side: %w", name, err)
	}
	if err := n.insideSide(sandboxNS, addr, slot); err != nil {
		return ifindex, fmt.Errorf("network device %s, inside: %w", name, err)
	}
	if err := n.awaitCarrier(ctx, name); err != nil {
		return ifindex, fmt.Errorf("network device %s: %w", name, err)
	}
	return ifindex, nil
}

// awaitCarrier waits until the host's side carries packets. It was set up before its peer, so the kernel's link watch turns its
// queue on, in the background and up to a second later; until then answers to the sandbox's first packets are dropped, and a
// resolver inside waits 5 s. Asking by ETHTOOL_GLINK makes newer kernels do it at once.
func (n *network) awaitCarrier(ctx context.Context, name string) error {
	for wait := 200 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if err := inNetns(n.ns, func() error { return askLink(name) }); err != nil {
			return fmt.Errorf("ask for its link: %w", err)
		}
		l, err := n.handle.LinkByName(name)
		if err != nil {
			return err
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for its link: %w", ctx.Err())
		case <-time.After(wait):
		}
	}
}

// askLink reads the link state of a device in the thread's network namespace.
func askLink(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{cmd: unix.ETHTOOL_GLINK}
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	request.data = unsafe.Pointer(&value)
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	runtime.KeepAlive(&value)
	if e != 0 {
		return e
	}
	return nil
}

// addLink waits a moment for the slot's last device, whose namespace a kernel worker may still be taking apart.
func (n *network) addLink(ctx context.Context, veth *netlink.Veth) error {
	for wait := 2 * time.Millisecond; ; wait *= 2 {
		err := n.handle.LinkAdd(veth)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EEXIST) || wait > 2*time.Second {
			return fmt.Errorf("make network device %s: %w", veth.Name, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

func (n *network) hostSide(name string, ifindex int, addr netip.Addr, slot int) error {
	err := inNetns(n.ns, func() error {
		for _, s := range [][2]string{
			{"ipv6/conf/" + name + "/disable_ipv6", "1"},
			{"ipv4/conf/" + name + "/forwarding", "1"},
			{"ipv4/conf/" + name + "/rp_filter", "1"},
			{"ipv4/conf/" + name + "/accept_redirects", "0"},
			{"ipv4/conf/" + name + "/send_redirects", "0"},
		} {
			if err := writeSysctl(s[0], s[1]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: ifindex, Name: name}}
	if err := n.handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	if err := n.handle.NeighSet(neighbour(ifindex, addr, hardware(1, slot))); err != nil {
		return fmt.Errorf("set neighbour: %w", err)
	}
	if err := n.handle.RouteReplace(&netlink.Route{LinkIndex: ifindex, Scope: netlink.SCOPE_LINK, Dst: hostNet(addr)}); err != nil {
		return fmt.Errorf("set route to %s: %w", addr, err)
	}
	return nil
}

func neighbour(ifindex int, addr netip.Addr, hw net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: ifindex, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: hw}
}

func (n *network) insideSide(ns int, addr netip.Addr, slot int) error {
	return inNetns(ns, func() error {
		// IPv6 stays off on the device: there is no route for it, and a link-local address would only cost time in resolvers.
		// The loopback keeps ::1.
		if err := writeSysctl("ipv6/conf/eth0/disable_ipv6", "1"); err != nil {
			return err
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		eth, err := h.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find eth0: %w", err)
		}
		i := eth.Attrs().Index
		if err := h.AddrAdd(eth, &netlink.Addr{IPNet: hostNet(addr)}); err != nil {
			return fmt.Errorf("set address %s: %w", addr, err)
		}
		if err := h.LinkSetUp(eth); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
		if err := h.NeighSet(neighbour(i, n.gateway, hardware(0, slot))); err != nil {
			return fmt.Errorf("set neighbour: %w", err)
		}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: i, Scope: netlink.SCOPE_LINK, Dst: hostNet(n.gateway)}); err != nil {
			return fmt.Errorf("set route to the gateway: %w", err)
		}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: i, Gw: n.gateway.AsSlice()}); err != nil {
			return fmt.Errorf("set default route: %w", err)
		}
		return nil
	})
}

// writeSysctl sets a value under /proc/sys/net, which shows the calling thread's network namespace. What the kernel does not have
// (IPv6 compiled out or booted without) needs no setting.
func writeSysctl(name, value string) error {
	err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)
	if errors.Is(err, os.ErrNotExist) && strings.HasPrefix(name, "ipv6/") {
		return nil
	}
	return err
}

// resolv are the lines of /etc/resolv.conf for a sandbox of network open.
func (n *network) resolv() []string {
	n.mu.Lock()
	gateway, forward := n.gateway, n.forward
	n.mu.Unlock()
	r := readResolvers(n.cfg.ResolvConf)
	var lines []string
	if forward != nil {
		lines = append(lines, "nameserver "+gateway.String())
	} else {
		for _, s := range r.servers[:min(len(r.servers), 3)] {
			lines = append(lines, "nameserver "+s.String())
		}
	}
	return append(lines, r.other...)
}

// gone reports whether the host's side of a veth has ended. An index is not given again before 2^31 others.
func (n *network) gone(ifindex int) bool {
	n.mu.Lock()
	h := n.handle
	n.mu.Unlock()
	if h == nil {
		return true
	}
	_, err := h.LinkByIndex(ifindex)
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing)
}

// waitGone waits until the device of a dropped namespace has ended.
func (n *network) waitGone(ctx context.Context, ifindex int) error {
	if ifindex == 0 {
		return nil
	}
	for wait := time.Millisecond; !n.gone(ifindex); wait = min(2*wait, 100*time.Millisecond) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("network device %d did not end with its namespace: %w", ifindex, ctx.Err())
		case <-time.After(wait):
		}
	}
	return nil
}

// left are the devices of this instance whose slots are not living.
func (n *network) left(living map[int]bool) ([]netlink.Link, error) {
	n.mu.Lock()
	h := n.handle
	n.mu.Unlock()
	if h == nil {
		return nil, nil
	}
	links, err := h.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	var out []netlink.Link
	for _, l := range links {
		rest, ok := strings.CutPrefix(l.Attrs().Name, n.prefix+"s")
		slot, err := strconv.Atoi(rest)
		if ok && err == nil && !living[slot] {
			out = append(out, l)
		}
	}
	return out, nil
}

// sweep removes devices that belong to none of the living slots. Their namespaces are held by something that outlived its
// sandbox, so this once they are deleted explicitly.
func (n *network) sweep(living map[int]bool) error {
	if n.reason != "" || n.cfg.Off {
		return nil
	}
	if _, err := os.Stat(n.rangeFile()); err != nil && !n.isReady() {
		return nil // no sandbox of network open was ever made here
	}
	if err := n.setUp(); err != nil {
		return err
	}
	links, err := n.left(living)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		var missing netlink.LinkNotFoundError
		if err := n.handle.LinkDel(l); err != nil && !errors.As(err, &missing) && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("remove network device %s: %w", l.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

func (n *network) isReady() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ready
}

// release removes table, range and forwarding rules of this instance, when the last sandbox is gone and the host gives up.
func (n *network) release() error {
	if !n.isReady() {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	err := errors.Join(n.removeRules(), n.handle.RouteDel(&netlink.Route{Dst: ipNet(n.rng), Type: unix.RTN_UNREACHABLE}))
	if n.forward != nil {
		n.forward.removeAddress()
	}
	os.Remove(n.rangeFile())
	n.closeLocked()
	return err
}
