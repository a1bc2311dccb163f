package keeper

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// leaver looks for what an earlier call may have left, then leaves one of everything. Its exit code tells what it found.
const leaver = `#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int entries(const char *dir, int numbers)
{
	DIR *d = opendir(dir);
	int n = 0;
	for (struct dirent *e; d && (e = readdir(d));)
		if (e->d_name[0] != '.' && (!numbers || (e->d_name[0] >= '1' && e->d_name[0] <= '9')))
			n++;
	return d ? n : -1;
}
static void touch(const char *p)
{
	int fd = open(p, O_CREAT | O_EXCL | O_WRONLY, 0666);
	if (fd < 0 || write(fd, "x", 1) != 1)
		_exit(90);
}
static void wrong(int code) { fprintf(stderr, "found %d: %s\n", code, strerror(errno)); exit(code); }
int main(void)
{
	if (entries(".", 0) != 1) wrong(1);
	if (entries("/tmp", 0) != 0) wrong(2);
	if (entries("/dev/shm", 0) != 0) wrong(3);
	if (entries("/proc", 1) != 1) wrong(4);
	if (shmget(7, 4096, 0666) >= 0 || errno != ENOENT || shmget(8, 4096, 0666) >= 0) wrong(5);
	if (msgget(7, 0666) >= 0 || errno != ENOENT) wrong(6);
	if (semget(7, 1, 0666) >= 0 || errno != ENOENT) wrong(7);
	if (syscall(SYS_mq_open, "dsecleak", O_RDWR, 0, NULL) >= 0 || errno != ENOENT) wrong(8);
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	struct sockaddr_un u = {AF_UNIX, "\0dsecleak"};
	if (bind(s, (struct sockaddr *)&u, sizeof u) < 0 || listen(s, 5) < 0) wrong(9);
	int t = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in a = {AF_INET, htons(5555), {htonl(0x7f000001)}};
	if (bind(t, (struct sockaddr *)&a, sizeof a) < 0 || listen(t, 5) < 0) wrong(10);
	int d = socket(AF_UNIX, SOCK_DGRAM, 0), v = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_un w = {AF_UNIX, "\0dsecleak-datagrams"};
	if (bind(d, (struct sockaddr *)&w, sizeof w) < 0) wrong(16);
	if (bind(v, (struct sockaddr *)&a, sizeof a) < 0) wrong(17);
	char buf[64];
	if (getsockopt(t, SOL_SOCKET, SO_ERROR, buf, &(socklen_t){sizeof buf}) < 0) wrong(11);
	if (syscall(SYS_keyctl, 0, -3 /* session keyring */, 1) >= 0 || (errno != EPERM && errno != ENOSYS)) wrong(12);
	if (syscall(SYS_add_key, "user", "dsecleak", "x", 1, -4) >= 0 || (errno != EPERM && errno != ENOSYS)) wrong(13);
	if (getpriority(0, 0) != 0) wrong(14);
	gethostname(buf, sizeof buf);
	if (strcmp(buf, "fncall")) wrong(15);

	touch("left"); touch("/tmp/left"); touch("/dev/shm/left"); mkdir("/tmp/d", 0777);
	void *m = shmat(shmget(8, 1 << 16, IPC_CREAT | 0666), NULL, 0); // attached by what is left running
	if (m == (void *)-1) return 94;
	if (shmget(7, 1 << 16, IPC_CREAT | 0666) < 0 || msgget(7, IPC_CREAT | 0666) < 0 || semget(7, 1, IPC_CREAT | 0666) < 0) return 91;
	if (syscall(SYS_mq_open, "dsecleak", O_RDWR | O_CREAT, 0666, NULL) >= 0 || errno != EMFILE) return 92; // there are none
	if (connect(c, (struct sockaddr *)&a, sizeof a) < 0) return 93; // its ports wait for a minute
	int x = accept(t, NULL, NULL);
	close(x); close(c);
	if (!fork()) { setsid(); if (!fork()) for (;;) pause(); _exit(0); }
	return 0;
}
`

// TestCallsLeaveNothing runs a program that looks for traces of the calls before it, and leaves all kinds itself, again and again in the
// same uids, groups and namespaces: 10,000 times in each mode in the long runs. The warm ones are started ahead.
func TestCallsLeaveNothing(t *testing.T) {
	count := map[string]int{"fresh": 500, "pooled": 500, "warm": 200} // the last come one after the other
	if os.Getenv("DSEC_TORTURE") != "" {
		count = map[string]int{"fresh": 10_000, "pooled": 10_000, "warm": 10_000}
	}
	h := open(t)
	p := program(t, leaver)
	if err := mountFile(within(t), h.c, "leaver", layerFile(t, map[string]string{"leaver": string(p)})); err != nil {
		t.Fatal(err)
	}
	run := func(mode string, n int) {
		var ahead atomic.Int64
		var left atomic.Int64
		left.Store(int64(n))
		var wg sync.WaitGroup
		workers := 4
		if mode == "warm" { // one after the other, so that there is time to start them ahead
			workers = 1
		}
		for range workers {
			wg.Go(func() {
				for left.Add(-1) >= 0 && !t.Failed() {
					r := h.newCall("./p")
					r.Pooled = mode == "pooled"
					r.Files = []CallFile{{Path: "p", Data: p, Exec: true}}
					if mode == "warm" {
						r = h.heldCall("cp /leaver p; chmod 755 p; rm main.sh; exec ./p")
						r.Layers = append(r.Layers, "leaver")
					}
					e, _, err := h.c.Call(within(t), r)
					if err != nil || e.Code != 0 || e.Signal != 0 || e.Leftover < 1 {
						t.Errorf("%s, after %d calls: %v %+v", mode, int64(n)-left.Load(), err, e)
						return
					}
					if e.Ahead {
						ahead.Add(1)
					}
				}
			})
		}
		wg.Wait()
		if got := ahead.Load(); mode == "warm" && n > 100 && got < int64(n)*3/4 {
			t.Errorf("only %d of %d were started ahead", got, n)
		}
		h.again()
	}
	run("fresh", 40) // what is kept for the next calls is made
	run("pooled", 40)
	run("warm", 40)
	keeper := h.c.Info().Pid
	before := kept(t, h, keeper)
	for mode, n := range count {
		run(mode, n)
		t.Logf("%s: %d calls", mode, n)
	}
	// On the host there is nothing either: no process of a call, no object of its namespaces, and in the keeper no more than before.
	for end := time.Now().Add(longest); ; time.Sleep(20 * time.Millisecond) {
		found := onHost(t)
		after := kept(t, h, keeper)
		for what, n := range after {
			if n > before[what]+map[string]int{"descriptors": 40, "groups": 4, "MiB": 48}[what] {
				found = append(found, fmt.Sprintf("%d %s, %d before", n, what, before[what]))
			}
		}
		if len(found) == 0 {
			t.Logf("the keeper has %v, had %v", after, before)
			break
		}
		if time.Now().After(end) {
			t.Fatalf("left: %.2000s", strings.Join(found, "\n"))
		}
	}
}

