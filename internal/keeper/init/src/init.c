// Process 1 of a container. Speaks docs/format/guest.md on descriptor 3, without a libc: a few pages stay resident.
//
// What it relies on and holds to:
//  - Until `userns` it is the host's root in fresh namespaces and reads nothing of the image: paths are resolved inside
//    the new root with openat2(RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS), mounts are attached by descriptor.
//  - Afterwards it is a uid that the sandbox has not mapped, with all capabilities of the sandbox's user namespace and
//    none outside, not dumpable, its memory's owner the initial user namespace: root inside can neither trace it nor
//    open its /proc entries, and no signal from inside has an effect on process 1 without a handler.
//  - Commands are started with clone3(CLONE_VM|CLONE_VFORK): the child shares this memory until its exec, so a failure's
//    text comes back in `res`. The child drops to the command's user there; it stays untraceable, since a change of
//    credentials and this memory's owner both forbid it.
//  - Files of the image that it reads itself (passwd, group) are bounded, opened without blocking and only if regular.
//  - It keeps nothing of a request: the frame is wiped once the command runs.
#include <asm/unistd.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/stat.h>
#include <asm/errno.h>
#include <asm/ioctls.h>
#include <linux/mman.h>
#include <asm/resource.h>
#include <asm/signal.h>

#include "sys_amd64.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef long i64;
typedef int i32;

#define NULL ((void *)0)
#define STREAM 3
#define HEADER 16
#define MAX_BODY (4u << 20)
#define ARENA (32u << 20) // pointers of argv and env: one for 4 octets of the body, twice for env, and some text
#define MAX_FDS 16
#define MAX_COMMANDS 8192
#define MAX_GROUPS 256
#define MAX_ID 65536 // ids that a sandbox has
#define FILE_MAX (1u << 20)
#define TEXT_MAX 4096

enum { T_BIRTH = 1, T_START = 2, T_SIGNAL = 3, T_PING = 4, T_SPAWN = 5, T_GROUP = 6, T_RESIZE = 7, T_PREPARE = 9, T_HOLD = 16, T_DROP = 17,
       T_HELLO = 0x81, T_STARTED, T_FAILED, T_EXITED, T_PONG, T_LISTENER, T_SPAWNED, T_GROUPED, T_HELD = 0x90 };
enum { G_KILL = 1, G_MARK = 2, G_STRIKE = 3, G_COUNT = 4 };
enum { S_BIRTH = 1, S_USER, S_CWD, S_PROGRAM, S_EXEC, S_CGROUP, S_TERMINAL, S_CONFINE };
enum { START_TERMINAL = 1, START_HOLDER = 2, START_NOFILTER = 4, START_CGROUPNS = 8, START_NOTIFY = 16, START_NOPIDFD = 32, START_RELAY = 64 };
enum { EXITED_REFUSED = 1 };

// ---- memory and text ----

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
void *memmove(void *d, const void *s, u64 n)
{
	u8 *a = d;
	const u8 *b = s;
	if (a <= b || a >= b + n)
		return memcpy(d, s, n);
	while (n--)
		a[n] = b[n];
	return d;
}
int memcmp(const void *a, const void *b, u64 n)
{
	const u8 *x = a, *y = b;
	for (; n; n--, x++, y++)
		if (*x != *y)
			return *x - *y;
	return 0;
}
u64 strlen(const char *s)
{
	u64 n = 0;
	while (s[n])
		n++;
	return n;
}
static int eq(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}
static const char *find(const char *s, char c)
{
	for (; *s; s++)
		if (*s == c)
			return s;
	return NULL;
}

// number reads a decimal number that fills s; -1 if it isn't one below 2^32-1.
static i64 number(const char *s)
{
	u64 v = 0;
	if (!*s)
		return -1;
	for (; *s; s++) {
		if (*s < '0' || *s > '9')
			return -1;
		v = v * 10 + (u64)(*s - '0');
		if (v >= 0xffffffffu)
			return -1;
	}
	return (i64)v;
}

// res is what a start came to. It is shared with the child of a start, hence volatile where both look.
static struct {
	volatile u32 stage, err;
	volatile u32 execing;
	u32 len;
	char text[TEXT_MAX];
} res;

static void say(const char *s)
{
	while (*s && res.len < sizeof res.text)
		res.text[res.len++] = *s++;
}
static void sayn(u64 v, u32 base)
{
	char b[24];
	int i = sizeof b;
	b[--i] = 0;
	do
		b[--i] = "0123456789abcdef"[v % base];
	while (v /= base);
	say(b + i);
}
// sayq says a name from the request or the image, with control octets made visible.
static void sayq(const char *s)
{
	int n = 0;
	for (; *s && n < 1024; s++, n++) {
		u8 c = (u8)*s;
		char b[2] = {*s, 0};
		if (c == '\n')
			say("\\n");
		else if (c == '\r')
			say("\\r");
		else if (c < 32 || c == 127)
			say("\\x"), sayn(c >> 4, 16), sayn(c & 15, 16);
		else
			say(b);
	}
	if (*s)
		say("...");
}
static void fail(u32 stage, u32 err)
{
	res.stage = stage;
	res.err = err;
	res.len = 0;
}
static const char *errtext(i64 e)
{
	if (e < 0)
		e = -e;
	switch (e) {
	case EPERM: return "operation not permitted";
	case ENOENT: return "not found";
	case EIO: return "input/output error";
	case E2BIG: return "argument list too long";
	case ENOEXEC: return "exec format error";
	case EBADF: return "bad descriptor";
	case EAGAIN: return "the process limit is reached";
	case ENOMEM: return "out of memory";
	case EACCES: return "permission denied";
	case EBUSY: return "busy";
	case EXDEV: return "crosses a mount";
	case ENODEV: return "no such device";
	case ENOTDIR: return "not a folder";
	case EISDIR: return "is a folder";
	case EINVAL: return "invalid argument";
	case ENFILE: return "too many open files on the host";
	case EMFILE: return "too many open files";
	case ETXTBSY: return "the file is open for writing";
	case ENOSPC: return "no space";
	case EROFS: return "read-only file system";
	case ENAMETOOLONG: return "name too long";
	case ENOSYS: return "not in this kernel";
	case ELOOP: return "too many links, or a link where none may be";
	case EOPNOTSUPP: return "not supported";
	case EUSERS: return "too many namespaces";
	case EDQUOT: return "quota exceeded";
	case ESTALE: return "stale file";
	}
	return "";
}
static void sayerr(i64 e)
{
	const char *t = errtext(e);
	if (*t)
		say(t);
	else
		say("error "), sayn((u64)(e < 0 ? -e : e), 10);
}

// ---- the stream ----

static u8 *body;                 // MAX_BODY octets, touched as far as frames are long
static struct { u32 len; u8 type, nfds; u16 flags; u64 id; } head;
static int fdq[64], nfdq;        // descriptors that came, in order
static int fds[MAX_FDS], nfds;   // of the frame at hand

struct iov { void *p; u64 n; };
struct msg { void *name; u32 namelen, pad; struct iov *iov; u64 niov; void *ctl; u64 nctl; i32 flags; u32 pad2; };
struct cmsg { u64 len; i32 level, type; i32 fd[252]; };
struct pollfd { i32 fd; short events, revents; };

static void die(int code) __attribute__((noreturn));
static void die(int code)
{
	for (;;)
		sys1(__NR_exit_group, code);
}
static void wait_stream(short what)
{
	struct pollfd p = {STREAM, what, 0};
	sys5(__NR_ppoll, &p, 1, NULL, NULL, 8);
}

// take fills n octets from the stream; the end of it is the end of process 1, and so of the sandbox.
static void take(void *to, u64 n)
{
	static struct cmsg c;
	u8 *p = to;
	while (n) {
		struct iov v = {p, n};
		struct msg m = {0, 0, 0, &v, 1, &c, sizeof c, 0, 0};
		i64 r = sys3(__NR_recvmsg, STREAM, &m, 0x40000000 /* MSG_CMSG_CLOEXEC */);
		if (r == -EAGAIN) {
			wait_stream(1);
			continue;
		}
		if (r == -EINTR)
			continue;
		if (r <= 0)
			die(0);
		if (m.nctl >= sizeof(u64) * 2 && c.level == 1 && c.type == 1) {
			u64 k = (c.len - 16) / 4;
			for (u64 i = 0; i < k && i < 252; i++) {
				if (nfdq == 64)
					die(1);
				fdq[nfdq++] = c.fd[i];
			}
		}
		p += r;
		n -= (u64)r;
	}
}
static void read_frame(void)
{
	take(&head, HEADER);
	if (head.len > MAX_BODY || head.nfds > MAX_FDS)
		die(1);
	take(body, head.len);
	if (head.nfds > nfdq)
		die(1);
	nfds = head.nfds;
	for (int i = 0; i < nfds; i++)
		fds[i] = fdq[i];
	nfdq -= nfds;
	for (int i = 0; i < nfdq; i++)
		fdq[i] = fdq[i + nfds];
}
// done_frame forgets a frame: descriptors that nobody took, and the octets.
static void done_frame(void)
{
	for (int i = 0; i < nfds; i++)
		if (fds[i] >= 0)
			sys1(__NR_close, fds[i]);
	nfds = 0;
	if (head.len > 4096)
		sys3(__NR_madvise, body, MAX_BODY, MADV_DONTNEED);
	else
		memset(body, 0, head.len);
}
static void send_flagged(u8 type, u16 flags, u64 id, const void *b, u32 n, const int *f, u32 nf)
{
	struct { u32 len; u8 type, nfds; u16 flags; u64 id; } h = {n, type, (u8)nf, flags, id};
	struct iov v[2] = {{&h, HEADER}, {(void *)b, n}};
	struct { u64 len; i32 level, type; i32 fd[4]; } c = {16 + 4 * nf, 1, 1, {0}};
	struct msg m = {0, 0, 0, v, n ? 2 : 1, nf ? &c : NULL, nf ? (16 + 4 * nf + 7) & ~7ul : 0, 0, 0};
	for (u32 i = 0; i < nf; i++)
		c.fd[i] = f[i];
	while (m.niov) {
		i64 r = sys3(__NR_sendmsg, STREAM, &m, 0x4000 /* MSG_NOSIGNAL */);
		if (r == -EAGAIN) {
			wait_stream(4);
			continue;
		}
		if (r == -EINTR)
			continue;
		if (r < 0)
			die(0);
		m.ctl = NULL;
		m.nctl = 0;
		while (m.niov && (u64)r >= m.iov->n) {
			r -= (i64)m.iov->n;
			m.iov++;
			m.niov--;
		}
		if (m.niov) {
			m.iov->p = (u8 *)m.iov->p + r;
			m.iov->n -= (u64)r;
		}
	}
}
static void send_frame(u8 type, u64 id, const void *b, u32 n, const int *f, u32 nf) { send_flagged(type, 0, id, b, n, f, nf); }
static void send_failed(u64 id)
{
	static struct { u32 stage, err, len; char text[TEXT_MAX]; } b;
	b.stage = res.stage;
	b.err = res.err;
	b.len = res.len;
	memcpy(b.text, res.text, res.len);
	send_frame(T_FAILED, id, &b, 12 + res.len, NULL, 0);
}

