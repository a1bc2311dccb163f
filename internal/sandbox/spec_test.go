package sandbox

import (
	"errors"
	"math"
	"testing"
)

func TestResourcesAreBounded(t *testing.T) {
	for name, set := range map[string]func(*Resources, int64){
		"memory": func(r *Resources, n int64) { r.Memory = n },
		"disk":   func(r *Resources, n int64) { r.Disk = n },
		"pids":   func(r *Resources, n int64) { r.Pids = n },
		"cpu":    func(r *Resources, n int64) { r.CPU = n },
		"weight": func(r *Resources, n int64) { r.CPUWeight = n },
	} {
		for _, n := range []int64{math.MinInt64, -1, 1, math.MaxInt64 / 2, math.MaxInt64} {
			s := Spec{Project: "p", Key: "k", Layers: []string{"sha256:00"}}
			set(&s.Resources, n)
			s.Fill()
			if name == "weight" && n == 1 {
				continue
			}
			if err := s.Resources.validate(); !errors.Is(err, ErrInvalid) {
				t.Errorf("%s %d: %v", name, n, err)
			}
		}
	}
}