// kept is what the keeper holds.
func kept(t *testing.T, h *house, pid int) map[string]int {
	t.Helper()
	m := map[string]int{}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	m["descriptors"] = len(fds)
	for what, file := range map[string]string{"mounts": fmt.Sprintf("/proc/%d/mountinfo", pid), "mounts of the host": "/proc/self/mountinfo"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if what == "mounts" {
			m[what] = strings.Count(string(b), "\n")
		} else {
			m[what] = strings.Count(string(b), h.dir)
		}
	}
	for _, at := range []string{"/sys/fs/cgroup/dsec-", "/sys/fs/cgroup/*/dsec-"} {
		found, _ := filepath.Glob(at + h.cfg.Instance + "/*/fncall-*")
		m["groups"] = max(m["groups"], len(found))
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int
	fmt.Sscan(string(b), &size, &resident)
	m["MiB"] = resident * os.Getpagesize() >> 20
	return m
}

// onHost finds processes of calls' uids, and objects of calls in the host's own namespaces.
func onHost(t *testing.T) (found []string) {
	t.Helper()
	ours := func(field string) bool {
		var uid int
		_, err := fmt.Sscan(field, &uid)
		return err == nil && uid >= callUID && uid < callUID+CallUIDs
	}
	out, err := exec.Command("ps", "-e", "-o", "uid=,pid=,stat=,args=").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 1 && ours(f[0]) {
			found = append(found, "process "+line)
		}
	}
	for _, kind := range []string{"shm", "msg", "sem"} { // key id perms ... uid gid cuid cgid
		b, _ := os.ReadFile("/proc/sysvipc/" + kind)
		for line := range strings.Lines(string(b)) {
			for _, f := range strings.Fields(line) {
				if ours(f) {
					found = append(found, kind+" "+line)
					break
				}
			}
		}
	}
	b, _ := os.ReadFile("/proc/net/unix")
	if strings.Contains(string(b), "dsecleak") {
		found = append(found, "an abstract socket in the host's network")
	}
	b, _ = os.ReadFile("/proc/key-users") // uid: usage nkeys/nikeys ...
	for line := range strings.Lines(string(b)) {
		if uid, rest, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && ours(uid) {
			found = append(found, "keys of uid "+uid+": "+rest)
		}
	}
	return found
}

// TestCallsEndWithTheirKeeper kills the keeper outright: every process of every call goes with it, and the next sweep removes the groups.
func TestCallsEndWithTheirKeeper(t *testing.T) {
	h := open(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			h.c.Call(within(t), func() *Call {
				r := h.newCall("sh", "-c", "(setsid sleep 4242 &) ; sleep 4242")
				r.CPU, r.Wall = time.Minute, time.Minute
				return r
			}())
		})
	}
	count := func() int {
		out, _ := exec.Command("pgrep", "-u", fmt.Sprintf("%d,%d,%d,%d,%d,%d", callUID, callUID+1, callUID+2, callUID+3, callUID+4, callUID+5)).Output()
		return len(strings.Fields(string(out)))
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(longest); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %d processes", what, count())
			}
		}
	}
	until("the calls never began", func() bool { return count() >= 12 }) // each is two processes or three
	if err := syscall.Kill(h.c.Info().Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	until("processes outlived the keeper", func() bool { return count() == 0 })
	until("its groups can't be removed", func() bool { return Sweep(h.cfg.Dir) == nil && len(leftGroups(h.cfg.Instance)) == 0 })
}

// TestCallsEndWithTheirHost breaks the host's connection, as its death does: what it had asked for is killed, and the keeper goes on.
func TestCallsEndWithTheirHost(t *testing.T) {
	h := open(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			r := h.newCall("sh", "-c", "(setsid sleep 5353 &) ; sleep 5353")
			r.CPU, r.Wall = time.Minute, time.Minute
			h.c.Call(within(t), r)
		})
	}
	count := func() int {
		out, _ := exec.Command("pgrep", "-fx", "sleep 5353").Output()
		return len(strings.Fields(string(out)))
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(longest); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %d processes", what, count())
			}
		}
	}
	until("the calls never began", func() bool { return count() >= 6 })
	h.c.Close()
	wg.Wait()
	until("processes outlived the host", func() bool { return count() == 0 })
	h.dial()
	if e := h.call(h.newCall("true")); e.Code != 0 {
		t.Errorf("the next host's call: %+v", e)
	}
}
