package oci

import (
	"encoding/json"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The parts of the OCI runtime specification, 1.0.2, that a bundle of ours uses.
type (
	config struct {
		Version  string  `json:"ociVersion"`
		Hostname string  `json:"hostname"`
		Process  process `json:"process"`
		Root     root    `json:"root"`
		Mounts   []mount `json:"mounts"`
		Linux    linux   `json:"linux"`
	}
	process struct {
		Args         []string            `json:"args"`
		Cwd          string              `json:"cwd"`
		User         map[string]int      `json:"user"`
		Capabilities map[string][]string `json:"capabilities"`
	}
	root struct {
		Path string `json:"path"`
	}
	mount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options,omitempty"`
	}
	linux struct {
		Namespaces   []namespace `json:"namespaces"`
		CgroupsPath  string      `json:"cgroupsPath,omitempty"`
		MaskedPaths  []string    `json:"maskedPaths,omitempty"`
		ReadonlyPath []string    `json:"readonlyPaths,omitempty"`
		UIDMappings  []mapping   `json:"uidMappings,omitempty"`
		GIDMappings  []mapping   `json:"gidMappings,omitempty"`
	}
	namespace struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
	mapping struct {
		Container uint32 `json:"containerID"`
		Host      uint32 `json:"hostID"`
		Size      uint32 `json:"size"`
	}
)

// place is where the keeper lays the bundle.
const place = "@BUNDLE@/"

// ids is the number of ids that a sandbox has.
const ids = 65536

// birth makes what the keeper must know of the runtime for a sandbox.
func (r *Runtime) birth(s *sandbox.Spec, uid uint32) (*keeper.Runtime, error) {
	c, err := r.config(s, uid)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("config.json: %w", err)
	}
	return &keeper.Runtime{Kind: known[r.Name].kind, Program: r.Program, Config: text}, nil
}

func (r *Runtime) config(s *sandbox.Spec, uid uint32) (*config, error) {
	caps, err := capabilities()
	if err != nil {
		return nil, err
	}
	c := &config{Version: "1.0.2", Hostname: s.Hostname, Root: root{place + "rootfs"}}
	c.Process = process{
		Args: []string{"/proc/self/fd/4"}, Cwd: "/", User: map[string]int{"uid": 0, "gid": 0},
		Capabilities: map[string][]string{"bounding": caps, "effective": caps, "permitted": caps},
	}
	c.Linux.Namespaces = []namespace{{Type: "pid"}, {Type: "mount"}, {Type: "uts"}, {Type: "ipc"}, {Type: "network", Path: place + "netns"}}
	if r.Name == GVisor {
		c.gvisor(s, uid)
	} else {
		c.shared(s, uid)
	}
	for i, v := range s.Volumes {
		c.Mounts = append(c.Mounts, mount{v.Path, "bind", place + "v" + strconv.Itoa(i), []string{"bind", "ro", "nosuid", "nodev"}})
	}
	return c, nil
}

// shared is for runtimes on the host's kernel: what the keeper's own births mount.
func (c *config) shared(_ *sandbox.Spec, uid uint32) {
	c.Mounts = []mount{
		{"/proc", "proc", "proc", []string{"nosuid", "nodev", "noexec"}},
		{"/dev", "bind", place + "dev", []string{"rbind", "ro", "nosuid", "noexec"}},
		{"/dev/shm", "bind", place + "shm", []string{"bind", "nosuid", "nodev"}},
		{"/dev/pts", "devpts", "devpts", []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=" + strconv.Itoa(int(uid)+5)}},
		{"/sys", "bind", place + "sys", []string{"rbind", "ro", "nosuid", "nodev", "noexec"}},
	}
	c.Linux.CgroupsPath = "/@CGROUP@"
	c.Linux.MaskedPaths, c.Linux.ReadonlyPath = confine.Masks(), confine.ReadOnly()
}

// gvisor is for a kernel of the sandbox's own, which brings its /proc, /dev and /sys.
func (c *config) gvisor(s *sandbox.Spec, uid uint32) {
	c.Process.Args = []string{"/dev/.dsec/dsec-init"}
	c.Mounts = []mount{
		{"/dev/.dsec", "bind", place + "programs", []string{"bind", "ro", "nosuid", "nodev"}},
		{"/dev/shm", "tmpfs", "shm", []string{"nosuid", "nodev", "mode=1777", "size=" + strconv.FormatInt(s.Resources.Memory, 10)}},
		{"/sys/fs/cgroup", "cgroup", "cgroup", []string{"ro", "nosuid", "noexec", "nodev"}},
	}
	c.Linux.Namespaces = append(c.Linux.Namespaces, namespace{Type: "user"})
	c.Linux.UIDMappings = []mapping{{0, uid, ids}}
	c.Linux.GIDMappings = c.Linux.UIDMappings
}

// names of capabilities by number, linux/capability.h.
var capNames = []string{"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
	"LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO",
	"SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD",
	"LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
	"PERFMON", "BPF", "CHECKPOINT_RESTORE"}

// capabilities are those that this process, and so the keeper, has: process 1 gives up at BIRTH what it does not need, and a runtime
// fails that is asked for one that is not there.
func capabilities() ([]string, error) {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if err := unix.Capget(&h, &d[0]); err != nil {
		return nil, fmt.Errorf("capabilities of this process: %w", err)
	}
	var out []string
	for i, name := range capNames {
		if d[i/32].Permitted>>(i%32)&1 == 1 {
			out = append(out, "CAP_"+name)
		}
	}
	return out, nil
}
