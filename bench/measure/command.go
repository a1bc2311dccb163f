package measure

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// commandTime bounds a command that has to end by itself.
const commandTime = 30 * time.Second

// Command runs a command to its end; its error tells what it printed. An interrupt does not end it, for who is killed in the middle of making
// a container leaves it: what runs takes milliseconds, and whoever calls looks at ctx before the next. It is killed after 30 s.
func Command(ctx context.Context, argv ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
	defer cancel()
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's interrupt goes to a whole group
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %.500s", strings.Join(argv, " "), err, out)
	}
	return nil
}
