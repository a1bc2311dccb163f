package measure

import (
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Sample is a set of durations. It may be added to from many goroutines.
type Sample struct {
	mu sync.Mutex
	d  []time.Duration
}

// Add adds one duration.
func (s *Sample) Add(d ...time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.d = append(s.d, d...)
}

// Join adds another sample's durations.
func (s *Sample) Join(o *Sample) { s.Add(o.d...) }

// Len is the number of durations.
func (s *Sample) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.d)
}

// Percentile is the smallest duration that p percent of the sample do not exceed; 0 for an empty sample.
func (s *Sample) Percentile(p float64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Percentile(s.d, p)
}

// Ms is a percentile in milliseconds.
func (s *Sample) Ms(p float64) float64 { return Ms(s.Percentile(p)) }

// Percentile is the smallest value that p percent of the list do not exceed; the zero value for an empty list.
func Percentile[T ~int64 | ~float64](list []T, p float64) T {
	if len(list) == 0 {
		return 0
	}
	l := slices.Clone(list)
	slices.Sort(l)
	i := int(math.Ceil(p/100*float64(len(l)))) - 1
	return l[min(max(i, 0), len(l)-1)]
}

// Median of a list; of an even number the lower one of the two in the middle.
func Median[T ~int64 | ~float64](list []T) T { return Percentile(list, 50) }

// Ms is a duration in milliseconds.
func Ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Print writes a result line to standard output.
func Print(name string, value float64, unit string) { Fprint(os.Stdout, name, value, unit) }

// Fprint writes a result line.
func Fprint(w io.Writer, name string, value float64, unit string) {
	fmt.Fprintf(w, "%s %s %s\n", name, format(value), unit)
}

// format gives three to four significant digits without an exponent.
func format(v float64) string {
	a := math.Abs(v)
	switch {
	case a >= 1000 || a == 0:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// Note writes a remark to standard error.
func Note(format string, a ...any) { fmt.Fprintf(os.Stderr, "# "+format+"\n", a...) }
