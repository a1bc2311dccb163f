package vm

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// Bounds of a machine's disks are the driver's. Its network is bounded by the driver where that can, else by a token bucket at each end of its
// namespace: what leaves for the machine, and what leaves for the world.

const (
	minRate = 64 << 10 // octets a second, with which a machine still comes up
	minOps  = 10
	// queueing is how long a packet may wait for its turn, in parts of a second; one that would wait longer is dropped, so that senders slow down.
	queueing = 5
	minBurst = 32 << 10 // octets: some of the largest packets
)

func checkRates(r vmm.Rates) error {
	for _, v := range []struct {
		name      string
		is, least int64
		unit      string
	}{{"network_rate", r.Network, minRate, "octets"}, {"disk_rate", r.Disk, minRate, "octets"}, {"disk_ops", r.DiskOps, minOps, "requests"}} {
		if v.is != 0 && v.is < v.least || v.is > 1<<40 {
			return fmt.Errorf("%s %d: want 0 for no bound, or %d to %d %s a second: %w", v.name, v.is, v.least, int64(1)<<40, v.unit, sandbox.ErrInvalid)
		}
	}
	return nil
}

// boundDevice bounds what leaves by a device of the thread's namespace, in octets a second.
func boundDevice(name string, rate int64) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("network_rate: device %s: %w", name, err)
	}
	burst := uint32(min(max(rate/100, minBurst), 64<<20))
	err = h.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       uint64(rate), Buffer: netlink.Xmittime(uint64(rate), burst), Limit: uint32(min(rate/queueing+int64(burst), 256<<20)),
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("network_rate: this kernel has no token bucket (sch_tbf); leave network_rate out: %w: %w", err, sandbox.ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("network_rate: device %s: %w", name, err)
	}
	return nil
}
