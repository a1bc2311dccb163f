package layer_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// with changes an entry's header.
func with(e entry, change func(*tar.Header)) entry {
	change(&e.Header)
	return e
}

func pax(e entry, records ...string) entry {
	e.PAXRecords = map[string]string{}
	for i := 0; i < len(records); i += 2 {
		e.PAXRecords[records[i]] = records[i+1]
	}
	return e
}

// raw is a header block that archive/tar would not write, and the blocks behind it.
func raw(name string, kind byte, size string, behind ...string) []byte {
	b := make([]byte, 512)
	copy(b, name)
	copy(b[100:], "0000644\x000000000\x000000000\x00")
	copy(b[124:], size)
	copy(b[136:], "00000000000\x00")
	copy(b[148:], "        ")
	b[156] = kind
	copy(b[257:], "ustar\x0000")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], []byte{'0' + byte(sum>>15&7), '0' + byte(sum>>12&7), '0' + byte(sum>>9&7), '0' + byte(sum>>6&7), '0' + byte(sum>>3&7), '0' + byte(sum&7), 0, ' '})
	b = append(b, strings.Join(behind, "")...)
	for len(b)%512 != 0 {
		b = append(b, 0)
	}
	return append(b, make([]byte, 1024)...)
}

// oddArchives are of every kind that an archive can be odd in.
func oddArchives(t testing.TB) map[string][]byte {
	long := strings.Repeat("n", 255)
	deep := strings.Repeat("d/", 100)
	kind := func(name string, k byte) entry { return entry{tar.Header{Typeflag: k, Name: name, Mode: 0o644}, ""} }
	list := map[string][]byte{
		"everything":       archive(t, folder("d"), file("d/a", "1"), hardlink("b", "d/a"), symlink("s", "d"), file(".wh.x", ""), file("d/.wh..wh..opq", ""), kind("p", tar.TypeFifo)),
		"leaves":           archive(t, file("../x", "1")),
		"leaves by link":   archive(t, symlink("l", "/etc"), file("l/passwd", "x")),
		"absolute":         archive(t, file("/etc/passwd", "x")),
		"dots":             archive(t, file("./././a//b/./c", "x"), folder("."), folder("/")),
		"empty name":       raw("", '0', "00000000000"),
		"root is a file":   raw(".", '0', "00000000001", "x"),
		"NUL":              raw("a\x00b", '0', "00000000000"),
		"link to itself":   archive(t, hardlink("a", "a")),
		"link to later":    archive(t, hardlink("a", "b"), file("b", "x")),
		"link to folder":   archive(t, folder("d"), hardlink("a", "d")),
		"link to link":     archive(t, symlink("s", "s"), hardlink("a", "s"), hardlink("b", "a")),
		"link replaced":    archive(t, file("a", "1"), hardlink("b", "a"), file("a", "2"), hardlink("b", "a")),
		"link and content": append(raw("b", '1', "00000000004", "text"), raw("c", '0', "00000000001", "x")...),
		"folder to file":   archive(t, folder("d"), file("d", "x")),
		"full to file":     archive(t, file("d/e", "x"), file("d", "x")),
		"file to folder":   archive(t, file("d", "x"), file("d/e", "x")),
		"folder twice":     archive(t, folder("d"), file("d/e", "x"), with(folder("d"), func(h *tar.Header) { h.Mode = 0o700 })),
		"devices":          archive(t, with(kind("c", tar.TypeChar), func(h *tar.Header) { h.Devmajor, h.Devminor = 4095, 1<<20-1 }), kind("w", tar.TypeChar), kind("b", tar.TypeBlock)),
		"device too large": archive(t, with(kind("c", tar.TypeChar), func(h *tar.Header) { h.Devmajor = 4096 })),
		"type s":           raw("sock", 's', "00000000000"),
		"type 7":           raw("cont", '7', "00000000001", "x"),
		"type V7":          raw("old", 0, "00000000001", "x"),
		"V7 folder":        raw("old/", 0, "00000000000"),
		"size negative":    raw("a", '0', "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
		"size huge":        raw("a", '0', "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff"),
		"size lies":        raw("a", '0', "00000002000", "short"),
		"whiteouts":        archive(t, file(".wh.", ""), file("a/.wh..", "")),
		"whiteout twice":   archive(t, file("a/.wh.x", ""), file("a/.wh.x", ""), folder("a/x"), file("a/x/y", "")),
		"whiteout folder":  archive(t, file(".wh.d/x", "")),
		"whiteout content": archive(t, file(".wh.x", "content"), hardlink(".wh.y", "nothing"), symlink(".wh..wh..opq", "x")),
		"whiteout long":    archive(t, file("d/.wh."+long, "")),
		"aufs":             archive(t, file(".wh..wh.plnk/1", ""), file(".wh..wh.aufs", "")),
		"opaque root":      archive(t, file(".wh..wh..opq", ""), file("a", "x")),
		"long":             archive(t, file(long+"/"+long+"/"+long, "x"), symlink("s", strings.Repeat("t", 4095))),
		"too long":         archive(t, file(long+"n", "x")),
		"link too long":    archive(t, symlink("s", strings.Repeat("t", 4096))),
		"link empty":       raw("s", '2', "00000000000"),
		"deep":             archive(t, file(deep+"f", "x")),
		"odd names":        archive(t, file("new\nline", "x"), file("\xff\xfe", "y"), file(" ", "z"), file("\u202e", "")),
		"times":            archive(t, with(file("a", ""), func(h *tar.Header) { h.ModTime = time.Unix(-1<<40, 999999999) }), with(file("b", ""), func(h *tar.Header) { h.ModTime = time.Unix(1<<50, 1) })),
		"owners":           archive(t, with(file("a", ""), func(h *tar.Header) { h.Uid, h.Gid = 1<<32-2, 1<<31 })),
		"owner too large":  archive(t, with(file("a", ""), func(h *tar.Header) { h.Uid = 1<<32 - 1 })),
		"modes":            archive(t, with(file("a", "x"), func(h *tar.Header) { h.Mode = 0o177777 })),
		"attributes": archive(t, pax(file("a", "x"), "SCHILY.xattr.user.a", "", "SCHILY.xattr.security.capability", "\x01\x00\x00\x03"+strings.Repeat("\x00", 20),
			"SCHILY.xattr.trusted.overlay.redirect", "/x", "SCHILY.xattr.trusted.overlay.opaque", "y", "SCHILY.xattr.system.posix_acl_access", "\x02\x00\x00\x00")),
		"attribute of none": archive(t, pax(file("a", "x"), "SCHILY.xattr.nothing", "1")),
		"attribute large":   archive(t, pax(file("a", "x"), "SCHILY.xattr.user.a", strings.Repeat("v", 65535), "SCHILY.xattr.user."+long, "v")),
		"attribute too big": archive(t, pax(file("a", "x"), "SCHILY.xattr.user.a", strings.Repeat("v", 65536))),
		"attribute of link": archive(t, pax(symlink("s", "t"), "SCHILY.xattr.trusted.a", "1")),
		"global header":     archive(t, entry{tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"path": "/g", "comment": "c"}}, ""}, file("a", "x")),
		"pax broken":        raw("x", 'x', "00000000010", "99 a=b\n"),
		"gnu long name":     append(raw("././@LongLink", 'L', "00000000400", strings.Repeat("l", 255)+"\x00")[:1024], raw("short", '0', "00000000001", "x")...),
		"sparse":            append(raw("sp", 'S', "00000000000")[:512], make([]byte, 1024)...),
		"pax sparse":        archive(t, pax(file("sp", strings.Repeat("\x00", 1536)), "comment", "x")),
		"zeros":             archive(t, file("z", strings.Repeat("\x00", 200<<10)), file("y", strings.Repeat("\x00", 64<<10)+"x")),
		"equal":             archive(t, file("a", strings.Repeat("x", 9000)), file("b", strings.Repeat("x", 9000)), file("c", strings.Repeat("x", 9001))),
		"nothing":           archive(t),
		"no end":            archive(t, file("a", "x"))[:1024],
		"half":              archive(t, file("a", strings.Repeat("x", 5000)))[:2000],
		"garbage":           []byte(strings.Repeat("garbage ", 200)),
		"empty":             {},
		"gzip head":         {0x1f, 0x8b},
		"zstd head":         {0x28, 0xb5, 0x2f, 0xfd},
	}
	var g, z bytes.Buffer
	gw := gzip.NewWriter(&g)
	gw.Write(list["everything"])
	gw.Close()
	zw, err := zstd.NewWriter(&z)
	must(t, err)
	zw.Write(list["everything"])
	zw.Close()
	list["gzip"], list["gzip cut"] = g.Bytes(), g.Bytes()[:g.Len()-9]
	list["zstd"], list["zstd cut"] = z.Bytes(), z.Bytes()[:z.Len()-3]
	return list
}

