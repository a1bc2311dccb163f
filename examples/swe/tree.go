package main

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
)

// filesOf reads the regular files of a tar that came from an agent's sandbox, which is hostile: sizes and counts are bounded.
func filesOf(r io.Reader) (map[string]file, error) {
	const most, biggest = 20000, 32 << 20
	files := map[string]file{}
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if h.Typeflag != tar.TypeReg || strings.HasPrefix(name, ".git/") {
			continue
		}
		if h.Size > biggest || len(files) >= most {
			return nil, fmt.Errorf("the work tree is too large: %s", name)
		}
		data, err := io.ReadAll(t)
		if err != nil {
			return nil, err
		}
		files[name] = file{data, fs.FileMode(h.Mode).Perm()}
	}
}
