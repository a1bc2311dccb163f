// Package confine says what a container's commands may not do, as data, and compiles the part that is a seccomp filter.
//
// It hides the filter's machine code and the reasons of each refusal (policy.go). Invariants: the filter judges by the
// call's number first, as a binary tree (a linear one of this size costs ten times as much to install); a call of another
// architecture, x32 among them, never reaches the tree; arguments are compared in the 32 bits that the kernel itself
// looks at; what is refused without an event gets an errno that honest tools take for "not here". It uses the standard
// library and x/sys only, because the keeper imports it.
package confine
