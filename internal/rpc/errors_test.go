package rpc

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestErrorTableReadsBothWays(t *testing.T) {
	sentinels, wire := map[error]bool{}, map[connect.Code]bool{}
	for _, c := range codes {
		if sentinels[c.sentinel] || wire[c.code] {
			t.Errorf("%v or %v stands twice in the table", c.sentinel, c.code)
		}
		sentinels[c.sentinel], wire[c.code] = true, true

		err := fmt.Errorf("start command %q: %w", "x", c.sentinel)
		out := Error(err)
		var ce *connect.Error
		if !errors.As(out, &ce) || ce.Code() != c.code || ce.Message() != err.Error() {
			t.Errorf("Error(%v) = %v", err, out)
		}
		name := c.code.String()
		if c.sentinel == ErrMoved { // between hosts and gateways alone
			name = "unavailable"
		}
		if CodeName(err) != name {
			t.Errorf("CodeName(%v) = %q", err, CodeName(err))
		}
		back := FromCode(c.code.String(), err.Error())
		if !errors.Is(back, c.sentinel) || back.Error() != err.Error() {
			t.Errorf("FromCode gives %v", back)
		}
		for _, o := range codes {
			if o.sentinel != c.sentinel && errors.Is(back, o.sentinel) {
				t.Errorf("%v is also %v", back, o.sentinel)
			}
		}
		again := Error(back)
		if !errors.As(again, &ce) || ce.Code() != c.code || ce.Message() != err.Error() {
			t.Errorf("a second hop makes %v of %v", again, err)
		}
		rec := httptest.NewRecorder()
		WriteError(rec, err)
		plain := readError(rec.Code, rec.Body.Bytes())
		if !errors.Is(plain, c.sentinel) || plain.Error() != err.Error() {
			t.Errorf("over plain HTTP %v comes back as %v", err, plain)
		}
	}
}

func TestErrorsWithoutSentinel(t *testing.T) {
	if Error(nil) != nil || FromError(nil) != nil {
		t.Error("nil is no error")
	}
	for _, tc := range []struct {
		name string
		err  error
		want connect.Code
	}{
		{"plain", errors.New("disk on fire"), connect.CodeInternal},
		{"first of the table wins", fmt.Errorf("%w: %w", context.Canceled, sandbox.ErrInvalid), connect.CodeInvalidArgument},
		{"own code", connect.NewError(connect.CodeAborted, errors.New("x")), connect.CodeAborted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, connect.CodeOf(Error(tc.err))); diff != "" {
				t.Error(diff)
			}
		})
	}
}
