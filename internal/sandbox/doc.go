// Package sandbox is the vocabulary of dsec: what a sandbox is, what may be asked of it, how it ends and what a backend
// must do. Everything else imports it and it imports nothing of the project.
//
// Two kinds of failure are kept apart everywhere: an error means that the platform failed or refused; an [Outcome] says how a
// command ended, whatever its exit code. A bad reward must be traceable to the model, the tool or the platform.
package sandbox
