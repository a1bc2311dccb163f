package fncall

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	verdicts *prometheus.CounterVec
	retries  prometheus.Counter
	queued   prometheus.Histogram
	recorded prometheus.Counter
	warm     *prometheus.CounterVec
}

func newMetrics(e *Engine, reg prometheus.Registerer) *metrics {
	m := &metrics{
		verdicts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_fncall_runs_total", Help: "Runs of function calls and of their compilers, by verdict."}, []string{"verdict"}),
		retries:  prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_fncall_retries_total", Help: "Runs that were tried again after a failure of the platform."}),
		queued: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_fncall_queue_seconds", Help: "Wait of runs for a place.",
			Buckets: []float64{.0001, .001, .01, .1, 1, 10, 60}}),
		recorded: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_fncall_recorded_total", Help: "Calls that were answered with the recorded result of their key."}),
	}
	m.warm = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_fncall_warm_total", Help: "Runs of mode warm, by whether their interpreter was started ahead or at the call."}, []string{"started"})
	if reg != nil {
		reg.MustRegister(m.verdicts, m.retries, m.queued, m.recorded, m.warm,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_fncall_standbys", Help: "Interpreters that were started ahead and wait for a call."}, e.standbys),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_fncall_waiting", Help: "Runs that wait for a place."}, func() float64 { w, _ := e.queue.length(); return float64(w) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_fncall_running", Help: "Places that are taken."}, func() float64 { _, r := e.queue.length(); return float64(r) }))
	}
	return m
}

// standbys asks the Runner; one that does not answer in time has none.
func (e *Engine) standbys() float64 {
	if e.cfg.Standbys == 0 {
		return 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	n, err := e.deps.Runner.Standbys(ctx)
	if err != nil {
		e.deps.Logger.Debug("count interpreters that wait", "err", err)
	}
	return float64(n)
}

// begun counts how a run of mode warm began.
func (m *metrics) begun(j *job, exit *Exit) {
	switch {
	case j.mode != "warm":
	case exit.Ahead:
		m.warm.WithLabelValues("ahead").Inc()
	default:
		m.warm.WithLabelValues("at the call").Inc()
	}
}
