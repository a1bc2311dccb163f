package measure

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestCommandEndsByItself(t *testing.T) {
	done := filepath.Join(t.TempDir(), "done")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if err := Command(ctx, "sh", "-c", "sleep 0.3; echo x > "+done); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(done); err != nil {
		t.Errorf("an interrupt ended it: %v", err)
	}
	if err := Command(ctx, "true"); !errors.Is(err, context.Canceled) {
		t.Errorf("began after an interrupt: %v", err)
	}
	if err := Command(t.Context(), "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("%v", err)
	}
}
