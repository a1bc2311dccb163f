package vm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// ownStats is what the host sees of the monitor.
func (x *instance) ownStats() (s sandbox.Stats) {
	s.MemoryPeak = -1
	x.mu.Lock()
	vm := x.vm
	x.mu.Unlock()
	if vm == nil || x.isSaved() {
		return s
	}
	dir := "/proc/" + strconv.Itoa(vm.Pid())
	if text, err := os.ReadFile(dir + "/statm"); err == nil {
		if f := strings.Fields(string(text)); len(f) > 1 {
			pages, _ := strconv.ParseInt(f[1], 10, 64)
			s.Memory = pages * int64(os.Getpagesize())
		}
	}
	if text, err := os.ReadFile(dir + "/stat"); err == nil {
		if f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])); len(f) > 12 {
			for _, v := range f[11:13] {
				ticks, _ := strconv.ParseInt(v, 10, 64)
				s.CPU += time.Duration(ticks) * (time.Second / 100)
			}
		}
	}
	return s
}

// hostMemory is what the machine's monitor holds of the host's memory, in octets: pages that several have count in parts (PSS). 0 where none
// lives.
func (x *instance) hostMemory() int64 {
	x.mu.Lock()
	vm := x.vm
	x.mu.Unlock()
	if vm == nil || x.isSaved() {
		return 0
	}
	text, err := os.ReadFile("/proc/" + strconv.Itoa(vm.Pid()) + "/smaps_rollup")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var kib int64
		if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	return 0
}
