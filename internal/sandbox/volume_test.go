package sandbox

import (
	"errors"
	"strings"
	"testing"
)

func TestCheckVolumes(t *testing.T) {
	for _, p := range []string{"/", "/proc", "/sys/fs", "/dev/shm", "/a/../b", "/a/", "//a", "a", "", "/" + strings.Repeat("y", 256), "/a/" + strings.Repeat("y", 256) + "/b"} {
		if err := CheckVolumes([]Volume{{Layer: "l", Path: p}}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.40q: got %v, want it refused", p, err)
		}
	}
	for _, p := range []string{"/data", "/etc", "/processes", "/" + strings.Repeat("y", 255)} {
		if err := CheckVolumes([]Volume{{Layer: "l", Path: p}}); err != nil {
			t.Errorf("%.40q: %v", p, err)
		}
	}
}
