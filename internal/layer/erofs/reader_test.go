package erofs_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// small is an image with all that the format knows.
func small(t testing.TB, split bool) (meta, data []byte) {
	t.Helper()
	im := newImage(t, split)
	big := file(t, im, bytes.Repeat([]byte("content "), 600))
	big.Set("user.a", []byte("value"))
	big.Set("system.posix_acl_access", bytes.Repeat([]byte{2}, 28))
	sparse := make([]byte, 70<<10)
	sparse[67<<10] = 1
	many := map[string]*erofs.Inode{}
	for i := range 60 {
		many[strings.Repeat("n", 1+i*3)+string(rune('a'+i%26))] = &erofs.Inode{Mode: unix.S_IFIFO | 0o600}
	}
	opaque := dir(nil)
	opaque.Set("trusted.overlay.opaque", []byte("y"))
	im.finishOnly(t, dir(map[string]*erofs.Inode{
		"big": big, "link": big, "sparse": file(t, im, sparse), "empty": file(t, im, nil), "many": dir(many), "o": opaque,
		"s": {Mode: unix.S_IFLNK | 0o777, Target: "big"}, "l": {Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("l", 4095)},
		"gone": {Mode: unix.S_IFCHR}, "b": {Mode: unix.S_IFBLK, Major: 8, Minor: 300},
	}))
	meta, err := os.ReadFile(im.meta.Name())
	if err != nil {
		t.Fatal(err)
	}
	if split {
		if data, err = os.ReadFile(im.data.Name()); err != nil {
			t.Fatal(err)
		}
	}
	return meta, data
}

// sealed makes the superblock's checksum right.
func sealed(b []byte) []byte {
	if len(b) < 4096 {
		return b
	}
	b = bytes.Clone(b)
	clear(b[1028:1032])
	binary.LittleEndian.PutUint32(b[1028:], ^crc32.Checksum(b[1024:4096], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// readAll reads everything that an image has, up to a bound, as one that is broken may claim terabytes.
func readAll(im *erofs.Image) error {
	var walk func(in *erofs.Inode) error
	walk = func(in *erofs.Inode) error {
		if in.Mode&unix.S_IFMT == unix.S_IFREG {
			if _, err := io.Copy(io.Discard, io.LimitReader(in.Data.Reader(), 1<<20)); err != nil {
				return err
			}
		}
		for _, n := range in.Names() {
			if err := walk(in.Children[n]); err != nil {
				return err
			}
		}
		return nil
	}
	return walk(im.Root)
}

func TestCutImages(t *testing.T) {
	for _, split := range []bool{false, true} {
		meta, data := small(t, split)
		for _, n := range []int{0, 1, 1024, 4095, 4096, 8192, len(meta) / 2, len(meta) - 8192} {
			im, err := erofs.Open(bytes.NewReader(meta[:n]), bytes.NewReader(data))
			if err == nil {
				err = readAll(im)
			}
			if err == nil {
				t.Errorf("an image cut at %d of %d octets was read", n, len(meta))
			}
		}
		if split {
			im, err := erofs.Open(bytes.NewReader(meta), bytes.NewReader(data[:4096]))
			if err == nil {
				err = readAll(im)
			}
			if !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("data cut: %v", err)
			}
		}
	}
}

func TestBrokenImages(t *testing.T) {
	meta, data := small(t, true)
	broken := bytes.Clone(meta)
	broken[1100] ^= 1
	if _, err := erofs.Open(bytes.NewReader(broken), bytes.NewReader(data)); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "checksum") {
		t.Error(err)
	}
	// Octets changed at random: an error or a tree, never more.
	r := rand.New(rand.NewChaCha8([32]byte{7}))
	for range 3000 {
		b := bytes.Clone(meta)
		for range 1 + r.IntN(4) {
			at := r.IntN(len(b))
			if r.IntN(3) == 0 {
				at = 1024 + r.IntN(256)
			}
			b[at] = byte(r.Uint32())
		}
		if im, err := erofs.Open(bytes.NewReader(sealed(b)), bytes.NewReader(data)); err == nil {
			readAll(im)
		}
	}
}

// Run it with -fuzzminimizetime=1x: making inputs of this size smaller takes longer than all else.
func FuzzOpen(f *testing.F) {
	for _, split := range []bool{false, true} {
		meta, data := small(f, split)
		f.Add(meta, data)
	}
	f.Fuzz(func(t *testing.T, meta, data []byte) {
		if im, err := erofs.Open(bytes.NewReader(sealed(meta)), bytes.NewReader(data)); err == nil {
			readAll(im)
		}
	})
}
