package vmm

import (
	"encoding/json"
	"fmt"
	"os"
)

// Image is a disk of the user's that a machine boots, instead of a kernel and a guest of ours. Nothing in it needs drivers that only virtual
// machines have, but where Bus says so.
type Image struct {
	Below      []*os.File // read-only: the disk, raw or qcow2, then qcow2 files with what was changed over it; none: a blank disk
	Raw        bool       // the first is raw
	Size       int64      // of the disk, in octets
	Top        *os.File   // WriteOverlay's: takes what the machine writes
	Limit      int64      // of Top; beyond it the machine's writes fail
	CDROM      *os.File   // nil: none
	Code, Vars *os.File   // UEFI's program, and the variables of this machine; nil: BIOS
	Bus        string     // ahci, virtio or nvme
	LocalClock bool       // its clock shows the host's local time, as Windows takes it to
}

// Close closes the files.
func (im *Image) Close() {
	for _, f := range append([]*os.File{im.Top, im.CDROM, im.Code, im.Vars}, im.Below...) {
		if f != nil {
			f.Close()
		}
	}
}

type node map[string]any

// file is the node of a descriptor's file. Nothing is opened by name: an image's own words about other files are not believed.
func (b *builder) file(f *os.File, readOnly bool) node {
	b.sets++
	b.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", b.fd(f), b.sets))
	return node{"driver": "file", "filename": fmt.Sprintf("/dev/fdset/%d", b.sets), "locking": "off", "read-only": readOnly}
}

func (b *builder) blockdev(name string, n node) {
	n["node-name"] = name
	text, err := json.Marshal(n)
	if err != nil {
		panic(err) // of texts and numbers
	}
	b.add("-blockdev", string(text))
}

// image gives the machine its disk, CD and firmware, and returns what the machine type is to be told.
func (b *builder) image(im *Image) (machine string) {
	var below any // null: no file below, whatever the image says
	for i, f := range im.Below {
		n := node{"driver": "qcow2", "read-only": true, "file": b.file(f, true), "backing": below}
		if i == 0 && im.Raw {
			n = node{"driver": "raw", "read-only": true, "file": b.file(f, true)}
		}
		name := fmt.Sprintf("below%d", i)
		b.blockdev(name, n)
		below = name
	}
	b.blockdev("top", node{"driver": "qcow2", "backing": below, "discard": "unmap",
		"file": node{"driver": "raw", "size": im.Limit, "discard": "unmap", "file": b.file(im.Top, false)}})
	disk := map[string]string{"ahci": "ide-hd,bus=ide.0,werror=report", "virtio": "virtio-blk-pci,werror=report", "nvme": "nvme,serial=dsec"}[im.Bus]
	b.drive(disk + ",drive=top,bootindex=1")
	if im.CDROM != nil {
		b.blockdev("cd", node{"driver": "raw", "read-only": true, "file": b.file(im.CDROM, true)})
		b.drive("ide-cd,bus=ide.1,drive=cd,bootindex=2")
	}
	if im.Code != nil {
		b.blockdev("code", node{"driver": "raw", "read-only": true, "file": b.file(im.Code, true)})
		b.blockdev("vars", node{"driver": "raw", "file": b.file(im.Vars, false)})
		machine = ",pflash0=code,pflash1=vars"
	}
	clock := "utc"
	if im.LocalClock {
		clock = "localtime"
	}
	b.add("-rtc", "base="+clock, "-device", "qemu-xhci", "-device", "usb-tablet", "-device", "virtio-rng-pci")
	return machine
}
