package peer

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

const (
	uidBase     = 1_900_000_000 // first host id of the mapped rows
	ids         = 65536
	memoryLimit = 2 << 30
	pidsLimit   = 4096
)

// object is a part of a runtime's configuration.
type object = map[string]any

// BaseSpec is what the runtime itself proposes, for the program /true without a terminal. It is written to config.json in dir too.
func BaseSpec(bin, dir string) (object, error) {
	os.Remove(filepath.Join(dir, "config.json"))
	c := exec.Command(bin, "spec")
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s spec: %w: %.300s", bin, err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	var s object
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, err
	}
	p := s["process"].(object)
	p["terminal"], p["args"] = false, []string{"/true"}
	delete(p, "rlimits") // raising them takes a right that a container host may lack
	if b, err = json.Marshal(s); err != nil {
		return nil, err
	}
	return s, os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}

// equal changes a specification to what a dsec sandbox has.
func equal(s object, cgroups string) {
	l := s["linux"].(object)
	var ns []object
	for _, t := range []string{"pid", "network", "ipc", "uts", "mount", "cgroup", "user"} {
		ns = append(ns, object{"type": t})
	}
	l["namespaces"] = ns
	m := []object{{"containerID": 0, "hostID": uidBase, "size": ids}}
	l["uidMappings"], l["gidMappings"] = m, m
	l["resources"] = object{"memory": object{"limit": memoryLimit}, "pids": object{"limit": pidsLimit},
		"devices": []object{{"allow": false, "access": "rwm"}}}
	l["seccomp"] = seccomp()
	l["cgroupsPath"] = cgroups
	s["root"].(object)["readonly"] = false
}

// seccomp is the list of a dsec sandbox in the words of these runtimes: all passes but what is named.
func seccomp() object {
	eperm := []string{"mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
		"setns", "bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key", "request_key", "init_module", "finit_module", "delete_module",
		"reboot", "swapon", "swapoff", "acct", "quotactl", "settimeofday", "clock_settime", "sethostname", "setdomainname",
		"fanotify_init", "syslog", "vhangup", "nfsservctl", "open_by_handle_at", "kexec_load", "kexec_file_load", "iopl", "ioperm",
		"_sysctl", "uselib", "ustat", "sysfs", "modify_ldt", "lookup_dcookie", "create_module", "get_kernel_syms", "query_module"}
	const ePERM, eNOSYS, eNOPROTOOPT, eAFNOSUPPORT, eOPNOTSUPP = 1, 38, 92, 97, 95
	deny := func(errno int, names []string, args ...object) object {
		o := object{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
		if len(args) > 0 {
			o["args"] = args
		}
		return o
	}
	arg := func(i int, op string, v uint64, two ...uint64) object {
		o := object{"index": i, "op": op, "value": v}
		if len(two) > 0 {
			o["valueTwo"] = two[0]
		}
		return o
	}
	list := []object{
		deny(ePERM, eperm),
		deny(eNOSYS, []string{"clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"}),
	}
	for _, flag := range []uint64{0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000} { // namespaces
		list = append(list, deny(ePERM, []string{"clone", "unshare"}, arg(0, "SCMP_CMP_MASKED_EQ", flag, flag)))
	}
	for _, family := range []uint64{3, 4, 5, 9, 17, 20, 21, 29, 30, 33, 38, 40, 44} {
		list = append(list, deny(eAFNOSUPPORT, []string{"socket", "socketpair"}, arg(0, "SCMP_CMP_EQ", family)))
	}
	for _, command := range []uint64{0x5412, 0x541c, 0x660f, 0x6611, 'X'<<8 | 109, 'X'<<8 | 129, 0xf509} {
		list = append(list, deny(ePERM, []string{"ioctl"}, arg(1, "SCMP_CMP_MASKED_EQ", 0xffff, command)))
	}
	for _, command := range []uint64{0x9409, 0x940d, 0x9436} {
		list = append(list, deny(eOPNOTSUPP, []string{"ioctl"}, arg(1, "SCMP_CMP_MASKED_EQ", 0xffff, command)))
	}
	list = append(list, deny(eNOPROTOOPT, []string{"setsockopt"}, arg(1, "SCMP_CMP_EQ", 6), arg(2, "SCMP_CMP_EQ", 31)))
	arch := "SCMP_ARCH_X86_64"
	if runtime.GOARCH == "arm64" {
		arch = "SCMP_ARCH_AARCH64"
	}
	return object{"defaultAction": "SCMP_ACT_ALLOW", "architectures": []string{arch}, "syscalls": list}
}

// image is the root file system as an archive that `ctr image import` takes.
func image(name string, layer []byte) ([]byte, error) {
	digest := func(b []byte) string { s := sha256.Sum256(b); return hex.EncodeToString(s[:]) }
	config, err := json.Marshal(object{"architecture": runtime.GOARCH, "os": "linux", "config": object{"Cmd": []string{"/true"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}}})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]object{{"Config": digest(config) + ".json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		data []byte
	}{{digest(config) + ".json", config}, {"layer.tar", layer}, {"manifest.json", manifest}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.data)), Typeflag: tar.TypeReg}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	err = w.Close()
	return out.Bytes(), err
}
