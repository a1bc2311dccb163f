// Package measure is what the load drivers have in common: samples and their lines of output, the machine's and a group's CPU time, a
// `dsec up` of the driver's own on temporary folders, and the small root file system that all candidates run on.
//
// A driver prints lines of "name value unit" on standard output and everything else on standard error. CPU time is read from control
// groups (exact, also of processes that ended long ago) and, for kernel threads, from /proc (ticks of 10 ms, so windows must be long).
// Whatever a driver makes on the machine carries "dsec-bench" in its name and is gone when it ends, also after an interrupt.
package measure
