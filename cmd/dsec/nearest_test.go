package main

import "testing"

func TestNearestFlag(t *testing.T) {
	known := []string{"--env", "--net", "--cpu", "--memory", "--cwd", "--tty", "--user", "--help"}
	for word, want := range map[string]string{"--evn": "--env", "--network": "--net", "--cpus": "--cpu", "--memroy": "--memory", "--mem": "--memory", "--nte": "--net", "--ab": "", "--workdir": "--cwd",
		"--tty5": "--tty", "-x": "", "--": "", "--entrypoint": "", "--something-else": "", "--uesr": "--user"} {
		if got := nearest(word, known); got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
	for word, want := range map[string]string{"--env": "--var", "--evn": "--var", "--network": ""} {
		if got := nearest(word, []string{"--var", "--user", "--cwd"}); got != want {
			t.Errorf("of exec, %s: %q, want %q", word, got, want)
		}
	}
	for text, want := range map[string]string{"unknown flag --network": `unknown flag --network, did you mean "--net"?`, "create: unknown flag --nosuch": "create: unknown flag --nosuch",
		"unknown flag --entrypoint": "unknown flag --entrypoint"} {
		if got := withFamiliar(text, known); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
