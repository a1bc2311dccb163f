package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Errors of the edge itself, beside those of internal/sandbox.
var (
	// ErrUnavailable says that a daemon could not be reached or went away in the middle of a call: whether the call had an effect
	// is not known. The same call with the same key is safe to send again.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnauthenticated says that the caller showed no key, or one that is not valid.
	ErrUnauthenticated = errors.New("not authenticated")
	// ErrMoved says that a host gave the sandbox to another one: nothing was done, and the call belongs there. Gateways see to that; clients
	// see ErrUnavailable.
	ErrMoved = errors.New("moved")
)

// codes is read from top to bottom: the first sentinel that matches an error gives its code. Both columns are unique.
var codes = []struct {
	sentinel error
	code     connect.Code
}{
	{sandbox.ErrInvalid, connect.CodeInvalidArgument},
	{sandbox.ErrNotFound, connect.CodeNotFound},
	{sandbox.ErrExists, connect.CodeAlreadyExists},
	{sandbox.ErrState, connect.CodeFailedPrecondition},
	{sandbox.ErrExhausted, connect.CodeResourceExhausted},
	{sandbox.ErrLost, connect.CodeDataLoss},
	{sandbox.ErrDenied, connect.CodePermissionDenied},
	{sandbox.ErrUnsupported, connect.CodeUnimplemented},
	{ErrUnauthenticated, connect.CodeUnauthenticated},
	{ErrUnavailable, connect.CodeUnavailable},
	{ErrMoved, connect.CodeAborted},
	{context.DeadlineExceeded, connect.CodeDeadlineExceeded},
	{context.Canceled, connect.CodeCanceled},
}

// Error gives err its wire code; the text stays. An error that wraps no sentinel is "internal". It returns nil for nil.
func Error(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		if ce == err && len(ce.Meta()) == 0 && !connect.IsWireError(err) {
			return ce
		}
		// One that came from another daemon: its headers are not ours to pass on, and a broken connection is no "unknown".
		return Error(FromError(err))
	}
	return connect.NewError(Code(err), errors.New(err.Error()))
}

// Code is the wire code of err; 0 for nil.
func Code(err error) connect.Code {
	if err == nil {
		return 0
	}
	for _, c := range codes {
		if errors.Is(err, c.sentinel) {
			return c.code
		}
	}
	var w *wireError
	if errors.As(err, &w) {
		return w.code
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return ce.Code()
	}
	return connect.CodeInternal
}

// FromError is the reverse for the side that called: an error with the same text that wraps the sentinel of its code. A call that
// broke off without an answer wraps ErrUnavailable. It returns nil for nil.
func FromError(err error) error {
	var ce *connect.Error
	if err == nil || !errors.As(err, &ce) {
		return err
	}
	code := ce.Code()
	if !connect.IsWireError(err) {
		if errors.Is(err, io.ErrUnexpectedEOF) { // cut off in the middle of a message; connect calls that an invalid argument
			return coded(connect.CodeUnavailable, ce.Message())
		}
		switch code {
		case connect.CodeCanceled, connect.CodeDeadlineExceeded, connect.CodeUnauthenticated, connect.CodeInvalidArgument, connect.CodeResourceExhausted:
		case connect.CodeInternal, connect.CodeUnknown, connect.CodeUnavailable:
			code = connect.CodeUnavailable
		}
	}
	return coded(code, ce.Message())
}

// CodeName is the name of an error's code as it stands in ItemError and in JSON, as in "not_found". Clients see that, and no [ErrMoved].
func CodeName(err error) string {
	if errors.Is(err, ErrMoved) {
		return connect.CodeUnavailable.String()
	}
	return Code(err).String()
}

// FromCode makes an error of a code's name, as it stands in ItemError, and a text.
func FromCode(name, message string) error {
	var c connect.Code
	if c.UnmarshalText([]byte(name)) != nil {
		c = connect.CodeInternal
	}
	return coded(c, message)
}

func coded(code connect.Code, message string) error {
	w := &wireError{code: code, text: message}
	for _, c := range codes {
		if c.code == code {
			w.sentinel = c.sentinel
		}
	}
	return w
}

type wireError struct {
	code     connect.Code
	text     string
	sentinel error
}

func (e *wireError) Error() string { return e.text }
func (e *wireError) Unwrap() error { return e.sentinel }

// httpStatus is the status that the Connect protocol gives a code, used for the plain HTTP routes too.
func httpStatus(c connect.Code) int {
	switch c {
	case connect.CodeCanceled:
		return 499
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeOutOfRange:
		return http.StatusBadRequest
	case connect.CodeDeadlineExceeded:
		return http.StatusGatewayTimeout
	case connect.CodeNotFound:
		return http.StatusNotFound
	case connect.CodeAlreadyExists, connect.CodeAborted:
		return http.StatusConflict
	case connect.CodePermissionDenied:
		return http.StatusForbidden
	case connect.CodeResourceExhausted:
		return http.StatusTooManyRequests
	case connect.CodeUnimplemented:
		return http.StatusNotImplemented
	case connect.CodeUnavailable:
		return http.StatusServiceUnavailable
	case connect.CodeUnauthenticated:
		return http.StatusUnauthorized
	}
	return http.StatusInternalServerError
}

type plainError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// WriteError answers a plain HTTP request with the error's status and {"code","message"}. It logs nothing: Edge.Fail does.
func WriteError(w http.ResponseWriter, err error) {
	code := Code(err)
	h := w.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/json")
	switch code {
	case connect.CodeResourceExhausted:
		h.Set("Retry-After", "1")
	case connect.CodeUnauthenticated:
		h.Set("WWW-Authenticate", `Bearer realm="dsec"`)
	}
	w.WriteHeader(httpStatus(code))
	body, _ := json.Marshal(plainError{Code: code.String(), Message: err.Error()})
	w.Write(append(body, '\n'))
}

// readError is the reverse of WriteError for the side that called.
func readError(status int, body []byte) error {
	var p plainError
	if json.Unmarshal(body, &p) == nil && p.Code != "" {
		return FromCode(p.Code, p.Message)
	}
	return fmt.Errorf("host answered status %d: %.200q: %w", status, body, ErrUnavailable)
}
