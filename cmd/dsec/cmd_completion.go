package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Run prints a script that completes the commands and flags, which it reads from the same model that parses them, and sandbox IDs.
func (x *completionCmd) Run(k *kong.Kong) error {
	switch x.Shell {
	case "bash":
		fmt.Print(bashCompletion(k.Model))
	case "zsh":
		fmt.Print("#compdef dsec\nautoload -U +X bashcompinit && bashcompinit\n" + bashCompletion(k.Model))
	case "fish":
		fmt.Print(fishCompletion(k.Model))
	}
	return nil
}

// words lists, for each path of commands, what can come next.
func words(app *kong.Application) map[string][]string {
	out := map[string][]string{}
	var walk func(n *kong.Node, path string)
	walk = func(n *kong.Node, path string) {
		for _, c := range n.Children {
			if !c.Hidden {
				out[path] = append(out[path], c.Name)
				walk(c, strings.TrimSpace(path+" "+c.Name))
			}
		}
		for _, f := range n.Flags {
			out[path] = append(out[path], "--"+f.Name)
		}
	}
	walk(app.Node, "")
	return out
}

var takesSandbox = []string{"exec", "shell", "inspect", "stop", "pause", "resume", "logs", "snapshot", "fork", "migrate", "cp"}

func bashCompletion(app *kong.Application) string {
	var b strings.Builder
	b.WriteString("_dsec() {\n  local cur=${COMP_WORDS[COMP_CWORD]} path= w\n  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n" +
		"    case $w in -*) ;; *) case \"${path:+$path }$w\" in\n")
	all := words(app)
	for path := range all {
		if path != "" {
			fmt.Fprintf(&b, "      %q) path=%q ;;\n", path, path)
		}
	}
	b.WriteString("    esac ;; esac\n  done\n  local list=\n  case $path in\n")
	for path, list := range all {
		fmt.Fprintf(&b, "    %q) list=%q ;;\n", path, strings.Join(list, " "))
	}
	fmt.Fprintf(&b, "  esac\n  case $path in %s) case $cur in -*) ;; *) list=\"$list $(dsec ps -q 2>/dev/null)\" ;; esac ;; esac\n", strings.Join(takesSandbox, "|"))
	b.WriteString("  COMPREPLY=($(compgen -W \"$list\" -- \"$cur\"))\n}\ncomplete -o default -F _dsec dsec\n")
	return b.String()
}

func fishCompletion(app *kong.Application) string {
	var b strings.Builder
	for path, list := range words(app) {
		cond := "__fish_use_subcommand"
		if path != "" {
			cond = "__fish_seen_subcommand_from " + strings.Fields(path)[len(strings.Fields(path))-1]
		}
		for _, w := range list {
			if flag, ok := strings.CutPrefix(w, "--"); ok {
				fmt.Fprintf(&b, "complete -c dsec -n %q -l %s\n", cond, flag)
			} else {
				fmt.Fprintf(&b, "complete -c dsec -n %q -a %s\n", cond, w)
			}
		}
	}
	fmt.Fprintf(&b, "complete -c dsec -n '__fish_seen_subcommand_from %s' -a '(dsec ps -q 2>/dev/null)'\n", strings.Join(takesSandbox, " "))
	return b.String()
}
