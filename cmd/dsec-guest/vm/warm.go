package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// warm bears a sandbox on a disk of memory, starts a program in it and removes it: what that reads and makes is then in the template's
// memory. A program that the image does not have is no failure.
func warm(ctx context.Context, c *keeper.Client, layer string) error {
	const dir = "/run/warm"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("warm", dir, "tmpfs", 0, "mode=0700,size=16m"); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	for _, d := range []string{"/upper", "/work"} {
		if err := os.Mkdir(dir+d, 0o755); err != nil {
			return err
		}
	}
	const id sandbox.ID = "template-aaaaaaaaaaaaaaaa"
	_, err := c.Create(ctx, &keeper.Birth{
		ID: id, Layers: []string{layer}, UpperDir: dir + "/upper", WorkDir: dir + "/work", UIDBase: 1 << 20, Hostname: "template",
		Resources: sandbox.Resources{Memory: 64 << 20, Pids: 64, CPUWeight: 100, Disk: 16 << 20}, Env: []string{"PATH=/bin:/usr/bin"},
	})
	if err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	cmd := &sandbox.Command{ID: "warm", Argv: []string{"/bin/sh", "-c", ":"}, Cwd: "/", User: "root", OutputCap: 4096, Timeout: 5 * time.Second}
	if err := c.Start(ctx, id, cmd); err == nil {
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			list, err := c.List(ctx)
			if err != nil || len(list) != 1 || len(list[0].Commands) == 0 || list[0].Commands[0].Ended {
				break
			}
		}
	}
	if err := c.Destroy(ctx, id); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	return nil
}
