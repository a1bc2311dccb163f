// Package vmm starts virtual machines: one interface over the monitors, with a driver for QEMU and one for Firecracker, and what both need: a
// probe that tells whether /dev/kvm really runs a guest, kernels with the initramfs that goes with them, and the saved state that clones start
// from. It hides command lines, control sockets and their versions. Monitors are children of the warden (internal/vmm/warden), so that they
// outlive the host daemon; a VM here is a handle on one that can be found again by its ID and folder.
//
// Invariants: a monitor gets every file by descriptor, never by a path that it would have to reach, and runs as a user of its own; every call
// on a control socket is bounded; what a driver can't do is data in Features.
package vmm

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Accelerator is what runs a guest's instructions.
type Accelerator string

const (
	KVM Accelerator = "kvm"
	TCG Accelerator = "tcg" // translated: slow, and the monitor alone is the wall
)

// Features of a driver on this host. A feature that is missing has its reason in Why.
type Features struct {
	Driver      string      `json:"driver"`
	Version     string      `json:"version"`
	Accelerator Accelerator `json:"accelerator"`
	Degraded    bool        `json:"degraded"` // not accelerated by hardware
	Template    bool        `json:"template"` // clones share a template's memory
	Pause       bool        `json:"pause"`
	Save        bool        `json:"save"`
	// Behind: what Save writes is the machine's memory with the state behind it, so it can be taken apart; and it ends all conversations with
	// the guest.
	Behind  bool `json:"behind"`
	Display bool `json:"display"`
	// TapByName: the monitor opens a tap itself, so it has to be there without anybody holding it.
	TapByName bool `json:"tap_by_name"`
	// NetRates: the driver bounds the network device by itself.
	NetRates bool `json:"net_rates"`
	// ELF: no other image of a kernel is booted.
	ELF bool              `json:"elf"`
	Why map[string]string `json:"why,omitempty"`
}

// Disk of a machine. Its serial is how the guest finds it.
type Disk struct {
	Serial   string
	File     *os.File // opened for reading, or for reading and writing
	ReadOnly bool
	Mapped   bool // read-only and part of the guest's memory, where the driver can: all machines share its pages
}

func (d Disk) memory() bool { return d.Mapped && d.ReadOnly }

// Memory is where a machine's memory comes from.
type Memory struct {
	File    *os.File // of Spec.Memory octets; nil: anonymous
	Private bool     // the machine's writes stay its own: a clone of what the file holds
	Faults  bool     // of a private one: each page is fetched when it is first used (userfaultfd)
}

// Rates bound what a machine moves in a second; 0: no bound.
type Rates struct {
	Disk    int64 // octets that are read and written
	DiskOps int64 // requests to disks
	Network int64 // octets in each direction
}

// Spec of a machine.
type Spec struct {
	ID      string // names the monitor's process and cgroup
	Dir     string // folder of its sockets, 0700, of this machine alone
	UID     uint32
	Machine string // microvm or q35
	Kernel  *Kernel
	Append  string // more of the kernel's command line
	Image   *Image // instead of Kernel, Append, Disks and a network: a disk of the user's, without a guest of ours
	CPUs    int
	Memory  int64 // octets, a multiple of 2 MiB
	Backing Memory
	Balloon bool // a device by which pages that the guest frees go back to the host
	Rates   Rates
	Disks   []Disk
	// Tap is a tap device's descriptor, TapName its name in Netns: a driver takes what it can use. Nil and empty: no network.
	Tap      *os.File
	TapName  string
	MAC      string
	Netns    *os.File // the monitor's network namespace; nil: the host's, in which it opens nothing
	Display  bool
	Incoming bool // wait for Load
	// From is what Load will be given. A driver whose monitor opens files by itself gives it to it at the start.
	From *os.File
	// Store is a folder for what Save writes before it is where it shall be, on the file system of that; empty: Dir.
	Store    string
	Group    Group
	Deadline time.Time
}

// Group bounds what the monitor itself may use of the host.
type Group struct {
	Memory int64 // octets
	CPU    int64 // milli-CPU, 0 for no cap
	Weight int64
	Pids   int64
}

// VM is a running machine.
type VM interface {
	ID() string
	Pid() int
	// Agent connects to the guest's port; one connection at a time.
	Agent(ctx context.Context) (net.Conn, error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	// Status is running, paused, saved (after Save), loading, or ended with a reason.
	Status(ctx context.Context) (string, error)
	// Save writes the machine's state while it is paused: with shared memory without its memory, else with it.
	Save(ctx context.Context, to *os.File, shared bool) error
	// Load fills a machine that waits for it; it is paused then.
	Load(ctx context.Context, from *os.File, shared bool) error
	// Over is closed when the guest has ended by itself, or the monitor is not reached any more: Status tells which.
	Over() <-chan struct{}
	// Console is the end of what the guest wrote on its serial port, also once the monitor has ended, as far as it was asked for before.
	Console(ctx context.Context) string
	// Display is the machine's screen, keyboard and pointer, where it has them.
	Display() (Display, bool)
	// Release lets go of the machine, which goes on: another process may then take it.
	Release()
	// Kill ends the monitor and returns when nothing of it is left. It is idempotent.
	Kill(ctx context.Context) error
}

// Driver makes machines.
type Driver interface {
	Features() Features
	// NewMemory makes the memory of a template: a file that this driver's machines can all map. Seal makes it unchangeable.
	NewMemory(dir string, size int64) (*os.File, error)
	Create(ctx context.Context, s *Spec) (VM, error)
	// Find takes a machine back that was made by an earlier process.
	Find(ctx context.Context, id, dir string) (VM, error)
}

// Display lets a program use a machine as a person does.
type Display interface {
	// Screenshot writes a PNG.
	Screenshot(ctx context.Context, w io.Writer) error
	// Keys presses the keys together and lets them go; names are QEMU's ("ctrl", "a", "ret").
	Keys(ctx context.Context, keys ...string) error
	// Type types text of printable ASCII, tabs and newlines.
	Type(ctx context.Context, text string) error
	// Pointer moves to a place in parts of 32767 of the screen, and sets the buttons that are held.
	Pointer(ctx context.Context, x, y int, buttons ...string) error
	// Scroll turns the wheel by steps, down when positive.
	Scroll(ctx context.Context, steps int) error
	// VNC connects to the machine's screen by the protocol of RFB.
	VNC(ctx context.Context) (net.Conn, error)
}

// check refuses what no driver takes.
func (s *Spec) check() error {
	switch {
	case (s.Kernel == nil) == (s.Image == nil):
		return fmt.Errorf("machine %s: want a kernel or an image: %w", s.ID, sandbox.ErrInvalid)
	case s.Image != nil && (s.Machine != "q35" || len(s.Disks) > 0 || s.Tap != nil):
		return fmt.Errorf("machine %s: an image boots on q35, without other disks and network: %w", s.ID, sandbox.ErrInvalid)
	case s.Memory < 64<<20 || s.Memory%(2<<20) != 0:
		return fmt.Errorf("machine %s: memory of %d octets: at least 64 MiB, in steps of 2 MiB: %w", s.ID, s.Memory, sandbox.ErrInvalid)
	case s.CPUs < 1 || s.CPUs > 32:
		return fmt.Errorf("machine %s: %d processors: 1 to 32: %w", s.ID, s.CPUs, sandbox.ErrInvalid)
	case s.UID == 0:
		return fmt.Errorf("machine %s: its monitor would run as root: %w", s.ID, sandbox.ErrInvalid)
	}
	return nil
}
