// The parent of function calls, and process 1 of each: without a libc, since it is cloned for every call.
//
// One runs for each environment, in a mount namespace that holds nothing but the environment's read-only root and /dev. For each message
// on descriptor 3 it clones a child into new mount, pid, ipc and UTS namespaces. That child is process 1 of the call: it enters the
// network namespace it was given, mounts /proc, the work folder, /tmp and /dev/shm, starts the program as process 2 and watches it: wall
// time from the exec, CPU time of the group, refused system calls. When the program ends, or a limit or the keeper ends it, everything
// else in the namespace is killed and reaped, and one report goes to the keeper.
//
// What it relies on and holds to:
//  - The program is another uid than process 1, in a user namespace that has that uid alone, without capabilities, with no_new_privs.
//    Its mount, pid, ipc and network namespaces belong to the initial user namespace, so nothing in it has power over them.
//  - Process 1 reads nothing of the program but counters of the kernel, and nobody can trace it: another uid, not dumpable.
//  - The program's process shares process 1's memory until its exec (CLONE_VM|CLONE_VFORK), and its descriptors until the filter is
//    there: so the listener of refused calls needs no way back. It keeps 0, 1 and 2 alone.
//  - Process 1 ends with its stream, the parent with its own: then everything ends.
//
// A call may be made ahead of its program: the file that its command opens is held by a mark of fanotify, so the command, an interpreter
// as a rule, starts, opens it, and sleeps in that call. Process 1 tells so, and lets it go on when the keeper has laid the program and says
// the limits of time, which count from there.
#include <asm/errno.h>
#include <asm/ioctl.h>
#include <asm/resource.h>
#include <asm/signal.h>
#include <asm/unistd.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/fanotify.h>
#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>

#include "sys_amd64.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef long i64;
typedef int i32;

#define NULL ((void *)0)
#define STREAM 3
#define INSIDE_ID 1000 // uid and gid of the program, as it sees them
#define MAX_MESSAGE (160u << 10)
#define MAX_FDS 16
#define WALL 0x40000000 // __WALL
#define MAX_EVENTS 8
#define MAX_FILTER 4096
#define CHECK 50000000ul // ns between two looks at the CPU time, at the most
#define ASLEEP 1000000000ul // ns of CPU time that a call may use while it waits for its program, and between two looks at that

// What a failure before the exec was about.
enum { S_NONE, S_CLONE, S_NETWORK, S_MOUNT, S_USER, S_GROUP, S_CONFINE, S_EXEC };

// Flags of a call, and of a report.
enum { CALL_POOLED = 1, CALL_HELD = 2 };
enum { R_WALL = 1, R_CPU = 2, R_FILTER = 4, R_TOLD = 8, R_HELD = 16 };

void *memcpy(void *d, const void *s, u64 n)
{
	void *r = d;
	__asm__ volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(n) : : "memory");
	return r;
}
void *memset(void *d, int c, u64 n)
{
	void *r = d;
	__asm__ volatile("rep stosb" : "+D"(d), "+c"(n) : "a"(c) : "memory");
	return r;
}
static u64 strlen_(const char *s)
{
	u64 n = 0;
	while (s[n])
		n++;
	return n;
}

static void die(int code) __attribute__((noreturn));
static void die(int code)
{
	for (;;)
		sys1(__NR_exit_group, code);
}

// ---- messages ----

// A call as it comes: this head, then the strings of argv and env, each ended by NUL. Descriptors: see F_ below.
static struct head {
	u32 flags, uid; // host uid and gid of the program
	u32 argc, envc;
	u32 tasks;      // descriptors of v1 groups to join
	u32 nofile;
	u64 cpu, wall;  // ns; of a held one they come later
	u64 fsize, stack, memlock;
} *head;
enum { F_CTL, F_DISK, F_NET, F_IN, F_OUT, F_ERR, F_GROUP, F_STAT, F_TASKS };
// Then the groups, then the user namespace if pooled, then the mark on the file that is held.

static u8 message[MAX_MESSAGE + 1];
static u64 message_len;
static int fds[MAX_FDS];
static u32 nfds;

