package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Bounds of the forwarder: a sandbox must not be able to take the host daemon's descriptors or memory.
const (
	dnsQueries  = 256 // at once, UDP
	dnsStreams  = 64  // at once, TCP
	dnsPatience = 5 * time.Second
	dnsMessage  = 65535
)

// dnsForwarder passes queries of sandboxes, sent to the gateway address, to the host's resolvers as they are at that moment. It
// looks at nothing in a message. It runs in the host daemon: while that restarts, resolvers inside ask again (5 s by default).
type dnsForwarder struct {
	file    string
	log     *slog.Logger
	handle  *netlink.Handle
	addr    *netlink.Addr
	udp     *net.UDPConn
	tcp     *net.TCPListener
	queries chan struct{}
	streams chan struct{}
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	ns      int
}

// newDNSForwarder puts the gateway address on the host's loopback device and listens there.
func newDNSForwarder(ns int, h *netlink.Handle, gateway netip.Addr, file, label string, log *slog.Logger) (*dnsForwarder, error) {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("resolver: find lo: %w", err)
	}
	f := &dnsForwarder{
		file: file, log: log, handle: h, ns: ns,
		addr:    &netlink.Addr{IPNet: hostNet(gateway), Label: "lo:" + label},
		queries: make(chan struct{}, dnsQueries), streams: make(chan struct{}, dnsStreams),
	}
	if err := h.AddrReplace(lo, f.addr); err != nil {
		return nil, fmt.Errorf("resolver: set address %s: %w", gateway, err)
	}
	err = inNetns(ns, func() (err error) {
		at := netip.AddrPortFrom(gateway, 53)
		if f.udp, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at)); err != nil {
			return err
		}
		f.tcp, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		if f.udp != nil {
			f.udp.Close()
		}
		return nil, fmt.Errorf("resolver: listen on %s: %w", gateway, err)
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.wg.Add(2)
	go f.serveUDP()
	go f.serveTCP()
	return f, nil
}

func (f *dnsForwarder) close() {
	f.cancel()
	f.udp.Close()
	f.tcp.Close()
	f.wg.Wait()
}

func (f *dnsForwarder) removeAddress() {
	if lo, err := f.handle.LinkByName("lo"); err == nil {
		f.handle.AddrDel(lo, f.addr)
	}
}

func (f *dnsForwarder) serveUDP() {
	defer f.wg.Done()
	buf := make([]byte, dnsMessage)
	for {
		n, from, err := f.udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		select {
		case f.queries <- struct{}{}:
		default:
			continue // full: the resolver inside asks again
		}
		query := append([]byte(nil), buf[:n]...)
		f.wg.Add(1)
		go func() {
			defer f.wg.Done()
			defer func() { <-f.queries }()
			if answer := f.ask(query); answer != nil {
				f.udp.WriteToUDPAddrPort(answer, from)
			}
		}()
	}
}

// ask sends a query to the host's resolvers in order and returns the first answer.
func (f *dnsForwarder) ask(query []byte) []byte {
	servers := readResolvers(f.file).servers
	for _, s := range servers[:min(len(servers), 3)] {
		conn, err := f.dial("udp", s)
		if err != nil {
			continue
		}
		answer, err := exchange(conn, query)
		conn.Close()
		if err == nil {
			return answer
		}
		if f.ctx.Err() != nil {
			return nil
		}
	}
	return nil
}

func exchange(conn net.Conn, query []byte) ([]byte, error) {
	conn.SetDeadline(time.Now().Add(dnsPatience))
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	buf := make([]byte, dnsMessage)
	n, err := conn.Read(buf)
	return buf[:n], err
}

func (f *dnsForwarder) dial(network string, to netip.Addr) (conn net.Conn, err error) {
	d := net.Dialer{Timeout: dnsPatience}
	// A UDP connect and a TCP connect to a resolver both make their socket on this thread, before any wait.
	e := inNetns(f.ns, func() error {
		conn, err = d.DialContext(f.ctx, network, netip.AddrPortFrom(to, 53).String())
		return nil
	})
	return conn, errors.Join(e, err)
}

func (f *dnsForwarder) serveTCP() {
	defer f.wg.Done()
	for {
		in, err := f.tcp.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			if errors.Is(err, unix.EMFILE) {
				time.Sleep(100 * time.Millisecond)
			}
			continue
		}
		select {
		case f.streams <- struct{}{}:
		default:
			in.Close()
			continue
		}
		f.wg.Add(1)
		go func() {
			defer f.wg.Done()
			defer func() { <-f.streams }()
			f.relay(in)
		}()
	}
}

// relay passes one TCP conversation on, bounded in time as a whole.
func (f *dnsForwarder) relay(in *net.TCPConn) {
	defer in.Close()
	stop := context.AfterFunc(f.ctx, func() { in.Close() })
	defer stop()
	in.SetDeadline(time.Now().Add(4 * dnsPatience))
	servers := readResolvers(f.file).servers
	for _, s := range servers[:min(len(servers), 3)] {
		out, err := f.dial("tcp", s)
		if err != nil {
			continue
		}
		out.SetDeadline(time.Now().Add(4 * dnsPatience))
		done := make(chan struct{})
		go func() {
			io.Copy(out, io.LimitReader(in, 1<<20))
			out.(*net.TCPConn).CloseWrite()
			close(done)
		}()
		io.Copy(in, io.LimitReader(out, 16<<20))
		in.CloseRead()
		<-done
		out.Close()
		return
	}
}
