package e2e

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// Bad input by plain HTTP, as curl sends it: status, code, and words that the message must hold: the field, and what would be right.
func TestBadInput(t *testing.T) {
	t.Parallel()
	s := shared(t)
	small := s.small(t)
	sb := s.box(t)
	arm := s.layer(t, tarOf(entry{name: "arm", mode: 0o755, data: "\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 9) + "\x02\x00\xb7\x00\x01\x00\x00\x00" + strings.Repeat("\x00", 40)}))
	exe(t, sb, client.Cmd{ID: "known", Argv: []string{"true"}})
	named := s.box(t, func(o *client.Options) { o.Name = "taken-name" })
	_ = named
	create := func(fields string) string {
		return fmt.Sprintf(`{"layers":[%q],"labels":{"test":"bad-input"},%s}`, small, fields)
	}
	start := func(fields string) string { return fmt.Sprintf(`{"sandbox":%q,%s}`, sb.ID, fields) }
	long := strings.Repeat("x", 131072)
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, c := range []struct {
		name, method, body string
		status             int
		code               string
		words              []string
	}{
		{"no layer", "SandboxService/Create", `{"layers":[]}`, 400, "invalid_argument", []string{"layer", "environment"}},
		{"unknown layer", "SandboxService/Create", `{"layers":["no/such"]}`, 404, "not_found", []string{"no/such"}},
		{"unknown version", "SandboxService/Create", `{"layers":["base/small@99"]}`, 404, "not_found", []string{"base/small", "99"}},
		{"unknown layer ID", "SandboxService/Create", `{"layers":["sha256:` + strings.Repeat("0", 64) + `"]}`, 404, "not_found", []string{"sha256:0000"}},
		{"no layer name at all", "SandboxService/Create", `{"layers":["Not A Name"]}`, 400, "invalid_argument", []string{"Not A Name"}},
		{"wrong architecture", "SandboxService/Create", fmt.Sprintf(`{"layers":[%q,%q]}`, small, arm), 400, "invalid_argument", []string{"arm64", "amd64"}},
		{"unknown environment", "SandboxService/Create", `{"environment":"nosuch"}`, 404, "not_found", []string{"nosuch"}},
		{"both", "SandboxService/Create", `{"environment":"x","layers":["base/small"]}`, 400, "invalid_argument", []string{"environment", "layers"}},
		{"the same layer twice", "SandboxService/Create", fmt.Sprintf(`{"layers":[%q,%q]}`, small, small), 400, "invalid_argument", []string{"same"}},
		{"unknown field", "SandboxService/Create", create(`"memroy":1`), 400, "invalid_argument", []string{"memroy"}},
		{"not JSON", "SandboxService/Create", `{"layers":`, 400, "invalid_argument", nil},
		{"wrong type", "SandboxService/Create", create(`"name":5`), 400, "invalid_argument", []string{"name"}},
		{"memory too small", "SandboxService/Create", create(`"resources":{"memory":1000}`), 400, "invalid_argument", []string{"memory", "4194304"}},
		{"memory negative", "SandboxService/Create", create(`"resources":{"memory":-5}`), 400, "invalid_argument", []string{"memory"}},
		{"disk too small", "SandboxService/Create", create(`"resources":{"disk":1000}`), 400, "invalid_argument", []string{"disk", "1048576"}},
		{"pids too small", "SandboxService/Create", create(`"resources":{"pids":1}`), 400, "invalid_argument", []string{"pids", "8"}},
		{"cpu too small", "SandboxService/Create", create(`"resources":{"cpuMilli":1}`), 400, "invalid_argument", []string{"cpu", "10"}},
		{"weight too large", "SandboxService/Create", create(`"resources":{"cpuWeight":100000}`), 400, "invalid_argument", []string{"cpu_weight", "10000"}},
		{"name of capitals", "SandboxService/Create", create(`"name":"Not-A-Name"`), 400, "invalid_argument", []string{"name", "Not-A-Name"}},
		{"name with a newline", "SandboxService/Create", create(`"name":"a\nb"`), 400, "invalid_argument", []string{"name"}},
		{"name too long", "SandboxService/Create", create(`"name":"` + strings.Repeat("n", 64) + `"`), 400, "invalid_argument", []string{"name"}},
		{"name taken", "SandboxService/Create", create(`"name":"taken-name"`), 409, "already_exists", []string{"taken-name"}},
		{"key with a newline", "SandboxService/Create", create(`"key":"a\nb"`), 400, "invalid_argument", []string{"key"}},
		{"key too long", "SandboxService/Create", create(`"key":"` + strings.Repeat("k", 5000) + `"`), 400, "invalid_argument", []string{"key"}},
		{"job with a slash", "SandboxService/Create", create(`"job":"a\u0000b"`), 400, "invalid_argument", []string{"job"}},
		{"unknown user", "SandboxService/Create", create(`"user":"nosuch","entrypoint":["true"]`), 0, "", []string{"nosuch"}},
		{"relative cwd", "SandboxService/Create", create(`"cwd":"tmp"`), 400, "invalid_argument", []string{"cwd", "absolute"}},
		{"two cwds", "SandboxService/Create", create(`"cwd":"/","cwdRaw":"` + b64("/") + `"`), 400, "invalid_argument", []string{"cwd"}},
		{"unknown network", "SandboxService/Create", create(`"network":"bridge"`), 400, "invalid_argument", []string{"network", "none", "open"}},
		{"unknown backend", "SandboxService/Create", create(`"backend":"vm"`), 501, "unimplemented", []string{"vm"}},
		{"durability not there", "SandboxService/Create", create(`"durability":"store"`), 501, "unimplemented", []string{"durability", "host"}},
		{"unknown durability", "SandboxService/Create", create(`"durability":"never"`), 0, "", []string{"durability"}},
		{"negative total", "SandboxService/Create", create(`"lifetime":{"totalMs":-1}`), 400, "invalid_argument", []string{"total"}},
		{"unknown end", "SandboxService/Create", create(`"lifetime":{"onIdle":"explode"}`), 400, "invalid_argument", []string{"on_idle", "stop", "pause"}},
		{"hostname", "SandboxService/Create", create(`"hostname":"a b"`), 400, "invalid_argument", []string{"hostname"}},
		{"environment name with =", "SandboxService/Create", create(`"env":[{"name":"a=b","value":"c"}]`), 400, "invalid_argument", []string{"env", "="}},
		{"environment too long", "SandboxService/Create", create(`"env":[{"name":"a","value":"` + long + `"}]`), 400, "invalid_argument", []string{"env", "131072"}},
		{"too many labels", "SandboxService/Create", create(`"key":"labels"`)[:0] + manyLabels(small), 400, "invalid_argument", []string{"labels", "64"}},
		{"batch of none", "SandboxService/CreateBatch", `{"request":` + create(`"job":"b"`) + `,"count":0}`, 400, "invalid_argument", []string{"count"}},
		{"batch too large", "SandboxService/CreateBatch", `{"request":` + create(`"job":"b"`) + `,"count":100001}`, 400, "invalid_argument", []string{"count", "10"}},
		{"get unknown", "SandboxService/Get", `{"id":"nosuch"}`, 404, "not_found", []string{"nosuch"}},
		{"get nothing", "SandboxService/Get", `{}`, 400, "invalid_argument", []string{"id"}},
		{"stop nothing", "SandboxService/Stop", `{}`, 400, "invalid_argument", nil},
		{"stop an empty selection", "SandboxService/Stop", `{"selector":{}}`, 400, "invalid_argument", []string{"selector"}},
		{"stop unknown", "SandboxService/Stop", `{"id":"nosuch"}`, 0, "", []string{"nosuch"}},
		{"pause level", "SandboxService/Pause", `{"id":"` + sb.ID + `","level":"saved"}`, 0, "", []string{"saved", "frozen"}},
		{"page token", "SandboxService/List", `{"pageToken":"garbage"}`, 400, "invalid_argument", []string{"page_token"}},
		{"page size", "SandboxService/List", `{"pageSize":-1}`, 400, "invalid_argument", []string{"page_size"}},
		{"unknown state", "SandboxService/List", `{"selector":{"states":["alive"]}}`, 400, "invalid_argument", []string{"state", "alive"}},

		{"no command", "CommandService/Start", start(`"argv":[]`), 400, "invalid_argument", []string{"argv", "session"}},
		{"empty program", "CommandService/Start", start(`"argv":[""]`), 400, "invalid_argument", []string{"argv[0]"}},
		{"argv and session", "CommandService/Start", start(`"argv":["true"],"session":"s"`), 400, "invalid_argument", []string{"argv", "session"}},
		{"two argvs", "CommandService/Start", start(`"argv":["true"],"argvRaw":["` + b64("true") + `"]`), 400, "invalid_argument", []string{"argv"}},
		{"argument too long", "CommandService/Start", start(`"argv":["echo","` + long + `"]`), 400, "invalid_argument", []string{"argv[1]", "131072"}},
		{"arguments too long together", "CommandService/Start", start(`"argv":["echo"` + strings.Repeat(`,"`+long[:131000]+`"`, 17) + `]`), 400, "invalid_argument", []string{"argv", "2097152"}},
		{"NUL in an argument", "CommandService/Start", start(`"argv":["echo","a\u0000b"]`), 400, "invalid_argument", []string{"argv[1]", "NUL"}},
		{"cwd relative", "CommandService/Start", start(`"argv":["true"],"cwd":"tmp"`), 400, "invalid_argument", []string{"cwd"}},
		{"timeout negative", "CommandService/Start", start(`"argv":["true"],"timeoutMs":-1`), 400, "invalid_argument", []string{"timeout"}},
		{"wait too long", "CommandService/Start", start(`"argv":["true"],"waitMs":600000`), 0, "", nil},
		{"cap too large", "CommandService/Start", start(`"argv":["true"],"outputCap":"99999999999"`), 400, "invalid_argument", []string{"output_cap", "1073741824"}},
		{"terminal too large", "CommandService/Start", start(`"argv":["true"],"terminal":{"rows":70000,"cols":80}`), 400, "invalid_argument", []string{"terminal", "65535"}},
		{"command ID", "CommandService/Start", start(`"argv":["true"],"id":"a\nb"`), 400, "invalid_argument", []string{"id"}},
		{"session not open", "CommandService/Start", start(`"session":"never","text":"true"`), 0, "", []string{"never"}},
		{"command in no sandbox", "CommandService/Start", `{"sandbox":"nosuch","argv":["true"]}`, 404, "not_found", []string{"nosuch"}},
		{"command nowhere", "CommandService/Start", `{"argv":["true"]}`, 400, "invalid_argument", []string{"sandbox"}},
		{"wait for nothing", "CommandService/Wait", start(`"id":"nosuch"`), 404, "not_found", []string{"nosuch"}},
		{"unknown stream", "CommandService/ReadOutput", start(`"id":"known","stream":"stdlog"`), 400, "invalid_argument", []string{"stream", "stdout"}},
		{"signal to nothing", "CommandService/Signal", start(`"id":"nosuch","signal":9`), 404, "not_found", []string{"nosuch"}},
		{"stdin of nothing", "CommandService/WriteStdin", start(`"id":"nosuch"`), 404, "not_found", []string{"nosuch"}},
		{"session shell relative", "CommandService/OpenSession", start(`"shell":"bash"`), 0, "", nil},

		{"stat relative", "FileService/Stat", fmt.Sprintf(`{"at":{"sandbox":%q,"path":"etc"}}`, sb.ID), 400, "invalid_argument", []string{"path", "absolute"}},
		{"stat missing", "FileService/Stat", fmt.Sprintf(`{"at":{"sandbox":%q,"path":"/no/such"}}`, sb.ID), 404, "not_found", []string{"/no/such"}},
		{"stat by nobody we know", "FileService/Stat", fmt.Sprintf(`{"at":{"sandbox":%q,"path":"/etc","user":"nosuch"}}`, sb.ID), 0, "", []string{"nosuch"}},
		{"path too long", "FileService/Stat", fmt.Sprintf(`{"at":{"sandbox":%q,"path":"/%s"}}`, sb.ID, strings.Repeat("p", 5000)), 400, "invalid_argument", []string{"path", "4095"}},
		{"remove the root", "FileService/Remove", fmt.Sprintf(`{"at":{"sandbox":%q,"path":"/"},"recursive":true}`, sb.ID), 0, "", nil},

		{"job name", "JobService/Put", `{"job":{"name":"a b\n"}}`, 400, "invalid_argument", []string{"job"}},
		{"lease too long", "JobService/Put", `{"job":{"name":"x","leaseMs":600000}}`, 400, "invalid_argument", []string{"lease_ms", "60000"}},
		{"renew unknown", "JobService/Renew", `{"name":"nosuch"}`, 404, "not_found", []string{"nosuch"}},
		{"layer name", "LayerService/PublishLayer", `{"name":"A/B","layer":"base/small"}`, 400, "invalid_argument", []string{"A/B"}},
		{"remove an unknown layer", "LayerService/RemoveLayer", `{"ref":"no/such"}`, 404, "not_found", []string{"no/such"}},
		{"environment of nothing", "LayerService/PublishEnvironment", `{"environment":{"name":"e"}}`, 400, "invalid_argument", []string{"base"}},
		{"environment of unknown", "LayerService/PublishEnvironment", `{"environment":{"name":"e","base":"no/such"}}`, 404, "not_found", []string{"no/such"}},
		{"roll back too far", "LayerService/RollbackLayer", `{"name":"base/small","version":77}`, 404, "not_found", []string{"77"}},
		{"a call that is not there", "SandboxService/Explode", `{}`, 404, "", nil},
		{"a service that is not there", "NoService/Explode", `{}`, 404, "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			begin := time.Now()
			status, body := s.post(t, c.method, c.body)
			if took := time.Since(begin); took > patience {
				t.Errorf("took %v", took)
			}
			if len(body) > 4000 {
				t.Errorf("an answer of %d octets", len(body))
			}
			if c.status == 0 { // refused one way or another, or told in an outcome
				for _, w := range c.words {
					if !strings.Contains(strings.ToLower(body), strings.ToLower(w)) {
						t.Errorf("%d %.600s does not name %q", status, body, w)
					}
				}
				if status >= 500 && status != 501 {
					t.Errorf("%d %s", status, body)
				}
				return
			}
			if status != c.status {
				t.Fatalf("%d %.600s, want %d", status, body, c.status)
			}
			if c.code == "" {
				return
			}
			e := parseError(t, body)
			if e.Code != c.code {
				t.Errorf("code %s (%s), want %s", e.Code, e.Message, c.code)
			}
			for _, w := range c.words {
				if !strings.Contains(strings.ToLower(e.Message), strings.ToLower(w)) {
					t.Errorf("%q does not name %q", e.Message, w)
				}
			}
		})
	}
	_, _ = s.client().StopAll(within(t), &dsecv1.Selector{Labels: map[string]string{"test": "bad-input"}})
	if got := out(t, sb, "echo alive; ls /"); !strings.HasPrefix(got, "alive\n") || !strings.Contains(got, "bin") {
		t.Errorf("the sandbox after all that: %q", got)
	}
}

func manyLabels(layer string) string {
	labels := map[string]string{}
	for i := range 65 {
		labels[fmt.Sprintf("l%d", i)] = "v"
	}
	b, _ := json.Marshal(map[string]any{"layers": []string{layer}, "labels": labels})
	return string(b)
}

// Octets that are no UTF-8 are carried: arguments, environment, folders, users' output, by JSON with the raw twins and by the SDK.
func TestOctets(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	odd := "b\xff\xfed \x01\n"
	b64 := base64.StdEncoding.EncodeToString
	status, body := s.post(t, "CommandService/Start", fmt.Sprintf(`{"sandbox":%q,"argvRaw":[%q,%q,%q],"waitMs":60000}`, sb.ID, b64([]byte("printf")), b64([]byte("%s")), b64([]byte(odd))))
	var r struct {
		Stdout  []byte
		Command struct{ ArgvRaw [][]byte }
	}
	if err := json.Unmarshal([]byte(body), &r); status != 200 || err != nil || string(r.Stdout) != odd || len(r.Command.ArgvRaw) != 3 || string(r.Command.ArgvRaw[2]) != odd {
		t.Errorf("%d %s", status, body)
	}
	res := exe(t, sb, client.Cmd{Argv: []string{"printf", "%s", odd}})
	want(t, res, 0, odd, "")
	dir := "/tmp/" + strings.TrimSpace(odd)
	must(t, sb.Files().MakeDir(within(t), dir, true))
	res = exe(t, sb, client.Cmd{Argv: []string{"pwd"}, Cwd: dir})
	want(t, res, 0, dir+"\n", "")
	ses := session(t, sb, client.SessionOptions{Cwd: dir})
	res, err := ses.Run(within(t), "pwd; printf '%s' '\xff\xfe'")
	must(t, err)
	want(t, res, 0, dir+"\n\xff\xfe", "")
	list, err := sb.ListCommands(within(t))
	must(t, err)
	found := false
	for _, c := range list {
		for _, a := range c.ArgvRaw {
			found = found || string(a) == odd
		}
	}
	if !found {
		t.Error("the list of commands lost the octets")
	}
	made := s.box(t, func(o *client.Options) { o.Cwd = "/tmp"; o.Env = map[string]string{"X": odd} })
	want(t, exe(t, made, sh(`printf '%s' "$X"`)), 0, odd, "")
}

func TestKeysAndVersions(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	list := func(header ...string) (int, string) { return s.post(t, "SandboxService/List", `{}`, header...) }
	for name, c := range map[string]struct {
		header []string
		status int
		words  []string
	}{
		"no key":          {[]string{"Authorization", ""}, 401, []string{"key"}},
		"wrong key":       {[]string{"Authorization", "Bearer wrong"}, 401, []string{"key"}},
		"no scheme":       {[]string{"Authorization", s.key()}, 401, []string{"Bearer"}},
		"other header":    {[]string{"Authorization", "", "X-API-Key", s.key()}, 200, nil},
		"older client":    {[]string{"Dsec-Protocol", "0"}, 400, []string{"upgrade", "client"}},
		"newer client":    {[]string{"Dsec-Protocol", "999"}, 400, []string{"upgrade", "server"}},
		"version garbage": {[]string{"Dsec-Protocol", "one"}, 400, []string{"Dsec-Protocol"}},
		"this version":    {[]string{"Dsec-Protocol", "1"}, 200, nil},
		"a project apart": {[]string{"Dsec-Project", "other"}, 403, []string{"other"}},
		"a bad project":   {[]string{"Dsec-Project", "No Project"}, 0, []string{"project"}},
	} {
		status, body := list(c.header...)
		if c.status != 0 && status != c.status || c.status == 0 && (status < 400 || status >= 500) {
			t.Errorf("%s: %d %s, want %d", name, status, body, c.status)
		}
		for _, w := range c.words {
			if !strings.Contains(strings.ToLower(body), strings.ToLower(w)) {
				t.Errorf("%s: %s does not name %q", name, body, w)
			}
		}
	}
	c := s.client()
	k, err := c.CreateKey(within(t), &dsecv1.CreateKeyRequest{Note: "short", TtlMs: 6000})
	must(t, err)
	auth := []string{"Authorization", "Bearer " + k.Key}
	if status, body := list(auth...); status != 200 {
		t.Errorf("fresh key: %d %s", status, body)
	}
	must(t, eventually(func() error {
		if status, body := list(auth...); status != 401 || !strings.Contains(body, "expired") {
			return fmt.Errorf("after its time: %d %s", status, body)
		}
		return nil
	}))
	// A key of another project sees nothing of this one.
	k, err = c.CreateKey(within(t), &dsecv1.CreateKeyRequest{Project: "default/team"})
	if err != nil {
		t.Logf("a project below: %v", err)
	} else {
		auth = []string{"Authorization", "Bearer " + k.Key}
		if status, body := s.post(t, "SandboxService/Get", fmt.Sprintf(`{"id":%q}`, sb.ID), auth...); status != 404 && status != 403 {
			t.Errorf("another project's key sees the sandbox: %d %s", status, body)
		}
		if status, body := list(auth...); status != 200 || strings.Contains(body, sb.ID) {
			t.Errorf("another project's list: %d %s", status, body)
		}
		if status, _ := s.post(t, "CommandService/Start", fmt.Sprintf(`{"sandbox":%q,"argv":["true"]}`, sb.ID), auth...); status != 404 && status != 403 {
			t.Errorf("another project's key runs a command: %d", status)
		}
		must(t, c.RevokeKey(within(t), k.Info.Id))
		if status, _ := list(auth...); status != 401 {
			t.Errorf("a revoked key: %d", status)
		}
	}
	for path, status := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 200, "/": 404, "/v1/files/" + sb.ID: 401, "/../etc/passwd": 404} {
		r, err := http.NewRequest("GET", "http://dsec"+path, nil)
		must(t, err)
		if got, body := s.send(t, r); got != status && !(path == "/metrics" && got == 401) && !(status == 404 && got == 401) {
			t.Errorf("GET %s without a key: %d %.200s, want %d", path, got, body, status)
		}
	}
}

// After its end a sandbox is still told of, its outcomes and log are readable, and its files and commands are refused by name.
func TestAfterTheEnd(t *testing.T) {
	t.Parallel()
	s := shared(t)
	key := fmt.Sprintf("after-the-end-%d", time.Now().UnixNano())
	sb := s.box(t, func(o *client.Options) { o.Key = key; o.Job = "ended" })
	r := exe(t, sb, client.Cmd{ID: "step", Argv: []string{"sh", "-c", "echo said; exit 4"}})
	running, err := sb.Start(within(t), client.Cmd{ID: "cut", Argv: []string{"sleep", "100"}})
	must(t, err)
	must(t, sb.Stop(within(t)))
	must(t, sb.Stop(within(t))) // again
	must(t, sb.Refresh(within(t)))
	if sb.Data.State != "stopped" || sb.Data.Cause.GetClass() != "none" {
		t.Errorf("%s, %v", sb.Data.State, sb.Data.Cause)
	}
	again, err := sb.Process(r.ID).Wait(within(t))
	must(t, err)
	want(t, again, 4, "said\n", "")
	cut, err := running.Wait(within(t))
	must(t, err)
	if cut.Outcome.Kind != "killed" {
		t.Errorf("the cut one: %s", describe(cut))
	}
	for name, err := range map[string]error{
		"command": func() error { _, err := sb.Exec(within(t), "true"); return err }(),
		"file":    func() error { _, err := sb.Files().ReadFile(within(t), "/etc/passwd"); return err }(),
		"session": func() error { _, err := sb.Session(within(t), client.SessionOptions{}); return err }(),
		"pause":   sb.Pause(within(t)),
	} {
		if !errors.Is(err, client.ErrState) {
			t.Errorf("%s after the end: %v", name, err)
			continue
		}
		errorText(t, err, sb.ID, "stopped")
	}
	var kinds []string
	must(t, s.client().Log(within(t), &dsecv1.ReadLogRequest{Sandbox: sb.ID, Output: true}, func(r *dsecv1.LogRecord) error {
		kinds = append(kinds, r.Kind)
		return nil
	}))
	for _, w := range []string{"create", "command", "output", "end"} {
		if !strings.Contains(strings.Join(kinds, " "), w) {
			t.Errorf("the log has no %q: %v", w, kinds)
		}
	}
	// The key answers the ended one and makes nothing new.
	_, err = s.client().RunContainer(within(t), client.Options{Layers: sb.Data.Layers, Key: key, Job: "ended"})
	t.Logf("the key of an ended sandbox with another request: %v", err)
	if err == nil {
		t.Error("another request under the key of an ended sandbox was taken")
	}
}
