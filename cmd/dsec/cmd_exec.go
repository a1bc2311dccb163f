package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/term"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// processFlags describe how a command runs.
type processFlags struct {
	Timeout time.Duration `short:"t" help:"Kill all of it after this long." placeholder:"DUR"`
	TTY     bool          `short:"T" name:"tty" help:"Give it a terminal."`
	Stdin   bool          `short:"i" name:"stdin" help:"Pass standard input on (a pipe or file is passed on without it too)."`
	Step    string        `help:"Step key: the same key never runs twice." placeholder:"KEY"`
	Cap     size          `help:"Octets kept of each stream (default 16m)." placeholder:"SIZE"`
}

type runCmd struct {
	sandboxFlags
	processFlags
	Keep bool     `help:"Leave the sandbox running and print its ID to standard error."`
	Argv []string `arg:"" passthrough:"" help:"Command, after --."`
}

func (x *runCmd) Run(ctx context.Context, c *cli) error {
	o, err := x.options()
	if err != nil {
		return err
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	if err := x.fetch(ctx, cl); err != nil {
		return err
	}
	if o.Key == "" {
		o.Key = fmt.Sprintf("run-%d-%d", os.Getpid(), time.Now().UnixNano())
	}
	sb, err := cl.RunContainer(ctx, o)
	if err != nil {
		if ctx.Err() != nil {
			// The create may be under way: stop whatever comes of it.
			late, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			_ = cl.StopKey(late, o.Job, o.Key, o.Name)
		}
		return err
	}
	if x.Keep {
		fmt.Fprintln(os.Stderr, sb.ID)
	} else {
		defer sb.Close()
	}
	return x.processFlags.exec(ctx, c, sb, client.Cmd{Argv: afterDashes(x.Argv)})
}

// Validate refuses an unknown flag, which would else begin the command.
func (x *runCmd) Validate(k *kong.Context) error   { return noFlag(k, x.Argv) }
func (x *execCmd) Validate(k *kong.Context) error  { return noFlag(k, x.Argv) }
func (x *shellCmd) Validate(k *kong.Context) error { return noFlag(k, x.Shell) }

func noFlag(k *kong.Context, argv []string) error {
	if len(argv) == 0 || argv[0] == "--" || !strings.HasPrefix(argv[0], "-") {
		return nil
	}
	word, _, _ := strings.Cut(argv[0], "=")
	hint := ""
	if near := nearest(word, flagNames(k)); near != "" {
		hint = fmt.Sprintf(", did you mean %q?", near)
	}
	return fmt.Errorf("unknown flag %s%s (a command that begins with a dash goes behind --)", word, hint)
}

// afterDashes drops the "--" that a passthrough argument keeps.
func afterDashes(argv []string) []string {
	if len(argv) > 0 && argv[0] == "--" {
		return argv[1:]
	}
	return argv
}

type execCmd struct {
	processFlags
	Var    map[string]string `short:"E" help:"Environment variable k=v; repeat." mapsep:"none"`
	User   string            `short:"u" help:"User (name, uid or uid:gid)."`
	Cwd    string            `short:"w" help:"Working folder."`
	Detach bool              `short:"d" help:"Print the command's ID and leave it running."`
	ID     string            `arg:"" help:"Sandbox ID or name."`
	Argv   []string          `arg:"" passthrough:"" help:"Command, after --."`
}

func (x *execCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	sb := cl.Sandbox(x.ID)
	cmd := client.Cmd{Argv: afterDashes(x.Argv), Env: x.Var, User: x.User, Cwd: x.Cwd}
	if x.Detach {
		x.fill(&cmd)
		p, err := x.join(ctx, sb, &cmd)
		if err != nil {
			return err
		}
		return c.emit(&dsecv1.Command{Id: p.ID, State: "running"}, func() { fmt.Println(p.ID) })
	}
	return x.exec(ctx, c, sb, cmd)
}

// join starts a command, or joins the one of its step. Whether that one has a standard input hangs on what dsec was called from, not on the
// command: where they differ in that alone, it is joined all the same, unless --stdin says that there is something to pass on.
func (f *processFlags) join(ctx context.Context, sb *client.Sandbox, cmd *client.Cmd) (*client.Process, error) {
	p, err := sb.Start(ctx, *cmd)
	if f.Step == "" || f.Stdin || !errors.Is(err, client.ErrExists) || !strings.Contains(err.Error(), ": stdin_open: ") {
		return p, err
	}
	cmd.StdinOpen = !cmd.StdinOpen
	return sb.Start(ctx, *cmd)
}

func (f *processFlags) fill(cmd *client.Cmd) {
	cmd.ID, cmd.Timeout, cmd.OutputCap = f.Step, f.Timeout, int64(f.Cap)
}

// exec runs the command with the caller's streams and ends with its code.
func (f *processFlags) exec(ctx context.Context, c *cli, sb *client.Sandbox, cmd client.Cmd) error {
	f.fill(&cmd)
	if len(cmd.Argv) == 0 {
		return errors.New("no command: give one after --")
	}
	if f.TTY {
		return terminal(ctx, sb, cmd)
	}
	cmd.StdinOpen = f.Stdin || !isTerminal(os.Stdin)
	p, err := f.join(ctx, sb, &cmd)
	if err != nil {
		return err
	}
	if cmd.StdinOpen {
		go pump(ctx, p, os.Stdin)
	}
	var stdout, stderr bytes.Buffer
	outTo, errTo := io.Writer(os.Stdout), io.Writer(os.Stderr)
	if c.Output == "json" {
		outTo, errTo = &stdout, &stderr
	}
	o, err := p.Stream(ctx, outTo, errTo)
	if err != nil {
		if ctx.Err() != nil {
			late, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_ = p.Signal(late, int(syscall.SIGTERM))
		}
		return err
	}
	if c.Output == "json" { // one value, in the form that the API answers a start with
		if err := c.show(&dsecv1.StartResponse{Command: &dsecv1.Command{Id: p.ID, State: "ended", Outcome: o}, Stdout: stdout.Bytes(), Stderr: stderr.Bytes(),
			StdoutText: strings.ToValidUTF8(stdout.String(), "\ufffd"), StderrText: strings.ToValidUTF8(stderr.String(), "\ufffd")}); err != nil {
			return err
		}
	}
	return finish(o)
}

func finish(o *dsecv1.Outcome) error {
	switch o.Kind {
	case "start_failed", "session_ended", "interrupted", "unknown":
		say("%s: %s", o.Kind, o.Error)
	case "timed_out":
		fmt.Fprintln(os.Stderr, "dsec: timed out; all of its processes were killed")
	case "out_of_memory":
		fmt.Fprintln(os.Stderr, "dsec: killed: out of memory (raise --memory)")
	}
	for name, s := range map[string]*dsecv1.StreamEnd{"stdout": o.Stdout, "stderr": o.Stderr} {
		if s != nil && s.Truncated {
			fmt.Fprintf(os.Stderr, "dsec: %s truncated: %d of %d octets kept\n", name, s.Head+s.Tail, s.Total)
		}
	}
	if code := (&client.Result{Outcome: o}).Code(); code != 0 {
		return exitCode(code)
	}
	return nil
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// pump passes standard input on until its end, or until the command no longer takes any.
func pump(ctx context.Context, p *client.Process, r io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 && p.Write(ctx, buf[:n]) != nil {
			return
		}
		if err != nil {
			_ = p.CloseStdin(ctx)
			return
		}
	}
}

type shellCmd struct {
	User  string   `short:"u" help:"User (name, uid or uid:gid)."`
	Cwd   string   `short:"w" help:"Working folder."`
	ID    string   `arg:"" help:"Sandbox ID or name."`
	Shell []string `arg:"" optional:"" passthrough:"" help:"Another shell, after --."`
}

func (x *shellCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	argv := afterDashes(x.Shell)
	if len(argv) == 0 {
		argv = []string{"/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi"}
	}
	return terminal(ctx, cl.Sandbox(x.ID), client.Cmd{Argv: argv, User: x.User, Cwd: x.Cwd})
}

// terminal joins the caller's terminal to one inside, with its size from the first octet on.
func terminal(ctx context.Context, sb *client.Sandbox, cmd client.Cmd) error {
	fd := int(os.Stdin.Fd())
	cmd.Terminal, cmd.StdinOpen = &dsecv1.Terminal{}, true
	if cols, rows, err := term.GetSize(fd); err == nil {
		cmd.Terminal.Rows, cmd.Terminal.Cols = uint32(rows), uint32(cols)
	}
	if t := os.Getenv("TERM"); t != "" {
		env := map[string]string{"TERM": t}
		for k, v := range cmd.Env {
			env[k] = v
		}
		cmd.Env = env
	}
	p, err := sb.Start(ctx, cmd)
	if err != nil {
		return err
	}
	if term.IsTerminal(fd) {
		old, err := term.MakeRaw(fd)
		if err != nil {
			return err
		}
		defer term.Restore(fd, old)
		resized := make(chan os.Signal, 1)
		signal.Notify(resized, syscall.SIGWINCH)
		defer signal.Stop(resized)
		go func() {
			for range resized {
				if cols, rows, err := term.GetSize(fd); err == nil {
					_ = p.Resize(ctx, rows, cols)
				}
			}
		}()
	}
	go pump(ctx, p, os.Stdin)
	o, err := p.Stream(ctx, os.Stdout, os.Stderr)
	if err != nil {
		return err
	}
	if code := (&client.Result{Outcome: o}).Code(); code != 0 {
		if o.Error != "" {
			fmt.Fprintf(os.Stderr, "\r\ndsec: %s\r\n", plain(o.Error))
		}
		return exitCode(code)
	}
	return nil
}
