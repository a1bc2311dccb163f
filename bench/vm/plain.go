package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// plainInit is process 1 of a plain machine: it mounts the environment's image and becomes a shell of it that reads the serial port.
const plainInit = `#!/bin/busybox sh
b=/bin/busybox
for m in /modules/*; do $b insmod $m; done
$b mount -t devtmpfs dev /dev
$b stty -F /dev/ttyS0 raw -echo
$b mount -t erofs -o ro,device=/dev/vdb /dev/vda /image
$b mount -t tmpfs tmp /image/tmp
$b echo plain-up >/dev/ttyS0
exec $b chroot /image /bin/sh </dev/ttyS0 >/dev/ttyS0 2>&1
`

// plain is what plain QEMU starts: Debian's kernel, an initramfs with its modules, the image that sandboxes have.
type plain struct {
	kernel, initrd string
	disks          []string
	accel          string
}

// plainAll measures machines of plain QEMU (q35): no sandbox, no template, no jail, no disk that could be written.
func plainAll(ctx context.Context, prefix, kernel string, n counts) (err error) {
	dir, err := os.MkdirTemp("", "dsec-bench-plain-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	p, err := newPlain(ctx, dir, kernel)
	if err != nil {
		return err
	}
	boots := &measure.Sample{}
	var machines []*plainMachine
	defer func() {
		for _, m := range machines {
			m.end()
		}
	}()
	for range n.cold {
		m, took, err := p.start(ctx)
		if err != nil {
			return err
		}
		machines = append(machines, m)
		boots.Add(took)
	}
	measure.Print(prefix+".cold", boots.Percentile(50).Seconds(), "s")
	var pids []int
	for _, m := range machines {
		pids = append(pids, m.cmd.Process.Pid)
	}
	rest(prefix, "mem", pids)
	took := &measure.Sample{}
	for range n.execs {
		began := time.Now()
		if err := machines[0].says("again"); err != nil {
			return err
		}
		took.Add(time.Since(began))
	}
	measure.Print(prefix+".exec_p50", took.Ms(50), "ms")
	measure.Print(prefix+".exec_p99", took.Ms(99), "ms")
	return nil
}

func newPlain(ctx context.Context, dir, kernel string) (*plain, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &plain{initrd: filepath.Join(dir, "initrd"), accel: "tcg"}
	if vmm.Probe(ctx, []string{self, vmm.ProbeArg}, "").Usable() {
		p.accel = "kvm"
	}
	k, err := vmm.OpenKernel(kernel, strings.NewReader(plainInit))
	if err != nil {
		return nil, err
	}
	defer k.Close()
	p.kernel = k.Image.Name()
	modules, err := io.ReadAll(io.NewSectionReader(k.Initrd, 0, 1<<30))
	if err != nil {
		return nil, err
	}
	// An initramfs may be several archives, one after another.
	cmd := exec.CommandContext(ctx, "sh", "-ec", "mkdir -p tree/bin tree/image; cp $(command -v busybox) tree/bin/busybox; cd tree; find . | busybox cpio -o -H newc")
	cmd.Dir = dir
	tools, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("make an initramfs: %w", err)
	}
	if err := os.WriteFile(p.initrd, append(modules, tools...), 0o600); err != nil {
		return nil, err
	}
	p.disks, err = image(ctx, dir)
	return p, err
}

// image copies the files of the image that sandboxes of a benchmark have: metadata first, then contents.
func image(ctx context.Context, dir string) (files []string, err error) {
	s, end, err := server(ctx, "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	l, err := s.Client.GetLayer(ctx, s.Layer)
	if err != nil {
		return nil, err
	}
	found, err := filepath.Glob(filepath.Join(s.Dir, "state", "*", "blobs", layer.ID(l.Layer.Forms[0].Digest).Hex()))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("the image of %s: found %q, %v", s.Layer, found, err)
	}
	// The store holds one layer: what is largest beside its metadata are its contents.
	var contents string
	var size int64
	list, err := os.ReadDir(filepath.Dir(found[0]))
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if st, err := e.Info(); err == nil && e.Name() != filepath.Base(found[0]) && st.Size() > size {
			contents, size = filepath.Join(filepath.Dir(found[0]), e.Name()), st.Size()
		}
	}
	for i, f := range []string{found[0], contents} {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		files = append(files, filepath.Join(dir, "image"+strconv.Itoa(i)))
		if err := os.WriteFile(files[i], b, 0o600); err != nil {
			return nil, err
		}
	}
	return files, nil
}

type plainMachine struct {
	cmd  *exec.Cmd
	to   io.WriteCloser
	from *bufio.Scanner
}

// start returns a machine whose shell has answered, and how long that took.
func (p *plain) start(ctx context.Context) (*plainMachine, time.Duration, error) {
	began := time.Now()
	line := "console=ttyS0 quiet panic=-1"
	if p.accel == "tcg" {
		// Without a word on its clock the kernel measures that against a timer that is late under emulation, and now and then never boots.
		line += " no_timer_check tsc=reliable mitigations=off" + khz()
	}
	args := []string{"-M", "q35", "-accel", p.accel, "-cpu", "max", "-m", strconv.Itoa(memory >> 20), "-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", p.kernel, "-initrd", p.initrd, "-append", line}
	for _, d := range p.disks {
		args = append(args, "-drive", "if=virtio,format=raw,readonly=on,file="+d)
	}
	m := &plainMachine{cmd: exec.CommandContext(ctx, "qemu-system-x86_64", args...)}
	var err error
	if m.to, err = m.cmd.StdinPipe(); err != nil {
		return nil, 0, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, 0, err
	}
	m.from = bufio.NewScanner(out)
	if err := m.cmd.Start(); err != nil {
		return nil, 0, fmt.Errorf("plain QEMU: %w", err)
	}
	stop := time.AfterFunc(2*time.Minute, func() { m.cmd.Process.Kill() })
	defer stop.Stop()
	// What is written before its serial port is read is lost.
	if err = m.hears("plain-up"); err == nil {
		err = m.says("up")
	}
	if err != nil {
		m.end()
		return nil, 0, err
	}
	return m, time.Since(began), nil
}

// says has the machine's shell echo a word.
func (m *plainMachine) says(word string) error {
	if _, err := fmt.Fprintf(m.to, "echo said-%s\n", word); err != nil {
		return err
	}
	return m.hears("said-" + word)
}

// hears waits for a line.
func (m *plainMachine) hears(line string) error {
	for m.from.Scan() {
		if strings.TrimSpace(m.from.Text()) == line {
			return nil
		}
	}
	return fmt.Errorf("plain QEMU ended before its guest said %q: %w", line, errors.Join(m.from.Err(), io.ErrUnexpectedEOF))
}

func (m *plainMachine) end() {
	m.cmd.Process.Kill()
	m.cmd.Wait()
}

// khz is the argument that tells a kernel the rate of this machine's clock.
func khz() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		var mhz float64
		if k, v, _ := strings.Cut(line, ":"); strings.TrimSpace(k) == "cpu MHz" {
			fmt.Sscan(v, &mhz)
			return " tsc_early_khz=" + strconv.Itoa(int(mhz*1000))
		}
	}
	return ""
}
