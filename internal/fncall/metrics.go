package fncall

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	verdicts *prometheus.CounterVec
	retries  prometheus.Counter
	queued   prometheus.Histogram
	recorded prometheus.Counter
}

func newMetrics(e *Engine, reg prometheus.Registerer) *metrics {
	m := &metrics{
		verdicts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_fncall_runs_total", Help: "Runs of function calls and of their compilers, by verdict."}, []string{"verdict"}),
		retries:  prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_fncall_retries_total", Help: "Runs that were tried again after a failure of the platform."}),
		queued: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_fncall_queue_seconds", Help: "Wait of runs for a place.",
			Buckets: []float64{.0001, .001, .01, .1, 1, 10, 60}}),
		recorded: prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_fncall_recorded_total", Help: "Calls that were answered with the recorded result of their key."}),
	}
	if reg != nil {
		reg.MustRegister(m.verdicts, m.retries, m.queued, m.recorded,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_fncall_waiting", Help: "Runs that wait for a place."}, func() float64 { w, _ := e.queue.length(); return float64(w) }),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dsec_fncall_running", Help: "Places that are taken."}, func() float64 { _, r := e.queue.length(); return float64(r) }))
	}
	return m
}
