package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
}

// world is a host with an uplink to one other machine, "internet", in namespaces of their own. No packet leaves them.
type world struct {
	host, internet int
	hostAddr       netip.Addr // on the uplink
	farAddr        netip.Addr
}

func newWorld(t testing.TB) *world {
	t.Helper()
	needRoot(t)
	w := &world{host: namespace(t), internet: namespace(t), hostAddr: netip.MustParseAddr("203.0.113.1"), farAddr: netip.MustParseAddr("203.0.113.2")}
	h := mustHandle(t, w.host)
	check(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink", MTU: 1450}, PeerName: "far", PeerNamespace: netlink.NsFd(w.internet), PeerMTU: 1450}))
	setUpLink(t, h, "uplink", netip.PrefixFrom(w.hostAddr, 24))
	far := mustHandle(t, w.internet)
	setUpLink(t, far, "far", netip.PrefixFrom(w.farAddr, 24))
	l, err := h.LinkByName("uplink")
	check(t, err)
	check(t, h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: w.farAddr.AsSlice()}))
	return w
}

func namespace(t testing.TB) int {
	t.Helper()
	ns, err := newNetns()
	check(t, err)
	t.Cleanup(func() { unix.Close(ns) })
	lo := mustHandle(t, ns)
	l, err := lo.LinkByName("lo")
	check(t, err)
	check(t, lo.LinkSetUp(l))
	return ns
}

func mustHandle(t testing.TB, ns int) *netlink.Handle {
	t.Helper()
	h, err := handleIn(ns)
	check(t, err)
	t.Cleanup(h.Close)
	return h
}

