package container

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// networkProbe is what the kernel can do for network "open", tried for real in a namespace of its own.
type networkProbe struct {
	reason   string // why "open" does not work here; empty when it does
	fix      string
	noFib    bool
	features map[string]string
}

func probeNetwork() networkProbe {
	p := networkProbe{features: map[string]string{}}
	ns, err := newNetns()
	if err != nil {
		p.reason, p.fix = err.Error(), "run the host as root of the initial user namespace, on a kernel with CONFIG_NET_NS"
		return p
	}
	defer unix.Close(ns)
	if err := probeVeth(ns); err != nil {
		p.reason, p.fix = fmt.Sprintf("the kernel makes no veth (%v)", err), "load the module veth"
		return p
	}
	plan := rulePlan{table: "dsec_probe", prefix: "dsecprob", rng: netip.MustParsePrefix("10.0.0.0/16"), gateway: netip.AddrFrom4([4]byte{10, 0, 0, 1})}
	err = probeRules(ns, plan)
	if err != nil {
		plan.noFib = true
		if probeRules(ns, plan) == nil {
			p.noFib, err = true, nil
			p.features["spoofing"] = "no fib expression in nftables: forged source addresses are stopped by rp_filter alone, which net.ipv4.conf.all.rp_filter=2 weakens"
		}
	}
	if err != nil {
		p.reason = fmt.Sprintf("the kernel takes no NAT rules of nf_tables (%v)", err)
		p.fix = "load the modules nf_tables, nft_masq, nft_reject_inet, nft_ct and nf_nat, or use network none"
	}
	return p
}

func probeVeth(ns int) error {
	h, err := handleIn(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "dsecprobe0"}, PeerName: "dsecprobe1"})
}

func probeRules(ns int, plan rulePlan) error {
	c, err := nftables.New(nftables.WithNetNSFd(ns))
	if err != nil {
		return err
	}
	layTable(c, plan)
	err = c.Flush()
	for e := err; e != nil; e = errors.Unwrap(e) {
		err = e // the library's words around the errno say nothing more
	}
	return err
}
