package rpc

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Octets takes a text field and its raw twin from a request: one of them may be set, both is ErrInvalid.
func Octets(field, text string, raw []byte) (string, error) {
	if len(raw) == 0 {
		return text, nil
	}
	if text != "" {
		return "", fmt.Errorf("%s and %s_raw: set one of them: %w", field, field, sandbox.ErrInvalid)
	}
	return string(raw), nil
}

// Twin splits octets for an answer: text alone when they are UTF-8, else the raw twin alone.
func Twin(s string) (text string, raw []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}

// OctetLists is Octets for a repeated field.
func OctetLists(field string, text []string, raw [][]byte) ([]string, error) {
	if len(raw) == 0 {
		return text, nil
	}
	if len(text) > 0 {
		return nil, fmt.Errorf("%s and %s_raw: set one of them: %w", field, field, sandbox.ErrInvalid)
	}
	out := make([]string, len(raw))
	for i, r := range raw {
		out[i] = string(r)
	}
	return out, nil
}

// TwinLists is Twin for a repeated field: all entries go into the raw twin when one of them is not UTF-8.
func TwinLists(list []string) (text []string, raw [][]byte) {
	for _, s := range list {
		if !utf8.ValidString(s) {
			raw = make([][]byte, len(list))
			for i, s := range list {
				raw[i] = []byte(s)
			}
			return nil, raw
		}
	}
	return list, nil
}

// Text makes text of output octets for callers that can't take octets: what is not UTF-8 is replaced.
func Text(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }

// Env takes an environment from a request, as NAME=value octets, and the names of the secret ones.
func Env(field string, vars []*dsecv1.EnvVar) (env, secret []string, err error) {
	if len(vars) == 0 {
		return nil, nil, nil
	}
	env = make([]string, 0, len(vars))
	for i, v := range vars {
		name, err := Octets(fmt.Sprintf("%s[%d].name", field, i), v.GetName(), v.GetNameRaw())
		if err != nil {
			return nil, nil, err
		}
		value, err := Octets(fmt.Sprintf("%s[%d].value", field, i), v.GetValue(), v.GetValueRaw())
		if err != nil {
			return nil, nil, err
		}
		if name == "" || strings.IndexByte(name, '=') >= 0 {
			return nil, nil, fmt.Errorf("%s[%d].name %.80q: must not be empty nor hold \"=\": %w", field, i, name, sandbox.ErrInvalid)
		}
		env = append(env, name+"="+value)
		if v.GetSecret() {
			secret = append(secret, name)
		}
	}
	return env, secret, nil
}

// EnvVars is the reverse of Env.
func EnvVars(env, secret []string) []*dsecv1.EnvVar {
	if len(env) == 0 {
		return nil
	}
	hidden := map[string]bool{}
	for _, s := range secret {
		hidden[s] = true
	}
	vars := make([]*dsecv1.EnvVar, 0, len(env))
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		v := &dsecv1.EnvVar{Secret: hidden[name]}
		v.Name, v.NameRaw = Twin(name)
		v.Value, v.ValueRaw = Twin(value)
		vars = append(vars, v)
	}
	return vars
}

