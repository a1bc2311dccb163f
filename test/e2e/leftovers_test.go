package e2e

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/keeper"
)

func readAll(r io.Reader) ([]byte, error) { return io.ReadAll(io.LimitReader(r, 256<<20)) }

// instance names what the host makes on the machine.
func (s *service) instance() string {
	b, err := os.ReadFile(filepath.Join(s.state, "host-id"))
	if err != nil {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, string(b))
}

// process is what /proc tells of one.
type process struct {
	pid  int
	uid  int
	name string
	args string
}

func (p process) String() string {
	return fmt.Sprintf("%d(uid %d) %s %s", p.pid, p.uid, p.name, p.args)
}

func processes() []process {
	list, _ := os.ReadDir("/proc")
	var out []process
	for _, e := range list {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		status, err := os.ReadFile("/proc/" + e.Name() + "/status")
		if err != nil {
			continue
		}
		p := process{pid: pid}
		for line := range strings.Lines(string(status)) {
			f := strings.Fields(line)
			switch {
			case len(f) > 1 && f[0] == "Name:":
				p.name = f[1]
			case len(f) > 1 && f[0] == "State:" && f[1] == "Z":
				p.name += " (zombie)"
			case len(f) > 1 && f[0] == "Uid:":
				p.uid, _ = strconv.Atoi(f[1])
			}
		}
		args, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		p.args = strings.TrimSpace(strings.ReplaceAll(string(args), "\x00", " "))
		out = append(out, p)
	}
	return out
}

// inside are the processes of the service's sandboxes. Those that process 1 is between two users have host uid 0 for a moment and
// are found by their cgroup.
func (s *service) inside() []process {
	var out []process
	for _, p := range processes() {
		if p.uid >= int(s.uid) && p.uid < int(s.uid)+slots*uidsPerBox {
			out = append(out, p)
		}
	}
	return out
}

func (s *service) keeper() (pid int) {
	for _, p := range processes() {
		if strings.Contains(p.args, " keeper --dir "+filepath.Join(s.run, "keeper-")) {
			return p.pid
		}
	}
	return 0
}

// cgroups are the groups of sandboxes in all hierarchies, but for those that the keeper has made ahead.
func (s *service) cgroups() []string {
	var out []string
	tops, _ := filepath.Glob("/sys/fs/cgroup/*/dsec-" + s.instance())
	for _, top := range append(tops, "/sys/fs/cgroup/dsec-"+s.instance()) {
		var groups []string
		for _, class := range []string{"ls", "be"} {
			found, _ := filepath.Glob(top + "/" + class + "/*")
			for _, f := range found {
				if st, err := os.Stat(f); err == nil && st.IsDir() && !restingCall(f) {
					groups = append(groups, f)
				}
			}
		}
		if len(groups) > keeper.Berths {
			out = append(out, groups...)
		}
	}
	return out
}

// restingCall reports whether a group is one of those that wait for the next function call: nothing runs in it.
func restingCall(group string) bool {
	if !strings.HasPrefix(filepath.Base(group), "fncall-") {
		return false
	}
	procs, err := os.ReadFile(filepath.Join(group, "cgroup.procs"))
	return err == nil && len(procs) == 0
}

// mounts are those of the service's folders in this mount namespace and in the keeper's two, but for those that stand as long as the
// service does (the pool, the keeper's devices) and for layers, which stay for a while for the next sandbox.
func (s *service) mounts(all bool) []string {
	var out []string
	spaces := []string{"/proc/self/mountinfo"}
	if k := s.keeper(); k != 0 {
		spaces = append(spaces, fmt.Sprintf("/proc/%d/mountinfo", k))
	}
	for _, space := range spaces {
		b, _ := os.ReadFile(space)
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 5 || !strings.HasPrefix(f[4], s.dir+"/") {
				continue
			}
			rest := strings.TrimPrefix(f[4], s.dir+"/")
			if !all && (rest == "state/pool" || rest == "run" || strings.HasPrefix(rest, "run/keeper-")) {
				continue
			}
			out = append(out, f[4])
		}
	}
	return out
}

// uppers are the writable folders in the pool.
func (s *service) uppers() []string {
	var out []string
	for _, d := range []string{"live", "making", "trash"} {
		list, _ := os.ReadDir(filepath.Join(s.state, "pool", d))
		for _, e := range list {
			out = append(out, d+"/"+e.Name())
		}
	}
	return out
}