func setUpLink(t testing.TB, h *netlink.Handle, name string, p netip.Prefix) {
	t.Helper()
	l, err := h.LinkByName(name)
	check(t, err)
	check(t, h.AddrAdd(l, &netlink.Addr{IPNet: ipNet(p)}))
	check(t, h.LinkSetUp(l))
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve answers every TCP connection in a namespace with the address it came from.
func serve(t testing.TB, ns int, at string) {
	t.Helper()
	var l net.Listener
	check(t, inNetns(ns, func() (err error) {
		l, err = net.Listen("tcp", at)
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
}

// connect connects from within a namespace and returns what the other side said.
func connect(ns int, to string) (string, error) {
	var c net.Conn
	err := inNetns(ns, func() (err error) {
		c, err = net.DialTimeout("tcp", to, 20*time.Second)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	return string(b), err
}

func testNetwork(t testing.TB, w *world, instance string) *network {
	t.Helper()
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	check(t, os.WriteFile(resolv, []byte("nameserver "+w.farAddr.String()+"\nsearch corp.test\noptions trust-ad edns0\n"), 0o600))
	n, err := newNetwork(NetworkConfig{Namespace: w.host, ResolvConf: resolv}, instance, t.TempDir(), 1000, slog.New(slog.DiscardHandler))
	check(t, err)
	if n.reason != "" {
		t.Skipf("skip: no network open on this kernel: %s", n.reason)
	}
	t.Cleanup(n.close)
	return n
}

func TestNetworkReachesOnlyTheOutside(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "one")
	a, b := namespace(t), namespace(t)
	for slot, ns := range []int{a, b} {
		if _, err := n.enter(t.Context(), ns, slot); err != nil {
			t.Fatal(err)
		}
	}
	serve(t, w.internet, "0.0.0.0:80")
	serve(t, w.host, "0.0.0.0:8080")
	serve(t, b, "0.0.0.0:9000")
	// An "instance metadata service" stands on the outside machine, and the host would route to it.
	far := mustHandle(t, w.internet)
	l, err := far.LinkByName("far")
	check(t, err)
	check(t, far.AddrAdd(l, &netlink.Addr{IPNet: hostNet(netip.MustParseAddr("169.254.169.254"))}))
	other := addrAt(n.rng, slotOffset+1)

	got, err := connect(a, w.farAddr.String()+":80")
	if err != nil || got != w.hostAddr.String() {
		t.Fatalf("to the outside: got %q, %v; want the host's address %s", got, err, w.hostAddr)
	}
	if got, err := connect(b, "127.0.0.1:9000"); err != nil || got != "127.0.0.1" {
		t.Fatalf("own loopback: %q, %v", got, err)
	}
	for name, to := range map[string]string{
		"host's address on the uplink": w.hostAddr.String() + ":8080",
		"gateway address":              n.gateway.String() + ":8080",
		"another sandbox":              other.String() + ":9000",
		"metadata service":             "169.254.169.254:80",
		"address no sandbox has":       addrAt(n.rng, slotOffset+77).String() + ":80",
	} {
		start := time.Now()
		if got, err := connect(a, to); err == nil {
			t.Errorf("%s (%s): connected, said %q; want a refusal", name, to, got)
		} else if isTimeout(err) {
			t.Errorf("%s (%s): no answer after %v; want a refusal at once", name, to, time.Since(start))
		}
	}
	if _, err := connect(w.internet, addrAt(n.rng, slotOffset+1).String()+":9000"); err == nil {
		t.Error("the outside reached a sandbox")
	}
	if mtu := linkMTU(t, a); mtu != 1450 {
		t.Errorf("MTU inside is %d, want the uplink's 1450", mtu)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func linkMTU(t testing.TB, ns int) int {
	t.Helper()
	l, err := mustHandle(t, ns).LinkByName("eth0")
	check(t, err)
	return l.Attrs().MTU
}

// Fault B46, firewalls: hosts whose FORWARD policy is drop (container engines set it) still let sandboxes out.
func TestNetworkForeignForwardDrop(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "drop")
	c, err := nftables.New(nftables.WithNetNSFd(w.host))
	check(t, err)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "filter"})
	policy := nftables.ChainPolicyDrop
	for name, hook := range map[string]*nftables.ChainHook{"FORWARD": nftables.ChainHookForward, "INPUT": nftables.ChainHookInput} {
		c.AddChain(&nftables.Chain{Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter, Policy: &policy})
	}
	check(t, c.Flush())
	ns := namespace(t)
	if _, err := n.enter(t.Context(), ns, 0); err != nil {
		t.Fatal(err)
	}
	serve(t, w.internet, "0.0.0.0:80")
	if got, err := connect(ns, w.farAddr.String()+":80"); err != nil || got != w.hostAddr.String() {
		t.Fatalf("to the outside: got %q, %v", got, err)
	}
	if n.features["forward"] == "" {
		t.Error("the features do not tell of the foreign chain")
	}
	// Setting up again, as a restarted daemon does, leaves one pair of rules; giving up leaves none.
	check(t, n.layRules())
	if got := foreignRules(t, c, table); got != 2 {
		t.Errorf("%d rules of ours in the foreign chain after a restart, want 2", got)
	}
	check(t, n.release())
	if got := foreignRules(t, c, table); got != 0 {
		t.Errorf("%d rules of ours in the foreign chain after release, want 0", got)
	}
	tables, err := c.ListTables()
	check(t, err)
	for _, x := range tables {
		if strings.HasPrefix(x.Name, "dsec_") {
			t.Errorf("table %s is left after release", x.Name)
		}
	}
}

func foreignRules(t testing.TB, c *nftables.Conn, table *nftables.Table) int {
	t.Helper()
	rules, err := c.GetRules(table, &nftables.Chain{Name: "FORWARD", Table: table})
	check(t, err)
	return len(rules)
}

// A sandbox that forges its source address reaches no one and is not answered in another's name.
func TestNetworkForgedSource(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "forge")
	ns := namespace(t)
	if _, err := n.enter(t.Context(), ns, 3); err != nil {
		t.Fatal(err)
	}
	h := mustHandle(t, ns)
	eth, err := h.LinkByName("eth0")
	check(t, err)
	for _, forged := range []netip.Addr{addrAt(n.rng, slotOffset+4), netip.MustParseAddr("198.51.100.9")} {
		check(t, h.AddrAdd(eth, &netlink.Addr{IPNet: hostNet(forged)}))
		if received(t, w, ns, forged, 300*time.Millisecond) {
			t.Errorf("a datagram from %s arrived outside", forged)
		}
	}
	if !received(t, w, ns, addrAt(n.rng, slotOffset+3), time.Minute) {
		t.Error("a datagram from the own address did not arrive outside")
	}
}

func received(t testing.TB, w *world, ns int, from netip.Addr, within time.Duration) bool {
	t.Helper()
	var in net.PacketConn
	check(t, inNetns(w.internet, func() (err error) {
		in, err = net.ListenPacket("udp4", w.farAddr.String()+":0")
		return err
	}))
	defer in.Close()
	check(t, inNetns(ns, func() error {
		out, err := net.DialUDP("udp4", &net.UDPAddr{IP: from.AsSlice()}, in.LocalAddr().(*net.UDPAddr))
		if err != nil {
			return err
		}
		defer out.Close()
		_, err = out.Write([]byte("x"))
		return err
	}))
	in.SetReadDeadline(time.Now().Add(within))
	_, _, err := in.ReadFrom(make([]byte, 8))
	return err == nil
}

// Fault kind N, CIDR clashes: a range that the host routes somewhere is left alone, and two instances never share one.
func TestNetworkRangeClash(t *testing.T) {
	w := newWorld(t)
	h := mustHandle(t, w.host)
	l, err := h.LinkByName("uplink")
	check(t, err)
	check(t, h.RouteAdd(&netlink.Route{Table: 52, LinkIndex: l.Attrs().Index, Dst: ipNet(netip.MustParsePrefix("10.214.7.0/24"))}))
	one, two := testNetwork(t, w, "one"), testNetwork(t, w, "two")
	check(t, one.setUp())
	check(t, two.setUp())
	if want := DefaultRanges[1]; one.rng != want {
		t.Errorf("first instance took %s, want %s: a VPN's table routes a part of %s", one.rng, want, DefaultRanges[0])
	}
	if want := DefaultRanges[2]; two.rng != want {
		t.Errorf("second instance took %s, want %s", two.rng, want)
	}
	// A restarted daemon finds its own mark and keeps the range.
	again, err := newNetwork(one.cfg, "one", one.state, 1000, one.log)
	check(t, err)
	t.Cleanup(again.close)
	check(t, again.setUp())
	if again.rng != one.rng {
		t.Errorf("after a restart the range is %s, want %s", again.rng, one.rng)
	}
	// All taken: a clear refusal.
	full := testNetwork(t, w, "three")
	full.cfg.Ranges = DefaultRanges[:3]
	if err := full.setUp(); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("with all ranges taken: %v, want ErrExhausted", err)
	}
}

// The device goes with its namespace, and the slot's name and address can be given again.
func TestNetworkDeviceEndsWithNamespace(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "ends")
	for range 3 {
		ns, err := newNetns()
		check(t, err)
		i, err := n.enter(t.Context(), ns, 9)
		check(t, err)
		if n.gone(i) {
			t.Fatal("the device is gone while its namespace lives")
		}
		unix.Close(ns)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		check(t, n.waitGone(ctx, i))
		cancel()
	}
	// One whose namespace is held by something that outlived the sandbox is swept.
	ns := namespace(t)
	i, err := n.enter(t.Context(), ns, 9)
	check(t, err)
	check(t, n.sweep(map[int]bool{9: true}))
	if n.gone(i) {
		t.Fatal("sweep removed the device of a living sandbox")
	}
	check(t, n.sweep(nil))
	if !n.gone(i) {
		t.Fatal("sweep left the device of a dead sandbox")
	}
}

func TestNetworkResolvers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		f := filepath.Join(dir, name)
		check(t, os.WriteFile(f, []byte(text), 0o600))
		return f
	}
	systemdResolv = write("systemd", "nameserver 192.0.2.53\n")
	local := func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.2") }
	cases := []struct {
		name, text string
		servers    string
		other      []string
		forward    bool
	}{
		{"plain", "# c\nnameserver 192.0.2.1\nsearch a.test b.test\noptions trust-ad ndots:2\n", "[192.0.2.1]", []string{"search a.test b.test", "options ndots:2"}, false},
		{"systemd-resolved", "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch .\n", "[192.0.2.53]", []string{"options edns0", "search ."}, false},
		{"stub of another kind", "nameserver 127.0.0.1\n", "[127.0.0.1]", nil, true},
		{"own address", "nameserver 192.0.2.2\n", "[192.0.2.2]", nil, true},
		{"metadata address", "nameserver 169.254.169.254\n", "[169.254.169.254]", nil, true},
		{"IPv6 alone", "nameserver 2001:db8::1\n", "[2001:db8::1]", nil, true},
		{"empty", "", "[127.0.0.1]", nil, true},
		{"rubbish", "nameserver\nnameserver x\n\x00\n", "[127.0.0.1]", nil, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := readResolvers(write("resolv.conf", c.text))
			if got := fmt.Sprint(r.servers); got != c.servers {
				t.Errorf("servers %s, want %s", got, c.servers)
			}
			if d := cmp.Diff(c.other, r.other); d != "" {
				t.Errorf("other lines (-want +got):\n%s", d)
			}
			if got := needsForwarder(r.servers, local); got != c.forward {
				t.Errorf("forwarder needed: %v, want %v", got, c.forward)
			}
		})
	}
}