static struct report {
	u32 stage, err; // not 0: the program did not begin
	i32 status;     // of wait4
	u32 flags;
	u64 cpu, wall; // ns
	u64 ended;     // ns of the monotonic clock
	u32 leftover, events_total;
	struct event { u32 nr, arch; u64 arg0, arg1, count; } events[MAX_EVENTS];
} report;

struct iov { void *p; u64 n; };
struct msg { void *name; u32 namelen, pad; struct iov *iov; u64 niov; void *ctl; u64 nctl; i32 flags; u32 pad2; };
struct pollfd { i32 fd; short events, revents; };
struct ts { i64 s, ns; };

static i64 receive(void)
{
	static struct { u64 len; i32 level, type; i32 fd[MAX_FDS]; } c;
	struct iov v = {message, MAX_MESSAGE};
	struct msg m = {0, 0, 0, &v, 1, &c, sizeof c, 0, 0};
	i64 r;
	do
		r = sys3(__NR_recvmsg, STREAM, &m, 0x40000000 /* MSG_CMSG_CLOEXEC */);
	while (r == -EINTR);
	nfds = 0;
	if (r > 0 && m.nctl >= 16 && c.level == 1 && c.type == 1)
		for (; nfds < (c.len - 16) / 4 && nfds < MAX_FDS; nfds++)
			fds[nfds] = c.fd[nfds];
	if (r > 0) {
		message_len = (u64)r;
		message[r] = 0;
	}
	return r;
}
static void tell(int fd)
{
	sys6(__NR_sendto, fd, (long)&report, sizeof report, 0x4000 /* MSG_NOSIGNAL */, 0, 0);
}
static void broken(int fd, u32 stage, i64 err) __attribute__((noreturn));
static void broken(int fd, u32 stage, i64 err)
{
	report.stage = stage;
	report.err = (u32)-err;
	tell(fd);
	die(0);
}

static u64 now(void)
{
	struct ts t;
	sys2(__NR_clock_gettime, 1 /* CLOCK_MONOTONIC */, &t);
	return (u64)t.s * 1000000000 + (u64)t.ns;
}
static u64 own_cpu(void)
{
	struct ts t;
	sys2(__NR_clock_gettime, 3 /* CLOCK_THREAD_CPUTIME_ID */, &t);
	return (u64)t.s * 1000000000 + (u64)t.ns;
}

// group_cpu reads usage_usec, the first line of cpu.stat, in ns.
static u64 group_cpu(int fd)
{
	char b[64];
	i64 n = sys4(__NR_pread64, fd, b, sizeof b - 1, 0);
	u64 v = 0;
	i64 i = 0;
	while (i < n && b[i] != ' ')
		i++;
	for (i++; i < n && b[i] >= '0' && b[i] <= '9'; i++)
		v = v * 10 + (u64)(b[i] - '0');
	return v * 1000;
}

// ---- the program's process ----

static struct { u16 len; void *p; } filter; // sock_fprog
static u8 filter_code[MAX_FILTER * 8];
static char **argv, **env;
static const char *path; // PATH of env
static u64 pointers[(MAX_MESSAGE + 64) / 8 * 2];
static volatile u32 stage, err, execing;
static volatile int listener = -1;
static volatile u64 began;
static u32 last_cap = 63;

static void child_fail(u32 s, i64 e) __attribute__((noreturn));
static void child_fail(u32 s, i64 e)
{
	stage = s;
	err = (u32)-e;
	for (;;)
		sys1(__NR_exit_group, 127);
}
static i64 put(const char *file, const char *text, u64 n)
{
	i64 fd = sys4(__NR_openat, AT_FDCWD, file, O_WRONLY | O_CLOEXEC, 0), r;
	if (fd < 0)
		return fd;
	r = sys3(__NR_write, fd, text, n);
	sys1(__NR_close, fd);
	return r;
}
static u64 decimal(char *to, u64 v)
{
	char b[24];
	u64 n = 0, i = 0;
	do
		b[n++] = (char)('0' + v % 10);
	while (v /= 10);
	while (n)
		to[i++] = b[--n];
	return i;
}
static i64 map_ids(void)
{
	char line[64];
	u64 n = decimal(line, INSIDE_ID);
	i64 r;
	line[n++] = ' ';
	n += decimal(line + n, head->uid);
	line[n++] = ' ';
	line[n++] = '1';
	line[n++] = '\n';
	if ((r = put("/proc/self/setgroups", "deny", 4)) < 0 || (r = put("/proc/self/uid_map", line, n)) < 0)
		return r;
	return put("/proc/self/gid_map", line, n);
}
static i64 set_caps(u64 permitted, u64 effective)
{
	struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct d[2] = {{(u32)effective, (u32)permitted, 0}, {(u32)(effective >> 32), (u32)(permitted >> 32), 0}};
	return sys2(__NR_capset, &h, d);
}
static i64 limit(u32 resource, u64 soft, u64 hard)
{
	u64 old[2], want[2] = {soft, hard};
	i64 r = sys4(__NR_prlimit64, 0, resource, NULL, old);
	if (r < 0)
		return r;
	if (want[1] > old[1])
		want[1] = old[1];
	if (want[0] > want[1])
		want[0] = want[1];
	return sys4(__NR_prlimit64, 0, resource, want, NULL);
}

