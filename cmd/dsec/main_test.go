package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// Flags and arguments of all commands fit together, and each command has words that explain it.
func TestCommandLine(t *testing.T) {
	var c cli
	k, err := parser(&c)
	if err != nil {
		t.Fatal(err)
	}
	leaves := k.Model.Leaves(false)
	if len(leaves) < 40 {
		t.Fatalf("%d commands", len(leaves))
	}
	for _, n := range leaves {
		var words []string
		for at := n; at != nil && at.Type == kong.CommandNode; at = at.Parent {
			words = append([]string{at.Name}, words...)
		}
		if n.Help == "" && !n.Hidden {
			t.Errorf("%s has no help", strings.Join(words, " "))
		}
		for _, f := range n.Flags {
			if f.Help == "" && !f.Hidden {
				t.Errorf("%s --%s has no help", strings.Join(words, " "), f.Name)
			}
		}
	}
}

// Only who interrupted the program is told so.
func TestBrokenCallsAreNotInterruptions(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	broken := fmt.Errorf("import layer: %w", context.Canceled)
	if got := failure(ctx, broken); !strings.Contains(got, "import layer") || !strings.Contains(got, "connection to the server broke") {
		t.Errorf("a server that died: %q", got)
	}
	cancel()
	if got := failure(ctx, broken); got != "interrupted" {
		t.Errorf("a user's interrupt: %q", got)
	}
}
