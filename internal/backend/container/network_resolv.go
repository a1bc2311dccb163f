package container

import (
	"net/netip"
	"os"
	"strings"
)

// systemdResolv is where systemd-resolved writes the servers that its stub on 127.0.0.53 asks. The stub itself answers only what
// comes over the host's loopback device, so a sandbox is given the servers behind it.
var systemdResolv = "/run/systemd/resolve/resolv.conf"

type resolvers struct {
	servers []netip.Addr
	other   []string // search and options lines
}

// readResolvers reads the host's resolver file; an absent or empty one means a resolver on the host's loopback (resolv.conf(5)).
func readResolvers(file string) resolvers {
	r := parseResolvers(file)
	if len(r.servers) == 1 && r.servers[0] == netip.AddrFrom4([4]byte{127, 0, 0, 53}) {
		if real := parseResolvers(systemdResolv); len(real.servers) > 0 {
			real.other = r.other
			r = real
		}
	}
	if len(r.servers) == 0 {
		r.servers = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	return r
}

func parseResolvers(file string) resolvers {
	var r resolvers
	b, err := os.ReadFile(file)
	if err != nil || len(b) > 64<<10 {
		return r
	}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "nameserver":
			if a, err := netip.ParseAddr(fields[1]); err == nil && len(r.servers) < 8 {
				r.servers = append(r.servers, a)
			}
		case "search", "domain", "options":
			// "trust-ad" speaks of the path to the host's own stub, which is not the sandbox's.
			kept := fields[:1:1]
			for _, f := range fields[1:] {
				if f != "trust-ad" {
					kept = append(kept, f)
				}
			}
			if len(kept) > 1 && len(r.other) < 8 {
				r.other = append(r.other, strings.Join(kept, " "))
			}
		}
	}
	return r
}

// needsForwarder reports whether a sandbox can't ask the servers itself: they sit on the host (loopback or an own address, whose
// services sandboxes do not reach), on the link (metadata addresses, which clouds use for DNS too) or speak IPv6 alone.
func needsForwarder(servers []netip.Addr, isLocal func(netip.Addr) bool) bool {
	for _, s := range servers {
		s = s.Unmap()
		if !s.Is4() || s.IsLoopback() || s.IsLinkLocalUnicast() || s.IsUnspecified() || isLocal(s) {
			return true
		}
	}
	return false
}
