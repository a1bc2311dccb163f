package main

import (
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/vmm"
)

func TestRatesOfMachines(t *testing.T) {
	s := vmSettings{NetworkRate: "50m", DiskRate: "1.5g", DiskOps: 300}
	if r, err := s.rates(); err != nil || r != (vmm.Rates{Network: 50 << 20, Disk: 3 << 29, DiskOps: 300}) {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := (&vmSettings{}).rates(); err != nil || r != (vmm.Rates{}) {
		t.Errorf("of nothing: %+v, %v", r, err)
	}
	for field, s := range map[string]vmSettings{"vm.network_rate": {NetworkRate: "fast"}, "vm.disk_rate": {DiskRate: "-1m"}, "vm.disk_ops": {DiskOps: -1}} {
		if _, err := s.rates(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
