package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// places says where the services of a machine keep things; `up`, `gateway` and `host` share it.
type places struct {
	State    string `help:"Folder for what is kept." default:"/var/lib/dsec" type:"path"`
	RunDir   string `name:"run" help:"Folder for sockets and what a restart of the machine may lose." default:"/run/dsec" type:"path"`
	LogLevel string `help:"debug, info, warn or error." default:"info"`
	LogForm  string `name:"log-format" help:"text or json." default:"text"`
	Conf     string `name:"config" help:"TOML file with settings (see docs/ops/config.md)." type:"existingfile" placeholder:"FILE"`
	settings settings
}

// settings are what the config file may hold; a name that is not known fails.
type settings struct {
	Host struct {
		MaxSandboxes  int    `toml:"max_sandboxes"`
		MaxBirths     int    `toml:"max_births"`
		MemoryReserve string `toml:"memory_reserve"` // size
		DiskReserve   string `toml:"disk_reserve"`   // size
		LogReserve    string `toml:"log_reserve"`    // size
		LogLocal      string `toml:"log_local"`      // size
		Retention     string `toml:"retention"`      // duration
		LeaveDynmods  bool   `toml:"leave_dynmods"`
		NetnsPool     int    `toml:"netns_pool"`
		UnpackLayers  bool   `toml:"unpack_layers"`
		UnpackLimit   string `toml:"unpack_limit"` // size
	} `toml:"host"`
	Network struct {
		Ranges []string `toml:"ranges"`
		Off    bool     `toml:"off"`
	} `toml:"network"`
	Gateway struct {
		Domain string   `toml:"domain"`
		Hosts  []string `toml:"hosts"`
		// Runtime of containers whose create names none.
		Runtime string `toml:"runtime"`
		Stall   string `toml:"stall"` // duration; "0s" never ends a body
		// LostAfter gives a host up that was silent for so long; "" never.
		LostAfter string `toml:"lost_after"`
		// NoVNC is the folder of noVNC's package.
		NoVNC string `toml:"novnc"`
	} `toml:"gateway"`
	FnCall fnCallSettings `toml:"fncall"`
	Images imageSettings  `toml:"images"`
	VM     vmSettings     `toml:"vm"`
	// Runtimes are paths of OCI runtimes by name, before those that are found.
	Runtimes map[string]string `toml:"runtimes"`
	Blobs    blobSettings      `toml:"blobs"`
	Store    []struct {
		At string `toml:"at"`
	} `toml:"store"`
}

func (p *places) load() error {
	for _, d := range []*string{&p.State, &p.RunDir} {
		abs, err := filepath.Abs(*d)
		if err != nil {
			return err
		}
		*d = abs
	}
	if p.Conf == "" {
		return nil
	}
	b, err := os.ReadFile(p.Conf)
	if err != nil {
		return err
	}
	dec := toml.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p.settings); err != nil {
		if strict, ok := err.(*toml.StrictMissingError); ok {
			return fmt.Errorf("%s: unknown setting\n%s", p.Conf, strict.String())
		}
		return fmt.Errorf("%s: %w", p.Conf, err)
	}
	return nil
}

func setSize(to *int64, name, text string) error {
	if text == "" {
		return nil
	}
	var s size
	if err := s.UnmarshalText([]byte(text)); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	*to = int64(s)
	return nil
}

func setDuration(to *time.Duration, name, text string) error {
	if text == "" {
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	*to = d
	return nil
}

// identity is the host's, chosen at its first start and kept in its state.
func identity(state string) (sandbox.HostID, error) {
	file := filepath.Join(state, "host-id")
	b, err := os.ReadFile(file)
	if err == nil {
		id, err := sandbox.ParseHostID(string(bytes.TrimSpace(b)))
		if err != nil {
			err = fmt.Errorf("%s: %w; bring back what it held: sandboxes and their logs belong to that identity", file, err)
		}
		return id, err
	}
	if !os.IsNotExist(err) {
		return "", err
	}
	id := sandbox.NewHostID()
	return id, writeFile(file, []byte(id+"\n"))
}

// writeFile writes a 0600 file at once: whoever reads it sees all of it or nothing.
func writeFile(file string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	if _, err := tmp.Write(data); err != nil {
		tmp.Close()
		return err
	}
	if err := tmp.Sync(); err != nil {
		tmp.Close()
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), file)
}

// clusterToken is what gateways and hosts know each other by; without a file of the operator's it is made once in the state folder.
func clusterToken(file, state string) (string, error) {
	made := file == ""
	if made {
		file = filepath.Join(state, "cluster-token")
	}
	b, err := os.ReadFile(file)
	if err == nil {
		return string(bytes.TrimSpace(b)), nil
	}
	if !made || !os.IsNotExist(err) {
		return "", fmt.Errorf("cluster token: %w", err)
	}
	token := sandbox.NewKey() + sandbox.NewKey()
	return token, writeFile(file, []byte(token+"\n"))
}

var notInstance = regexp.MustCompile(`[^a-z0-9]`)

// instance names what the host makes on the machine: it must differ between two hosts of one machine, so it is the host's identity.
func instance(id sandbox.HostID) string { return notInstance.ReplaceAllString(string(id), "") }