// A resolver on the host's loopback is reached through the forwarder, over UDP and TCP, and nothing else of the host with it.
func TestNetworkForwardsNames(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "names")
	check(t, os.WriteFile(n.cfg.ResolvConf, []byte("nameserver 127.0.0.1\n"), 0o600))
	var udp net.PacketConn
	check(t, inNetns(w.host, func() (err error) {
		udp, err = net.ListenPacket("udp4", "127.0.0.1:53")
		return err
	}))
	t.Cleanup(func() { udp.Close() })
	go func() {
		b := make([]byte, 600)
		for {
			k, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			udp.WriteTo(append([]byte("answer to "), b[:k]...), from)
		}
	}()
	serve(t, w.host, "127.0.0.1:53")
	ns := namespace(t)
	if _, err := n.enter(t.Context(), ns, 5); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"nameserver " + n.gateway.String()}, n.resolv()); d != "" {
		t.Fatalf("resolv.conf (-want +got):\n%s", d)
	}
	var c net.Conn
	check(t, inNetns(ns, func() (err error) {
		c, err = net.Dial("udp4", n.gateway.String()+":53")
		return err
	}))
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	_, err := c.Write([]byte("query"))
	check(t, err)
	b := make([]byte, 64)
	k, err := c.Read(b)
	if err != nil || string(b[:k]) != "answer to query" {
		t.Fatalf("UDP: %q, %v", b[:k], err)
	}
	if got, err := connect(ns, n.gateway.String()+":53"); err != nil || got != "127.0.0.1" {
		t.Fatalf("TCP: %q, %v", got, err)
	}
	check(t, n.release())
}

