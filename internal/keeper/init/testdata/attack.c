// Tries to get at process 1 and at commands before their exec, while they share its memory. Prints what worked.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int is_init(int pid)
{
	char p[64], b[32] = "";
	snprintf(p, sizeof p, "/proc/%d/comm", pid);
	int f = open(p, O_RDONLY);
	if (f < 0)
		return 0;
	int n = read(f, b, sizeof b - 1);
	close(f);
	return n > 0 && !strncmp(b, "dsec-init", 9);
}

static long seen;

static void try(int pid)
{
	char p[64], b[16];
	const char *files[] = {"mem", "environ", "maps", "fd/3", "exe", "cwd", "root", "stack", "auxv"};
	if (!is_init(pid))
		return;
	seen++;
	for (unsigned i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(p, sizeof p, "/proc/%d/%s", pid, files[i]);
		int f = open(p, O_RDONLY | O_NONBLOCK);
		if (f < 0)
			continue;
		int n = pread(f, b, sizeof b, i == 0 ? 0x400000 : 0);
		if (n > 0 && is_init(pid))
			printf("read %s of %d\n", files[i], pid);
		close(f);
	}
	struct iovec l = {b, sizeof b}, r = {(void *)0x400000, sizeof b};
	if (process_vm_readv(pid, &l, 1, &r, 1, 0) > 0 && is_init(pid))
		printf("process_vm_readv of %d\n", pid);
	int pf = syscall(SYS_pidfd_open, pid, 0);
	int got = pf < 0 ? -1 : syscall(438 /* pidfd_getfd */, pf, 3, 0);
	if (got >= 0 && is_init(pid))
		printf("pidfd_getfd of %d\n", pid);
	if (got >= 0)
		close(got);
	if (pf >= 0)
		close(pf);
	if (ptrace(PTRACE_SEIZE, pid, 0, 0) == 0) {
		if (is_init(pid))
			printf("traced %d\n", pid);
		ptrace(PTRACE_INTERRUPT, pid, 0, 0);
		waitpid(pid, 0, __WALL);
		ptrace(PTRACE_DETACH, pid, 0, 0);
	}
	struct rlimit64 lim = {1, 1};
	if (pid == 1 && syscall(SYS_prlimit64, pid, RLIMIT_NOFILE, &lim, NULL) == 0)
		printf("limits of %d\n", pid);
}

int main(int argc, char **argv)
{
	struct timespec t0, t;
	(void)argc;
	clock_gettime(CLOCK_MONOTONIC, &t0);
	try(1);
	seen = 0;
	do {
		DIR *d = opendir("/proc");
		for (struct dirent *e; d && (e = readdir(d));) {
			int pid = atoi(e->d_name);
			if (pid > 1 && pid != getpid())
				try(pid);
		}
		if (d)
			closedir(d);
		clock_gettime(CLOCK_MONOTONIC, &t);
	} while ((t.tv_sec - t0.tv_sec) * 1000 + (t.tv_nsec - t0.tv_nsec) / 1000000 < atoi(argv[1]));
	printf("seen %d\n", seen > 0);
	return 0;
}
