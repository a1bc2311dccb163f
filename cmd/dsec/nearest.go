package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// familiar are flags of other tools for sandboxes that have another name here.
var familiar = map[string]string{"--network": "--net", "--cpus": "--cpu", "--env": "--var", "--env-var": "--var", "--workdir": "--cwd", "--entrypoint": "--image-entrypoint"}

// nearest is the flag that was meant by one that is not known, or "": the one of another tool's name, the one that begins so, else the one
// that takes at most two slips of the hand, or one in a short word.
func nearest(word string, known []string) string {
	best, least := "", 3
	if len(word) < len("--")+5 {
		least = 2
	}
	all := slices.Clone(known)
	for theirs, ours := range familiar {
		if slices.Contains(known, ours) && !slices.Contains(known, theirs) {
			all = append(all, theirs)
		}
	}
	slices.Sort(all) // the same answer each time
	for _, k := range all {
		if k == word || len(word) > len("--") && strings.HasPrefix(k, word) {
			best = k
			break
		}
		if d := slips(word, k); d < least && d < len(word)-2 {
			best, least = k, d
		}
	}
	if !slices.Contains(known, best) {
		return familiar[best]
	}
	return best
}

// withFamiliar adds to an error of the parser that suggests nothing the flag that goes by another name here.
func withFamiliar(text string, known []string) string {
	_, rest, ok := strings.Cut(text, "unknown flag ")
	if !ok || strings.Contains(rest, " ") {
		return text
	}
	if to := nearest(rest, known); to != "" {
		return fmt.Sprintf("%s, did you mean %q?", text, to)
	}
	return text
}

// flagNames are the flags that the command takes, as they are typed.
func flagNames(k *kong.Context) []string {
	var out []string
	for _, f := range k.Flags() {
		if !f.Hidden {
			out = append(out, "--"+f.Name)
		}
	}
	return out
}

// slips counts the letters to change, add, drop or swap with their neighbour to make b of a.
func slips(a, b string) int {
	var older []int
	last := make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], older[j-2]+1)
			}
		}
		older, last = last, row
	}
	return last[len(b)]
}
