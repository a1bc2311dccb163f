package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/guest/binary"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

func wardenMain(args []string) int { return warden.Main(args) }

func kvmProbeMain() int { return vmm.ProbeMain() }

// vmSettings are what the config file may hold for microvm and vm.
type vmSettings struct {
	Off         bool   `toml:"off"`
	Kernel      string `toml:"kernel"` // folder
	QEMU        string `toml:"qemu"`   // program
	NoTemplates bool   `toml:"no_templates"`
	Ready       int    `toml:"ready"`        // clones with a sandbox in them that wait for the next create of their kind
	Firecracker string `toml:"firecracker"`  // program of microvm instead of QEMU
	Jailer      string `toml:"jailer"`       // of the same version
	Faults      bool   `toml:"faults"`       // Firecracker's clones get their memory page by page
	Mapped      bool   `toml:"mapped"`       // Firecracker's images are memory that machines share
	NoReclaim   bool   `toml:"no_reclaim"`   // guests keep pages of files that nobody uses
	NetworkRate string `toml:"network_rate"` // size a second, of each machine in each direction
	DiskRate    string `toml:"disk_rate"`    // size a second, of each machine
	DiskOps     int64  `toml:"disk_ops"`     // requests a second, of each machine
}

func (s *vmSettings) rates() (r vmm.Rates, err error) {
	r.DiskOps = s.DiskOps
	if s.DiskOps < 0 {
		err = fmt.Errorf("vm.disk_ops: %d: want requests a second, or 0 for no bound", s.DiskOps)
	}
	return r, errors.Join(err, setSize(&r.Network, "vm.network_rate", s.NetworkRate), setSize(&r.Disk, "vm.disk_rate", s.DiskRate))
}

// probeKVM asks whether guests run by hardware here. The answer is kept until the machine is started anew.
func (p *places) probeKVM(ctx context.Context) vmm.Verdict {
	self, err := os.Executable()
	if err != nil {
		return vmm.Verdict{KVM: "broken", Reason: err.Error()}
	}
	return vmm.Probe(ctx, []string{self, vmm.ProbeArg}, filepath.Join(p.State, "vm", "kvm.json"))
}

// kernelFolder is where the guests' kernel lies, or empty.
func (p *places) kernelFolder() string {
	if p.settings.VM.Kernel != "" {
		return p.settings.VM.Kernel
	}
	return vm.FindKernel(p.State)
}

// openVMs makes the backends of virtual machines that this host can have. None is no failure: doctor says why.
func (p *places) openVMs(ctx context.Context, id sandbox.HostID, cc container.Config, layers vm.Layers, network vm.Network, logger *slog.Logger) (list []*vm.Backend, err error) {
	kernel := p.kernelFolder()
	if p.settings.VM.Off || kernel == "" {
		return nil, nil
	}
	guest, err := binary.OpenVM()
	if err != nil {
		logger.Warn("no virtual machines", "err", err)
		return nil, nil
	}
	defer guest.Close()
	rates, err := p.settings.VM.rates()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.Conf, err)
	}
	verdict := p.probeKVM(ctx)
	for i, name := range []string{"microvm", "vm"} {
		b, err := vm.New(ctx, vm.Config{
			Name: name, Instance: instance(id) + name[:1], Host: string(id), StateDir: filepath.Join(p.State, name),
			RunDir: filepath.Join(p.RunDir, name+"-"+instance(id)), Kernel: kernel, Guest: guest, Seccomp: cc.Seccomp, Events: cc.Events,
			UIDBase: uint32(vm.DefaultUIDBase + i*vm.DefaultSlots), NoTemplates: p.settings.VM.NoTemplates, Ready: min(max(p.settings.VM.Ready, 0), 64), QEMU: p.settings.VM.QEMU,
			Firecracker: p.settings.VM.Firecracker, Jailer: p.settings.VM.Jailer, Faults: p.settings.VM.Faults, Mapped: p.settings.VM.Mapped,
			Rates: rates, NoReclaim: p.settings.VM.NoReclaim,
		}, vm.Deps{Layers: layers, Network: network, Verdict: verdict, Log: logger})
		if errors.Is(err, sandbox.ErrUnsupported) {
			logger.Warn("no virtual machines", "err", err)
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	return list, nil
}

// vmChecks are doctor's lines about virtual machines.
func (p *places) vmChecks(ctx context.Context) []container.Check {
	verdict := p.probeKVM(ctx)
	kvm := container.Check{Feature: "KVM", OK: verdict.Usable(), Detail: fmt.Sprintf("runs guests (%.1f ns an instruction)", verdict.NsPerInsn)}
	if !kvm.OK {
		kvm.Detail = verdict.KVM + ": " + verdict.Reason
		kvm.Fix = "microvm and vm run translated, with allow_degraded alone"
	}
	q := container.Check{Feature: "QEMU"}
	if d, err := vmm.NewQEMU(ctx, vmm.QEMUConfig{Program: p.settings.VM.QEMU, Verdict: verdict}); err != nil {
		q.Detail, q.Fix = err.Error(), "install qemu-system-x86"
	} else {
		f := d.Features()
		q.OK, q.Detail = true, fmt.Sprintf("%s, accelerator %s, degraded: %v", f.Version, f.Accelerator, f.Degraded)
	}
	k := container.Check{Feature: "guest kernel", Detail: p.kernelFolder(), OK: p.kernelFolder() != ""}
	if !k.OK {
		k.Detail, k.Fix = "none found", "`make guest-kernel`, or [vm] kernel in the config: docs/ops/vms.md"
	}
	checks := []container.Check{kvm, q, k}
	if p.settings.VM.Firecracker != "" {
		checks = append(checks, p.firecrackerCheck(ctx, verdict))
	}
	return checks
}

// firecrackerCheck is doctor's line about Firecracker, where it is configured.
func (p *places) firecrackerCheck(ctx context.Context, v vmm.Verdict) container.Check {
	c := container.Check{Feature: "Firecracker"}
	v = vmm.KeptBoot(vm.BootsFile(filepath.Join(p.State, "microvm")), v, "firecracker")
	d, err := vmm.NewFirecracker(ctx, vmm.FirecrackerConfig{Program: p.settings.VM.Firecracker, Jailer: p.settings.VM.Jailer, Verdict: v})
	if err != nil {
		c.Detail, c.Fix = err.Error(), "this host has no microvm; without [vm] firecracker it is QEMU's"
		return c
	}
	f := d.Features()
	c.OK, c.Detail = true, f.Version
	for _, what := range []string{"pause", "jail"} {
		if why := f.Why[what]; why != "" {
			c.Detail += "; no " + what + ": " + why
		}
	}
	return c
}
