// Package peer drives other container runtimes through the cycle that dsec is measured by: a container of the same root file system,
// a libc-free `true` in it, and its removal.
//
// Each runtime runs in two rows. As installed: what its own `spec` command, or `ctr run` of an image, gives. Equal: the namespaces (user
// and cgroup too), id mapping, memory and pids limits and system call list of a dsec sandbox, and a fresh overlay for each container,
// whose mount is the load client's and not charged to the runtime.
//
// A runtime is driven by a process of its own (this program again, see [Main]) in a private mount namespace: crun refuses a machine
// that has both versions of control groups until version 2 is unmounted, and what is mounted there goes when the process ends. The
// driver's process is the load client; its CPU time is not counted, that of all it starts is.
package peer
