package vmm

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"
)

// MaxConsole bounds what is kept of a machine's console, in octets: the last of it.
const MaxConsole = 1 << 20

const (
	consoleFile = "console"
	consoleRing = "1048576" // octets of QEMU's own buffer: MaxConsole, a power of two
	consolePart = 64 << 10
)

// KeptConsole is the end of what a machine wrote on its console, as far as it was read before the monitor ended.
func KeptConsole(dir string) []byte {
	f, err := os.Open(filepath.Join(dir, consoleFile))
	if err != nil {
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > MaxConsole {
		f.Seek(-MaxConsole, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(f, MaxConsole))
	return text
}

// keepConsole adds to the kept text. The file is begun anew with its end when it has twice what is kept.
func keepConsole(dir string, more []byte) error {
	path := filepath.Join(dir, consoleFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(more)
	st, serr := f.Stat()
	if err = errors.Join(err, serr, f.Close()); err != nil || st.Size() < 2*MaxConsole {
		return err
	}
	return errors.Join(os.WriteFile(path+".new", KeptConsole(dir), 0o600), os.Rename(path+".new", path))
}

// Console takes what QEMU holds out of its buffer, which a read empties, into the machine's folder, and returns what is kept there.
func (v *qemuVM) Console(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	v.console.Lock()
	defer v.console.Unlock()
	for range MaxConsole/consolePart + 1 {
		var text string
		if v.do(ctx, "ringbuf-read", map[string]any{"device": "console", "size": consolePart, "format": "base64"}, &text) != nil {
			break
		}
		part, err := base64.StdEncoding.DecodeString(text)
		if err != nil || len(part) == 0 || keepConsole(v.dir, part) != nil {
			break
		}
	}
	return string(KeptConsole(v.dir))
}
