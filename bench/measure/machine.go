package measure

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux

// Busy is the CPU time that the machine has spent since boot on anything but idling and waiting; time stolen by a hypervisor is not in it.
func Busy() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	f := strings.Fields(string(line)) // cpu user nice system idle iowait irq softirq steal
	if len(f) < 8 {
		return 0, fmt.Errorf("/proc/stat: %.80q", line)
	}
	var sum int64
	for _, i := range []int{1, 2, 3, 6, 7} {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		sum += n
	}
	return time.Duration(sum) * tick, nil
}

const kthreadFlag = 0x00200000 // PF_KTHREAD in /proc/PID/stat

// Threads is the CPU time of threads since they began, by their numbers.
type Threads map[string]time.Duration

// since is the time spent after an earlier reading: of those that were there then the difference, of new ones all.
func (t Threads) since(o Threads) (sum time.Duration) {
	for id, d := range t {
		sum += max(0, d-o[id])
	}
	return sum
}

// KernelThreads reads the kernel's own threads. Those that end before the next reading are lost, as are ticks that a thread slips
// through; over seconds that evens out.
func KernelThreads() (Threads, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all := Threads{}
	for _, n := range names {
		if n[0] < '0' || n[0] > '9' {
			continue
		}
		b, err := os.ReadFile("/proc/" + n + "/stat")
		if err != nil {
			continue // it has ended
		}
		i := bytes.LastIndexByte(b, ')')
		if i < 0 {
			continue
		}
		f := strings.Fields(string(b[i+1:])) // state ppid pgrp session tty tpgid flags ... utime(11) stime(12)
		if len(f) < 13 {
			continue
		}
		if flags, _ := strconv.ParseInt(f[6], 10, 64); flags&kthreadFlag == 0 {
			continue
		}
		u, _ := strconv.ParseInt(f[11], 10, 64)
		s, _ := strconv.ParseInt(f[12], 10, 64)
		all[n] = time.Duration(u+s) * tick
	}
	return all, nil
}

// Self is the CPU time of this process, its children apart.
func Self() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// Reading is the state of all clocks at a moment.
type Reading struct {
	at                     time.Time
	machine, group, client time.Duration
	kernel                 Threads
}

// Read takes a reading of the machine, of the candidate's processes (group) and of the load client.
func Read(group, client func() (time.Duration, error)) (r Reading, err error) {
	r.at = time.Now()
	if r.machine, err = Busy(); err != nil {
		return r, err
	}
	if r.kernel, err = KernelThreads(); err != nil {
		return r, err
	}
	if r.group, err = group(); err != nil {
		return r, err
	}
	r.client, err = client()
	return r, err
}

// CPU is what was spent between two readings.
type CPU struct {
	Wall    time.Duration
	Machine time.Duration // all, see Busy
	Kernel  time.Duration // kernel threads
	Group   time.Duration // the candidate's processes
	Client  time.Duration // the load client
}

// Since is what was spent after an earlier reading.
func (r Reading) Since(o Reading) CPU {
	return CPU{Wall: r.at.Sub(o.at), Machine: r.machine - o.machine, Kernel: r.kernel.since(o.kernel), Group: r.group - o.group, Client: r.client - o.client}
}

// Less takes off what an idle machine spends in the same time.
func (c CPU) Less(idle CPU) CPU {
	if idle.Wall <= 0 {
		return c
	}
	part := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) * float64(c.Wall) / float64(idle.Wall))
	}
	c.Machine -= part(idle.Machine)
	c.Kernel -= part(idle.Kernel)
	c.Group -= part(idle.Group)
	return c
}

// PerCycle is the candidate's CPU time in ms for each of n cycles: its processes and the kernel's threads. Both are read apart from
// all else that runs on the machine, but for kernel threads that work for others.
func (c CPU) PerCycle(n int) float64 { return Ms(max(0, c.Group)+max(0, c.Kernel)) / float64(n) }

// MachinePerCycle is the machine's busy time without the load client's, in ms a cycle: right on a machine that does nothing else,
// and there a check of PerCycle.
func (c CPU) MachinePerCycle(n int) float64 { return Ms(c.Machine-c.Client) / float64(n) }

// MemInfo returns fields of /proc/meminfo in KiB.
func MemInfo(names ...string) (map[string]int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	all := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		if f := strings.Fields(rest); len(f) > 0 {
			all[name], _ = strconv.ParseInt(f[0], 10, 64)
		}
	}
	out := map[string]int64{}
	for _, n := range names {
		v, ok := all[n]
		if !ok {
			return nil, fmt.Errorf("/proc/meminfo has no %s", n)
		}
		out[n] = v
	}
	return out, nil
}

// DropCaches empties the page cache and the caches of names, so that free memory says what is in use.
func DropCaches() error {
	unix.Sync()
	for range 3 { // what the first round frees may pin others
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0o200); err != nil {
			return fmt.Errorf("drop caches: %w", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil
}

// Resident is a process's share of the memory it has in use, in KiB (PSS); 0 when it has ended.
func Resident(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			v, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return v
		}
	}
	return 0
}
