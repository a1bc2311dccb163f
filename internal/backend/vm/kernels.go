package vm

import (
	"os"
	"path/filepath"
)

// KernelFolders are where a kernel for guests is looked for, in order: DSEC_GUEST_KERNEL, the host's state folder, what `make guest-kernel`
// leaves.
func KernelFolders(state string) (out []string) {
	if at := os.Getenv("DSEC_GUEST_KERNEL"); at != "" {
		out = append(out, at)
	}
	out = append(out, filepath.Join(state, "vm", "kernel"))
	cache := os.Getenv("XDG_CACHE_HOME")
	if home, err := os.UserHomeDir(); cache == "" && err == nil {
		cache = filepath.Join(home, ".cache")
	}
	if cache != "" {
		out = append(out, filepath.Join(cache, "dsec", "guest-kernel"))
	}
	return append(out, "/usr/lib/dsec/guest-kernel")
}

// FindKernel returns the first of the folders that has one, or empty.
func FindKernel(state string) string {
	for _, at := range KernelFolders(state) {
		for _, name := range []string{"vmlinux", "vmlinuz"} {
			if _, err := os.Stat(filepath.Join(at, name)); err == nil {
				return at
			}
		}
	}
	return ""
}