// Fault B46, ports: 127.0.0.1 and ::1, any number, proxy variables of the daemon without effect, nothing listens: at once.
func TestDialInside(t *testing.T) {
	needRoot(t)
	t.Setenv("HTTP_PROXY", "http://192.0.2.99:3128")
	t.Setenv("ALL_PROXY", "socks5://192.0.2.99:1080")
	ns := namespace(t)
	for _, at := range []string{"127.0.0.1:8080", "0.0.0.0:22", "[::1]:49983", "127.0.0.1:1"} {
		serve(t, ns, at)
		a := netip.MustParseAddrPort(at)
		c, err := dialIn(t.Context(), ns, a.Port())
		if err != nil {
			t.Errorf("dial %s: %v", at, err)
			continue
		}
		b, err := io.ReadAll(c)
		if err != nil || len(b) == 0 {
			t.Errorf("read from %s: %q, %v", at, b, err)
		}
		c.Close()
	}
	if _, err := dialIn(t.Context(), ns, 4444); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a port nobody listens on: %v, want ErrNotFound", err)
	}
	if _, err := dialIn(t.Context(), ns, 0); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("port 0: %v, want ErrInvalid", err)
	}
	// A listener that does not accept and whose backlog is full never answers; the context bounds the wait.
	var l *net.TCPListener
	check(t, inNetns(ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "full")
		defer f.Close()
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 7000, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return err
		}
		if err := unix.Listen(fd, 0); err != nil {
			return err
		}
		x, err := net.FileListener(f)
		if err == nil {
			l = x.(*net.TCPListener)
		}
		return err
	}))
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var err error
	for range 20 {
		if _, err = dialIn(ctx, ns, 7000); err != nil {
			break
		}
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a full backlog: %v, want the context's deadline", err)
	}
}

func entries(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
}

// The very first datagram of a sandbox arrives: the device carries packets when enter returns.
func TestNetworkFirstPacket(t *testing.T) {
	w := newWorld(t)
	n := testNetwork(t, w, "first")
	for slot := range 20 {
		ns := namespace(t)
		if _, err := n.enter(t.Context(), ns, slot); err != nil {
			t.Fatal(err)
		}
		if !received(t, w, ns, addrAt(n.rng, slotOffset+slot), time.Minute) {
			t.Errorf("the first datagram of sandbox %d was lost", slot)
		}
	}
}

func BenchmarkNetworkEnter(b *testing.B) {
	w := newWorld(b)
	n := testNetwork(b, w, "bench")
	i := 0
	for b.Loop() {
		b.StopTimer()
		ns, err := newNetns()
		check(b, err)
		b.StartTimer()
		_, err = n.enter(b.Context(), ns, i%1000)
		check(b, err)
		b.StopTimer()
		unix.Close(ns)
		b.StartTimer()
		i++
	}
}
