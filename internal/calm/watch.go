package calm

import (
	"errors"
	"fmt"
	"os"
	"strconv"
)

// watchSlack is how much later than asked for, in nanoseconds, the runtime's watch thread may be woken.
const watchSlack = "2000000"

// Watch makes the Go runtime's watch thread look less often. While anything runs the thread wants to look each 20 µs, which the kernel
// makes 70 to 100; it finds nothing nearly always, and each look takes the processor from a thread that has work: of a small machine's
// services a sixth of their CPU time. With this it looks each 2 ms. It then takes a processor of the runtime's from a system call that
// lasts as much later, and tells a goroutine that computes for more than 10 ms to let others run 2 ms later.
//
// It relies on the runtime starting that thread before any other. Were the thread another one, then only its own short waits would take
// longer. It needs the right to change timers' slack of threads (root has it); without it, or without /proc, nothing changes and the
// error says why.
func Watch() error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("find the runtime's watch thread: %w", err)
	}
	var tids []int
	for _, t := range tasks {
		if n, err := strconv.Atoi(t.Name()); err == nil {
			tids = append(tids, n)
		}
	}
	tid := second(os.Getpid(), tids)
	if tid == 0 {
		return errors.New("find the runtime's watch thread: the process has one thread alone")
	}
	if err := os.WriteFile("/proc/"+strconv.Itoa(tid)+"/timerslack_ns", []byte(watchSlack), 0); err != nil {
		return fmt.Errorf("let the runtime's watch thread sleep longer: %w", err)
	}
	return nil
}

// second is the thread that was made first after the process: numbers rise, and begin anew at the end of their range. 0: there is none.
func second(pid int, tids []int) (tid int) {
	const most = 1 << 22 // numbers are below
	near := most
	for _, t := range tids {
		if d := (t - pid + most) % most; d > 0 && d < near {
			near, tid = d, t
		}
	}
	return tid
}
