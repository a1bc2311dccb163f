package obs

import (
	"bytes"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestCallsOfTwoRolesOnOneRegistry(t *testing.T) {
	r := NewRegistry()
	for _, role := range []string{"gateway", "host"} {
		c, err := NewCalls(r, role)
		if err != nil {
			t.Fatal(err)
		}
		c.Observe("/dsec.v1.CommandService/Start", "ok", 3*time.Millisecond)
	}
	rec := httptest.NewRecorder()
	Handler(r).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	for _, want := range []string{`dsec_calls_total{code="ok",procedure="/dsec.v1.CommandService/Start",role="host"} 1`, "go_goroutines", "process_resident_memory_bytes"} {
		if !strings.Contains(rec.Body.String(), want) {
			t.Errorf("missing: %s", want)
		}
	}
}

func TestLogger(t *testing.T) {
	var b bytes.Buffer
	l, err := NewLogger(&b, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	l.Info("no")
	l.Warn("yes")
	if s := b.String(); strings.Contains(s, "no") || !strings.Contains(s, `"msg":"yes"`) {
		t.Error(s)
	}
	for _, bad := range [][2]string{{"loud", "text"}, {"info", "xml"}} {
		if _, err := NewLogger(&b, bad[0], bad[1]); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
