// Dedup measures how many octets an S3 store holds for ten versions of one environment. See docs/ops/bench.md.
package main

import (
	"archive/tar"
	"archive/zip"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

func main() {
	base := flag.String("base", "", "tar of the base image")
	wheels := flag.String("wheels", "", "folder with a folder of Python wheels for each version; without it files of the base are edited")
	versions := flag.Int("versions", 10, "versions, when there are no wheels")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	if err := run(ctx, *base, *wheels, *versions); err != nil {
		fmt.Fprintln(os.Stderr, "bench dedup:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, base, wheels string, versions int) error {
	if base == "" {
		return errors.New("-base: name a tar")
	}
	var sets [][]string
	if wheels != "" {
		dirs, err := filepath.Glob(filepath.Join(wheels, "*"))
		if err != nil {
			return err
		}
		sort.Strings(dirs)
		for _, d := range dirs {
			files, err := filepath.Glob(filepath.Join(d, "*.whl"))
			if err != nil {
				return err
			}
			sort.Strings(files)
			sets = append(sets, files)
		}
		if versions = len(sets); versions == 0 {
			return fmt.Errorf("-wheels: nothing in %s", wheels)
		}
	}
	dir, err := os.MkdirTemp("", "dsec-bench-dedup-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	server := storetest.NewS3(dir)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	h := &http.Server{Handler: server}
	go h.Serve(l)
	defer h.Close()
	st, err := store.NewS3(store.S3Config{Endpoint: "http://" + l.Addr().String(), Bucket: storetest.Bucket, PathStyle: true, AccessKey: storetest.AccessKey,
		SecretKey: storetest.SecretKey, Spool: dir})
	if err != nil {
		return err
	}
	c := layer.New(nil, st)
	var logical, before int64
	var added []float64
	for v := range versions {
		r, w := io.Pipe()
		go func() { w.CloseWithError(tree(w, base, v, sets)) }()
		began := time.Now()
		d, err := c.ImportTar(ctx, "bench", r, layer.Options{Form: layer.FormSplit})
		r.Close()
		if err != nil {
			return fmt.Errorf("version %d: %w", v, err)
		}
		size := d.Forms[0].Stored()
		logical += size
		now := server.Octets()
		measure.Note("version %d: %d entries, %.1f MB, adds %.1f MB to the store, %.1f s", v, d.Entries, mb(size), mb(now-before), time.Since(began).Seconds())
		if v > 0 {
			added = append(added, float64(now-before)/float64(size))
		} else {
			measure.Print("dedup.first_over_logical", float64(now)/float64(size), "ratio")
		}
		before = now
	}
	slices.Sort(added)
	measure.Print("dedup.stored_over_logical", float64(before)/float64(logical), "ratio")
	if len(added) > 0 {
		measure.Print("dedup.version_over_logical", added[len(added)/2], "ratio")
	}
	return nil
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// tree writes version v: the base with the version's wheels and edits.
func tree(out io.Writer, base string, v int, sets [][]string) error {
	f, err := os.Open(base)
	if err != nil {
		return err
	}
	defer f.Close()
	in, w := tar.NewReader(f), tar.NewWriter(out)
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		var body io.Reader = in
		if sets == nil && h.Typeflag == tar.TypeReg && h.Size > 0 && h.Size < 1<<20 {
			if body, err = edited(h, in, v); err != nil {
				return err
			}
		}
		h.Format = tar.FormatPAX
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(w, body); err != nil {
			return err
		}
	}
	put := func(name string, b []byte, mode int64) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(b)), ModTime: time.Unix(1700000000, 0), Typeflag: tar.TypeReg, Format: tar.FormatPAX}); err != nil {
			return err
		}
		_, err := w.Write(b)
		return err
	}
	if err := put("etc/dsec-version", fmt.Appendf(nil, "%d\n", v), 0o644); err != nil {
		return err
	}
	if sets != nil {
		for _, wheel := range sets[v] {
			if err := unpack(wheel, put); err != nil {
				return fmt.Errorf("%s: %w", wheel, err)
			}
		}
	}
	return w.Close()
}

// edited changes one file in forty of the base from version to version, as an upgrade does: something is inserted.
func edited(h *tar.Header, in io.Reader, v int) (io.Reader, error) {
	b, err := io.ReadAll(in)
	if err != nil {
		return nil, err
	}
	for i := 1; i <= v; i++ {
		sum := uint64(14695981039346656037)
		for _, c := range []byte(h.Name) {
			sum = (sum ^ uint64(c)) * 1099511628211
		}
		rng := rand.New(rand.NewPCG(sum, uint64(i)))
		if rng.IntN(40) == 0 {
			at := rng.IntN(len(b) + 1)
			b = slices.Insert(b, at, fmt.Appendf(nil, "# changed in version %d\n", i)...)
		}
	}
	h.Size = int64(len(b))
	return strings.NewReader(string(b)), nil
}

// unpack puts a wheel's files where Debian's Python looks for packages.
func unpack(wheel string, put func(string, []byte, int64) error) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, f := range z.File {
		if strings.HasSuffix(f.Name, "/") {
			continue
		}
		r, err := f.Open()
		if err != nil {
			return err
		}
		b, err := io.ReadAll(r)
		r.Close()
		if err == nil {
			err = put(path.Join("usr/lib/python3/dist-packages", path.Clean("/"+f.Name)), b, int64(f.Mode().Perm()|0o444))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