// Milliseconds makes a duration of a wire field; what a duration can't hold is ErrInvalid.
func Milliseconds(field string, ms int64) (time.Duration, error) {
	if ms > math.MaxInt64/int64(time.Millisecond) || ms < math.MinInt64/int64(time.Millisecond) {
		return 0, fmt.Errorf("%s %d: too long: %w", field, ms, sandbox.ErrInvalid)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// Timestamp is nil for the zero time.
func Timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// Time is the reverse of Timestamp, in UTC.
func Time(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// Resources takes limits from a request; zeros stay for Fill, negative ones are ErrInvalid.
func Resources(r *dsecv1.Resources) (sandbox.Resources, error) {
	for _, f := range []struct {
		name string
		v    int64
	}{{"memory", r.GetMemory()}, {"disk", r.GetDisk()}, {"pids", r.GetPids()}, {"cpu_milli", r.GetCpuMilli()}, {"cpu_weight", r.GetCpuWeight()}} {
		if f.v < 0 {
			return sandbox.Resources{}, fmt.Errorf("resources.%s %d: must not be negative; 0 takes the default: %w", f.name, f.v, sandbox.ErrInvalid)
		}
	}
	return sandbox.Resources{Memory: r.GetMemory(), Disk: r.GetDisk(), Pids: r.GetPids(), CPU: r.GetCpuMilli(), CPUWeight: r.GetCpuWeight()}, nil
}

// ResourcesProto is the reverse of Resources.
func ResourcesProto(r sandbox.Resources) *dsecv1.Resources {
	return &dsecv1.Resources{Memory: r.Memory, Disk: r.Disk, Pids: r.Pids, CpuMilli: r.CPU, CpuWeight: r.CPUWeight}
}

// Unbounded is the idle time that stands for "no bound": the longest total lifetime.
const Unbounded = 30 * 24 * time.Hour

// Lifetime takes lifetimes from a request; zeros stay for Fill. A negative idle time is Unbounded.
func Lifetime(l *dsecv1.Lifetime) (sandbox.Lifetime, error) {
	idle, err := Milliseconds("lifetime.idle_ms", l.GetIdleMs())
	if err != nil {
		return sandbox.Lifetime{}, err
	}
	total, err := Milliseconds("lifetime.total_ms", l.GetTotalMs())
	if err != nil {
		return sandbox.Lifetime{}, err
	}
	if total < 0 {
		return sandbox.Lifetime{}, fmt.Errorf("lifetime.total_ms %d: a sandbox always has a total lifetime, of 720 h at most: %w", l.GetTotalMs(), sandbox.ErrInvalid)
	}
	if idle < 0 {
		idle = Unbounded
	}
	return sandbox.Lifetime{Idle: idle, Total: total, OnIdle: sandbox.EndAction(l.GetOnIdle()), OnTotal: sandbox.EndAction(l.GetOnTotal())}, nil
}

// LifetimeProto is the reverse of Lifetime.
func LifetimeProto(l sandbox.Lifetime) *dsecv1.Lifetime {
	return &dsecv1.Lifetime{IdleMs: l.Idle.Milliseconds(), TotalMs: l.Total.Milliseconds(), OnIdle: string(l.OnIdle), OnTotal: string(l.OnTotal)}
}

// Spec takes a resolved spec from a gateway. It is neither filled nor validated.
func Spec(p *dsecv1.Spec) (*sandbox.Spec, error) {
	if p == nil {
		return nil, fmt.Errorf("spec: missing: %w", sandbox.ErrInvalid)
	}
	res, err := Resources(p.GetResources())
	if err != nil {
		return nil, err
	}
	life, err := Lifetime(p.GetLifetime())
	if err != nil {
		return nil, err
	}
	env, _, err := Env("env", p.GetEnv())
	if err != nil {
		return nil, err
	}
	cwd, err := Octets("cwd", p.GetCwd(), p.GetCwdRaw())
	if err != nil {
		return nil, err
	}
	return &sandbox.Spec{
		Project: p.GetProject(), Job: p.GetJob(), Key: p.GetKey(), Name: p.GetName(), Labels: p.GetLabels(),
		Backend: p.GetBackend(), Layers: p.GetLayers(), EnvName: p.GetEnvironment(), Env: env,
		User: p.GetUser(), Cwd: cwd, Hostname: p.GetHostname(), Entry: p.GetEntrypoint(),
		Resources: res, Lifetime: life, Network: sandbox.NetworkMode(p.GetNetwork()),
		BestEffort: p.GetBestEffort(), NoNewPrivs: p.GetNoNewPrivs(), AllowDegraded: p.GetAllowDegraded(), Durability: sandbox.Durability(p.GetDurability()),
		Volumes: Volumes(p.GetVolumes()), Trace: sandbox.TraceLevel(p.GetTrace()), Volatile: p.GetVolatilePaths(),
	}, nil
}

// Volumes takes volumes from a message.
func Volumes(list []*dsecv1.Volume) (out []sandbox.Volume) {
	for _, v := range list {
		out = append(out, sandbox.Volume{Layer: v.GetLayer(), Path: v.GetPath()})
	}
	return out
}

// VolumesProto is the reverse of Volumes.
func VolumesProto(list []sandbox.Volume) (out []*dsecv1.Volume) {
	for _, v := range list {
		out = append(out, &dsecv1.Volume{Layer: v.Layer, Path: v.Path})
	}
	return out
}

// SpecProto is the reverse of Spec; secret names the entries of Env whose values the log must not hold.
func SpecProto(s *sandbox.Spec, secret []string) *dsecv1.Spec {
	p := &dsecv1.Spec{
		Project: s.Project, Job: s.Job, Key: s.Key, Name: s.Name, Labels: s.Labels,
		Backend: s.Backend, Layers: s.Layers, Environment: s.EnvName, Env: EnvVars(s.Env, secret),
		User: s.User, Hostname: s.Hostname, Entrypoint: s.Entry,
		Resources: ResourcesProto(s.Resources), Lifetime: LifetimeProto(s.Lifetime), Network: string(s.Network),
		BestEffort: s.BestEffort, NoNewPrivs: s.NoNewPrivs, AllowDegraded: s.AllowDegraded, Durability: string(s.Durability),
		Volumes: VolumesProto(s.Volumes), Trace: string(s.Trace), VolatilePaths: s.Volatile,
	}
	p.Cwd, p.CwdRaw = Twin(s.Cwd)
	return p
}

// Command takes a command from a request. It is neither filled nor validated; an empty ID stays for the host to give one.
func Command(p *dsecv1.StartRequest) (*sandbox.Command, error) {
	argv, err := OctetLists("argv", p.GetArgv(), p.GetArgvRaw())
	if err != nil {
		return nil, err
	}
	text, err := Octets("text", p.GetText(), p.GetTextRaw())
	if err != nil {
		return nil, err
	}
	cwd, err := Octets("cwd", p.GetCwd(), p.GetCwdRaw())
	if err != nil {
		return nil, err
	}
	env, secret, err := Env("env", p.GetEnv())
	if err != nil {
		return nil, err
	}
	size, err := Size(p.GetTerminal())
	if err != nil {
		return nil, err
	}
	timeout, err := Milliseconds("timeout_ms", p.GetTimeoutMs())
	if err != nil {
		return nil, err
	}
	return &sandbox.Command{
		ID: p.GetId(), Argv: argv, Session: p.GetSession(), Text: text, Env: env, SecretEnv: secret, Cwd: cwd, User: p.GetUser(),
		Stdin: p.GetStdin(), StdinOpen: p.GetStdinOpen(), Terminal: size, Timeout: timeout, OutputCap: p.GetOutputCap(),
		Class: sandbox.StepClass(p.GetRestore()), Check: p.GetCheck(),
	}, nil
}

// StartRequest is the reverse of Command, without the sandbox and what belongs to the call alone.
func StartRequest(c *sandbox.Command) *dsecv1.StartRequest {
	p := &dsecv1.StartRequest{
		Id: c.ID, Session: c.Session, Env: EnvVars(c.Env, c.SecretEnv), User: c.User, Stdin: c.Stdin, StdinOpen: c.StdinOpen,
		Terminal: SizeProto(c.Terminal), TimeoutMs: c.Timeout.Milliseconds(), OutputCap: c.OutputCap,
		Restore: string(c.Class), Check: c.Check,
	}
	p.Argv, p.ArgvRaw = TwinLists(c.Argv)
	p.Text, p.TextRaw = Twin(c.Text)
	p.Cwd, p.CwdRaw = Twin(c.Cwd)
	return p
}

// CommandProto describes a command in an answer; seq, state, outcome and times are the caller's to add.
func CommandProto(c *sandbox.Command) *dsecv1.Command {
	p := &dsecv1.Command{Id: c.ID, Session: c.Session, Terminal: c.Terminal != nil}
	p.Argv, p.ArgvRaw = TwinLists(c.Argv)
	p.Text, p.TextRaw = Twin(c.Text)
	return p
}

// Size takes the size of a terminal from a request; nil is no terminal.
func Size(t *dsecv1.Terminal) (*sandbox.Size, error) {
	if t == nil {
		return nil, nil
	}
	if t.GetRows() > math.MaxUint16 || t.GetCols() > math.MaxUint16 {
		return nil, fmt.Errorf("terminal of %d rows and %d columns: at most %d each: %w", t.GetRows(), t.GetCols(), math.MaxUint16, sandbox.ErrInvalid)
	}
	return &sandbox.Size{Rows: uint16(t.GetRows()), Cols: uint16(t.GetCols())}, nil
}

// SizeProto is the reverse of Size.
func SizeProto(s *sandbox.Size) *dsecv1.Terminal {
	if s == nil {
		return nil
	}
	return &dsecv1.Terminal{Rows: uint32(s.Rows), Cols: uint32(s.Cols)}
}

// Session takes a session from a request; secret names the entries of its environment whose values the log must not hold.
func Session(p *dsecv1.OpenSessionRequest) (s *sandbox.Session, secret []string, err error) {
	cwd, err := Octets("cwd", p.GetCwd(), p.GetCwdRaw())
	if err != nil {
		return nil, nil, err
	}
	env, secret, err := Env("env", p.GetEnv())
	if err != nil {
		return nil, nil, err
	}
	return &sandbox.Session{Name: p.GetName(), Shell: p.GetShell(), Env: env, Cwd: cwd, User: p.GetUser()}, secret, nil
}

// OpenSessionRequest is the reverse of Session, without the sandbox.
func OpenSessionRequest(s *sandbox.Session, secret []string) *dsecv1.OpenSessionRequest {
	p := &dsecv1.OpenSessionRequest{Name: s.Name, Shell: s.Shell, Env: EnvVars(s.Env, secret), User: s.User}
	p.Cwd, p.CwdRaw = Twin(s.Cwd)
	return p
}

// Outcome takes an outcome from the wire; nil gives the zero Outcome.
func Outcome(p *dsecv1.Outcome) sandbox.Outcome {
	return sandbox.Outcome{
		Kind: sandbox.OutcomeKind(p.GetKind()), Code: int(p.GetCode()), Signal: int(p.GetSignal()), Error: p.GetError(),
		MemoryHit: p.GetMemoryHit(), PidsHit: p.GetPidsHit(), DiskHit: p.GetDiskHit(), OutputOpen: p.GetOutputOpen(),
		SessionEnd: p.GetSessionEnd(), Shared: p.GetShared(),
		Stdout: streamEnd(p.GetStdout()), Stderr: streamEnd(p.GetStderr()),
		Usage:   sandbox.Usage{CPU: time.Duration(p.GetCpuUs()) * time.Microsecond, MemoryPeak: p.GetMemoryPeak()},
		Started: Time(p.GetStarted()), Ended: Time(p.GetEnded()),
	}
}

// OutcomeProto is the reverse of Outcome. The text of an error may hold a program's name, so it is made valid UTF-8.
func OutcomeProto(o sandbox.Outcome) *dsecv1.Outcome {
	return &dsecv1.Outcome{
		Kind: string(o.Kind), Code: int32(o.Code), Signal: int32(o.Signal), Error: valid(o.Error),
		MemoryHit: o.MemoryHit, PidsHit: o.PidsHit, DiskHit: o.DiskHit, OutputOpen: o.OutputOpen, SessionEnd: o.SessionEnd, Shared: o.Shared,
		Stdout: streamEndProto(o.Stdout), Stderr: streamEndProto(o.Stderr),
		CpuUs: o.Usage.CPU.Microseconds(), MemoryPeak: o.Usage.MemoryPeak, Started: Timestamp(o.Started), Ended: Timestamp(o.Ended),
	}
}

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func streamEnd(p *dsecv1.StreamEnd) sandbox.StreamEnd {
	return sandbox.StreamEnd{Total: p.GetTotal(), Head: p.GetHead(), Tail: p.GetTail(), Truncated: p.GetTruncated(), SHA256: p.GetSha256()}
}

func streamEndProto(s sandbox.StreamEnd) *dsecv1.StreamEnd {
	if s == (sandbox.StreamEnd{}) {
		return nil
	}
	return &dsecv1.StreamEnd{Total: s.Total, Head: s.Head, Tail: s.Tail, Truncated: s.Truncated, Sha256: s.SHA256}
}

// Cause takes a cause from the wire.
func Cause(p *dsecv1.Cause) sandbox.Cause {
	return sandbox.Cause{Class: sandbox.Class(p.GetClass()), Reason: p.GetReason(), Detail: p.GetDetail()}
}

// CauseProto is the reverse of Cause; nil for the zero Cause.
func CauseProto(c sandbox.Cause) *dsecv1.Cause {
	if c == (sandbox.Cause{}) {
		return nil
	}
	return &dsecv1.Cause{Class: string(c.Class), Reason: c.Reason, Detail: valid(c.Detail)}
}

// Capabilities takes a backend's abilities from the wire.
func Capabilities(p *dsecv1.Capabilities) sandbox.Capabilities {
	levels := make([]sandbox.PauseLevel, len(p.GetPauseLevels()))
	for i, l := range p.GetPauseLevels() {
		levels[i] = sandbox.PauseLevel(l)
	}
	return sandbox.Capabilities{
		Backend: p.GetBackend(), Isolation: p.GetIsolation(), PauseLevels: levels, Networks: p.GetNetworks(), Fork: p.GetFork(),
		Snapshot: p.GetSnapshot(), Terminal: p.GetTerminal(), Sessions: p.GetSessions(), Ports: p.GetPorts(), Features: p.GetFeatures(),
	}
}

// CapabilitiesProto is the reverse of Capabilities, for the host that has them.
func CapabilitiesProto(c sandbox.Capabilities, host sandbox.HostID) *dsecv1.Capabilities {
	levels := make([]string, len(c.PauseLevels))
	for i, l := range c.PauseLevels {
		levels[i] = string(l)
	}
	return &dsecv1.Capabilities{
		Backend: c.Backend, Isolation: c.Isolation, PauseLevels: levels, Networks: c.Networks, Fork: c.Fork, Snapshot: c.Snapshot,
		Terminal: c.Terminal, Sessions: c.Sessions, Ports: c.Ports, Features: c.Features, Host: string(host),
	}
}

// StatsProto tells what a sandbox uses.
func StatsProto(s sandbox.Stats) *dsecv1.StatsResponse {
	return &dsecv1.StatsResponse{Memory: s.Memory, MemoryPeak: s.MemoryPeak, CpuUs: s.CPU.Microseconds(), Pids: s.Pids, Disk: s.Disk, OomKills: s.OOMKills, HostMemory: s.HostMemory}
}
