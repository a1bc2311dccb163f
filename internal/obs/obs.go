// Package obs is what daemons tell about themselves: the logger and the metrics of calls. Labels are from bounded sets; none is the
// ID of a sandbox, a key or a project.
package obs

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// NewLogger writes records of a level ("debug", "info", "warn", "error") and above, as "text" or "json".
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: want debug, info, warn or error: %w", level, sandbox.ErrInvalid)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("log format %q: want text or json: %w", format, sandbox.ErrInvalid)
}

// NewRegistry has the metrics of the process and of the Go runtime.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Handler serves a registry to Prometheus.
func Handler(g prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second})
}

// Calls counts the calls that a daemon served.
type Calls struct {
	count *prometheus.CounterVec
	took  *prometheus.HistogramVec
}

// NewCalls registers the metrics of calls; role is "gateway" or "host". Several roles may share a registry.
func NewCalls(r prometheus.Registerer, role string) (*Calls, error) {
	labels := prometheus.Labels{"role": role}
	c := &Calls{
		count: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dsec_calls_total", Help: "Calls served, by procedure and code.", ConstLabels: labels}, []string{"procedure", "code"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dsec_call_seconds", Help: "Time from the start of a call to its answer.", ConstLabels: labels,
			Buckets: []float64{.0005, .001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}}, []string{"procedure"}),
	}
	for _, m := range []prometheus.Collector{c.count, c.took} {
		if err := r.Register(m); err != nil {
			return nil, fmt.Errorf("register metrics of calls: %w", err)
		}
	}
	return c, nil
}

// Observe counts one call; it fits rpc.Edge.Observe.
func (c *Calls) Observe(procedure, code string, took time.Duration) {
	c.count.WithLabelValues(procedure, code).Inc()
	c.took.WithLabelValues(procedure).Observe(took.Seconds())
}
