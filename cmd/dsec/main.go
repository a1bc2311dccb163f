// Command dsec is the whole of dsec in one binary: the services of a machine (up, gateway, host, keeper), what looks at them (doctor,
// top) and the client commands of a person (run, exec, cp, logs, ...). It is the only place where the packages are wired together.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// version is set by the build.
var version = "dev"

type cli struct {
	URL     string           `help:"Server: http://host:port, https://host:port or unix:/path." env:"DSEC_URL" placeholder:"URL"`
	Key     string           `help:"API key." env:"DSEC_KEY" placeholder:"KEY"`
	KeyFile string           `help:"File that holds the API key." env:"DSEC_KEY_FILE" placeholder:"FILE"`
	Output  string           `short:"o" help:"Output: text or json; of export: the file." default:"text" placeholder:"FORM"`
	Version kong.VersionFlag `help:"Print the version."`

	Run      runCmd      `cmd:"" group:"sandboxes" help:"Run one command in a new sandbox and stop it afterwards."`
	Create   createCmd   `cmd:"" group:"sandboxes" help:"Make sandboxes and print their IDs."`
	Exec     execCmd     `cmd:"" group:"sandboxes" help:"Run a command in a sandbox."`
	Shell    shellCmd    `cmd:"" group:"sandboxes" help:"Open a terminal in a sandbox."`
	Cp       cpCmd       `cmd:"" group:"sandboxes" help:"Copy files or folders to or from a sandbox (SANDBOX:/path)."`
	Ps       psCmd       `cmd:"" group:"sandboxes" help:"List sandboxes."`
	Inspect  inspectCmd  `cmd:"" group:"sandboxes" help:"Show all that is known of a sandbox."`
	Stop     stopCmd     `cmd:"" group:"sandboxes" help:"Stop sandboxes by ID, name, label or job."`
	Pause    pauseCmd    `cmd:"" group:"sandboxes" help:"Freeze sandboxes; any request wakes them."`
	Resume   resumeCmd   `cmd:"" group:"sandboxes" help:"Wake paused sandboxes."`
	Logs     logsCmd     `cmd:"" group:"sandboxes" help:"Show the trajectory of a sandbox: every step, with its output; or remove trajectories."`
	Verdict  verdictCmd  `cmd:"" group:"sandboxes" help:"Attach a reward and metadata to a trajectory."`
	Trace    traceCmd    `cmd:"" group:"sandboxes" help:"Show what the steps of a sandbox did: files, processes, I/O."`
	Replay   replayCmd   `cmd:"" group:"sandboxes" help:"Do the recorded steps of a sandbox again in a fresh one and compare."`
	Restore  restoreCmd  `cmd:"" group:"sandboxes" help:"Make a sandbox that is gone again, from its trajectory."`
	Export   exportCmd   `cmd:"" group:"sandboxes" help:"Write trajectories as lines of JSON."`
	Snapshot snapshotCmd `cmd:"" group:"sandboxes" help:"Make a sandbox's changes a new layer."`
	Screen   screenCmd   `cmd:"" group:"sandboxes" help:"Use a sandbox's screen: picture, keys, pointer."`
	Fork     forkCmd     `cmd:"" group:"sandboxes" help:"Make sandboxes that begin with the files of a living one."`
	Migrate  migrateCmd  `cmd:"" group:"sandboxes" help:"Move a sandbox of a machine to another host."`
	Top      topCmd      `cmd:"" group:"sandboxes" help:"Show what the sandboxes use."`
	FnCall   fncallCmd   `cmd:"" name:"fncall" group:"sandboxes" help:"Run a small program to its end and judge it."`

	Layer layerCmd `cmd:"" group:"environments" help:"Build, list, roll back and remove layers."`
	Env   envCmd   `cmd:"" group:"environments" help:"Compose, build, list, export, roll back and remove environments."`
	Image imageCmd `cmd:"" group:"environments" help:"Import OCI images, list and remove them."`

	Up      upCmd      `cmd:"" group:"services" help:"Run gateway, monitor and host of one machine."`
	Gateway gatewayCmd `cmd:"" group:"services" help:"Run a gateway (with its monitor)."`
	Host    hostCmd    `cmd:"" group:"services" help:"Run a host."`
	Monitor monitorCmd `cmd:"" group:"services" help:"Watch the hosts and print what they report."`
	GC      gcCmd      `cmd:"" name:"gc" group:"services" help:"Give back the space of deleted objects in a bucket."`
	Keeper  keeperCmd  `cmd:"" group:"services" hidden:"" help:"Spawn and hold sandboxes for a host (started by the host)."`
	Blobd   blobdCmd   `cmd:"" group:"services" hidden:"" help:"Read layers on demand for a host (started by the host)."`
	Doctor  doctorCmd  `cmd:"" group:"services" help:"Say what this host can do, feature by feature, and why not."`
	APIKey  keyCmd     `cmd:"" name:"key" group:"services" help:"Make, list and revoke API keys."`

	Completion completionCmd `cmd:"" group:"other" help:"Print a shell completion script (bash, zsh, fish)."`
}

