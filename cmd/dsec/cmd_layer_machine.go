package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// machineFlags make a layer the image of a whole machine, for the backend vm.
type machineFlags struct {
	Machine  string `help:"From a disk image of a whole machine (raw or qcow2), for the backend vm: docs/ops/guests.md." xor:"from" placeholder:"FILE" type:"existingfile"`
	CDROM    string `name:"cdrom" help:"ISO image in the drive of such a machine; without --machine its disk is blank." placeholder:"FILE" type:"existingfile"`
	Firmware string `help:"Of such a machine: bios or uefi." enum:"bios,uefi" default:"bios"`
	Bus      string `help:"Of its disk: ahci, virtio or nvme." enum:"ahci,virtio,nvme" default:"ahci"`
	Clock    string `help:"Of its hardware: utc, or local as Windows takes it." enum:"utc,local" default:"utc"`
}

// openMachine streams the layer. Its files have no times, so that the same image is the same layer.
func (x machineFlags) openMachine(ctx context.Context) (io.ReadCloser, string, error) {
	m := &vm.OwnImage{Firmware: x.Firmware, Bus: x.Bus, Clock: x.Clock}
	files := map[string]string{}
	if x.Machine != "" {
		m.Disk = "disk"
		files[m.Disk] = x.Machine
		if err := checkImage(x.Machine); err != nil {
			return nil, "", err
		}
	}
	if x.CDROM != "" {
		m.CDROM = "cd.iso"
		files[m.CDROM] = x.CDROM
		if _, err := fileSize(x.CDROM); err != nil {
			return nil, "", fmt.Errorf("--cdrom %w", err)
		}
	}
	text, err := toml.Marshal(m)
	if err != nil {
		return nil, "", err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(writeMachine(ctx, w, text, m, files)) }()
	return r, "image of a machine", nil
}

// fileSize is the size of an ordinary file that holds something: to open a pipe would wait for who writes to it.
func fileSize(path string) (int64, error) {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return 0, err
	case !st.Mode().IsRegular():
		return 0, fmt.Errorf("%s: is no file", path)
	case st.Size() == 0:
		return 0, fmt.Errorf("%s: holds nothing", path)
	}
	return st.Size(), nil
}

func checkImage(path string) error {
	if _, err := fileSize(path); err != nil {
		return fmt.Errorf("--machine %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, _, err := vmm.ImageSize(f); err != nil {
		return fmt.Errorf("--machine %s: %w", path, err)
	}
	return nil
}

func writeMachine(ctx context.Context, w io.Writer, text []byte, m *vm.OwnImage, files map[string]string) error {
	t := tar.NewWriter(w)
	entry := func(name string, size int64) error {
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, ModTime: time.Unix(0, 0), Format: tar.FormatPAX})
	}
	if err := entry(vm.OwnFile, int64(len(text))); err != nil {
		return err
	}
	if _, err := t.Write(text); err != nil {
		return err
	}
	for _, name := range []string{m.Disk, m.CDROM} {
		if name == "" {
			continue
		}
		if err := writeImage(ctx, t, files[name], func(size int64) error { return entry(name, size) }); err != nil {
			return err
		}
	}
	return t.Close()
}

func writeImage(ctx context.Context, t *tar.Writer, path string, entry func(size int64) error) error {
	size, err := fileSize(path)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := entry(size); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { f.Close() })
	defer stop()
	_, err = io.CopyN(t, f, size)
	return errors.Join(err, ctx.Err())
}