// run executes the program, looking for it as a shell does.
static i64 run(void)
{
	static char file[4096];
	const char *name = argv[0], *p = path;
	i64 r, worst = -ENOENT;
	for (const char *c = name; *c; c++)
		if (*c == '/')
			return sys3(__NR_execve, name, argv, env);
	u64 m = strlen_(name);
	if (!m)
		return -ENOENT;
	for (;;) {
		u64 n = 0;
		while (p[n] && p[n] != ':')
			n++;
		if (n + m + 2 < sizeof file) {
			memcpy(file, n ? p : ".", n ? n : 1);
			u64 k = n ? n : 1;
			file[k++] = '/';
			memcpy(file + k, name, m + 1);
			r = sys3(__NR_execve, file, argv, env);
			if (r != -ENOENT && r != -ENOTDIR)
				worst = r;
			if (r != -ENOENT && r != -ENOTDIR && r != -EACCES)
				return r;
		}
		if (!p[n])
			return worst;
		p += n + 1;
	}
}

static void child(void *unused)
{
	i64 r;
	(void)unused;
	sys0(__NR_setsid);
	for (u32 i = 0; i < head->tasks; i++)
		if ((r = sys3(__NR_write, fds[F_TASKS + i], "0", 1)) < 0)
			child_fail(S_GROUP, r);
	if ((r = sys1(__NR_unshare, CLONE_NEWCGROUP)) < 0)
		child_fail(S_GROUP, r);
	if (head->flags & CALL_POOLED)
		r = sys2(__NR_setns, fds[F_TASKS + head->tasks], CLONE_NEWUSER);
	else
		r = map_ids();
	if (r < 0)
		child_fail(S_USER, r);
	for (u32 c = 0; c <= last_cap; c++)
		if (sys5(__NR_prctl, PR_CAPBSET_DROP, c, 0, 0, 0) == -EINVAL)
			break;
	if ((r = sys3(__NR_setresgid, INSIDE_ID, INSIDE_ID, INSIDE_ID)) < 0 || (r = sys3(__NR_setresuid, INSIDE_ID, INSIDE_ID, INSIDE_ID)) < 0 ||
	    (r = set_caps(0, 0)) < 0)
		child_fail(S_USER, r);
	if ((r = sys5(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) < 0)
		child_fail(S_CONFINE, r);
	if ((r = limit(RLIMIT_CORE, 0, 0)) < 0 || (r = limit(RLIMIT_FSIZE, head->fsize, head->fsize)) < 0 ||
	    (r = limit(RLIMIT_STACK, head->stack, head->stack)) < 0 || (r = limit(RLIMIT_MEMLOCK, head->memlock, head->memlock)) < 0 ||
	    // Queues count for the uid until the kernel has cleared away their namespace, some time after the call: better none than now and then.
	    (r = limit(RLIMIT_MSGQUEUE, 0, 0)) < 0 || (r = limit(RLIMIT_RTPRIO, 0, 0)) < 0)
		child_fail(S_CONFINE, r);
	for (int i = 0; i < 3; i++)
		if ((r = sys2(__NR_dup2, fds[F_IN + i], i)) < 0)
			child_fail(S_EXEC, r);
	if ((r = sys1(__NR_chdir, "/box")) < 0)
		child_fail(S_MOUNT, r);
	sys1(__NR_umask, 022);
	sys3(__NR_setpriority, 0, 0, 0);
	u64 none = 0;
	sys4(__NR_rt_sigprocmask, SIG_SETMASK, &none, NULL, 8);
	if (filter.len) {
		r = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW | SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter);
		if (r < 0)
			child_fail(S_CONFINE, r);
		listener = (int)r;
	}
	// The listener is a descriptor too, and may be a higher one than the program is to have.
	if ((r = sys3(__NR_close_range, 3, ~0u, CLOSE_RANGE_UNSHARE)) < 0 || (r = limit(RLIMIT_NOFILE, head->nofile, head->nofile)) < 0)
		child_fail(S_CONFINE, r);
	began = now();
	execing = 1;
	r = run();
	execing = 0;
	child_fail(S_EXEC, r);
}

