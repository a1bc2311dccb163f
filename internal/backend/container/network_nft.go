package container

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// Where our chains stand: before the host's own filters (priority 0), since what we refuse must be refused whatever these accept.
const priorityBefore = -10

// rulePlan is what the rules depend on.
type rulePlan struct {
	table   string
	prefix  string // of our devices
	rng     netip.Prefix
	gateway netip.Addr
	noFib   bool // no reverse path check in nftables: rp_filter of the device stands alone
}

func (n *network) plan() rulePlan {
	return rulePlan{table: "dsec_" + n.instance, prefix: n.prefix, rng: n.rng, gateway: n.gateway, noFib: n.noFib}
}

// layRules replaces the table of this instance in one transaction, so that there is no moment without it.
//
//	prerouting  from a sandbox: IPv6 and addresses that are not the sender's own are dropped
//	input       from a sandbox: port 53 of the gateway address alone; nothing else of the host is reachable
//	forward     from a sandbox: never to another one, to link-local (metadata) or to loopback; the rest goes on to the host's own
//	            filters; to a sandbox: answers alone
//	postrouting from the range to the outside: the host's address
//
// A refusal is answered (reset or "administratively prohibited"), so that a tool fails at once instead of waiting.
func (n *network) layRules() error {
	c, err := nftables.New(nftables.WithNetNSFd(n.ns))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	layTable(c, n.plan())
	if err := c.Flush(); err != nil {
		return fmt.Errorf("lay nftables rules: %w", err)
	}
	return n.passForeignForward()
}

func layTable(c *nftables.Conn, p rulePlan) {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: p.table}
	c.AddTable(t) // so that the delete finds it
	c.DelTable(t)
	c.AddTable(t)
	first, last := p.rng.Addr(), addrAt(p.rng, 1<<(32-p.rng.Bits())-1)
	own := &nftables.Set{Table: t, Name: "own", KeyType: nftables.TypeIPAddr, Interval: true}
	c.AddSet(own, []nftables.SetElement{
		{Key: first.AsSlice()},
		{Key: last.Next().AsSlice(), IntervalEnd: true},
	})
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority int32) func(...[]expr.Any) {
		prio := nftables.ChainPriority(priority)
		ch := c.AddChain(&nftables.Chain{Name: name, Table: t, Type: kind, Hooknum: hook, Priority: &prio})
		return func(parts ...[]expr.Any) {
			var e []expr.Any
			for _, x := range parts {
				e = append(e, x...)
			}
			c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: e})
		}
	}
	ours, inOwn := fromDevice(p.prefix), lookup(own)
	rule := chain("sent", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, -290)
	rule(ours, protocol(unix.NFPROTO_IPV6), drop())
	if !p.noFib {
		rule(ours, protocol(unix.NFPROTO_IPV4), reverseMissing(), drop())
	}

	rule = chain("to_host", nftables.ChainTypeFilter, nftables.ChainHookInput, priorityBefore)
	for _, l4 := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		rule(ours, protocol(unix.NFPROTO_IPV4), destination(hostPrefix(p.gateway)), transport(l4), port(53), accept())
	}
	rule(ours, transport(unix.IPPROTO_TCP), reset())
	rule(ours, prohibited())

	rule = chain("through", nftables.ChainTypeFilter, nftables.ChainHookForward, priorityBefore)
	closed := []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("127.0.0.0/8")}
	for _, d := range closed {
		rule(ours, protocol(unix.NFPROTO_IPV4), destination(d), transport(unix.IPPROTO_TCP), reset())
		rule(ours, protocol(unix.NFPROTO_IPV4), destination(d), prohibited())
	}
	rule(ours, protocol(unix.NFPROTO_IPV4), destinationIn(), inOwn, transport(unix.IPPROTO_TCP), reset())
	rule(ours, protocol(unix.NFPROTO_IPV4), destinationIn(), inOwn, prohibited())
	rule(toDevice(p.prefix), established(), accept())
	rule(toDevice(p.prefix), drop())

	rule = chain("leaving", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, 100)
	rule(protocol(unix.NFPROTO_IPV4), source(p.rng), notToDevice(p.prefix), []expr.Any{&expr.Masq{}})
}

// passForeignForward lets our traffic through forward chains of others whose policy is drop (container engines and firewalls set
// it). An "accept" in our own table can't do that: every base chain of a hook is asked, and one drop is final. So a rule for our
// devices is put at the head of each such chain, as the engines themselves do, marked with our instance and removed by the same
// mark. What can't be opened like that is told by the doctor.
func (n *network) passForeignForward() error {
	chains, c, err := n.droppingChains()
	if err != nil {
		return err
	}
	for _, ch := range chains {
		if err := n.dropMarked(c, ch); err != nil {
			return err
		}
		for _, match := range [][]expr.Any{fromDevice(n.prefix), append(toDevice(n.prefix), established()...)} {
			c.InsertRule(&nftables.Rule{
				Table: ch.Table, Chain: ch, Exprs: append(append([]expr.Any(nil), match...), &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept}),
				UserData: n.mark(),
			})
		}
		if err := c.Flush(); err != nil {
			// The chain's owner may have replaced it in this moment, or guard it (a table with an owner since 5.12).
			n.features["forward"] = fmt.Sprintf("chain %s of table %s drops forwarded packets and can't be opened (%v)", ch.Name, ch.Table.Name, err)
			continue
		}
		n.features["forward"] = fmt.Sprintf("chain %s of table %s drops forwarded packets: two accept rules for %s* stand at its head", ch.Name, ch.Table.Name, n.prefix)
	}
	return nil
}

