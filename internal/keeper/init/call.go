package initproc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
)

// OpenCalls returns the program that function calls are born of (src/call.c) as a sealed memfd, as Open does. Start it with a
// sequenced-packet socket as descriptor 3.
func OpenCalls() (*os.File, error) {
	if len(callImage) == 0 {
		return nil, fmt.Errorf("the parent of function calls for %s: %w", runtime.GOARCH, errors.ErrUnsupported)
	}
	return sealed("dsec-calls", callImage)
}
