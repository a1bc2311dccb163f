package blob

import (
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// benchFile is a file of the daemon's, of so many MiB.
func benchFile(b *testing.B, mib int, buffered bool) (*rig, *os.File, Data) {
	st := newTrouble()
	d := st.add(random(mib<<20, 1))
	r := newRig(b, st, func(c *Config) { c.Buffered = buffered; c.Deadline = time.Minute })
	f, err := r.client.OpenSeen(b.Context(), r.mount, d)
	do(b, err)
	b.Cleanup(func() { f.Close() })
	return r, f, d
}

// BenchmarkWarmSequential reads what the cache has, 1 MiB at a time.
func BenchmarkWarmSequential(b *testing.B) {
	for name, buffered := range map[string]bool{"direct": false, "buffered": true} {
		b.Run(name, func(b *testing.B) {
			_, f, d := benchFile(b, 64, buffered)
			buf := make([]byte, UnitSize)
			all := func() {
				for off := int64(0); off < d.Size; off += UnitSize {
					if _, err := f.ReadAt(buf, off); err != nil && err != io.EOF {
						b.Fatal(err)
					}
				}
			}
			all()
			b.SetBytes(d.Size)
			for b.Loop() {
				all()
			}
		})
	}
}

// BenchmarkWarmRandom reads 4 KiB anywhere in what the cache has.
func BenchmarkWarmRandom(b *testing.B) {
	_, f, d := benchFile(b, 64, false)
	do(b, readAll(f, d.Size))
	buf := make([]byte, 4096)
	rnd := rand.New(rand.NewPCG(1, 2))
	b.SetBytes(4096)
	for b.Loop() {
		if _, err := f.ReadAt(buf, rnd.Int64N(d.Size/4096)*4096); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkColdSequential reads what a store in memory has, near or far, with nothing in the cache.
func BenchmarkColdSequential(b *testing.B) {
	for _, delay := range []time.Duration{0, 10 * time.Millisecond} {
		b.Run(delay.String(), func(b *testing.B) {
			r, f, d := benchFile(b, 64, false)
			r.store.set(func() { r.store.delay = func(int64, int) time.Duration { return delay } })
			b.SetBytes(d.Size)
			for b.Loop() {
				do(b, readAll(f, d.Size))
				b.StopTimer()
				r.server.node(nodeOf(d.Digest[len(prefix):])).empty()
				b.StartTimer()
			}
		})
	}
}

func readAll(f *os.File, size int64) error {
	_, err := io.Copy(io.Discard, io.NewSectionReader(f, 0, size))
	return err
}

// BenchmarkErofsOverDaemon reads a layer through EROFS with the page cache of EROFS dropped each time.
func BenchmarkErofsOverDaemon(b *testing.B) {
	for name, change := range map[string]func(*SupervisorConfig){"direct": nil, "buffered": func(c *SupervisorConfig) { c.Buffered = true }} {
		b.Run(name, func(b *testing.B) {
			h := newHouse(b, 0, change)
			meta, d := h.image(map[string][]byte{"f": random(64<<20, 2)})
			f, err := h.OpenSeen(b.Context(), d)
			do(b, err)
			at := mountImage(b, meta, f)
			f.Close()
			file, err := os.Open(filepath.Join(at, "f"))
			do(b, err)
			defer file.Close()
			do(b, readAll(file, 64<<20))
			b.SetBytes(64 << 20)
			for b.Loop() {
				b.StopTimer()
				do(b, unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
				b.StartTimer()
				do(b, readAll(file, 64<<20))
			}
		})
	}
}
