// Package replay says whether a step that was done again came to the same: it compares what was recorded with what happened.
//
// It hides what counts as equal. Compared are the exit code or signal, each output stream as whole octets with its total, and changed
// paths where both sides know them; never how streams interleave or in what pieces they came. Two streams that differ may still be equal
// after normalisers: each recognises one kind of token (a time, a process number, an address, ...) and replaces it by its name, on both
// sides alike. Paths that an environment declares volatile are listed and not compared. A report names those whose tokens differed. What can't be compared is told with the reason, never taken for equal.
//
// The package is pure: no I/O, no clock. Its input comes from sandboxes and is bounded by Most.
package replay
