// Command init is process 1 of the machine in which test/kernels/run.sh runs test programs. From its initramfs it loads the drivers
// of the disks, enters the root on the first disk, mounts what a distribution's own init would (cgroup2 alone at /sys/fs/cgroup, all
// controllers on), runs the lines of the plan on the second disk one after another and powers the machine off.
//
// A line of the plan is "name seconds folder program arguments...". All that a program writes goes to out/<name>.log on the second
// disk; the console shows the tests' verdicts. It ends with a line "kernels: <name> <exit status>".
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const disk = "/disk" // the second one

func main() {
	if len(os.Args) > 1 && os.Args[1] == "plan" {
		if err := plan(); err != nil {
			fmt.Println("kernels: failed:", err)
		}
		return
	}
	if err := boot(); err != nil {
		fmt.Println("kernels: boot failed:", err)
	} else {
		reap()
	}
	unix.Sync()
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// reap runs the plan in a child and, as process 1 must, takes in every orphan until the child has ended.
func reap() {
	// The program stays open under the initramfs, which the root has covered.
	child, err := os.StartProcess("/proc/self/exe", []string{"init", "plan"}, &os.ProcAttr{
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=" + disk + "/tmp",
			"DSEC_RUNTIMES=/runtimes"},
		Dir: "/", Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		fmt.Println("kernels: failed:", err)
		return
	}
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid == child.Pid {
			return
		}
	}
}

type mount struct{ what, at, kind, options string }

func mountAll(list ...mount) error {
	for _, m := range list {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.what, m.at, m.kind, 0, m.options); err != nil && err != unix.EBUSY {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.at, err)
		}
	}
	return nil
}

func boot() error {
	if err := mountAll(mount{"proc", "/proc", "proc", ""}, mount{"sys", "/sys", "sysfs", ""}, mount{"dev", "/dev", "devtmpfs", ""}); err != nil {
		return err
	}
	modules, err := filepath.Glob("/modules/*.ko") // named in the order of their loading
	if err != nil {
		return err
	}
	for _, m := range modules {
		f, err := os.Open(m)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("load %s: %w", m, err)
		}
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if _, err := os.Stat("/dev/vdb"); err == nil {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("no /dev/vdb")
		}
	}
	if err := mountAll(mount{"/dev/vda", "/new", "ext4", ""}, mount{"/dev/vdb", "/new" + disk, "ext4", "prjquota"}); err != nil {
		return err
	}
	for _, d := range []string{"proc", "sys", "dev"} {
		if err := unix.Mount("/"+d, "/new/"+d, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move /%s: %w", d, err)
		}
	}
	if err := unix.Chdir("/new"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("take the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	err = mountAll(
		mount{"devpts", "/dev/pts", "devpts", "mode=0620,gid=5,ptmxmode=0666"}, mount{"shm", "/dev/shm", "tmpfs", "mode=1777"},
		mount{"run", "/run", "tmpfs", "mode=0755"}, mount{"tmp", "/tmp", "tmpfs", "mode=1777"},
		mount{"cgroup2", "/sys/fs/cgroup", "cgroup2", "nsdelegate,memory_recursiveprot"}, // as systemd mounts it
		mount{"security", "/sys/kernel/security", "securityfs", ""},
	)
	if err != nil {
		return err
	}
	if err := os.MkdirAll("/lib/modules", 0o755); err != nil {
		return err
	}
	if err := unix.Mount(disk+"/modules", "/lib/modules", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the modules: %w", err)
	}
	// systemd makes mounts shared and gives services these controllers.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+cpu +memory +pids +io"), 0); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/kernel/pid_max", []byte("4194304"), 0); err != nil { // systemd's setting
		return err
	}
	if err := unix.Sethostname([]byte("kernels")); err != nil {
		return err
	}
	most := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &most); err != nil {
		return err
	}
	for _, d := range []string{"tmp", "out"} {
		if err := os.MkdirAll(disk+"/"+d, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func plan() error {
	// Distributions load these at boot or their device's node does; all else loads itself at its first use.
	for _, cmd := range [][]string{{"modprobe", "loop"}, {"ip", "link", "set", "lo", "up"}} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(cmd, " "), err, out)
		}
	}
	var u unix.Utsname
	unix.Uname(&u)
	fmt.Println("kernels: running", unix.ByteSliceToString(u.Release[:]))
	if line, _ := os.ReadFile("/proc/cmdline"); strings.Contains(string(line), "dsec.heartbeat") {
		go func() {
			for range time.Tick(10 * time.Second) {
				fmt.Println("alive")
			}
		}()
	}
	text, err := os.ReadFile(disk + "/plan")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		seconds, err := strconv.Atoi(f[1])
		if err != nil {
			return err
		}
		fmt.Printf("kernels: %s %d\n", f[0], run(f[0], time.Duration(seconds)*time.Second, f[2], f[3:]))
		unix.Sync()
	}
	return nil
}

// verdict matches what the console shows of a log: verdicts of tests, what they say for the documentation, figures and remarks of a benchmark.
var verdict = regexp.MustCompile(`^\s*(=== RUN|--- |panic:|FAIL|ok |PASS|fatal error|\S+_test\.go:\d+: seen: |seen: |# |bench|[a-z]+\.[a-z0-9_.]+ [0-9.e+-]+ )`)

// run returns the exit status, -1 when there is none.
func run(name string, within time.Duration, dir string, argv []string) int {
	log, err := os.Create(filepath.Join(disk, "out", name+".log"))
	if err != nil {
		fmt.Println(err)
		return -1
	}
	defer log.Close()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	cmd.WaitDelay = 10 * time.Second
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		in := bufio.NewReader(r)
		for {
			line, err := in.ReadString('\n')
			line = strings.ReplaceAll(line, "\x16", "") // marks of a test's output that is made for programs
			log.WriteString(line)
			if verdict.MatchString(line) {
				fmt.Print(strings.TrimRight(line, "\n"), "\n")
			}
			if err != nil {
				return
			}
		}
	}()
	err = cmd.Run()
	w.Close()
	<-shown
	if err != nil {
		fmt.Fprintln(log, "end:", err)
	}
	return cmd.ProcessState.ExitCode()
}
