package sandbox

import (
	"fmt"
	"strings"
	"time"
)

// StreamName is one of a command's output streams. A terminal has Stdout alone.
type StreamName uint8

const (
	Stdout StreamName = 1
	Stderr StreamName = 2
)

// Command is a request to run something in a sandbox. Either Argv is set (a process of its own) or Session and Text (text for the
// living shell of that session). Strings are octets; none may hold a NUL.
type Command struct {
	ID        string        `json:"id"` // the client's step key, or given by the host
	Argv      []string      `json:"argv,omitempty"`
	Session   string        `json:"session,omitempty"`
	Text      string        `json:"text,omitempty"`
	Env       []string      `json:"env,omitempty"` // on top of the sandbox's
	SecretEnv []string      `json:"-"`             // names in Env whose values the log keeps only as a keyed hash
	Cwd       string        `json:"cwd,omitempty"`
	User      string        `json:"user,omitempty"`
	Stdin     []byte        `json:"stdin,omitempty"`      // given at once
	StdinOpen bool          `json:"stdin_open,omitempty"` // more comes by write-stdin; else end of file follows Stdin
	Terminal  *Size         `json:"terminal,omitempty"`
	Timeout   time.Duration `json:"timeout,omitempty"` // counts only time in which the sandbox runs; 0 is none
	OutputCap int64         `json:"output_cap,omitempty"`
	// Class says what a restore does with it; empty takes the job's. Check is the check of ClassVerify.
	Class StepClass `json:"-"`
	Check []string  `json:"-"`
}

// StepClass says what a restore of a sandbox does with a step that was done before.
type StepClass string

const (
	ClassRepeat StepClass = "repeat" // done again
	ClassVerify StepClass = "verify" // a check decides
	ClassNever  StepClass = "never"  // the caller is asked
)

// Size of a terminal in characters.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Fill sets the defaults of what is zero, from the sandbox's own.
func (c *Command) Fill(s *Spec) {
	set(&c.OutputCap, DefaultOutputCap)
	if c.Session == "" {
		set(&c.Cwd, s.Cwd)
		set(&c.User, s.User)
	}
	if c.Terminal != nil && c.Terminal.Rows == 0 && c.Terminal.Cols == 0 {
		c.Terminal = &Size{Rows: 24, Cols: 80}
	}
}

// Validate checks a filled command; the error names the field and the fix and wraps ErrInvalid.
func (c *Command) Validate() error {
	if err := CheckKey("command id", c.ID); err != nil {
		return err
	}
	if (len(c.Argv) > 0) == (c.Session != "") {
		return fmt.Errorf("argv or session: give one of them: %w", ErrInvalid)
	}
	if c.Session != "" {
		if err := c.validateSession(); err != nil {
			return err
		}
	} else if err := c.validateArgv(); err != nil {
		return err
	}
	if c.OutputCap < 0 || c.OutputCap > MaxOutputCap {
		return fmt.Errorf("output_cap %d: 0 to %d octets: %w", c.OutputCap, MaxOutputCap, ErrInvalid)
	}
	if c.Timeout < 0 {
		return fmt.Errorf("timeout %v: must not be negative: %w", c.Timeout, ErrInvalid)
	}
	return c.validateClass()
}

func (c *Command) validateClass() error {
	switch {
	case c.Class != "" && c.Class != ClassRepeat && c.Class != ClassVerify && c.Class != ClassNever:
		return fmt.Errorf("restore %.40q: want repeat, verify or never: %w", c.Class, ErrInvalid)
	case (c.Class == ClassVerify) != (len(c.Check) > 0):
		return fmt.Errorf("check: goes with restore %q, and that with it: %w", ClassVerify, ErrInvalid)
	}
	if len(c.Check) == 0 {
		return nil
	}
	check := Command{ID: "check", Argv: c.Check, Cwd: "/"}
	if err := check.validateArgv(); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	return nil
}

func (c *Command) validateSession() error {
	if err := CheckKey("session", c.Session); err != nil {
		return err
	}
	switch {
	case strings.IndexByte(c.Text, 0) >= 0:
		return fmt.Errorf("text: holds a NUL octet, which no shell takes: %w", ErrInvalid)
	case len(c.Text) > 16<<20:
		return fmt.Errorf("text: %d octets, at most 16 MiB: %w", len(c.Text), ErrInvalid)
	case c.Terminal != nil || c.User != "" || c.Cwd != "" || len(c.Env) > 0:
		return fmt.Errorf("terminal, user, cwd or env: belong to the session, set them when it is opened: %w", ErrInvalid)
	}
	return nil
}

func (c *Command) validateArgv() error {
	total := 0
	for i, a := range c.Argv {
		switch {
		case strings.IndexByte(a, 0) >= 0:
			return fmt.Errorf("argv[%d]: holds a NUL octet: %w", i, ErrInvalid)
		case len(a) > MaxArgument:
			return fmt.Errorf("argv[%d]: %d octets; the kernel takes fewer than %d (send it as stdin or a file): %w", i, len(a), MaxArgument+1, ErrInvalid)
		}
		total += len(a) + 9
	}
	if c.Argv[0] == "" {
		return fmt.Errorf("argv[0]: names no program: %w", ErrInvalid)
	}
	if c.Text != "" {
		return fmt.Errorf("text: needs a session: %w", ErrInvalid)
	}
	for _, e := range c.Env {
		total += len(e) + 9
	}
	if total > MaxArguments {
		return fmt.Errorf("argv and env: %d octets together, the kernel takes %d: %w", total, MaxArguments, ErrInvalid)
	}
	if err := CheckEnv("env", c.Env); err != nil {
		return err
	}
	return CheckPath("cwd", c.Cwd)
}

// Tail is T, the number of last octets kept of a stream whose cap is c.
func Tail(c int64) int64 { return min(MaxTail, c/2) }
