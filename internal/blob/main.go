package blob

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/store"
)

// fuseFD is the descriptor under which the supervisor gives a daemon its connection.
const fuseFD = 3

const (
	memoryLimit = 384 << 20 // of the daemon's heap; its cgroup, where there is one with a memory controller, gets twice that
	// heapGrowth is in percent. Nearly all of the heap are units without a pointer that live for a moment: few collections are enough, and
	// the limit bounds the rest.
	heapGrowth = 400
	spareProcs = 4 // beside one for each processor
)

func (c *Config) flags(stores []string, group string) []string {
	f := []string{"--run", c.RunDir, "--cache", c.CacheDir, "--limit", strconv.FormatInt(c.Limit, 10), "--deadline", c.Deadline.String(),
		"--fetches", strconv.Itoa(c.Fetches), "--prefetch", strconv.Itoa(c.Prefetch), "--mark", c.Mark, "--fuse", c.Fuse, "--group", group}
	if c.Buffered {
		f = append(f, "--buffered")
	}
	for _, s := range stores {
		f = append(f, "--store", s)
	}
	return f
}

// Main runs a daemon until it is told to stop and returns the process's exit code. Its connection is descriptor 3; open opens the
// stores that the supervisor named.
func Main(args []string, open func(stores []string) (store.Store, error), log *slog.Logger) int {
	if err := run(args, open, log); err != nil {
		log.Error("blobd", "err", err)
		return 1
	}
	return 0
}

type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func run(args []string, open func([]string) (store.Store, error), log *slog.Logger) error {
	heir := len(args) > 0 && args[0] == heirFlag
	if heir {
		args = args[1:]
	}
	var c Config
	var stores list
	var group string
	fs := flag.NewFlagSet("blobd", flag.ContinueOnError)
	fs.StringVar(&c.RunDir, "run", "", "run folder")
	fs.StringVar(&c.CacheDir, "cache", "", "cache folder")
	fs.Int64Var(&c.Limit, "limit", 0, "octets of the cache")
	fs.DurationVar(&c.Deadline, "deadline", 0, "of a read")
	fs.IntVar(&c.Fetches, "fetches", 0, "reads of the store at once")
	fs.IntVar(&c.Prefetch, "prefetch", 0, "units fetched ahead at once")
	fs.BoolVar(&c.Buffered, "buffered", false, "let the kernel keep what it read")
	fs.StringVar(&c.Mark, "mark", "", "of the settings")
	fs.StringVar(&c.Fuse, "fuse", "", "mark of the connection")
	fs.StringVar(&group, "group", "", "name of the cgroup")
	fs.Var(&stores, "store", "store; repeat")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if err := c.fill(); err != nil {
		return err
	}
	if heir {
		debug.SetGCPercent(20)
		return inherit(c.RunDir, args)
	}
	unix.CloseOnExec(fuseFD)
	// What unpacks units ahead must not keep those from running that answer reads: between the two the kernel decides, not our scheduler.
	runtime.GOMAXPROCS(runtime.NumCPU() + spareProcs)
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	debug.SetMemoryLimit(memoryLimit)
	debug.SetGCPercent(heapGrowth)
	protect(group, log)
	if dismiss, err := bequeath(args); err != nil {
		log.Warn("reads will hang should this process and its host die", "err", err)
	} else {
		defer dismiss()
	}
	st, err := open(stores)
	if err != nil {
		return err
	}
	s, err := NewServer(c, st, os.NewFile(fuseFD, "/dev/fuse"), log)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// protect keeps the daemon alive where others go: it holds up every sandbox that reads through it.
func protect(group string, log *slog.Logger) {
	for _, score := range []string{"-1000", "-500", "0"} { // lowering it needs a capability that a host may lack
		if os.WriteFile("/proc/self/oom_score_adj", []byte(score), 0) == nil {
			break
		}
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil && lim.Cur < lim.Max {
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	if group == "" {
		return
	}
	dir, err := groupDir(group)
	if err == nil {
		if err = os.Mkdir(dir, 0o755); errors.Is(err, os.ErrExist) {
			err = nil
		}
	}
	if err == nil {
		// Without a memory controller there is no such file.
		os.WriteFile(filepath.Join(dir, "memory.high"), []byte(strconv.Itoa(2*memoryLimit)), 0)
		err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)
	}
	if err != nil {
		log.Warn("no cgroup of its own", "err", err)
	}
}

// groupDir is the folder of a cgroup in the v2 tree.
func groupDir(name string) (string, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(info)) {
		pre, post, _ := strings.Cut(line, " - ")
		a := strings.Fields(pre)
		if b := strings.Fields(post); len(a) >= 5 && len(b) > 0 && b[0] == "cgroup2" && a[3] == "/" {
			return filepath.Join(a[4], name), nil
		}
	}
	return "", fmt.Errorf("cgroup2 is not mounted")
}
