package host

import (
	"bytes"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/fake"
)

// A log or a disk that is full is told once when it happens and once when it is over, however long it lasts.
func TestShortSpaceIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		var log, disk atomic.Int64
		log.Store(1 << 40)
		disk.Store(1 << 40)
		newRig(t, fake.Options{}, func(c *Config, d *Deps) {
			d.LogDisk = func() (int64, error) { return log.Load(), nil }
			d.Disk = func() (int64, error) { return disk.Load(), nil }
			d.Logger = slog.New(slog.NewTextHandler(&b, nil))
		})
		want := func(step string, warns, infos int) {
			t.Helper()
			time.Sleep(10 * spaceEvery)
			synctest.Wait()
			if w, i := strings.Count(b.String(), "space runs short"), strings.Count(b.String(), "room again"); w != warns || i != infos {
				t.Errorf("%s: told %d times that it is short and %d that it is not, want %d and %d\n%s", step, w, i, warns, infos, b.String())
			}
		}
		want("room", 0, 0)
		log.Store(0)
		want("log full", 1, 0)
		disk.Store(0)
		want("disk full too", 2, 0)
		log.Store(1 << 40)
		disk.Store(1 << 40)
		want("room again", 2, 1)
	})
}