// ---- decoding; the host is trusted, but a slip of it must not make us run wild ----

static u8 *at, *end;
static int bad;

static u64 num(u32 n)
{
	u64 v = 0;
	if (bad || (u64)(end - at) < n) {
		bad = 1;
		return 0;
	}
	memcpy(&v, at, n);
	at += n;
	return v;
}
// str makes the next str a C string in place: it moves over its own length field.
static char *str(u32 *len)
{
	u32 n = (u32)num(4);
	if (bad || (u64)(end - at) < n) {
		bad = 1;
		return "";
	}
	char *s = (char *)at - 4;
	memmove(s, at, n);
	s[n] = 0;
	at += n;
	if (len)
		*len = n;
	return s;
}

static u8 *arena;
static u64 arena_used;

static void *alloc(u64 n)
{
	void *p = arena + arena_used;
	n = (n + 7) & ~7ul;
	if (n > ARENA - arena_used)
		die(1);
	arena_used += n;
	return p;
}
static void arena_reset(void)
{
	if (arena_used > 4096)
		sys3(__NR_madvise, arena, ARENA, MADV_DONTNEED);
	else
		memset(arena, 0, arena_used);
	arena_used = 0;
}
static char **list(u32 *count, u32 extra)
{
	u32 n = (u32)num(4);
	if (bad || n > (u64)(end - at) / 4) {
		bad = 1;
		n = 0;
	}
	char **l = alloc((n + extra + 1) * 8ul);
	for (u32 i = 0; i < n; i++)
		l[i] = str(NULL);
	l[n] = NULL;
	*count = n;
	return l;
}
static void *mapped(u64 n)
{
	i64 r = sys6(__NR_mmap, 0, (long)n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (r < 0 && r > -4096)
		die(1);
	return (void *)r;
}

// ---- what birth left ----

static int exe = -1;    // this program, for holders
static int ptsdir = -1; // the sandbox's devpts
static int groups = -1; // folder of a cgroup2 tree in which process 1 makes the groups of commands itself
static char leaf_memory[24]; // their limit of memory, as text: runtimes size themselves by the leaf alone
static u32 own_uid;
static u64 caps;
static u32 birth_flags;
static struct { u16 len; void *p; } filter; // sock_fprog
static char *base_env;                      // strings one after another
static u32 base_count;
static struct limit { u32 resource, pad; u64 soft, hard; } *limits;
static u32 nlimits;

// ---- birth ----

static int root = -1, procdir = -1;
static int base = -1; // the root that process 1 was cloned with, where PREPARE lays what BIRTH takes over

static i64 resolve(int dir, const char *path, u64 flags, u64 how)
{
	struct open_how h = {flags | O_CLOEXEC, 0, how};
	while (*path == '/')
		path++;
	return sys4(__NR_openat2, dir, *path ? path : ".", &h, sizeof h);
}
static i64 inside(const char *path)
{
	return resolve(root >= 0 ? root : base, path, O_PATH, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
}
static i64 attach(int fd, int target)
{
	return sys5(__NR_move_mount, fd, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}
static i64 mount_fd(const char *type, const char *const *opts, u64 attr)
{
	i64 r, fs = sys2(__NR_fsopen, type, FSOPEN_CLOEXEC);
	if (fs < 0)
		return fs;
	for (; *opts; opts += 2) {
		if (opts[1])
			r = sys5(__NR_fsconfig, fs, FSCONFIG_SET_STRING, opts[0], opts[1], 0);
		else
			r = sys5(__NR_fsconfig, fs, FSCONFIG_SET_FLAG, opts[0], NULL, 0);
		if (r < 0)
			goto out;
	}
	r = sys5(__NR_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
	if (r >= 0)
		r = sys3(__NR_fsmount, fs, FSMOUNT_CLOEXEC, attr);
out:
	sys1(__NR_close, fs);
	return r;
}
// copy clones a mount at fd, read-only where asked, and attaches it at target.
static i64 copy(int fd, int target, int ro)
{
	i64 t = sys3(__NR_open_tree, fd, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH), r = 0;
	if (t < 0)
		return t;
	if (ro) {
		struct mount_attr a = {MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, 0, 0, 0};
		r = sys5(__NR_mount_setattr, t, "", AT_EMPTY_PATH, &a, sizeof a);
	}
	if (r >= 0)
		r = attach((int)t, target);
	sys1(__NR_close, t);
	return r;
}
// bind binds one path over another. It is for PREPARE: all that is there was put there by the host. A clone by descriptors costs three
// times as much, since it has a mount namespace of its own until it is attached.
static i64 bind(const char *from, const char *to)
{
	return sys5(__NR_mount, from, to, NULL, 4096 /* MS_BIND */, NULL);
}
static int null = -1, empty = -1; // what masks are made of

static i64 op_mask(const char *path, int folder)
{
	struct statx st;
	// The folder is read-only as the shared /dev is that has it. What can't be bound so is looked at.
	if (root < 0 && base >= 0 && bind(folder ? "/dev/mqueue" : "/dev/null", path) >= 0)
		return 0;
	i64 r, t = inside(path);
	if (t == -ENOENT || t == -ENOTDIR)
		return 0;
	if (t < 0)
		return t;
	r = sys5(__NR_statx, t, "", AT_EMPTY_PATH | AT_NO_AUTOMOUNT, STATX_TYPE, &st);
	if (r < 0)
		goto out;
	if ((st.stx_mode & S_IFMT) == S_IFDIR) {
		// The shared read-only /dev has an empty folder for mqueue; a tmpfs of its own would be one more superblock.
		if (empty < 0)
			empty = (int)inside("/dev/mqueue");
		if (empty < 0) {
			const char *o[] = {"size", "4k", "nr_inodes", "1", "mode", "0555", NULL};
			empty = (int)mount_fd("tmpfs", o, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
		}
		r = empty < 0 ? empty : copy(empty, (int)t, 1);
	} else {
		if (null < 0)
			null = (int)inside("/dev/null");
		r = null < 0 ? null : copy(null, (int)t, 0);
	}
out:
	sys1(__NR_close, t);
	return r;
}
static i64 set_caps(u64 permitted, u64 effective)
{
	struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct d[2] = {{(u32)effective, (u32)permitted, 0}, {(u32)(effective >> 32), (u32)(permitted >> 32), 0}};
	return sys2(__NR_capset, &h, d);
}
static u64 all_caps;

// op_userns becomes process 1 for good: another user, in the user namespace of fd; where the kernel is the sandbox's own there is none
// to join, and fd is -1.
static i64 op_userns(int fd)
{
	i64 r;
	if ((r = sys2(__NR_setgroups, 0, NULL)) < 0 || (r = sys2(__NR_prctl, PR_SET_KEEPCAPS, 1)) < 0 ||
	    (r = sys3(__NR_setresgid, own_uid, own_uid, own_uid)) < 0 || (r = sys3(__NR_setresuid, own_uid, own_uid, own_uid)) < 0)
		return r;
	// A host may lack capabilities itself (CAP_SYS_RESOURCE here): keep what there is.
	struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct d[2];
	if ((r = sys2(__NR_capget, &h, d)) < 0)
		return r;
	u64 have = d[0].permitted | (u64)d[1].permitted << 32;
	if ((r = set_caps(have, have)) < 0)
		return r;
	if (fd >= 0 && (r = sys2(__NR_setns, fd, CLONE_NEWUSER)) < 0)
		return r;
	if ((r = sys2(__NR_capget, &h, d)) < 0)
		return r;
	all_caps = d[0].permitted | (u64)d[1].permitted << 32;
	for (int c = 0; c < 64; c++) {
		if (caps >> c & 1)
			continue;
		if ((r = sys2(__NR_prctl, PR_CAPBSET_READ, c)) == -EINVAL)
			break; // beyond the kernel's last
		if (r == 1 && (r = sys2(__NR_prctl, PR_CAPBSET_DROP, c)) < 0)
			return r;
	}
	return sys2(__NR_prctl, PR_SET_DUMPABLE, 0);
}

// op_groups makes the group of all commands, with controllers for theirs below it. It goes through a mount that nobody else sees: the
// one that is seen may be read-only.
static i64 op_groups(void)
{
	const char *none[] = {NULL};
	i64 m = mount_fd("cgroup2", none, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NODEV), r;
	if (m < 0)
		return m;
	if ((r = sys3(__NR_mkdirat, m, "commands", 0755)) < 0 && r != -EEXIST)
		return r;
	if ((r = sys4(__NR_openat, m, "commands", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0)) < 0)
		return r;
	groups = (int)r;
	sys1(__NR_close, m);
	if ((r = sys4(__NR_openat, groups, "cgroup.subtree_control", O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0)) < 0)
		return r;
	m = r;
	r = sys3(__NR_write, m, "+memory +pids", 13);
	sys1(__NR_close, m);
	return r;
}

// field returns the next NUL separated field of an op, "" after the last.
static char *field(char **p, char *stop)
{
	char *s = *p;
	if (s >= stop)
		return "";
	*p = s + strlen(s) + 1;
	return s;
}
static int fdarg(const char *s)
{
	i64 n = number(s);
	return n < 0 || n >= nfds ? -1 : fds[n];
}
// op_base leaves the spawner in a mount namespace that has an empty read-only folder and nothing of the host. Every process 1 starts with
// a copy of that: it costs little, and the root of a sandbox can lie on top of it. A pivot_root walks all processes of the machine and
// lets go of the old root, which waits for all processors.
static i64 op_base(void)
{
	static const char *const opts[] = {"size", "4k", "nr_inodes", "8", "mode", "0555", NULL}, *const dirs[] = {"dev", "sys", "proc", "drop", NULL};
	i64 r = sys1(__NR_unshare, CLONE_NEWNS), m;
	if (r < 0 || (r = sys5(__NR_mount, NULL, "/", NULL, (1ul << 18 | 1ul << 14) /* MS_PRIVATE|MS_REC */, NULL)) < 0)
		return r;
	if ((m = mount_fd("tmpfs", opts, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)) < 0)
		return m;
	for (const char *const *d = dirs; *d && r >= 0; d++)
		r = sys3(__NR_mkdirat, m, *d, 0555);
	struct mount_attr a = {MOUNT_ATTR_RDONLY, 0, 0, 0};
	if (r >= 0 && (r = sys5(__NR_mount_setattr, m, "", AT_EMPTY_PATH, &a, sizeof a)) >= 0 &&
	    (r = sys5(__NR_move_mount, m, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH)) >= 0 && (r = sys1(__NR_fchdir, m)) >= 0 &&
	    (r = sys2(__NR_pivot_root, ".", ".")) >= 0 && (r = sys2(__NR_umount2, ".", 2 /* MNT_DETACH */)) >= 0)
		r = sys1(__NR_chdir, "/");
	sys1(__NR_close, m);
	sys1(__NR_close, base);
	base = -1; // was the old root
	return r;
}
static i64 op(char *verb, char *p, char *stop)
{
	char *a = field(&p, stop), *b = field(&p, stop);
	i64 r, t;
	if (eq(verb, "private"))
		return sys5(__NR_mount, NULL, "/", NULL, (1ul << 18 | 1ul << 14) /* MS_PRIVATE|MS_REC */, NULL);
	if (eq(verb, "netns"))
		return sys2(__NR_setns, fdarg(a), CLONE_NEWNET);
	if (eq(verb, "base"))
		return op_base();
	if (eq(verb, "cgroup")) { // the namespace's root is the group that we are in now
		if ((r = sys1(__NR_unshare, CLONE_NEWCGROUP)) < 0)
			return r;
		return sys3(__NR_write, fdarg(a), "0", 1);
	}
	if (eq(verb, "drop")) // below the root, so that it ends with the namespace: an end of its own would wait for the kernel once more
		return sys5(__NR_move_mount, fdarg(a), "", base, "drop", MOVE_MOUNT_F_EMPTY_PATH);
	if (eq(verb, "shift")) {
		if ((t = inside(a)) < 0)
			return t;
		i64 from = resolve(base, a, O_PATH, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS);
		r = from < 0 ? from : attach((int)from, (int)t);
		if (from >= 0)
			sys1(__NR_close, from);
		sys1(__NR_close, t);
		return r;
	}
	if (eq(verb, "enter")) {
		if ((r = sys1(__NR_fchdir, root)) < 0 || (r = sys1(__NR_chroot, ".")) < 0)
			return r;
		return sys1(__NR_chdir, "/");
	}
	if (eq(verb, "root")) {
		// On top of "/": no folder of the host is needed, and pivot_root(".", ".") puts it underneath.
		int fd = fdarg(a);
		if ((r = sys5(__NR_move_mount, fd, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH)) < 0)
			return r;
		return root = (int)sys3(__NR_fcntl, fd, 1030 /* F_DUPFD_CLOEXEC */, 4);
	}
	if (eq(verb, "hostname"))
		return sys2(__NR_sethostname, a, strlen(a));
	if (eq(verb, "sysctl")) {
		if ((t = resolve(procdir, a, O_WRONLY, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV)) < 0)
			return t;
		r = sys3(__NR_write, t, b, strlen(b));
		sys1(__NR_close, t);
		return r;
	}
	if (eq(verb, "userns"))
		return op_userns(fdarg(a));
	if (eq(verb, "stay"))
		return op_userns(-1);
	if (eq(verb, "remove")) { // a file that is not there is no error
		r = sys3(__NR_unlinkat, AT_FDCWD, a, 0);
		return r == -ENOENT ? 0 : r;
	}
	if (eq(verb, "pts")) // mounted by whoever made the root
		return ptsdir = (int)resolve(AT_FDCWD, a, O_PATH | O_DIRECTORY, RESOLVE_NO_SYMLINKS);
	if (eq(verb, "groups"))
		return op_groups();
	if (eq(verb, "set")) {
		if (eq(a, "memory.max") && strlen(b) < sizeof leaf_memory)
			memcpy(leaf_memory, b, strlen(b) + 1);
		if ((t = resolve(groups, a, O_WRONLY, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV)) < 0)
			return t;
		r = sys3(__NR_write, t, b, strlen(b));
		sys1(__NR_close, t);
		return r;
	}
	if (eq(verb, "events")) {
		// Every command inherits this filter, so that one listener hears of all of them. It asks about a few calls that process 1
		// and the file server never make.
		u64 code[128];
		i64 n = sys4(__NR_pread64, fdarg(a), code, sizeof code, 0);
		if (n <= 0 || n % 8 || n == sizeof code)
			return n < 0 ? n : -EINVAL;
		struct { u16 len; void *p; } f = {(u16)(n / 8), code};
		if ((r = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW | SECCOMP_FILTER_FLAG_NEW_LISTENER, &f)) < 0)
			return r;
		int l = (int)r;
		send_frame(T_LISTENER, 0, NULL, 0, &l, 1);
		sys1(__NR_close, l);
		return 0;
	}
	if (eq(verb, "pivot")) {
		if ((r = sys1(__NR_fchdir, root)) < 0 || (r = sys2(__NR_pivot_root, ".", ".")) < 0 || (r = sys2(__NR_umount2, ".", 2 /* MNT_DETACH */)) < 0)
			return r;
		return sys1(__NR_chdir, "/");
	}
	if (eq(verb, "mask"))
		return op_mask(a, eq(b, "folder"));
	if (eq(verb, "move")) {
		if ((t = inside(b)) < 0)
			return t;
		r = attach(fdarg(a), (int)t);
		sys1(__NR_close, t);
		return r;
	}
	if (eq(verb, "ro") && root < 0 && base >= 0) {
		struct mount_attr m = {MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, 0, 0, 0};
		if ((r = bind(a, a)) < 0)
			return r;
		return sys5(__NR_mount_setattr, AT_FDCWD, a, 0, &m, sizeof m);
	}
	if (eq(verb, "ro")) {
		if ((t = inside(a)) < 0)
			return t;
		r = copy((int)t, (int)t, 1);
		sys1(__NR_close, t);
		return r;
	}
	if (eq(verb, "proc") || eq(verb, "devpts")) {
		int pts = verb[0] == 'd';
		const char *po[] = {NULL}, *to[] = {"newinstance", NULL, "mode", "620", "ptmxmode", "666", "gid", b, NULL};
		if (pts && !*b)
			to[6] = NULL;
		i64 m = mount_fd(pts ? "devpts" : "proc", pts ? to : po, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC | (pts ? 0 : MOUNT_ATTR_NODEV));
		if (m < 0)
			return m;
		if ((t = inside(a)) < 0)
			return t;
		r = attach((int)m, (int)t);
		sys1(__NR_close, t);
		if (pts)
			ptsdir = (int)m;
		else
			procdir = (int)m;
		return r;
	}
	return -EINVAL;
}

// run_ops runs operations; what failed is in res.
static int run_ops(char **ops, u32 *lens, u32 n)
{
	for (u32 i = 0; i < n; i++) {
		char *p = ops[i], *stop = p + lens[i], *verb = field(&p, stop);
		i64 r = op(verb, p, stop);
		if (r < 0) {
			fail(S_BIRTH, (u32)-r);
			say("birth:");
			for (p = ops[i]; p < stop;) {
				say(" ");
				sayq(field(&p, stop));
			}
			say(": ");
			sayerr(r);
			return -1;
		}
	}
	return 0;
}

// prepare does what of a birth is the same for every sandbox, before there is one. It has no answer but FAILED.
static void prepare(void)
{
	at = body;
	end = body + head.len;
	bad = 0;
	u32 nops = (u32)num(4);
	if (nops > 256)
		bad = 1;
	char **ops = alloc(nops * 8ul + 8);
	u32 *lens = alloc(nops * 4ul + 8);
	for (u32 i = 0; i < nops && !bad; i++)
		ops[i] = str(&lens[i]);
	if (bad || at != end) {
		fail(S_BIRTH, EINVAL);
		say("malformed PREPARE");
		goto failed;
	}
	if (base < 0 && (base = (int)sys4(__NR_openat, AT_FDCWD, "/", O_PATH | O_DIRECTORY | O_CLOEXEC, 0)) < 0) {
		fail(S_BIRTH, (u32)-base);
		goto failed;
	}
	if (run_ops(ops, lens, nops) < 0)
		goto failed;
	done_frame();
	arena_reset();
	return;
failed:
	send_failed(0);
	die(1);
}

static void birth(void)
{
	at = body;
	end = body + head.len;
	bad = 0;
	fail(S_BIRTH, EINVAL);
	if (num(4) != 1) {
		say("BIRTH of another version");
		goto failed;
	}
	own_uid = (u32)num(4);
	u32 nops = (u32)num(4), len;
	if (bad || nops > 256)
		goto malformed;
	char **ops = alloc(nops * 8ul + 8);
	u32 *lens = alloc(nops * 4ul + 8);
	for (u32 i = 0; i < nops; i++)
		ops[i] = str(&lens[i]);
	char *f = str(&len);
	caps = num(8);
	birth_flags = (u32)num(4);
	char **env = list(&base_count, 0);
	nlimits = (u32)num(4);
	if (bad || nlimits > 32 || len % 8 || len / 8 > 4096)
		goto malformed;
	// One mapping for what stays.
	u64 size = len + nlimits * sizeof *limits + 1;
	for (u32 i = 0; i < base_count; i++)
		size += strlen(env[i]) + 1;
	u8 *keep = mapped(size);
	filter.len = (u16)(len / 8);
	filter.p = memcpy(keep, f, len);
	keep += len;
	limits = (void *)keep;
	for (u32 i = 0; i < nlimits; i++) {
		limits[i].resource = (u32)num(4);
		limits[i].soft = num(8);
		limits[i].hard = num(8);
	}
	keep += nlimits * sizeof *limits;
	base_env = (char *)keep;
	for (u32 i = 0; i < base_count; i++) {
		u64 n = strlen(env[i]) + 1;
		memcpy(keep, env[i], n);
		keep += n;
	}
	if (bad || at != end)
		goto malformed;
	if (run_ops(ops, lens, nops) < 0)
		goto failed;
	int done[] = {root, base, procdir, null, empty};
	for (u32 i = 0; i < sizeof done / sizeof *done; i++)
		if (done[i] >= 0)
			sys1(__NR_close, done[i]);
	i64 own = sys4(__NR_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);
	if (own >= 0) {
		for (int i = 0; i < 3; i++)
			sys2(__NR_dup2, own, i);
		sys1(__NR_close, own);
	}
	done_frame();
	arena_reset();
	u32 hello[2] = {1, 7};
	send_frame(T_HELLO, 0, hello, 8, NULL, 0);
	return;
malformed:
	fail(S_BIRTH, EINVAL);
	say("malformed BIRTH");
failed:
	send_failed(0);
	die(1);
}

// ---- users ----

struct user {
	u32 uid, gid, ngroups;
	char *name, *home;
	u32 groups[MAX_GROUPS];
};

// stamp tells one state of a file from another.
struct stamp { u64 dev, ino, size; i64 ms, cs; u32 mn, cn; };

static void stamp_of(const struct statx *st, struct stamp *t)
{
	memset(t, 0, sizeof *t);
	t->dev = (u64)st->stx_dev_major << 32 | st->stx_dev_minor;
	t->ino = st->stx_ino;
	t->size = st->stx_size;
	t->ms = st->stx_mtime.tv_sec;
	t->mn = st->stx_mtime.tv_nsec;
	t->cs = st->stx_ctime.tv_sec;
	t->cn = st->stx_ctime.tv_nsec;
}

static u64 slurped; // octets that the last slurp wrote

// slurp reads a file of the image; t is what it was before. NULL: absent, not regular, or unreadable.
static char *slurp(const char *path, struct stamp *t)
{
	struct statx st;
	i64 fd = resolve(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, RESOLVE_NO_MAGICLINKS);
	if (fd < 0)
		return NULL;
	char *b = NULL;
	if (sys5(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &st) < 0 || (st.stx_mode & S_IFMT) != S_IFREG)
		goto out;
	stamp_of(&st, t);
	static char *file; // one at a time
	if (!file)
		file = mapped(FILE_MAX + 1);
	b = file;
	u64 n = 0;
	while (n < FILE_MAX) {
		i64 r = sys3(__NR_read, fd, b + n, FILE_MAX - n);
		if (r <= 0)
			break;
		n += (u64)r;
	}
	slurped = n;
	if (n == FILE_MAX) // cut: the last line may not be whole
		while (n && b[n - 1] != '\n')
			n--;
	b[n] = 0;
out:
	sys1(__NR_close, fd);
	return b;
}
static void unslurp(char *b)
{
	if (b && slurped > 4096)
		sys3(__NR_madvise, b, FILE_MAX + 1, MADV_DONTNEED);
}
// row cuts the next line of *p into n fields at ':' (missing ones are ""); 0 at the end. A NUL in the file ends it.
static int row(char **p, char **f, int n)
{
	char *s = *p;
	if (!*s)
		return 0;
	for (int i = 0; i < n; i++) {
		f[i] = s;
		while (*s && *s != '\n' && (*s != ':' || i == n - 1))
			s++;
		char c = *s;
		*s = 0;
		if (c)
			s++;
		if (c != ':') {
			char *e = c ? s - 1 : s;
			for (i++; i < n; i++)
				f[i] = e;
			if (!c) {
				*p = e;
				return 1;
			}
			*p = s;
			return 1;
		}
	}
	*p = s;
	return 1;
}
static char *keep(const char *s)
{
	u64 n = strlen(s) + 1;
	return memcpy(alloc(n), s, n);
}
static int member(char *l, const char *name)
{
	while (*l) {
		char *s = l;
		while (*l && *l != ',')
			l++;
		int last = !*l;
		*l = 0;
		if (eq(s, name))
			return 1;
		if (last)
			return 0;
		l++;
	}
	return 0;
}

// A user that was found, for as long as the files that tell of it are the same ones: most commands of a sandbox are one user's, and the
// files cost two opens and the reading. Of files that changed a moment ago a next change may not show; those are read each time.
static struct {
	u32 set;
	char want[64], name[64], home[256];
	struct stamp files[2];
	struct user u;
} last;

static int stamp(const char *path, struct stamp *t)
{
	struct statx st;
	if (sys5(__NR_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BASIC_STATS, &st) < 0 || (st.stx_mode & S_IFMT) != S_IFREG)
		return -1;
	stamp_of(&st, t);
	return 0;
}
static int stamps(struct stamp *t)
{
	return stamp("/etc/passwd", &t[0]) < 0 || stamp("/etc/group", &t[1]) < 0 ? -1 : 0;
}
static void copy_user(struct user *to, const struct user *from)
{
	memcpy(to, from, (u64)((const char *)&from->groups[from->ngroups] - (const char *)from));
}

static int look_up(struct user *u, char *want);

static struct stamp seen[2]; // of the files as look_up read them; ino 0: it did not

static int find_user(struct user *u, char *want)
{
	u64 n = strlen(want) + 1;
	if (n > sizeof last.want)
		return look_up(u, want);
	struct stamp now[2];
	if (last.set && eq(want, last.want) && stamps(now) == 0 && !memcmp(now, last.files, sizeof now)) {
		copy_user(u, &last.u);
		return 0;
	}
	char asked[sizeof last.want];
	memcpy(asked, want, n); // look_up cuts it
	if (look_up(u, want) < 0)
		return -1;
	last.set = 0;
	struct { i64 s, n; } t;
	if (!seen[0].ino || !seen[1].ino || sys2(__NR_clock_gettime, 0 /* CLOCK_REALTIME */, &t) < 0)
		return 0;
	for (int i = 0; i < 2; i++)
		if (seen[i].ms > t.s - 3 || seen[i].cs > t.s - 3)
			return 0;
	if (strlen(u->home) >= sizeof last.home || (u->name && strlen(u->name) >= sizeof last.name))
		return 0;
	copy_user(&last.u, u);
	last.u.home = memcpy(last.home, u->home, strlen(u->home) + 1);
	if (u->name)
		last.u.name = memcpy(last.name, u->name, strlen(u->name) + 1);
	memcpy(last.want, asked, n);
	memcpy(last.files, seen, sizeof seen);
	last.set = 1;
	return 0;
}

static int look_up(struct user *u, char *want)
{
	char *group = NULL, *f[7], *p;
	memset(seen, 0, sizeof seen);
	u->uid = u->gid = u->ngroups = 0;
	u->name = NULL;
	u->home = "/";
	for (char *s = want; *s; s++)
		if (*s == ':') {
			*s = 0;
			group = s + 1;
			break;
		}
	if (!*want)
		want = "0";
	i64 id = number(want);
	char *passwd = slurp("/etc/passwd", &seen[0]);
	int found = 0;
	// A name goes before a number, as for chown(1): a user may be called 1000.
	for (int pass = 0; pass < 2 && passwd && !found; pass++) {
		if (pass == 1 && id < 0)
			break;
		for (p = passwd; *p && !found;) {
			// The cut writes NULs, so each pass works on a line of its own.
			char *e = p, line[1024];
			while (*e && *e != '\n')
				e++;
			u64 n = (u64)(e - p);
			if (n >= sizeof line) {
				p = *e ? e + 1 : e;
				continue;
			}
			memcpy(line, p, n);
			line[n] = 0;
			p = *e ? e + 1 : e;
			char *q = line;
			if (!row(&q, f, 7) || !*f[0])
				continue;
			i64 uid = number(f[2]), gid = number(f[3]);
			if (uid < 0 || gid < 0 || (pass == 0 ? !eq(f[0], want) : uid != id))
				continue;
			u->uid = (u32)uid;
			u->gid = (u32)gid;
			u->name = keep(f[0]);
			if (f[5][0] == '/')
				u->home = keep(f[5]);
			found = 1;
		}
	}
	unslurp(passwd);
	if (!found) {
		if (id < 0 && eq(want, "root")) // an image without a passwd file still has a root
			id = 0;
		if (id < 0) {
			fail(S_USER, ENOENT);
			say("user "), sayq(want), say(": not in /etc/passwd");
			return -1;
		}
		u->uid = (u32)id;
		if (id == 0)
			u->name = "root", u->home = "/root";
	}
	i64 gid = group ? number(group) : -1;
	if (group && !*group) {
		fail(S_USER, EINVAL);
		say("user "), sayq(want), say(":: the group is empty");
		return -1;
	}
	char *groups = group || u->name ? slurp("/etc/group", &seen[1]) : NULL;
	int got = 0;
	for (p = groups; p && *p;) {
		if (!row(&p, f, 4))
			break;
		i64 g = number(f[2]);
		if (g < 0)
			continue;
		if (group) {
			if (eq(f[0], group)) {
				u->gid = (u32)g;
				got = 1;
				break;
			}
		} else if (u->name && g < MAX_ID && g != u->gid && u->ngroups < MAX_GROUPS - 1 && member(f[3], u->name))
			u->groups[u->ngroups++] = (u32)g;
	}
	unslurp(groups);
	if (group && !got) {
		if (gid < 0) {
			fail(S_USER, ENOENT);
			say("group "), sayq(group), say(": not in /etc/group");
			return -1;
		}
		u->gid = (u32)gid;
	}
	if (u->uid >= MAX_ID || u->gid >= MAX_ID) {
		fail(S_USER, EINVAL);
		say("user "), sayn(u->uid, 10), say(":"), sayn(u->gid, 10), say(": outside the sandbox's 65536 ids");
		return -1;
	}
	u->groups[u->ngroups++] = u->gid;
	return 0;
}

// ---- commands ----

static struct command { u64 id; i32 pid, master; u32 group; } commands[MAX_COMMANDS]; // master: of a terminal that is relayed, else -1
static u32 ncommands;

struct start {
	u64 id;
	u32 flags;
	int in[3], slave, nolistener;
	char *cwd;
	int home; // cwd is the home, not asked for
	char **argv, **env;
	u32 argc;
	const char *path;
	struct user *u;
};

static void child_fail(void) __attribute__((noreturn));
static void child_fail(void)
{
	for (;;)
		sys1(__NR_exit_group, 127);
}
static void child_die(u32 stage, i64 r, const char *what)
{
	fail(stage, (u32)-r);
	say(what), say(": "), sayerr(r);
	child_fail();
}

static const char *machine(u32 m)
{
	switch (m) {
	case 3: return "i386";
	case 8: return "mips";
	case 20: return "powerpc";
	case 21: return "powerpc64";
	case 22: return "s390x";
	case 40: return "arm";
	case 62: return "x86_64";
	case 183: return "aarch64";
	case 243: return "riscv";
	case 258: return "loongarch";
	}
	return NULL;
}

// explain says why exec of a program that is there failed. It runs as the command's user.
static void explain(const char *path, i64 r)
{
	char *b = alloc(4096);
	struct statx st;
	i64 n = 0;
	fail(r == -ENOENT || r == -EACCES || r == -EISDIR ? S_PROGRAM : S_EXEC, (u32)-r);
	say("program "), sayq(path), say(": ");
	i64 s = sys5(__NR_statx, AT_FDCWD, path, 0, STATX_TYPE | STATX_MODE, &st);
	if (s < 0) {
		sayerr(s == -ENOENT ? r : s);
		return;
	}
	if ((st.stx_mode & S_IFMT) == S_IFDIR) {
		res.stage = S_PROGRAM;
		res.err = EISDIR;
		say("is a folder");
		return;
	}
	if (r == -EACCES) {
		if ((st.stx_mode & S_IFMT) != S_IFREG) {
			say("is not a regular file");
			return;
		}
		if (!(st.stx_mode & 0111)) {
			say("not executable (mode 0"), sayn(st.stx_mode & 07777, 8), say(")");
			return;
		}
	}
	i64 fd = (st.stx_mode & S_IFMT) == S_IFREG ? sys4(__NR_openat, AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0) : -1;
	if (fd >= 0)
		n = sys3(__NR_read, fd, b, 4095);
	if (n < 0)
		n = 0;
	b[n] = 0;
	if (n > 2 && b[0] == '#' && b[1] == '!' && (r == -ENOENT || r == -EACCES || r == -ENOTDIR || r == -ELOOP || r == -ENOEXEC)) {
		char *i = b + 2, *e;
		while (*i == ' ' || *i == '\t')
			i++;
		for (e = i; *e && *e != ' ' && *e != '\t' && *e != '\n'; e++)
			;
		char after = *e;
		*e = 0;
		say("its interpreter "), sayq(i), say(": ");
		if (r == -ENOENT)
			say("not found");
		else
			sayerr(r);
		if (e > i && e[-1] == '\r')
			say(" (the script's lines end with a carriage return)");
		(void)after;
		return;
	}
	if (n >= 20 && !memcmp(b, "\177ELF", 4)) {
		u32 m = (u8)b[18] | (u32)(u8)b[19] << 8;
		if (m != ELF_MACHINE || b[4] != 2) {
			const char *name = machine(m);
			res.stage = S_EXEC;
			say("built for ");
			if (name)
				say(name);
			else
				say("machine "), sayn(m, 10);
			if (m == ELF_MACHINE)
				say(" with 32-bit pointers");
			say(", this is " MACHINE_NAME);
			return;
		}
		if (r == -ENOENT && n >= 64) {
			u64 off = *(u64 *)(b + 32);
			u32 size = *(u16 *)(b + 54), k = *(u16 *)(b + 56);
			for (u32 i = 0; i < k && size >= 56 && off + size <= (u64)n; i++, off += size)
				if (*(u32 *)(b + off) == 3) {
					u64 o = *(u64 *)(b + off + 8), l = *(u64 *)(b + off + 32);
					if (o < (u64)n && l < (u64)n - o) {
						b[o + l] = 0;
						say("its loader "), sayq(b + o), say(": not found");
						return;
					}
				}
		}
		sayerr(r);
		return;
	}
	if (r == -ENOEXEC) {
		say(n ? "exec format error: neither an ELF program nor a script with #!" : "exec format error: the file is empty");
		return;
	}
	sayerr(r);
}

// foreign tells of a program that the filter would kill at its first call: 32-bit code is another architecture to it.
static int foreign(struct start *s, const char *path)
{
	struct statx st;
	u8 b[20];
	if (!filter.len || s->flags & START_NOFILTER ||
	    sys5(__NR_statx, AT_FDCWD, path, 0, STATX_TYPE | STATX_MODE, &st) < 0 || (st.stx_mode & S_IFMT) != S_IFREG || !(st.stx_mode & 0111))
		return 0;
	i64 fd = sys4(__NR_openat, AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	i64 n = sys3(__NR_read, fd, b, sizeof b);
	sys1(__NR_close, fd);
	if (n < 20 || memcmp(b, "\177ELF\001", 5))
		return 0;
	const char *m = machine(b[18] | (u32)b[19] << 8);
	fail(S_EXEC, ENOEXEC);
	say("program "), sayq(path), say(": a 32-bit program");
	if (m)
		say(" ("), say(m), say(")");
	say("; sandboxes run those for " MACHINE_NAME " alone");
	return 1;
}

static void too_big(struct start *s)
{
	fail(S_EXEC, E2BIG);
	say("program "), sayq(s->argv[0]), say(": ");
	for (int e = 0; e < 2; e++) {
		char **l = e ? s->env : s->argv;
		for (u32 i = 0; l[i]; i++) {
			u64 n = strlen(l[i]) + 1;
			if (n > 131072) {
				say(e ? "environment entry " : "argument "), sayn(i, 10), say(" has ");
				sayn(n - 1, 10), say(" octets; with its end at most 131072 are allowed");
				return;
			}
		}
	}
	say("arguments and environment together are too long");
}

static void run(struct start *s)
{
	i64 r, seen = 0;
	const char *name = s->argv[0];
	if (find(name, '/')) {
		if (foreign(s, name))
			return;
		r = sys3(__NR_execve, name, s->argv, s->env);
		if (r == -E2BIG)
			too_big(s);
		else if (r == -ENOENT || r == -ENOTDIR) {
			struct statx st;
			if (sys5(__NR_statx, AT_FDCWD, name, 0, STATX_TYPE, &st) < 0) {
				fail(S_PROGRAM, (u32)-r);
				say("program "), sayq(name), say(": "), sayerr(r);
			} else
				explain(name, r);
		} else
			explain(name, r);
		return;
	}
	// The arena is the parent's: it forgets these with the frame.
	u64 nl = strlen(name), size = 0, longest = 4096 + 256;
	const char *p = s->path;
	for (const char *e = p; *p; p = *e ? ++e : e) {
		for (e = p; *e && *e != ':';)
			e++;
		if ((u64)(e - p) > size)
			size = (u64)(e - p);
	}
	size += nl + 3;
	if (size > longest)
		size = longest;
	p = s->path;
	char *full = alloc(size), *denied = alloc(size); // small, so that they are wiped and their page stays
	for (; *name;) {
		const char *e = p;
		while (*e && *e != ':')
			e++;
		u64 n = (u64)(e - p);
		if (n + nl + 2 <= size) {
			memcpy(full, p, n);
			if (!n)
				full[n++] = '.';
			full[n++] = '/';
			memcpy(full + n, name, nl + 1);
			if (foreign(s, full))
				return;
			r = sys3(__NR_execve, full, s->argv, s->env);
			if (r == -E2BIG) {
				too_big(s);
				return;
			}
			if (r == -ENOENT) {
				struct statx st;
				// Present, yet not found: its interpreter or loader is missing.
				if (sys5(__NR_statx, AT_FDCWD, full, 0, STATX_TYPE, &st) >= 0) {
					explain(full, r);
					return;
				}
			} else if (r == -EACCES || r == -EISDIR) {
				struct statx st;
				if (!seen && sys5(__NR_statx, AT_FDCWD, full, 0, STATX_TYPE, &st) >= 0 && (st.stx_mode & S_IFMT) != S_IFDIR) {
					seen = r;
					memcpy(denied, full, n + nl + 1);
				}
			} else if (r != -ENOTDIR && r != -ENAMETOOLONG && r != -ELOOP) {
				explain(full, r);
				return;
			}
		}
		if (!*e)
			break;
		p = e + 1;
	}
	if (seen) {
		explain(denied, seen);
		return;
	}
	fail(S_PROGRAM, ENOENT);
	say("program "), sayq(name), say(": not found in PATH ("), sayq(s->path), say(")");
}

static void child(void *arg)
{
	struct start *s = arg;
	struct user *u = s->u;
	i64 r;
	sys0(__NR_setsid);
	if (s->slave >= 0) {
		if ((r = sys3(__NR_ioctl, s->slave, TIOCSCTTY, 0)) < 0)
			child_die(S_TERMINAL, r, "controlling terminal");
		s->in[0] = s->in[1] = s->in[2] = s->slave;
	}
	for (int i = 0; i < 3; i++)
		if (s->in[i] >= 0 && (r = sys2(__NR_dup2, s->in[i], i)) < 0)
			child_die(S_EXEC, r, "standard descriptors");
	if (s->flags & START_CGROUPNS && (r = sys1(__NR_unshare, CLONE_NEWCGROUP)) < 0)
		child_die(S_CGROUP, r, "cgroup namespace");
	for (u32 i = 0; i < nlimits; i++) {
		u64 old[2], want[2] = {limits[i].soft, limits[i].hard};
		if (sys4(__NR_prlimit64, 0, limits[i].resource, NULL, old) < 0)
			continue;
		if (want[1] > old[1])
			want[1] = old[1];
		if (want[0] > want[1])
			want[0] = want[1];
		if ((r = sys4(__NR_prlimit64, 0, limits[i].resource, want, NULL)) < 0)
			child_die(S_CONFINE, r, "resource limit");
	}
	if (birth_flags & 1 && (r = sys5(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) < 0)
		child_die(S_CONFINE, r, "no_new_privs");
	// The filter before the credentials: without no_new_privs it takes CAP_SYS_ADMIN here. It lets the rest pass.
	if (filter.len && !(s->flags & START_NOFILTER)) {
		u64 f = SECCOMP_FILTER_FLAG_SPEC_ALLOW | (s->flags & START_NOTIFY ? SECCOMP_FILTER_FLAG_NEW_LISTENER : 0);
		r = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, f, &filter);
		if (r == -EINVAL && f == SECCOMP_FILTER_FLAG_SPEC_ALLOW)
			r = sys3(__NR_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter); // a kernel without that flag
		if (r < 0)
			child_die(S_CONFINE, r, "seccomp filter");
		if (s->flags & START_NOTIFY) {
			int l = (int)r; // the parent sleeps, so the stream is ours
			send_frame(T_LISTENER, s->id, NULL, 0, &l, 1);
		}
	}
	int last = 3;
	if (s->flags & START_HOLDER) {
		// The socket is descriptor 3, this program 4.
		int hold = (int)sys3(__NR_fcntl, fds[nfds - 1], 1030, 5), self = (int)sys3(__NR_fcntl, exe, 1030, 5);
		if (hold < 0 || self < 0)
			child_die(S_EXEC, hold < 0 ? hold : self, "holder's descriptors");
		sys2(__NR_dup2, hold, 3);
		sys3(__NR_dup3, self, 4, O_CLOEXEC);
		last = 5;
	}
	sys3(__NR_close_range, last, ~0u, 0);
	if ((r = sys2(__NR_setgroups, u->ngroups, u->groups)) < 0 || (r = sys3(__NR_setresgid, u->gid, u->gid, u->gid)) < 0 ||
	    (r = sys3(__NR_setresuid, u->uid, u->uid, u->uid)) < 0) {
		fail(S_USER, (u32)-r);
		say("user "), sayn(u->uid, 10), say(":"), sayn(u->gid, 10), say(": "), sayerr(r);
		child_fail();
	}
	u64 c = u->uid ? 0 : caps & all_caps;
	if ((r = set_caps(c, c)) < 0)
		child_die(S_CONFINE, r, "capabilities");
	sys1(__NR_umask, 022);
	u64 none = 0;
	sys4(__NR_rt_sigprocmask, SIG_SETMASK, &none, NULL, 8);
	r = sys1(__NR_chdir, s->cwd);
	if (r >= 0) {
		// A folder whose way to the root is cut (a descriptor's, a detached mount's) is none of the sandbox's.
		i64 n = sys2(__NR_getcwd, res.text, sizeof res.text);
		if (n > 0 && res.text[0] != '/')
			r = -ENOENT;
		if (n > 0)
			memset(res.text, 0, (u64)n);
	}
	if (r < 0 && s->home)
		r = sys1(__NR_chdir, "/");
	if (r < 0) {
		fail(S_CWD, (u32)-r);
		say("cwd "), sayq(s->cwd), say(": "), sayerr(r);
		if (r == -EACCES)
			say(" for uid "), sayn(u->uid, 10);
		child_fail();
	}
	res.execing = 1;
	if (s->flags & START_HOLDER) {
		if ((r = sys5(__NR_execveat, 4, "", s->argv, s->env, AT_EMPTY_PATH)) < 0)
			child_die(S_EXEC, r, "holder");
	} else
		run(s);
	res.execing = 0;
	child_fail();
}

static int named(const char *e, const char *name)
{
	u64 n = strlen(name);
	return !memcmp(e, name, n) && e[n] == '=';
}
static char *join(const char *name, const char *v)
{
	u64 n = strlen(name), m = strlen(v);
	char *s = alloc(n + m + 2);
	memcpy(s, name, n);
	s[n] = '=';
	memcpy(s + n + 1, v, m + 1);
	return s;
}

// environment: START's entries (the last of a name wins), BIRTH's of other names, and what a login would have set.
static char **environment(char **mine, u32 n, struct user *u, int terminal, const char **path)
{
	const char *defaults[5][2] = {{"PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, {"HOME", u->home},
		{"USER", u->name}, {"LOGNAME", u->name}, {"TERM", terminal ? "xterm-256color" : NULL}};
	char **l = alloc((n + base_count + 6) * 8ul), *b = base_env;
	u32 k = 0;
	for (u32 i = 0; i < n; i++) {
		const char *e = find(mine[i], '=');
		if (!e || e == mine[i]) {
			fail(S_EXEC, EINVAL);
			say("environment entry "), sayn(i, 10), say(" ("), sayq(mine[i]), say("): no name before '='");
			return NULL;
		}
	}
	for (u32 i = 0; i < base_count; i++, b += strlen(b) + 1)
		l[k++] = b;
	u32 nb = k;
	for (u32 i = 0; i < n; i++) {
		u64 w = (u64)(find(mine[i], '=') - mine[i]) + 1;
		u32 j = 0;
		// Names are few where this is quadratic: a request's own duplicates are its affair beyond 64 entries.
		u32 upto = n > 64 ? nb : k;
		for (; j < upto; j++)
			if (!memcmp(l[j], mine[i], w))
				break;
		if (j < upto)
			l[j] = mine[i];
		else
			l[k++] = mine[i];
	}
	for (int d = 0; d < 5; d++) {
		u32 j = 0;
		for (; j < k; j++)
			if (named(l[j], defaults[d][0]))
				break;
		if (j == k && defaults[d][1])
			l[k++] = join(defaults[d][0], defaults[d][1]);
	}
	l[k] = NULL;
	*path = "";
	for (u32 j = 0; j < k; j++)
		if (named(l[j], "PATH"))
			*path = l[j] + 5;
	return l;
}

struct ptmx {
	struct user *u;
	i64 r;
};

// open_ptmx runs in a child that shares our descriptors: our own id is not mapped, so there is no way back to it.
static void open_ptmx(void *arg)
{
	struct ptmx *p = arg;
	if (sys1(__NR_setfsgid, p->u->gid) == -ENOSYS) { // not Linux itself
		sys3(__NR_setresgid, p->u->gid, p->u->gid, p->u->gid);
		sys3(__NR_setresuid, p->u->uid, p->u->uid, p->u->uid);
	} else
		sys1(__NR_setfsuid, p->u->uid);
	p->r = resolve(ptsdir, "ptmx", O_RDWR | O_NOCTTY, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV);
	for (;;)
		sys1(__NR_exit_group, 0);
}

static int terminal(struct start *s, u16 rows, u16 cols, int *master)
{
	struct { u16 r, c, x, y; } ws = {rows ? rows : 24, cols ? cols : 80, 0, 0};
	int zero = 0;
	i64 m, r;
	// A terminal belongs to whoever opens it: open it as the command's user.
	struct ptmx p = {.u = s->u, .r = -EAGAIN};
	struct clone_args a = {.flags = CLONE_VM | CLONE_VFORK | CLONE_FILES};
	i64 pid = clone_run(&a, sizeof a, open_ptmx, &p);
	if (pid < 0)
		p.r = pid;
	else
		while (sys4(__NR_wait4, pid, NULL, 0x40000000 /* __WALL */, NULL) == -EINTR)
			;
	m = r = p.r;
	if (m < 0)
		goto failed;
	if ((r = sys3(__NR_ioctl, m, TIOCSPTLCK, &zero)) < 0 || (r = sys3(__NR_ioctl, m, TIOCSWINSZ, &ws)) < 0 ||
	    (r = sys3(__NR_ioctl, m, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) {
		sys1(__NR_close, m);
		goto failed;
	}
	*master = (int)m;
	s->slave = (int)r;
	return 0;
failed:
	fail(S_TERMINAL, (u32)-r);
	say("terminal: "), sayerr(r);
	return -1;
}

// ---- groups of commands that process 1 makes itself, and terminals whose octets it carries: where descriptors can come in but none
// can go out, and no cgroup of the host's is seen ----

static char *group_path(char *to, u32 group, const char *file)
{
	char *p = to, d[12];
	int i = sizeof d;
	*p++ = 'c';
	do
		d[--i] = (char)('0' + group % 10);
	while (group /= 10);
	while (i < (int)sizeof d)
		*p++ = d[i++];
	if (*file)
		*p++ = '/';
	memcpy(p, file, strlen(file) + 1);
	return to;
}
// group_open makes a group where there is none and opens it.
static i64 group_open(u32 group)
{
	char path[64];
	i64 r = sys3(__NR_mkdirat, groups, group_path(path, group, ""), 0755);
	if (r < 0 && r != -EEXIST)
		return r;
	if (!r && *leaf_memory) {
		char file[64];
		if ((r = sys4(__NR_openat, groups, group_path(file, group, "memory.max"), O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0)) >= 0) {
			sys3(__NR_write, r, leaf_memory, strlen(leaf_memory)); // for who reads it; the limit is the sandbox's
			sys1(__NR_close, r);
		}
	}
	return sys4(__NR_openat, groups, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
}
static void group_drop(u32 group)
{
	char path[64];
	if (group)
		sys3(__NR_unlinkat, groups, group_path(path, group, ""), 0x200 /* AT_REMOVEDIR */); // refused while something lives in it
}

#define GROUP_PIDS 512
#define MARKED 256
static struct marked { u32 group, n; i32 pid[GROUP_PIDS]; } *marked; // by mark

// group_pids reads the processes of a group; those beyond the bound are left out, and met by the next look.
static u32 group_pids(u32 group, i32 *to)
{
	static char text[8192];
	char path[64];
	i64 fd = sys4(__NR_openat, groups, group_path(path, group, "cgroup.procs"), O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (fd < 0)
		return 0;
	i64 n, len = 0;
	while (len < (i64)sizeof text - 1 && (n = sys3(__NR_read, fd, text + len, sizeof text - 1 - (u64)len)) > 0)
		len += n;
	sys1(__NR_close, fd);
	u32 k = 0;
	i32 v = 0;
	for (i64 i = 0; i < len && k < GROUP_PIDS; i++) {
		if (text[i] >= '0' && text[i] <= '9')
			v = v * 10 + (text[i] - '0');
		else if (v > 0)
			to[k++] = v, v = 0;
	}
	return k;
}
// group_figure reads the number after a key in a file of the group of all commands.
static u64 group_figure(const char *file, const char *key)
{
	char text[256];
	i64 fd = sys4(__NR_openat, groups, file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (fd < 0)
		return 0;
	i64 n = sys3(__NR_read, fd, text, sizeof text - 1);
	sys1(__NR_close, fd);
	text[n > 0 ? n : 0] = 0;
	u64 k = strlen(key), v = 0;
	for (char *p = text; *p;) {
		if (!memcmp(p, key, k) && (!k || p[k] == ' ')) {
			for (p += k ? k + 1 : 0; *p >= '0' && *p <= '9'; p++)
				v = v * 10 + (u64)(*p - '0');
			return v;
		}
		while (*p && *p++ != '\n')
			;
	}
	return 0;
}
static u64 refused; // forks so far

// more_refused reports whether forks were refused since the last look.
static int more_refused(void)
{
	if (groups < 0)
		return 0;
	u64 was = refused;
	refused = group_figure("pids.events", "max");
	return refused > was;
}
static void group_act(void)
{
	at = body;
	end = body + head.len;
	bad = 0;
	u32 group = (u32)num(4), act = (u32)num(4), sig = (u32)num(4), out = 0;
	static i32 pids[GROUP_PIDS];
	if (bad || groups < 0 || sig > 64)
		goto answer;
	if (act == G_COUNT) {
		out = (u32)group_figure("pids.current", "");
		goto answer;
	}
	if (act == G_KILL) {
		char path[64];
		i64 fd = sys4(__NR_openat, groups, group_path(path, group, "cgroup.kill"), O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0);
		if (fd >= 0) {
			out = sys3(__NR_write, fd, "1", 1) == 1;
			sys1(__NR_close, fd);
		}
		goto answer;
	}
	if (!marked)
		marked = mapped(MARKED * sizeof *marked);
	struct marked *m = NULL;
	for (u32 i = 0; i < MARKED && !m; i++)
		if (marked[i].group == group || !marked[i].group)
			m = &marked[i];
	if (!m) // more sessions than the host allows: the oldest place is used again
		m = &marked[group % MARKED];
	if (act == G_MARK) {
		m->group = group;
		out = m->n = group_pids(group, m->pid);
	} else if (act == G_STRIKE) {
		u32 n = group_pids(group, pids);
		for (u32 i = 0; i < n; i++) {
			u32 j = 0;
			while (j < m->n && m->pid[j] != pids[i])
				j++;
			if (m->group == group && j < m->n)
				continue;
			out++;
			sys2(__NR_kill, pids[i], (long)sig);
		}
	}
answer:
	send_frame(T_GROUPED, head.id, &out, 4, NULL, 0);
}
static void resize(void)
{
	at = body;
	end = body + head.len;
	bad = 0;
	u16 rows = (u16)num(2), cols = (u16)num(2);
	struct { u16 r, c, x, y; } ws = {rows, cols, 0, 0};
	for (u32 i = 0; i < ncommands && !bad; i++)
		if (commands[i].id == head.id && commands[i].master >= 0)
			sys3(__NR_ioctl, commands[i].master, TIOCSWINSZ, &ws);
}

// relay carries the octets of a terminal from and to two pipes, in a process of its own that holds nothing else. It ends when nobody
// has the terminal open any more, or nobody reads.
static void relay(int master, int in, int out) __attribute__((noreturn));
static void relay(int master, int in, int out)
{
	static u8 a[16384], b[16384];
	u64 na = 0, nb = 0, oa = 0; // a: to the terminal from oa on; b: from it
	int over = 0;               // nothing more comes to the terminal
	sys2(__NR_prctl, PR_SET_NAME, "dsec-terminal");
	for (;;) {
		struct pollfd p[3] = {{master, (short)((nb < sizeof b ? 1 : 0) | (na > oa ? 4 : 0)), 0}, {over || na > oa ? -1 : in, 1, 0}, {nb ? out : -1, 4, 0}};
		i64 r = sys5(__NR_ppoll, p, 3, NULL, NULL, 8);
		if (r < 0 && r != -EINTR)
			die(0);
		if (r < 0)
			continue;
		if (p[0].revents & (1 | 16 /* POLLHUP */) && nb < sizeof b) {
			r = sys3(__NR_read, master, b + nb, sizeof b - nb);
			if (r == -EIO) // it looked for octets before it found that the other side is closed: some may have come in between
				r = sys3(__NR_read, master, b + nb, sizeof b - nb);
			if (r > 0)
				nb += (u64)r;
			else if (r != -EAGAIN && r != -EINTR) {
				for (u64 o = 0; o < nb; o += (u64)r) { // what is left may wait for its reader
					struct pollfd q = {out, 4, 0};
					sys5(__NR_ppoll, &q, 1, NULL, NULL, 8);
					r = sys3(__NR_write, out, b + o, nb - o);
					if (r == -EAGAIN || r == -EINTR)
						r = 0;
					else if (r <= 0)
						break;
				}
				die(0);
			}
		}
		if (p[0].revents & 4 && na > oa) {
			r = sys3(__NR_write, master, a + oa, na - oa);
			if (r > 0)
				oa += (u64)r;
			else if (r != -EAGAIN && r != -EINTR)
				oa = na;
			if (oa == na)
				na = oa = 0;
		}
		if (p[1].revents) {
			r = sys3(__NR_read, in, a, sizeof a);
			if (r > 0)
				na = (u64)r, oa = 0;
			else if (r != -EAGAIN && r != -EINTR)
				over = 1;
		}
		if (p[2].revents) {
			r = sys3(__NR_write, out, b, nb);
			if (r > 0) {
				memmove(b, b + r, nb - (u64)r);
				nb -= (u64)r;
			} else if (r != -EAGAIN && r != -EINTR)
				die(0);
		}
	}
}
// start_relay leaves the relay to itself: it is reaped as an orphan is.
static i64 start_relay(int master, int in, int out)
{
	struct clone_args a = {.exit_signal = SIGCHLD};
	i64 pid = sys2(__NR_clone3, &a, sizeof a);
	if (pid)
		return pid;
	int f[3] = {master, in, out};
	for (int i = 0; i < 3; i++) {
		i64 n = sys3(__NR_fcntl, f[i], 1030 /* F_DUPFD_CLOEXEC */, 16);
		if (n < 0)
			die(1);
		f[i] = (int)n;
	}
	for (int i = 0; i < 3; i++)
		sys2(__NR_dup2, f[i], i);
	sys3(__NR_close_range, 3, ~0u, 0);
	sys3(__NR_fcntl, 0, 4 /* F_SETFL */, 02 | 04000 /* O_RDWR|O_NONBLOCK */);
	relay(0, 1, 2);
}

static void start(void)
{
	static struct user u;
	struct start s = {.in = {-1, -1, -1}, .slave = -1, .u = &u, .id = head.id};
	int master = -1, cg = -1, mine = -1;
	u32 nenv;
	at = body;
	end = body + head.len;
	bad = 0;
	res.stage = res.err = res.len = 0;
	res.execing = 0;
	char *user = str(NULL);
	s.cwd = str(NULL);
	s.argv = list(&s.argc, 1);
	char **env = list(&nenv, 0);
	s.flags = (u32)num(4);
	u16 rows = (u16)num(2), cols = (u16)num(2);
	int relayed = (s.flags & START_TERMINAL) && (s.flags & START_RELAY);
	int own = s.flags & START_HOLDER ? 1 : relayed ? 2 : s.flags & START_TERMINAL ? 0 : 3;
	u32 group = head.flags;
	if (bad || at != end || (nfds != own && nfds != own + 1) || (s.flags & START_HOLDER && s.flags & START_TERMINAL)) {
		fail(S_EXEC, EINVAL);
		say("malformed START");
		goto failed;
	}
	if (s.flags & START_HOLDER) {
		s.argv[0] = "dsec-holder";
		s.argv[1] = NULL;
		s.argc = 1;
	} else if (!s.argc) {
		fail(S_PROGRAM, EINVAL);
		say("no program: argv is empty");
		goto failed;
	}
	if (ncommands == MAX_COMMANDS) {
		fail(S_EXEC, EAGAIN);
		say("8192 commands run at once");
		goto failed;
	}
	if (nfds == own + 1)
		cg = fds[0];
	else if (group && groups >= 0) {
		if ((cg = mine = (int)group_open(group)) < 0) {
			fail(S_CGROUP, (u32)-cg);
			say("the command's cgroup: "), sayerr(cg);
			goto failed;
		}
	}
	if (find_user(&u, user) < 0)
		goto failed;
	if (!(s.env = environment(env, nenv, &u, s.flags & START_TERMINAL, &s.path)))
		goto failed;
	if (!*s.cwd) {
		s.cwd = u.home;
		for (char **e = s.env; *e; e++)
			if (named(*e, "HOME"))
				s.cwd = *e + 5;
		s.home = 1;
	}
	if (s.flags & START_TERMINAL) {
		if (terminal(&s, rows, cols, &master) < 0)
			goto failed;
	} else if (!(s.flags & START_HOLDER))
		for (int i = 0; i < 3; i++) {
			struct statx st;
			s.in[i] = fds[nfds - 3 + i];
			// /dev/stdout is opened anew by path: the pipe has to be the user's. It works where the host gave it to the range.
			if (sys5(__NR_statx, s.in[i], "", AT_EMPTY_PATH, STATX_TYPE | STATX_UID | STATX_GID, &st) >= 0 && (st.stx_mode & S_IFMT) == S_IFIFO &&
			    (st.stx_uid != u.uid || st.stx_gid != u.gid))
				sys3(__NR_fchown, s.in[i], u.uid, u.gid);
		}
	i32 pidfd = -1;
	struct clone_args a = {.flags = CLONE_VM | CLONE_VFORK | (s.flags & START_NOPIDFD ? 0 : CLONE_PIDFD) | (cg >= 0 ? CLONE_INTO_CGROUP : 0), .pidfd = (u64)&pidfd,
		.exit_signal = SIGCHLD, .cgroup = cg >= 0 ? (u64)cg : 0};
	i64 pid = clone_run(&a, sizeof a, child, &s);
	if (s.slave >= 0)
		sys1(__NR_close, s.slave);
	if (pid < 0) {
		fail(cg >= 0 && pid != -EAGAIN && pid != -ENOMEM ? S_CGROUP : S_EXEC, (u32)-pid);
		say(res.stage == S_CGROUP ? "start in the command's cgroup: " : "start: "), sayerr(pid);
		goto failed;
	}
	if (!res.stage && !res.execing) {
		fail(S_EXEC, EINTR);
		say("killed before its program ran");
	}
	if (res.stage) {
		while (sys4(__NR_wait4, pid, NULL, 0x40000000 /* __WALL */, NULL) == -EINTR)
			;
		if (pidfd >= 0)
			sys1(__NR_close, pidfd);
		goto failed;
	}
	struct command *c = &commands[ncommands++];
	c->id = head.id;
	c->pid = (i32)pid;
	c->group = mine >= 0 ? group : 0;
	c->master = -1;
	u32 b[3] = {(u32)pid, u.uid, u.gid};
	int f[2], nf = 0;
	if (relayed) {
		start_relay(master, fds[nfds - 2], fds[nfds - 1]); // without it the command's terminal is hung up
		c->master = master;
		master = -1;
	}
	if (pidfd >= 0)
		f[nf++] = pidfd;
	if (master >= 0)
		f[nf++] = master;
	send_frame(T_STARTED, head.id, b, 12, f, (u32)nf);
	if (pidfd >= 0)
		sys1(__NR_close, pidfd);
	goto out;
failed:
	send_failed(head.id);
	if (mine >= 0)
		group_drop(group);
out:
	if (master >= 0)
		sys1(__NR_close, master);
	if (mine >= 0)
		sys1(__NR_close, mine);
	arena_reset();
}

static void signal_command(void)
{
	at = body;
	end = body + head.len;
	bad = 0;
	i32 sig = (i32)num(4);
	u32 group = (u32)num(4);
	if (bad || sig < 0 || sig > 64)
		return;
	for (u32 i = 0; i < ncommands; i++)
		if (commands[i].id == head.id) {
			sys2(__NR_kill, group ? -commands[i].pid : commands[i].pid, sig);
			return;
		}
}

// reap takes every ended child. Those that are no command were orphans of commands: process 1 is their parent now.
static void reap(void)
{
	struct { i64 us, uu, ss, su, maxrss, rest[13]; } ru;
	for (;;) {
		i32 status = 0;
		i64 pid = sys4(__NR_wait4, -1, &status, 1 | 0x40000000 /* WNOHANG|__WALL */, &ru);
		if (pid == -EINTR)
			continue;
		if (pid <= 0)
			return;
		for (u32 i = 0; i < ncommands; i++)
			if (commands[i].pid == pid) {
				struct __attribute__((packed)) { i32 status; u64 user, sys, rss; } b =
					{status, (u64)(ru.us * 1000000 + ru.uu), (u64)(ru.ss * 1000000 + ru.su), (u64)ru.maxrss << 10};
				u64 id = commands[i].id;
				if (commands[i].master >= 0)
					sys1(__NR_close, commands[i].master);
				group_drop(commands[i].group);
				commands[i] = commands[--ncommands];
				send_flagged(T_EXITED, more_refused() ? EXITED_REFUSED : 0, id, &b, sizeof b, NULL, 0);
				break;
			}
	}
}

// holder keeps descriptors for a session's shell. Its memory is its own, from an exec: nothing of process 1 is in it.
static void holder(void) __attribute__((noreturn));
static void holder(void)
{
	static u32 b[1 + MAX_FDS];
	for (;;) {
		read_frame();
		if (head.type == T_HOLD) {
			b[0] = (u32)nfds;
			for (int i = 0; i < nfds; i++)
				b[i + 1] = (u32)fds[i];
			nfds = 0;
			send_frame(T_HELD, head.id, b, 4 + 4 * b[0], NULL, 0);
		} else if (head.type == T_DROP) {
			at = body;
			end = body + head.len;
			bad = 0;
			for (u32 n = (u32)num(4); n && !bad; n--) {
				u32 fd = (u32)num(4);
				if (!bad && fd > STREAM)
					sys1(__NR_close, fd);
			}
		}
		done_frame();
	}
}

// userns makes user namespaces for the keeper: for each octet that comes, a child in a new one, whose number goes back; the next
// octet ends the child. The fork of a process this small costs a tenth of one of the keeper's.
static void userns(void) __attribute__((noreturn));
static void userns(void)
{
	u8 c;
	for (;;) {
		if (sys3(__NR_read, STREAM, &c, 1) != 1)
			die(0);
		struct clone_args a = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
		i64 pid = sys2(__NR_clone3, &a, sizeof a);
		if (!pid) {
			sys2(__NR_prctl, PR_SET_PDEATHSIG, 9);
			sys3(__NR_close, STREAM, 0, 0);
			for (;;)
				sys4(__NR_ppoll, NULL, 0, NULL, NULL);
		}
		i32 out = (i32)pid;
		if (sys3(__NR_write, STREAM, &out, 4) != 4)
			die(0);
		i64 n = sys3(__NR_read, STREAM, &c, 1);
		if (pid > 0) {
			sys2(__NR_kill, pid, 9);
			while (sys4(__NR_wait4, pid, NULL, 0x40000000 /* __WALL */, NULL) == -EINTR)
				;
		}
		if (n != 1)
			die(0);
	}
}

// spawn makes a process 1 in new namespaces and in the group of the second descriptor; the first is its stream. It is the spawner's
// sister: the keeper's child, to wait for. What the spawner has set up is its own too, so there is neither an exec nor a copy of the
// keeper's many descriptors. spare is the first descriptor that nobody needs.
static void spawn(u32 spare)
{
	i32 out = -EINVAL;
	if (nfds == 2) {
		struct clone_args a = {.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_PARENT | CLONE_INTO_CGROUP,
			.cgroup = (u64)fds[1]};
		i64 pid = sys2(__NR_clone3, &a, sizeof a);
		if (!pid) {
			if (sys3(__NR_dup3, fds[0], STREAM, O_CLOEXEC) < 0)
				die(1);
			sys3(__NR_close_range, spare, ~0u, 0);
			sys0(__NR_setsid);
			nfds = nfdq = 0;
			base = -1; // was the spawner's own, this one's is a copy
			return;
		}
		out = (i32)pid;
	}
	done_frame();
	send_frame(T_SPAWNED, head.id, &out, 4, NULL, 0);
}

__attribute__((used, noreturn)) void entry(long *sp);
void entry(long *sp)
{
	const char *name = sp[0] ? (const char *)sp[1] : "";
	sys3(__NR_close_range, STREAM + 1, ~0u, 0);
	sys3(__NR_fcntl, STREAM, 2 /* F_SETFD */, 1);
	if (eq(name, "dsec-userns")) {
		sys2(__NR_prctl, PR_SET_NAME, "dsec-userns");
		userns();
	}
	body = mapped(MAX_BODY + 4096);
	int hold = eq(name, "dsec-holder");
	sys2(__NR_prctl, PR_SET_NAME, hold ? "dsec-holder" : "dsec-init"); // else the number of a descriptor
	if (hold)
		holder();
	arena = mapped(ARENA);
	exe = (int)sys4(__NR_openat, AT_FDCWD, "/proc/self/exe", O_PATH | O_CLOEXEC, 0);
	// Whatever the spawner's runtime had set: commands inherit from here.
	for (int i = 1; i <= 64; i++) {
		struct { u64 h, f, r, m; } dfl = {0};
		sys4(__NR_rt_sigaction, i, &dfl, NULL, 8);
	}
	u64 chld = 1ul << (SIGCHLD - 1);
	sys4(__NR_rt_sigprocmask, SIG_SETMASK, &chld, NULL, 8);
	i64 sfd = sys4(__NR_signalfd4, -1, &chld, 8, 02004000 /* CLOEXEC|NONBLOCK */);
	sys3(__NR_setpriority, 0, 0, 0);
	sys1(__NR_umask, 022);
	read_frame();
	while (head.type == T_SPAWN || head.type == T_PREPARE) {
		if (head.type == T_PREPARE)
			prepare();
		else
			spawn((u32)(exe > sfd ? exe : sfd) + 1);
		read_frame(); // of the spawner the next SPAWN, of a child its PREPARE or BIRTH
	}
	if (head.type != T_BIRTH)
		die(1);
	birth();
	for (;;) {
		struct pollfd p[2] = {{STREAM, 1, 0}, {(i32)sfd, 1, 0}};
		i64 r = sys5(__NR_ppoll, p, 2, NULL, NULL, 8);
		if (r < 0 && r != -EINTR)
			die(1);
		if (p[1].revents) {
			static u8 info[128];
			while (sys3(__NR_read, sfd, info, sizeof info) > 0)
				;
			reap();
		}
		if (p[0].revents) {
			read_frame();
			switch (head.type) {
			case T_START: start(); break;
			case T_SIGNAL: signal_command(); break;
			case T_GROUP: group_act(); break;
			case T_RESIZE: resize(); break;
			case T_PING: send_frame(T_PONG, head.id, NULL, 0, NULL, 0); break;
			}
			done_frame();
		}
	}
}
