package host

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// metrics of a host; labels come from the vocabulary alone.
type metrics struct {
	creates       *prometheus.CounterVec
	createTime    prometheus.Histogram
	ends          *prometheus.CounterVec
	commands      *prometheus.CounterVec
	leases        *prometheus.CounterVec
	refused       prometheus.Counter
	denied        prometheus.Counter
	logErrors     prometheus.Counter
	destroyErrors prometheus.Counter
	steps         *prometheus.CounterVec
}

func newMetrics(h *Host, reg prometheus.Registerer) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "dsec", Subsystem: "host", Name: name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "dsec", Subsystem: "host", Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		creates: vec("creates_total", "Creates by result.", "result"),
		createTime: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "dsec", Subsystem: "host", Name: "create_seconds", Help: "Time from admission to birth.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5, 30},
		}),
		ends:          vec("ends_total", "Sandboxes that ended, by class of the cause.", "class"),
		commands:      vec("commands_total", "Commands that ended, by outcome.", "kind"),
		leases:        vec("leases_ended_total", "Leases that ran out, by action.", "action"),
		steps:         vec("steps_total", "Steps other than commands that ended, by act.", "act"),
		refused:       counter("creates_refused_total", "Creates refused by admission."),
		denied:        counter("denied_total", "Calls refused by the confinement that no honest tool makes."),
		logErrors:     counter("log_errors_total", "Appends to the log that failed."),
		destroyErrors: counter("destroy_errors_total", "Tries to destroy a sandbox that failed."),
	}
	if reg == nil {
		return m
	}
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "dsec", Subsystem: "host", Name: name, Help: help}, f)
	}
	reg.MustRegister(m.creates, m.createTime, m.ends, m.commands, m.leases, m.steps, m.refused, m.denied, m.logErrors, m.destroyErrors,
		gauge("sandboxes", "Sandboxes that have not ended.", func() float64 { return float64(h.count().living) }),
		gauge("creating", "Creates under way.", func() float64 { return float64(h.count().creating) }),
		gauge("records", "Sandboxes whose records are kept, ended ones included.", func() float64 { return float64(h.count().boxes) }),
		gauge("paused", "Sandboxes that are paused.", func() float64 { return float64(h.countState(sandbox.Paused)) }),
	)
	return m
}

type counts struct{ living, creating, boxes int }

func (h *Host) count() counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return counts{len(h.alive), h.creating, len(h.boxes)}
}

func (h *Host) countState(s sandbox.State) int {
	return len(h.find(func(b *box) bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.state == s
	}))
}
