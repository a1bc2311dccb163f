package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A saved machine is its memory with the state behind it, in one file; that of a template is two, since all clones map the memory.

// Save saves a paused machine. With shared, the memory goes to the file that the machine was made with: only what it has touched, since the
// file was empty. Each saving breaks the guest's connections, and what was listened for stays.
func (v *fcVM) Save(ctx context.Context, to *os.File, shared bool) error {
	state, memory := fcSaved+".state", fcSaved+".memory"
	kind, at := "Full", v.d.inside(memory)
	if shared {
		// Without a record of what was written it takes the pages that are there: of a machine that was booted that is all there are.
		if kind, at = "Diff", v.start.memory; at == "" {
			return fmt.Errorf("machine %s: has no memory to share: %w", v.id, sandbox.ErrState)
		}
	}
	clean := func() error {
		var errs []error
		for _, f := range []string{state, memory} {
			// A stale one would be merged into, which gives clones that do not live.
			if err := os.Remove(filepath.Join(v.root, f)); err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}
	if err := clean(); err != nil {
		return fmt.Errorf("machine %s: %w", v.id, err)
	}
	defer clean()
	err := v.call(ctx, http.MethodPut, "/snapshot/create", map[string]string{"snapshot_type": kind, "snapshot_path": v.d.inside(state), "mem_file_path": at}, nil)
	if err != nil {
		return err
	}
	end := int64(0)
	if !shared {
		m, size, err := v.taken(memory)
		if err != nil {
			return err
		}
		defer m.Close()
		if err := CopySparse(to, m, 0); err != nil {
			return fmt.Errorf("machine %s: its memory: %w", v.id, err)
		}
		end = size
	}
	f, size, err := v.taken(state)
	if err != nil {
		return err
	}
	defer f.Close()
	if size > maxState {
		return fmt.Errorf("machine %s: a state of %d octets: %w", v.id, size, sandbox.ErrInvalid)
	}
	if _, err := io.Copy(io.NewOffsetWriter(to, end), f); err != nil {
		return fmt.Errorf("machine %s: its state: %w", v.id, err)
	}
	return nil
}

// maxState bounds the state of a machine beside its memory, in octets.
const maxState = 16 << 20

// taken opens a file that the monitor made in its folder, where it could have put anything.
func (v *fcVM) taken(name string) (*os.File, int64, error) {
	fd, err := unix.Open(filepath.Join(v.root, name), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("machine %s: %s: %w", v.id, name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != v.uid {
		f.Close()
		return nil, 0, fmt.Errorf("machine %s: %s is no file of the monitor's (%v): %w", v.id, name, err, sandbox.ErrDenied)
	}
	return f, st.Size, nil
}

// Load fills a machine that was made with Incoming from what Spec.From named; it is paused then. One that fails ends the monitor.
func (v *fcVM) Load(ctx context.Context, _ *os.File, shared bool) error {
	from := map[string]string{"backend_type": "File", "backend_path": v.start.memory}
	if v.start.pages {
		from = map[string]string{"backend_type": "Uffd", "backend_path": v.d.inside(fcPages)}
	}
	err := v.call(ctx, http.MethodPut, "/snapshot/load", map[string]any{
		"snapshot_path": v.start.state, "mem_backend": from, "resume_vm": false, "vsock_override": map[string]string{"uds_path": v.d.inside(fcVsock)},
	}, nil)
	// A state has the bounds of the machine that was saved; templates have none.
	if err == nil && (!shared || v.start.rates != Rates{}) {
		err = v.bound(ctx)
	}
	return err
}

// bound bounds the devices of a machine that was loaded.
func (v *fcVM) bound(ctx context.Context) error {
	r := v.start.rates
	for _, id := range v.start.drives {
		body := map[string]any{"drive_id": id, "rate_limiter": limiter(r.Disk, r.DiskOps)}
		if err := v.call(ctx, http.MethodPatch, "/drives/"+id, body, nil); err != nil {
			return err
		}
	}
	if !v.start.network {
		return nil
	}
	body := map[string]any{"iface_id": fcNetwork, "rx_rate_limiter": limiter(r.Network, 0), "tx_rate_limiter": limiter(r.Network, 0)}
	return v.call(ctx, http.MethodPatch, "/network-interfaces/"+fcNetwork, body, nil)
}