func (n *network) mark() []byte {
	return userdata.AppendString(nil, userdata.TypeComment, "dsec_"+n.instance)
}

// droppingChains are the forward chains of others with policy drop.
func (n *network) droppingChains() ([]*nftables.Chain, *nftables.Conn, error) {
	c, err := nftables.New(nftables.WithNetNSFd(n.ns))
	if err != nil {
		return nil, nil, fmt.Errorf("open nftables: %w", err)
	}
	all, err := c.ListChains()
	if err != nil {
		return nil, nil, fmt.Errorf("list nftables chains: %w", err)
	}
	var out []*nftables.Chain
	for _, ch := range all {
		family := ch.Table.Family
		if ch.Hooknum == nil || *ch.Hooknum != *nftables.ChainHookForward || ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop ||
			(family != nftables.TableFamilyIPv4 && family != nftables.TableFamilyINet) || strings.HasPrefix(ch.Table.Name, "dsec_") {
			continue
		}
		out = append(out, ch)
	}
	return out, c, nil
}

// dropMarked queues the removal of our own rules in a foreign chain.
func (n *network) dropMarked(c *nftables.Conn, ch *nftables.Chain) error {
	rules, err := c.GetRules(ch.Table, ch)
	if err != nil {
		return fmt.Errorf("list nftables rules of %s: %w", ch.Name, err)
	}
	for _, r := range rules {
		if string(r.UserData) == string(n.mark()) {
			if err := c.DelRule(r); err != nil {
				return fmt.Errorf("remove nftables rule of %s: %w", ch.Name, err)
			}
		}
	}
	return nil
}

// removeRules takes away all that layRules made.
func (n *network) removeRules() error {
	chains, c, err := n.droppingChains()
	if err != nil {
		return err
	}
	for _, ch := range chains {
		if err := n.dropMarked(c, ch); err != nil {
			return err
		}
	}
	c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: n.plan().table})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("remove nftables rules: %w", err)
	}
	return nil
}

// tableRange is the range that the table of this instance names, or the zero prefix when there is no such table.
func (n *network) tableRange() (netip.Prefix, error) {
	c, err := nftables.New(nftables.WithNetNSFd(n.ns))
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("open nftables: %w", err)
	}
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: "dsec_" + n.instance}
	set, err := c.GetSetByName(t, "own")
	if errors.Is(err, unix.ENOENT) {
		return netip.Prefix{}, nil
	}
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("read nftables set: %w", err)
	}
	elements, err := c.GetSetElements(set)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("read nftables set: %w", err)
	}
	var first, end netip.Addr
	for _, e := range elements {
		a, ok := netip.AddrFromSlice(e.Key)
		if !ok || !a.Is4() {
			continue
		}
		if e.IntervalEnd && !a.IsUnspecified() {
			end = a
		} else if !e.IntervalEnd {
			first = a
		}
	}
	if !first.IsValid() {
		return netip.Prefix{}, nil
	}
	for bits := 8; bits <= 30; bits++ {
		p := netip.PrefixFrom(first, bits)
		if p.Masked() == p && addrAt(p, 1<<(32-bits)) == end {
			return p, nil
		}
	}
	return netip.Prefix{}, nil
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// The parts of rules. Register 1 carries every comparison.

func fromDevice(prefix string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(prefix)}}
}

func toDevice(prefix string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(prefix)}}
}

func notToDevice(prefix string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte(prefix)}}
}

func protocol(family byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}}}
}

func transport(l4 byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{l4}}}
}

func port(p uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p)},
	}
}

func destinationIn() []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}}
}

func destination(p netip.Prefix) []expr.Any { return append(destinationIn(), within(p)...) }

func source(p netip.Prefix) []expr.Any {
	return append([]expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}}, within(p)...)
}

func within(p netip.Prefix) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: ipNet(p).Mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
	}
}

func lookup(s *nftables.Set) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID}}
}

// reverseMissing matches a packet whose source address is not reached through the device it came by.
func reverseMissing() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, ResultOIF: true, FlagSADDR: true, FlagIIF: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)},
	}
}

// established matches answers. "ct state" is a bit mask: the comparison is with "no bit of it".
func established() []expr.Any {
	bits := binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: bits, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() []expr.Any   { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
func reset() []expr.Any  { return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}} }

func prohibited() []expr.Any {
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}}
}
