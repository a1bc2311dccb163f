package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A client in a loop costs a line a second, the number of lines and of those left out is that of its calls, and others are still told.
func TestFailuresDoNotFloodTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		e := &Edge{Log: slog.New(slog.NewTextHandler(&b, nil))}
		wrong := fmt.Errorf("sandbox x: %w", sandbox.ErrNotFound)
		const calls = 10_000
		for range calls {
			e.note(context.Background(), "/s/Get", wrong, time.Time{})
			time.Sleep(time.Millisecond)
		}
		e.note(context.Background(), "/s/Get", errors.New("broken"), time.Time{})
		e.note(context.Background(), "/s/List", wrong, time.Time{})
		time.Sleep(2 * time.Second)
		e.note(context.Background(), "/s/Get", wrong, time.Time{})
		told, left := 0, 0
		for line := range strings.Lines(b.String()) {
			if !strings.Contains(line, "/s/Get") || !strings.Contains(line, "not_found") {
				continue
			}
			told++
			if _, n, ok := strings.Cut(line, "left_out="); ok {
				var k int
				fmt.Sscan(n, &k)
				left += k
			}
		}
		if told > tellBurst+12 || told+left != calls+1 {
			t.Errorf("%d lines and %d left out of %d calls", told, left, calls+1)
		}
		if !strings.Contains(b.String(), "broken") || !strings.Contains(b.String(), "/s/List") {
			t.Error("another failure was left out too")
		}
	})
}

// The kinds are bounded, whatever paths a caller makes up.
func TestKindsOfFailuresAreBounded(t *testing.T) {
	var q quiet
	now := time.Now()
	for i := range 10 * mostKinds {
		q.admit(fmt.Sprintf("/made/up/%d", i), connect.CodeNotFound, now)
	}
	if len(q.kind) > mostKinds+1 {
		t.Errorf("%d kinds are kept", len(q.kind))
	}
}
