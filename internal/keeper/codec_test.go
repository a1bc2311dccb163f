package keeper

import (
	"bytes"
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestCodecRoundTrip(t *testing.T) {
	at := time.Unix(1_800_000_000, 123456789)
	birth := Birth{ID: "h12345-abcdefghijklmnop", Layers: []string{"a", "\xff\x00b"}, UIDBase: 7, Resources: sandbox.Resources{Memory: 1 << 40, CPU: -1},
		Env: []string{"A=b"}, NoSuid: true, Seccomp: []byte{1, 2}, Caps: 1 << 63, Deadline: at}
	alive := listResponse{Boxes: []Alive{{ID: birth.ID, Birth: birth, Ended: &sandbox.Cause{Class: "limit"}, Commands: []Running{{ID: "c", Stdin: 5}}}, {}}}
	info := Info{Features: map[string]string{"a": "yes", "b": "no"}, Started: at}
	start := startRequest{"x", sandbox.Command{Argv: []string{"a"}, Stdin: []byte("s"), Terminal: &sandbox.Size{Rows: 1, Cols: 65535}, Timeout: time.Hour}}
	for _, c := range []struct{ in, out any }{{&birth, &Birth{}}, {&alive, &listResponse{}}, {&info, &Info{}}, {&start, &startRequest{}}} {
		if err := decodeValue(appendValue(nil, c.in), c.out); err != nil {
			t.Error(err)
		}
		if d := cmp.Diff(c.in, c.out, cmp.AllowUnexported(startRequest{}, listResponse{})); d != "" {
			t.Error(d)
		}
	}
}

// Either side may know more fields than the other.
func TestCodecGrows(t *testing.T) {
	type old struct{ A, B int }
	type young struct {
		A, B int
		C    string
		D    []int
	}
	var y young
	if err := decodeValue(appendValue(nil, &old{1, 2}), &y); err != nil || y.A != 1 || y.B != 2 || y.C != "" {
		t.Errorf("%+v %v", y, err)
	}
	var o old
	if err := decodeValue(appendValue(nil, &young{3, 4, "x", []int{5}}), &o); err != nil || o != (old{3, 4}) {
		t.Errorf("%+v %v", o, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(appendValue(nil, &Birth{Layers: []string{"x"}, Env: []string{"A=b"}}))
	f.Add(appendValue(nil, &listResponse{Boxes: []Alive{{}}}))
	f.Add([]byte{255, 255, 255, 255, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []any{&Birth{}, &listResponse{}, &startRequest{}, &endEvent{}, &Info{}} {
			err := decodeValue(b, p)
			if err != nil && !errors.Is(err, sandbox.ErrInvalid) {
				t.Error(err)
			}
		}
	})
}

func pair(t *testing.T) (*conn, *conn) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var c [2]*conn
	for i, fd := range p {
		f := os.NewFile(uintptr(fd), "")
		n, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		c[i] = newConn(n.(*net.UnixConn))
		t.Cleanup(c[i].close)
	}
	return c[0], c[1]
}

func TestFramesAndDescriptors(t *testing.T) {
	a, b := pair(t)
	big := make([]byte, 5<<20)
	for i := range big {
		big[i] = byte(i * 7)
	}
	done := make(chan error, 1)
	go func() {
		var err error
		for i := range 40 {
			var fds []int
			for range i % 3 {
				fds = append(fds, 0)
			}
			err = errors.Join(err, a.write(kindRequest, opStart, uint64(i), nil, big[:i*i*3000], fds...))
		}
		a.close()
		done <- err
	}()
	for i := range 40 {
		f, err := b.read()
		if err != nil {
			t.Fatal(err)
		}
		if f.num != uint64(i) || len(f.fds) != i%3 || len(f.body) != i*i*3000 || !bytes.Equal(f.body, big[:len(f.body)]) {
			t.Errorf("frame %d: %d, %d octets, %d descriptors", i, f.num, len(f.body), len(f.fds))
		}
		for _, fd := range f.fds {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
				t.Error(err)
			}
			syscall.Close(fd)
		}
	}
	if _, err := b.read(); err == nil {
		t.Error("read beyond the end")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestBadFrames(t *testing.T) {
	for name, octets := range map[string][]byte{
		"too long":       {0, 0, 0, 0xff, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"no descriptor":  {0, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"ends in a body": {9, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1},
	} {
		a, b := pair(t)
		a.c.Write(octets)
		a.close()
		if f, err := b.read(); err == nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestHostsFile(t *testing.T) {
	for _, c := range []struct {
		image string
		b     Birth
		want  string
	}{
		{"", Birth{Hostname: "n"}, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tn\n"},
		{"127.0.0.1 localhost\n# c\n1.2.3.4 a b\n\n", Birth{Hostname: "n", Hosts: []string{"5.6.7.8 x"}},
			"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tn\n5.6.7.8 x\n# c\n1.2.3.4 a b\n"},
	} {
		if d := cmp.Diff(c.want, hostsFile(c.image, &c.b)); d != "" {
			t.Error(d)
		}
	}
}

func TestFindCgroups(t *testing.T) {
	const hybrid = "31 23 0:28 / /c rw - tmpfs tmpfs rw\n33 31 0:29 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 / /c/memory rw shared:1 - cgroup cgroup rw,memory\n39 31 0:36 / /c/pids rw - cgroup cgroup rw,pids\n41 31 0:38 / DIR rw - cgroup2 cgroup2 rw\n"
	dir := t.TempDir()
	write := func(text string) {
		if err := os.WriteFile(dir+"/cgroup.controllers", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	info := "41 31 0:38 / " + dir + " rw - cgroup2 cgroup2 rw\n"
	write("hugetlb\n")
	g, err := findCgroups("dsec-x", hybrid[:len(hybrid)-len("41 31 0:38 / DIR rw - cgroup2 cgroup2 rw\n")]+info)
	if err != nil || g.pure() || !cmp.Equal(g.limits, []string{"memory", "pids", "cpu"}) || g.v1["cpu"] != "/c/cpu,cpuacct" {
		t.Errorf("%+v %v", g, err)
	}
	write("cpuset cpu io memory hugetlb pids\n")
	if g, err = findCgroups("dsec-x", info); err != nil || !g.pure() || len(g.limits) != 0 {
		t.Errorf("%+v %v", g, err)
	}
	write("\n")
	if _, err = findCgroups("dsec-x", info); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Error(err)
	}
	if _, err = findCgroups("dsec-x", ""); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Error(err)
	}
}
