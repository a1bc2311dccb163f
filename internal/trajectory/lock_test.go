package trajectory_test

import (
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A lock that its holder lets go in a moment, as the child of a process that was killed does when its own program runs, is waited for; one that
// stays is told.
func TestLockIsWaitedFor(t *testing.T) {
	fs, err := trajectory.DirFS(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for try := 0; ; try++ { // on a busy machine it may be let go late
		held, err := fs.Lock("lock")
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan error)
		time.AfterFunc(20*time.Millisecond, func() { gone <- held.Close() })
		mine, err := fs.Lock("lock")
		if err := <-gone; err != nil {
			t.Fatal(err)
		}
		if err == nil {
			if _, err := fs.Lock("lock"); err == nil {
				t.Error("two have it")
			}
			mine.Close()
			return
		}
		if try == 20 {
			t.Fatal(err)
		}
	}
}