// exitCode ends the program with the code of a command that ran in a sandbox.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit %d", int(e)) }

// parser reads the command line into c.
func parser(c *cli) (*kong.Kong, error) {
	return kong.New(c, kong.Name("dsec"),
		kong.Description("Sandboxes for agents: isolated, stateful environments that start in milliseconds, and a log that never lies."),
		kong.Vars{"version": "dsec " + version},
		kong.ExplicitGroups([]kong.Group{{Key: "sandboxes", Title: "Sandboxes"}, {Key: "environments", Title: "Layers and environments"},
			{Key: "services", Title: "Services"}, {Key: "other", Title: "Other"}}))
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "keeper" {
		os.Exit(keeperMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "blobd" {
		os.Exit(blobdMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "warden" {
		os.Exit(wardenMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == vmm.ProbeArg {
		os.Exit(kvmProbeMain())
	}
	var c cli
	k, err := parser(&c)
	if err != nil {
		panic(err) // TestCommandLine finds it
	}
	words := os.Args[1:]
	if len(words) == 0 {
		words = []string{"--help"}
	}
	if words[0] == "help" { // as many programs have it
		words = append(words[1:], "--help")
	}
	parsed, err := k.Parse(words)
	if err != nil {
		// Standard output is for what was asked for, and codes below 125 are those of commands inside.
		text := err.Error()
		var p *kong.ParseError
		if errors.As(err, &p) && p.Context != nil {
			text = withFamiliar(text, flagNames(p.Context))
		}
		say("%s (see `%s --help`)", text, commandOf(err))
		os.Exit(125)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	parsed.BindTo(ctx, (*context.Context)(nil))
	err = parsed.Run(&c)
	var code exitCode
	switch {
	case err == nil:
	case errors.As(err, &code):
		os.Exit(int(code))
	default:
		fmt.Fprintln(os.Stderr, "dsec:", lines(failure(ctx, err)))
		os.Exit(125)
	}
}

// commandOf names the command whose use was wrong, as far as it was given.
func commandOf(err error) string {
	var p *kong.ParseError
	if errors.As(err, &p) && p.Context != nil {
		if path := p.Context.Command(); path != "" {
			return "dsec " + bare(path)
		}
	}
	return "dsec"
}

// bare leaves the arguments out of a path of commands such as "exec <id> <argv>".
func bare(path string) string {
	var out []string
	for _, w := range strings.Fields(path) {
		if w[0] != '<' && w[0] != '[' {
			out = append(out, w)
		}
	}
	return strings.Join(out, " ")
}

const noSandbox = "A name is that of a living sandbox; one that has ended is found by its ID (`dsec ps -a`)."

// failure is what is said of an error that ends the program. A server that dies ends calls as a cancellation does, which only the user makes.
func failure(ctx context.Context, err error) string {
	if errors.Is(err, context.Canceled) && ctx.Err() == nil {
		return err.Error() + "\nThe connection to the server broke."
	}
	return explain(err)
}

// explain adds what to do next to the errors that have one answer.
func explain(err error) string {
	text := err.Error()
	switch {
	case unauthenticated(err):
		return text + "\nGive the key with --key-file or DSEC_KEY; `dsec up` wrote the first one beside its socket."
	case errors.Is(err, client.ErrNotFound) && strings.HasPrefix(text, "sandbox "):
		return text + "\n" + noSandbox
	case errors.Is(err, client.ErrInvalid) && strings.HasPrefix(text, "restore: sandbox id "):
		return text + "\nA name is that of a living sandbox; one that is gone is restored by its ID (`dsec ps -a`) or by --job and --create-key."
	case errors.Is(err, client.ErrNotFound) && strings.HasPrefix(text, "screen: "):
		return text + "\nNo display server serves RFB there; start one inside or name its --port (docs/ops/desktop.md)."
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return text
}

// unauthenticated tells a key that is missing or wrong from one that may not do this.
func unauthenticated(err error) bool {
	var e *client.Error
	return errors.As(err, &e) && e.Code == "unauthenticated"
}

// Validate checks what the form of the output may be: export takes a file there.
func (c *cli) Validate(k *kong.Context) error {
	if c.Output == "text" || c.Output == "json" || bare(k.Command()) == "export" {
		return nil
	}
	return fmt.Errorf("--output %q: want text or json", c.Output)
}

func (c *cli) client(ctx context.Context) (*client.Client, error) {
	return client.Connect(ctx, client.Config{URL: c.URL, Key: c.Key, KeyFile: c.KeyFile})
}