// importer builds layers in a store of its own.
type importer struct {
	c     *layer.Catalogue
	s     store.Store
	paths func(digest string) string
}

func newImporter(t testing.TB) importer {
	dir := t.TempDir()
	s, err := store.NewDir(dir + "/store")
	must(t, err)
	return importer{layer.New(nil, s), s, func(digest string) string { return blobPath(dir, digest) }}
}

// check builds a layer in both forms and looks at all that must hold of whatever was accepted.
func (im importer) check(t *testing.T, data []byte) error {
	ctx := context.Background()
	limits := layer.Limits{Entries: 1000, Bytes: 16 << 20, Depth: 128, Xattrs: 1 << 20}
	out, err := os.CreateTemp("", "dsec-fuzz-")
	must(t, err)
	defer os.Remove(out.Name())
	defer out.Close()
	built, err := layer.FromTar(ctx, bytes.NewReader(data), out, layer.Options{Limits: limits})
	d, err2 := im.c.ImportTar(ctx, "default", bytes.NewReader(data), layer.Options{Limits: limits, Form: layer.FormSplit})
	if (err == nil) != (err2 == nil) {
		t.Fatalf("one form: %v, the other: %v", err, err2)
	}
	if err != nil {
		return err
	}
	defer func() { // keep the store small, and the rounds apart
		must(t, im.s.Delete(ctx, "layers/"+d.ID.Hex()+".json"), im.s.Delete(ctx, layer.BlobKey(d.Forms[0].Digest)))
		if f := d.Forms[0].Data; f != nil {
			must(t, im.s.Delete(ctx, layer.BlobKey(f.Digest)), im.s.Delete(ctx, layer.BlobKey(f.Units)))
		}
	}()
	if built.ID != d.ID || built.Entries != d.Entries || built.Bytes != d.Bytes || built.Arch != d.Arch {
		t.Errorf("%+v\n%+v", built, d)
	}
	if st, err := out.Stat(); err != nil || st.Size() != built.Size {
		t.Errorf("size %d, file %d, %v", built.Size, st.Size(), err)
	}
	if _, err := erofs.Open(out, nil); err != nil {
		t.Errorf("what was written can't be read: %v", err)
	}
	must(t, im.c.Verify(ctx, d.ID))
	var again bytes.Buffer
	if err := im.c.WriteTar(ctx, d.ID, &again); err != nil {
		if !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("archive: %v", err)
		}
		return nil
	}
	same, err := layer.FromTar(ctx, &again, struct{ erofs.Output }{discard{}}, layer.Options{})
	if err != nil || same.ID != d.ID {
		t.Errorf("built from its own archive: %+v, %v, want %s", same, err, d.ID)
	}
	return nil
}

type discard struct{}

func (discard) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (discard) Truncate(int64) error                   { return nil }

var _ io.WriterAt = discard{}

// What archives are made of that were not made by a packer: each is refused with a reason or becomes a layer that is right.
func TestOddArchives(t *testing.T) {
	im := newImporter(t)
	for name, data := range oddArchives(t) {
		t.Run(name, func(t *testing.T) {
			if err := im.check(t, data); err != nil && !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, sandbox.ErrUnsupported) && !errors.Is(err, sandbox.ErrExhausted) {
				t.Errorf("an error of the platform: %v", err)
			} else {
				t.Log(err)
			}
		})
	}
}

// Run it with -fuzzminimizetime=1x: making inputs of this size smaller takes longer than all else.
func FuzzFromTar(f *testing.F) {
	for _, data := range oddArchives(f) {
		if len(data) < 64<<10 {
			f.Add(data)
		}
	}
	im := newImporter(f)
	f.Fuzz(func(t *testing.T, data []byte) { im.check(t, data) })
}