// devices are the host ends of the sandboxes' networks.
func (s *service) devices() []string {
	h := fnv.New32a()
	h.Write([]byte(s.instance()))
	prefix := fmt.Sprintf("dsec%04xs", h.Sum32()&0xffff)
	var out []string
	links, _ := net.Interfaces()
	for _, l := range links {
		if strings.HasPrefix(l.Name, prefix) {
			out = append(out, l.Name)
		}
	}
	return out
}

// held counts the keeper's descriptors that belong to sandboxes: process 1's sockets, output pipes, sandboxes' listeners. The pools
// of namespaces and the connection of the host are left out.
func (s *service) held() (n int) {
	k := s.keeper()
	list, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", k))
	for _, e := range list {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", k, e.Name()))
		if err != nil {
			continue
		}
		switch kind, _, _ := strings.Cut(to, ":"); kind {
		case "pipe", "socket", "anon_inode", "pid", "mnt":
			n++
		}
	}
	return n
}

// leftovers describes what there is of sandboxes.
func (s *service) leftovers() []string {
	var out []string
	add := func(what string, list []string) {
		if len(list) > 0 {
			sort.Strings(list)
			more := ""
			if n := len(list); n > 8 {
				list, more = list[:8], fmt.Sprintf(" and %d more", n-8)
			}
			out = append(out, what+": "+strings.Join(list, "; ")+more)
		}
	}
	var procs []string
	for _, p := range s.inside() {
		procs = append(procs, p.String())
	}
	add("processes", procs)
	add("cgroups", s.cgroups())
	add("mounts", s.mounts(false))
	add("uppers", s.uppers())
	add("network devices", s.devices())
	return out
}

// patience bounds every wait for something that is due; no machine is that slow.
const patience = 3 * time.Minute

// eventually polls until done answers nil, and returns the last answer.
func eventually(done func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := done()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// idle waits until no sandbox is left, neither listed nor on the machine.
func (s *service) idle() error {
	c := s.client()
	return eventually(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		list, err := c.List(ctx, &dsecv1.Selector{})
		if err != nil {
			return err
		}
		if len(list) > 0 {
			return fmt.Errorf("%d sandboxes are listed, as %s in state %s", len(list), list[0].ID, list[0].Data.State)
		}
		if left := s.leftovers(); len(left) > 0 {
			return errors.New("left behind: " + strings.Join(left, "\n"))
		}
		return nil
	})
}

// mountedElsewhere reports whether a process that is not the service's sees one of its mounts.
func (s *service) mountedElsewhere() bool {
	for _, p := range processes() {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", p.pid))
		if strings.Contains(string(b), s.dir+"/") && !strings.Contains(p.args, s.dir) && (p.uid < int(s.uid) || p.uid >= int(s.uid)+slots*uidsPerBox) {
			return true
		}
	}
	return false
}

// nothingLeft checks after the service's end that nothing of it is on the machine but its state folder.
func (s *service) nothingLeft() error {
	return eventually(func() error {
		left := s.leftovers()
		for _, m := range s.mounts(true) {
			left = append(left, "mount "+m)
		}
		if k := s.keeper(); k != 0 {
			left = append(left, fmt.Sprintf("keeper %d", k))
		}
		for _, pattern := range []string{"/sys/fs/cgroup/dsec-", "/sys/fs/cgroup/*/dsec-"} {
			if i := s.instance(); i != "" {
				found, _ := filepath.Glob(pattern + i)
				left = append(left, found...)
			}
		}
		if b, err := exec.Command("nft", "list", "tables").Output(); err == nil && strings.Contains(string(b), "dsec_"+s.instance()+"\n") {
			left = append(left, "nft table dsec_"+s.instance())
		}
		loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
		for _, l := range loops {
			b, err := os.ReadFile(l)
			// A program of this machine that made a mount namespace meanwhile has a copy of the pool's mount until it ends.
			if err == nil && strings.HasPrefix(string(b), s.dir+"/") && !s.mountedElsewhere() {
				left = append(left, "loop device of "+strings.TrimSpace(string(b)))
			}
		}
		if len(left) > 0 {
			return errors.New("left behind: " + strings.Join(left, "\n"))
		}
		return nil
	})
}