// ---- process 1 ----

// mount makes a file system and attaches it.
static i64 mount_proc(void)
{
	i64 r, m, fs = sys2(__NR_fsopen, "proc", FSOPEN_CLOEXEC);
	if (fs < 0)
		return fs;
	if ((r = sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, "hidepid", "2", 0)) < 0 || (r = sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, "subset", "pid", 0)) < 0 ||
	    (r = sys5(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0)) < 0)
		goto out;
	m = r = sys3(__NR_fsmount, fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
	if (r >= 0) {
		r = sys5(__NR_move_mount, m, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH);
		sys1(__NR_close, m);
	}
out:
	sys1(__NR_close, fs);
	return r;
}
static i64 bind(const char *from, const char *to)
{
	return sys5(__NR_mount, from, to, NULL, 4096 /* MS_BIND */, NULL);
}
static i64 mounts(void)
{
	i64 r = mount_proc();
	if (r < 0)
		return r;
	// The disk has three folders. Its root is seen nowhere in the end: the work folder lies on it.
	if ((r = sys5(__NR_move_mount, fds[F_DISK], "", AT_FDCWD, "/box", MOVE_MOUNT_F_EMPTY_PATH)) < 0 || (r = bind("/box/tmp", "/tmp")) < 0 ||
	    (r = bind("/box/shm", "/dev/shm")) < 0)
		return r;
	return bind("/box/work", "/box");
}

static void parse(void)
{
	u8 *p = message + sizeof *head, *stop = message + message_len;
	u64 n = 0;
	u32 want = head->argc + head->envc;
	if (!head->argc || head->argc > 65536 || head->envc > 65536 || (want + 2) * 8ul > sizeof pointers)
		broken(fds[F_CTL], S_EXEC, -E2BIG);
	argv = (char **)pointers;
	path = "/usr/local/bin:/usr/bin:/bin";
	for (u32 i = 0; i < want; i++) {
		if (p >= stop)
			broken(fds[F_CTL], S_EXEC, -EINVAL);
		if (i == head->argc) {
			pointers[n++] = 0;
			env = (char **)&pointers[n];
		}
		pointers[n++] = (u64)p;
		if (i >= head->argc && p[0] == 'P' && p[1] == 'A' && p[2] == 'T' && p[3] == 'H' && p[4] == '=')
			path = (char *)p + 5;
		while (p < stop && *p)
			p++;
		p++;
	}
	pointers[n++] = 0;
	if (!head->envc)
		env = (char **)&pointers[n - 1];
}

static int main_pid;
static u32 cpus = 1;

// refused takes one notification and answers it.
static int refused(void)
{
	static struct seccomp_notif n;
	static struct seccomp_notif_resp a;
	memset(&n, 0, sizeof n);
	if (sys3(__NR_ioctl, listener, SECCOMP_IOCTL_NOTIF_RECV, &n) < 0)
		return 0;
	int foreign = n.data.arch != AUDIT_ARCH_X86_64 || (u32)n.data.nr & 0x40000000;
	struct event *e = NULL;
	report.events_total++;
	for (u32 i = 0; i < MAX_EVENTS; i++) {
		struct event *x = &report.events[i];
		if (!x->count || (x->nr == (u32)n.data.nr && x->arch == n.data.arch && (x->nr != __NR_ioctl || x->arg1 == n.data.args[1]))) {
			e = x;
			break;
		}
	}
	if (e) {
		if (!e->count++) {
			e->nr = (u32)n.data.nr;
			e->arch = n.data.arch;
			e->arg0 = n.data.args[0];
			e->arg1 = n.data.args[1];
		}
	}
	if (foreign)
		return 1; // it never goes on
	a.id = n.id;
	a.val = 0;
	a.error = -EPERM;
	a.flags = 0;
	sys3(__NR_ioctl, listener, SECCOMP_IOCTL_NOTIF_SEND, &a);
	return 0;
}

