package host

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Config is how a host runs. Its fields are turned by who operates the machine.
type Config struct {
	ID      sandbox.HostID // identity, chosen once
	Dir     string         // state folder; holds the key for hashes of secrets
	Version string         // of the software

	MaxSandboxes  int           // living at once
	MaxBirths     int           // creates worked on at once
	MaxWaiting    int           // creates that wait for their turn; more are refused
	MemoryReserve int64         // octets of available memory below which no sandbox is admitted
	DiskReserve   int64         // octets of free disk for sandboxes below which none is admitted
	LogReserve    int64         // octets of free log space below which none is admitted
	Retention     time.Duration // of records and logs after a job's last sandbox, where the job names none
	// ForgetUnknown ends living sandboxes that the log does not know. Without it a host that finds such refuses to start: its log was
	// lost, damaged or is another's, and what lives may be worth more than a quick start.
	ForgetUnknown bool
	LogDir        string // where the log lies, for error texts
}

// Default is a configuration for a machine of any size; ID and Dir are the caller's to set.
func Default() Config {
	return Config{
		MaxSandboxes: 4000, MaxBirths: 16, MaxWaiting: 1024,
		MemoryReserve: 512 << 20, DiskReserve: 512 << 20, LogReserve: 256 << 20, Retention: 24 * time.Hour,
	}
}

// Validate names the field that is wrong.
func (c *Config) Validate() error {
	if _, err := sandbox.ParseHostID(string(c.ID)); err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		ok   bool
	}{
		{"dir", c.Dir != ""}, {"max_sandboxes", c.MaxSandboxes > 0}, {"max_births", c.MaxBirths > 0}, {"max_waiting", c.MaxWaiting >= 0},
		{"memory_reserve", c.MemoryReserve >= 0}, {"disk_reserve", c.DiskReserve >= 0}, {"log_reserve", c.LogReserve >= 0},
		{"retention", c.Retention > 0},
	} {
		if !f.ok {
			return fmt.Errorf("host config: %s: missing or out of range: %w", f.name, sandbox.ErrInvalid)
		}
	}
	return nil
}

// Deps are what a host works with.
type Deps struct {
	Backends map[string]sandbox.Backend // by the name in Spec.Backend
	Log      Log
	// Memory is the machine's memory in octets; nil reads /proc/meminfo.
	Memory func() (total, available int64, err error)
	// Disk is the free space for sandboxes' own writes in octets; nil is not watched.
	Disk func() (free int64, err error)
	// LogDisk is the free space of the log's file system in octets; nil is not watched.
	LogDisk func() (free int64, err error)
	// Doctor says what this host can do, for its status. May be nil.
	Doctor func(ctx context.Context) map[string]string
	// TakeOver shuts a lost host out of the store and fetches its log into a folder. Nil: this host has no store.
	TakeOver func(ctx context.Context, host, dir string) (LostLog, error)
	Logger   *slog.Logger
	Registry prometheus.Registerer // nil registers nothing
}

// Log is what a host needs of [trajectory.Log].
type Log interface {
	Append(ctx context.Context, id trajectory.ID, recs []trajectory.Record, d sandbox.Durability) (first uint64, err error)
	Read(ctx context.Context, id trajectory.ID, q trajectory.Query) (recs []trajectory.Record, next uint64, err error)
	Wait(ctx context.Context, id trajectory.ID, seq uint64) error
	ReadOutput(ctx context.Context, id trajectory.ID, cmd string, stream sandbox.StreamName, offset int64, p []byte) (int, error)
	StreamState(id trajectory.ID, cmd string, stream sandbox.StreamName) (trajectory.StreamState, error)
	Stat(id trajectory.ID) (trajectory.Info, error)
	Trajectories() []trajectory.Info
	Remove(ctx context.Context, ids ...trajectory.ID) error
	NewInputWriter() *trajectory.InputWriter
	OpenInput(in *trajectory.Input) (io.ReadCloser, error)
	Space() trajectory.Space
	Stores() bool
	Ship(ctx context.Context) error
	Sync(ctx context.Context) error
	Fenced(ctx context.Context) (bool, error)
	Import(ctx context.Context, id trajectory.ID, recs []trajectory.Record) error
	Keep(from interface {
		OpenInput(in *trajectory.Input) (io.ReadCloser, error)
	}, in *trajectory.Input, d sandbox.Durability) (*trajectory.Input, error)
}

// secretKey is the key under which values of secret environment entries are hashed into the log. It is made at the first start.
func secretKey(dir string) ([]byte, error) {
	path := filepath.Join(dir, "secret.key")
	key, err := os.ReadFile(path)
	if err == nil && len(key) == 32 {
		return key, nil
	}
	if err == nil {
		return nil, fmt.Errorf("read %s: %d octets, want 32; restore it, or remove it to give up comparing secrets of older steps: %w", path, len(key), sandbox.ErrInvalid)
	}
	if !os.IsNotExist(err) {
		return nil, fmt.Errorf("read secret key: %w", err)
	}
	key = randomOctets(32)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	if err := writeFile(path, key); err != nil {
		return nil, fmt.Errorf("write secret key: %w", err)
	}
	return key, nil
}

// writeFile publishes a small file whole or not at all.
func writeFile(path string, data []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	return err
}
