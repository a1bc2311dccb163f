// The least that a call of the same kind takes on this machine: fresh mount, pid, ipc, UTS, network and user namespaces, the same mounts,
// groups, limits and filter, then a vfork and exec. No queue, API, log or keeper. floor ROOT FILTER COUNT WARM GROUPS... prints the medians
// in ms: fresh network namespaces, then one network namespace for all.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UID 1800000000
static void must(long r, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
	_exit(1);
}
static void put(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_CLOEXEC);
	must(fd, file);
	must(write(fd, text, strlen(text)), file);
	close(fd);
}
static struct sock_fprog filter;
static int groups[8], ngroups;
static char **group_names;

static void limit(int what, rlim_t v)
{
	struct rlimit old, l = {v, v};
	getrlimit(what, &old);
	if (l.rlim_max > old.rlim_max)
		l.rlim_cur = l.rlim_max = old.rlim_max;
	must(setrlimit(what, &l), "limit");
}
static void program(void)
{
	char map[64];
	setsid();
	for (int i = 0; i < ngroups; i++)
		must(write(groups[i], "0", 1), "group");
	must(unshare(CLONE_NEWCGROUP), "cgroup namespace");
	must(setgroups(0, NULL), "groups");
	must(setresgid(UID, UID, UID), "gid");
	must(setresuid(UID, UID, UID), "uid");
	prctl(PR_SET_DUMPABLE, 1);
	must(unshare(CLONE_NEWUSER), "user namespace");
	snprintf(map, sizeof map, "1000 %d 1\n", UID);
	put("/proc/self/setgroups", "deny");
	put("/proc/self/uid_map", map);
	put("/proc/self/gid_map", map);
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
	limit(RLIMIT_CORE, 0);
	limit(RLIMIT_NOFILE, 1024);
	limit(RLIMIT_FSIZE, 64 << 20);
	limit(RLIMIT_STACK, 64 << 20);
	limit(RLIMIT_MEMLOCK, 64 << 10);
	must(chdir("/box"), "chdir");
	must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW | SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter), "filter");
	pid_t p = vfork();
	if (!p) {
		execl("/true", "true", NULL);
		_exit(127);
	}
	int st;
	must(waitpid(p, &st, 0), "wait");
	_exit(WEXITSTATUS(st));
}
static void init(int net)
{
	if (!net) {
		struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP};
		int s = socket(AF_INET, SOCK_DGRAM, 0);
		must(ioctl(s, SIOCSIFFLAGS, &r), "lo");
		close(s);
	}
	sethostname("floor", 5);
	must(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2,subset=pid"), "/proc");
	must(mount("work", "/box", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=1024,mode=0755"), "/box");
	must(mkdir("/box/work", 0755), "mkdir");
	must(mkdir("/box/tmp", 0777), "mkdir");
	must(mkdir("/box/shm", 0777), "mkdir");
	must(mount("/box/tmp", "/tmp", NULL, MS_BIND, NULL), "/tmp");
	must(mount("/box/shm", "/dev/shm", NULL, MS_BIND, NULL), "/dev/shm");
	must(mount("/box/work", "/box", NULL, MS_BIND, NULL), "/box");
	pid_t p = fork();
	if (!p)
		program();
	int st;
	must(waitpid(p, &st, 0), "wait");
	_exit(WEXITSTATUS(st));
}
static double once(int net)
{
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	struct clone_args c = {.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | (net ? 0 : CLONE_NEWNET), .exit_signal = SIGCHLD};
	pid_t p = (pid_t)syscall(SYS_clone3, &c, sizeof c);
	must(p, "clone3");
	if (!p)
		init(net);
	int st;
	must(waitpid(p, &st, 0), "wait");
	clock_gettime(CLOCK_MONOTONIC, &b);
	if (st) {
		fprintf(stderr, "floor: a call ended with status %#x\n", st);
		_exit(1);
	}
	return (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6;
}
static int less(const void *a, const void *b)
{
	double x = *(double *)a, y = *(double *)b;
	return x < y ? -1 : x > y;
}
int main(int argc, char **argv)
{
	static unsigned char code[4096 * 8];
	if (argc < 5)
		return 2;
	int fd = open(argv[2], O_RDONLY), n = (int)read(fd, code, sizeof code), count = atoi(argv[3]), warm = atoi(argv[4]);
	must(n, "filter");
	close(fd);
	filter.len = (unsigned short)(n / 8);
	filter.filter = (struct sock_filter *)code;
	group_names = argv + 5;
	for (int i = 5; i < argc && ngroups < 8; i++)
		must(groups[ngroups++] = open(argv[i], O_WRONLY | O_CLOEXEC), argv[i]);
	must(unshare(CLONE_NEWNS), "mount namespace");
	must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
	must(mount(argv[1], argv[1], NULL, MS_BIND, NULL), "root");
	must(chdir(argv[1]), "root");
	must(mount("dev", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k"), "/dev");
	must(mkdir("dev/shm", 0755), "shm");
	must(mount(NULL, ".", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL), "read-only");
	must(syscall(SYS_pivot_root, ".", "."), "pivot_root");
	must(umount2(".", MNT_DETACH), "old root");
	double *t = calloc((size_t)count, sizeof *t);
	for (int net = 0; net < 2; net++) {
		if (net)
			must(unshare(CLONE_NEWNET), "network namespace");
		for (int i = 0; i < warm; i++)
			once(net);
		for (int i = 0; i < count; i++)
			t[i] = once(net);
		qsort(t, (size_t)count, sizeof *t, less);
		printf("%.4f\n", t[count / 2]);
	}
	return 0;
}