// let_go takes the mark of the held file away, so that nobody waits for that file again, and answers all who wait: there may be several. It
// says how many there were. The mark's group is closed with everything else: that takes long.
static u32 let_go(int mark)
{
	struct fanotify_event_metadata e;
	u32 n = 0;
	sys5(__NR_fanotify_mark, mark, FAN_MARK_FLUSH, 0, AT_FDCWD, NULL);
	while (sys3(__NR_read, mark, &e, sizeof e) == sizeof e) {
		struct fanotify_response a = {.fd = e.fd, .response = FAN_ALLOW};
		sys3(__NR_write, mark, &a, sizeof a);
		sys1(__NR_close, e.fd);
		n++;
	}
	return n;
}

// first_check is when the CPU time is looked at first.
static u64 first_check(void)
{
	u64 soon = head->cpu / cpus;
	return began + (soon < CHECK ? soon : CHECK);
}

static void call(void) __attribute__((noreturn));
static void call(void)
{
	int ctl = fds[F_CTL], stat = fds[F_STAT], held = head->flags & CALL_HELD ? fds[nfds - 1] : -1, waited = held, lost = 0;
	i64 r;
	struct { u64 h, f, rr, m; } dfl = {0};
	sys4(__NR_rt_sigaction, SIGCHLD, &dfl, NULL, 8);
	u64 chld = 1ul << (SIGCHLD - 1);
	sys4(__NR_rt_sigprocmask, SIG_SETMASK, &chld, NULL, 8);
	sys3(__NR_close, STREAM, 0, 0);
	parse();
	int sfd = (int)sys4(__NR_signalfd4, -1, &chld, 8, 02004000 /* CLOEXEC|NONBLOCK */);
	if (sfd < 0)
		broken(ctl, S_CLONE, sfd);
	if ((r = sys2(__NR_setns, fds[F_NET], CLONE_NEWNET)) < 0)
		broken(ctl, S_NETWORK, r);
	sys2(__NR_sethostname, "fncall", 6);
	if ((r = mounts()) < 0)
		broken(ctl, S_MOUNT, r);
	if ((r = sys2(__NR_setgroups, 0, NULL)) < 0)
		broken(ctl, S_USER, r);
	if (!(head->flags & CALL_POOLED)) {
		// A process may map one id of a new user namespace by itself if that is its own and the namespace's owner's.
		struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
		struct __user_cap_data_struct d[2];
		if ((r = sys3(__NR_setresgid, -1, head->uid, -1)) < 0 || (r = sys3(__NR_setresuid, -1, head->uid, -1)) < 0 || (r = sys2(__NR_capget, &h, d)) < 0)
			broken(ctl, S_USER, r);
		u64 have = d[0].permitted | (u64)d[1].permitted << 32;
		if ((r = set_caps(have, have)) < 0 || (r = sys5(__NR_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0)) < 0)
			broken(ctl, S_USER, r);
	}
	u64 base = group_cpu(stat);
	struct clone_args a = {.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_INTO_CGROUP | (head->flags & CALL_POOLED ? 0 : CLONE_NEWUSER),
		.exit_signal = SIGCHLD, .cgroup = (u64)fds[F_GROUP]};
	r = clone_run(&a, sizeof a, child, NULL);
	if (r < 0)
		broken(ctl, S_CLONE, r);
	main_pid = (int)r;
	if (!(head->flags & CALL_POOLED)) {
		sys3(__NR_setresuid, -1, 0, -1);
		sys3(__NR_setresgid, -1, 0, -1);
	}
	sys5(__NR_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	if (stage)
		broken(ctl, stage, -(i64)err);
	if (!began) // killed before its exec, for memory
		began = now();
	// What the program holds alone: else its readers would wait for us.
	for (int i = 0; i < 3; i++)
		sys1(__NR_close, i);
	for (u32 i = 0; i < nfds; i++)
		if (fds[i] != ctl && fds[i] != stat && fds[i] != held)
			sys1(__NR_close, fds[i]);
	u64 own = own_cpu(), next = first_check(), asleep = 0;
	for (int over = 0; !over;) {
		u64 t = now(), due = began + head->wall;
		if (next < due)
			due = next;
		if (held >= 0)
			due = t + ASLEEP;
		struct ts wait = {0, 0};
		if (due > t) {
			wait.s = (i64)((due - t) / 1000000000);
			wait.ns = (i64)((due - t) % 1000000000);
		}
		struct pollfd p[4] = {{sfd, 1, 0}, {ctl, 1, 0}, {listener, 1, 0}, {waited, 1, 0}}; // those below 0 are none
		r = sys5(__NR_ppoll, p, 4, &wait, NULL, 8);
		if (r < 0 && r != -EINTR)
			die(1);
		t = now();
		if (p[0].revents) {
			static u8 info[128];
			while (sys3(__NR_read, sfd, info, sizeof info) > 0)
				;
			for (;;) {
				i32 status = 0;
				i64 pid = sys4(__NR_wait4, -1, &status, 1 /* WNOHANG */ | WALL, NULL);
				if (pid <= 0)
					break;
				if (pid == main_pid) {
					report.status = status;
					report.wall = t - began;
					report.ended = t;
					main_pid = 0;
					over = 1;
					if (lost && (status & 0x7f) == SIGKILL)
						report.flags |= R_HELD;
				}
			}
			if (over)
				break;
		}
		if (p[1].revents) {
			u64 go[2]; // the limits of time; or one octet to end
			r = sys3(__NR_read, ctl, go, sizeof go);
			if (r == sizeof go && held >= 0) {
				head->cpu = go[0];
				head->wall = go[1];
				base = group_cpu(stat);
				own = own_cpu();
				began = now();
				next = first_check();
				lost = !let_go(held); // who waited has just died: the program itself, as a rule
				waited = held; // who was about to wait
				held = -1;
				continue;
			}
			if (r != 1)
				die(0); // the keeper is gone
			report.flags |= R_TOLD;
			over = 1;
		}
		if (p[3].revents && held < 0) {
			let_go(waited);
		} else if (p[3].revents) {
			waited = -1;
			asleep = group_cpu(stat);
			sys6(__NR_sendto, ctl, (long)"r", 1, 0x4000 /* MSG_NOSIGNAL */, 0, 0);
		}
		if (p[2].revents & 1) {
			if (refused()) {
				report.flags |= R_FILTER;
				over = 1;
			}
		} else if (p[2].revents) // nobody has the filter any more
			listener = -1;
		if (over)
			break;
		if (held >= 0) { // what runs beside one that waits would be on nobody's time
			over = waited < 0 && group_cpu(stat) - asleep >= ASLEEP;
			continue;
		}
		if (t >= began + head->wall) {
			report.flags |= R_WALL;
			over = 1;
		}
		if (t >= next) {
			// What answering refused calls costs is the program's doing.
			u64 used = group_cpu(stat) - base + (report.events_total > 64 ? own_cpu() - own : 0);
			if (used >= head->cpu) {
				report.flags |= R_CPU;
				over = 1;
			} else {
				u64 left = (head->cpu - used) / cpus;
				if (left < 1000000)
					left = 1000000;
				next = t + (left > CHECK ? CHECK : left);
			}
		}
	}
	if (held >= 0)
		report.flags |= R_HELD; // its program never began
	// Of a pair the other one may end at the end of its input before this one is reaped.
	u64 killed = now();
	sys2(__NR_kill, -1, SIGKILL);
	for (;;) {
		i32 status = 0;
		i64 pid = sys4(__NR_wait4, -1, &status, WALL, NULL);
		if (pid == -EINTR)
			continue;
		if (pid < 0)
			break;
		if (pid == main_pid) {
			report.status = status;
			report.ended = killed;
			report.wall = now() - began;
		} else if ((status & 0x7f) == SIGKILL)
			report.leftover++;
	}
	report.cpu = group_cpu(stat) - base + (report.events_total > 64 ? own_cpu() - own : 0);
	tell(ctl);
	die(0);
}

// ---- the parent ----

// enter makes the environment's root, of which a detached mount came, that of this process, in a mount namespace of its own.
static i64 enter(int root, int dev)
{
	i64 r;
	if ((r = sys1(__NR_unshare, CLONE_NEWNS)) < 0 || (r = sys5(__NR_mount, NULL, "/", NULL, (1ul << 18 | 1ul << 14) /* MS_PRIVATE|MS_REC */, NULL)) < 0 ||
	    (r = sys5(__NR_move_mount, root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH)) < 0 || (r = sys1(__NR_fchdir, root)) < 0 ||
	    (r = sys2(__NR_pivot_root, ".", ".")) < 0 || (r = sys2(__NR_umount2, ".", 2 /* MNT_DETACH */)) < 0 || (r = sys1(__NR_chdir, "/")) < 0)
		return r;
	return sys5(__NR_move_mount, dev, "", AT_FDCWD, "/dev", MOVE_MOUNT_F_EMPTY_PATH);
}

__attribute__((used, noreturn)) void entry(long *sp);
void entry(long *sp)
{
	(void)sp;
	sys3(__NR_close_range, STREAM + 1, ~0u, 0);
	sys3(__NR_fcntl, STREAM, 2 /* F_SETFD */, 1);
	sys2(__NR_prctl, PR_SET_NAME, "dsec-calls");
	for (int i = 1; i <= 64; i++) { // children are reaped by the kernel
		struct { u64 h, f, r, m; } act = {i == SIGCHLD ? 1 /* SIG_IGN */ : 0, 0, 0, 0};
		sys4(__NR_rt_sigaction, i, &act, NULL, 8);
	}
	u64 none = 0, mask[128] = {0};
	sys4(__NR_rt_sigprocmask, SIG_SETMASK, &none, NULL, 8);
	// Births are short and somebody waits for them; the program itself has the usual priority.
	if (sys3(__NR_setpriority, 0, 0, -10) < 0)
		sys3(__NR_setpriority, 0, 0, 0);
	sys1(__NR_umask, 022);
	i64 n = sys3(__NR_sched_getaffinity, 0, sizeof mask, mask);
	cpus = 0;
	for (i64 i = 0; i < n / 8; i++)
		for (u64 m = mask[i]; m; m &= m - 1)
			cpus++;
	if (!cpus)
		cpus = 1;
	// The first message: the filter, with the root and /dev.
	n = receive();
	if (n < 0 || nfds != 2 || n > (i64)sizeof filter_code + 1)
		die(1);
	filter.len = (u16)((n - 1) / 8); // an octet stands before it, so that the message is never empty
	filter.p = filter_code;
	memcpy(filter_code, message + 1, (u64)n - 1);
	if ((n = enter(fds[0], fds[1])) < 0) {
		report.stage = S_MOUNT;
		report.err = (u32)-n;
	}
	sys1(__NR_close, fds[0]);
	sys1(__NR_close, fds[1]);
	tell(STREAM);
	if (n < 0)
		die(1);
	head = (struct head *)message;
	for (;;) {
		n = receive();
		if (n <= 0)
			die(0);
		if ((u64)n < sizeof *head || head->tasks > 4 || nfds != F_TASKS + head->tasks + !!(head->flags & CALL_POOLED) + !!(head->flags & CALL_HELD)) {
			if (nfds) { // a slip of the keeper's
				memset(&report, 0, sizeof report);
				report.stage = S_CLONE;
				report.err = EINVAL;
				tell(fds[0]);
			}
		} else {
			struct clone_args a = {.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC, .exit_signal = SIGCHLD};
			i64 pid = sys2(__NR_clone3, &a, sizeof a);
			if (!pid)
				call();
			if (pid < 0) {
				memset(&report, 0, sizeof report);
				report.stage = S_CLONE;
				report.err = (u32)-pid;
				tell(fds[0]);
			}
		}
		for (u32 i = 0; i < nfds; i++)
			sys1(__NR_close, fds[i]);
	}
}
