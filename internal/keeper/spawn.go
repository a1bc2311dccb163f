package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// LogName is the keeper's log in its run folder.
const LogName = "keeper.log"

// Spawn starts a keeper for the run folder, in a session of its own, and returns when it answers Hello or ctx ends. exe is this
// program; args come before the keeper's own flags, as in "keeper". The keeper does not end with the caller.
func Spawn(ctx context.Context, exe string, args []string, cfg Config) error {
	if err := cfg.validate(); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("keeper: make run folder: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(cfg.Dir, LogName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("keeper: open log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(exe, append(append([]string(nil), args...), cfg.flags()...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("keeper: start %s: %w", exe, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // reaps it when it dies before the caller does
	for {
		c, err := Dial(ctx, cfg.Dir, DialOptions{Host: "spawn"})
		if err == nil {
			c.Close()
			return nil
		}
		if !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		select {
		case err := <-ended:
			return fmt.Errorf("keeper: ended at start (%v); see %s", err, log.Name())
		case <-ctx.Done():
			return fmt.Errorf("keeper: not ready (%v): %w", err, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}
