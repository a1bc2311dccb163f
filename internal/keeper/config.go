package keeper

import (
	"flag"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

var instancePattern = regexp.MustCompile(`^[a-z0-9]{1,32}$`)

func (c *Config) validate() error {
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("keeper dir %q: want an absolute path: %w", c.Dir, sandbox.ErrInvalid)
	}
	if !instancePattern.MatchString(c.Instance) {
		return fmt.Errorf("keeper instance %q: want 1 to 32 of a-z 0-9: %w", c.Instance, sandbox.ErrInvalid)
	}
	if c.NetnsPool == 0 {
		c.NetnsPool = 16
	}
	if c.Lonely == 0 {
		c.Lonely = 2 * time.Minute
	}
	if c.NetnsPool < 0 || c.NetnsPool > 1024 {
		return fmt.Errorf("keeper netns pool %d: 1 to 1024: %w", c.NetnsPool, sandbox.ErrInvalid)
	}
	return nil
}

func (c *Config) flags() []string {
	f := []string{"--dir", c.Dir, "--instance", c.Instance, "--netns-pool", strconv.Itoa(c.NetnsPool)}
	if c.Lonely > 0 {
		f = append(f, "--lonely", c.Lonely.String())
	}
	if c.LeaveDynmods {
		f = append(f, "--leave-dynmods")
	}
	return f
}

func parseFlags(args []string) (Config, error) {
	var c Config
	fs := flag.NewFlagSet("keeper", flag.ContinueOnError)
	fs.StringVar(&c.Dir, "dir", "", "run folder")
	fs.StringVar(&c.Instance, "instance", "", "name of the instance")
	fs.IntVar(&c.NetnsPool, "netns-pool", 16, "network namespaces kept ready")
	fs.BoolVar(&c.LeaveDynmods, "leave-dynmods", false, "leave the cgroup2 mount's favordynmods as it is")
	fs.DurationVar(&c.Lonely, "lonely", 0, "end after so long without a host and without a sandbox")
	if err := fs.Parse(args); err != nil {
		return c, err
	}
	return c, c.validate()
}
