package host

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A payload is one octet that names the message and the message's protobuf octets: argv, paths and names may be any octets, which
// JSON does not carry.
type tag byte

const (
	tagCreate   tag = 'C' // HostCreateRequest, secrets hashed
	tagState    tag = 'S' // LogRecord: state, cause, data = the backend's handle, step = pause level
	tagPolicy   tag = 'L' // SetLifetimeRequest
	tagCommand  tag = 'c' // StartRequest without sandbox, stdin and what belongs to the call alone; secrets hashed
	tagOutcome  tag = 'o' // Outcome
	tagResult   tag = 'R' // LogRecord: outcome, and what else a resend answers
	tagSession  tag = 'e' // OpenSessionRequest
	tagStdin    tag = 'i' // WriteStdinRequest: eof alone; the octets are the record's input
	tagSignal   tag = 'k' // SignalRequest
	tagResize   tag = 'z' // ResizeRequest
	tagSnapshot tag = 's' // SnapshotRequest
	tagWrite    tag = 'w' // WriteRequest without data; append is a flag in it
	tagMakeDir  tag = 'd' // MakeDirRequest
	tagMove     tag = 'm' // MoveRequest
	tagRemove   tag = 'r' // RemoveRequest
	tagUpload   tag = 'u' // UploadRequest without data
	tagScreen   tag = 'g' // ScreenActRequest without sandbox and step
	tagJob      tag = 'J' // Job
	tagEvent    tag = 'E' // LogRecord: kind, step, request_json as text
	tagVerdict  tag = 'v' // Verdict
	tagTrace    tag = 'P' // StepTrace
	tagRedo     tag = 'D' // Redo
	tagRestored tag = 'T' // Restored
	tagRecalled tag = 'A' // Recalled
)

// message returns an empty message of a tag and the kind that LogService names it by.
func (t tag) message() (proto.Message, string) {
	switch t {
	case tagCreate:
		return &dsecv1.HostCreateRequest{}, "create"
	case tagState:
		return &dsecv1.LogRecord{}, "state"
	case tagPolicy:
		return &dsecv1.SetLifetimeRequest{}, "lifetime"
	case tagCommand:
		return &dsecv1.StartRequest{}, "command"
	case tagOutcome:
		return &dsecv1.Outcome{}, "end"
	case tagResult:
		return &dsecv1.LogRecord{}, "end"
	case tagSession:
		return &dsecv1.OpenSessionRequest{}, "session"
	case tagStdin:
		return &dsecv1.WriteStdinRequest{}, "stdin"
	case tagSignal:
		return &dsecv1.SignalRequest{}, "signal"
	case tagResize:
		return &dsecv1.ResizeRequest{}, "resize"
	case tagSnapshot:
		return &dsecv1.SnapshotRequest{}, "snapshot"
	case tagWrite:
		return &dsecv1.WriteRequest{}, "write"
	case tagMakeDir:
		return &dsecv1.MakeDirRequest{}, "makedir"
	case tagMove:
		return &dsecv1.MoveRequest{}, "move"
	case tagRemove:
		return &dsecv1.RemoveRequest{}, "remove"
	case tagUpload:
		return &dsecv1.UploadRequest{}, "upload"
	case tagScreen:
		return &dsecv1.ScreenActRequest{}, "screen"
	case tagJob:
		return &dsecv1.Job{}, "job"
	case tagEvent:
		return &dsecv1.LogRecord{}, "event"
	case tagVerdict:
		return &dsecv1.Verdict{}, "verdict"
	case tagTrace:
		return &dsecv1.StepTrace{}, "trace"
	case tagRedo:
		return &dsecv1.Redo{}, "redo"
	case tagRestored:
		return &dsecv1.Restored{}, "restored"
	case tagRecalled:
		return &dsecv1.Recalled{}, "recalled"
	}
	return nil, ""
}

// name is what an error calls a step of the tag.
func (t tag) name() string {
	_, n := t.message()
	return n
}

var deterministic = proto.MarshalOptions{Deterministic: true}

// encode makes a payload. Every message here was decoded from the wire or made of valid text, so it always marshals.
func encode(t tag, m proto.Message) []byte {
	b := make([]byte, 1, 1+96)
	b[0] = byte(t)
	b, err := deterministic.MarshalAppend(b, m)
	if err != nil {
		panic(fmt.Sprintf("host: encode %c: %v", t, err))
	}
	return b
}

// decode is the reverse; what it can't read is ErrLost.
func decode(b []byte) (tag, proto.Message, error) {
	if len(b) == 0 {
		return 0, nil, fmt.Errorf("decode record: no payload: %w", sandbox.ErrLost)
	}
	t := tag(b[0])
	m, _ := t.message()
	if m == nil {
		return 0, nil, fmt.Errorf("decode record: payload of kind %q is not known: %w", b[0], sandbox.ErrLost)
	}
	if err := proto.Unmarshal(b[1:], m); err != nil {
		return 0, nil, fmt.Errorf("decode record: %w: %w", err, sandbox.ErrLost)
	}
	return t, m, nil
}

func randomOctets(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// mac is the keyed hash that stands for a secret value in the log.
func (h *Host) mac(parts ...string) string {
	m := hmac.New(sha256.New, h.secret)
	for _, p := range parts {
		fmt.Fprintf(m, "%d:%s", len(p), p)
	}
	return "hmac-sha256:" + hex.EncodeToString(m.Sum(nil))
}

// hideSecrets replaces the values of secret entries. The list is the caller's own; changed entries are copies.
func (h *Host) hideSecrets(vars []*dsecv1.EnvVar) {
	for i, v := range vars {
		if v.GetSecret() {
			value := v.GetValue() + string(v.GetValueRaw())
			vars[i] = &dsecv1.EnvVar{Name: v.GetName(), NameRaw: v.GetNameRaw(), Value: h.mac(v.GetName()+string(v.GetNameRaw()), value), Secret: true}
		}
	}
}

// digest identifies a canonical request with its input.
func digest(payload []byte, in *trajectory.Input) [32]byte {
	if in == nil {
		return sha256.Sum256(payload)
	}
	d := sha256.New()
	d.Write(payload)
	d.Write(in.SHA256[:])
	return [32]byte(d.Sum(nil))
}

// difference names the first field in which two requests differ, as in `argv[2]: "a", now "b"`; "" when they are equal.
func difference(was, is proto.Message) string {
	return diffMessage("", was.ProtoReflect(), is.ProtoReflect())
}

func diffMessage(path string, a, b protoreflect.Message) string {
	fields := a.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := strings.TrimPrefix(path+"."+strings.TrimSuffix(string(f.Name()), "_raw"), ".")
		va, vb := a.Get(f), b.Get(f)
		switch {
		case va.Equal(vb) && a.Has(f) == b.Has(f):
		case f.IsList():
			return diffList(name, f, va.List(), vb.List())
		case f.IsMap():
			return diffMap(name, va.Map(), vb.Map())
		case f.Message() == nil, !a.Has(f) || !b.Has(f):
			return fmt.Sprintf("%s: %s, now %s", name, show(a, f), show(b, f))
		default:
			return diffMessage(name, va.Message(), vb.Message())
		}
	}
	return ""
}

func diffList(name string, f protoreflect.FieldDescriptor, a, b protoreflect.List) string {
	for i := range min(a.Len(), b.Len()) {
		if a.Get(i).Equal(b.Get(i)) {
			continue
		}
		if f.Message() != nil {
			return fmt.Sprintf("%s[%d]: %s", name, i, diffMessage("", a.Get(i).Message(), b.Get(i).Message()))
		}
		return fmt.Sprintf("%s[%d]: %.80q, now %.80q", name, i, a.Get(i).String(), b.Get(i).String())
	}
	return fmt.Sprintf("%s: %d entries, now %d", name, a.Len(), b.Len())
}

// diffMap names the least key whose values differ.
func diffMap(name string, a, b protoreflect.Map) string {
	least, found := "", false
	look := func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		if same := a.Has(k) && b.Has(k) && a.Get(k).Equal(b.Get(k)); !same && (!found || k.String() < least) {
			least, found = k.String(), true
		}
		return true
	}
	a.Range(look)
	b.Range(look)
	value := func(m protoreflect.Map) string {
		k := protoreflect.ValueOfString(least).MapKey() // all our maps have such keys
		if !m.Has(k) {
			return "unset"
		}
		return fmt.Sprintf("%.80q", m.Get(k).String())
	}
	return fmt.Sprintf("%s[%.80q]: %s, now %s", name, least, value(a), value(b))
}

func show(m protoreflect.Message, f protoreflect.FieldDescriptor) string {
	if !m.Has(f) {
		return "unset"
	}
	v := m.Get(f)
	switch f.Kind() {
	case protoreflect.StringKind:
		return fmt.Sprintf("%.80q", v.String())
	case protoreflect.BytesKind:
		return fmt.Sprintf("%.80q", v.Bytes())
	case protoreflect.MessageKind:
		return "set"
	}
	return v.String()
}

// logRecord is a record as LogService shows it.
func logRecord(r *trajectory.Record, output bool) *dsecv1.LogRecord {
	p := &dsecv1.LogRecord{
		Epoch: int64(r.Epoch), Seq: int64(r.Seq), Time: rpc.Timestamp(r.Wall), MonoNs: r.Mono.Nanoseconds(), Kind: r.Kind.String(),
		Step: strings.ToValidUTF8(r.Step, "\uFFFD"), Offset: r.Offset, Late: r.Flags&trajectory.Late != 0,
	}
	if in := r.Input; in != nil {
		p.Length, p.Sha256, p.Input = in.Size, hex.EncodeToString(in.SHA256[:]), in.Kept.String()
		if output && in.Kept == trajectory.KeptInline {
			p.Data = in.Data
		}
	}
	if r.Kind == trajectory.KindOutput {
		p.Kind, p.Stream, p.Length = "output", streamName(r.Stream), int64(len(r.Payload))
		if output {
			p.Data = r.Payload
		}
		return p
	}
	if len(r.Payload) == 0 {
		return p
	}
	t, m, err := decode(r.Payload)
	if err != nil {
		p.RequestJson = `"` + err.Error() + `"`
		return p
	}
	if r.Kind != trajectory.KindVoid {
		_, p.Kind = t.message()
	}
	switch m := m.(type) {
	case *dsecv1.Outcome:
		p.Outcome = m
	case *dsecv1.LogRecord:
		p.Outcome, p.Cause, p.State, p.Summary = m.Outcome, m.Cause, m.State, m.Summary
		if t == tagResult && m.Sha256 != "" {
			p.Sha256 = m.Sha256
		}
		p.RequestJson = m.RequestJson
		if t == tagEvent {
			p.Kind = m.Kind
		}
	case *dsecv1.Verdict:
		p.Verdict = m
	case *dsecv1.StepTrace:
		p.Trace = m
	case *dsecv1.Redo:
		p.Outcome, p.State = m.GetOutcome(), m.GetState()
		p.RequestJson = jsonOf(&dsecv1.Redo{Seq: m.Seq, Differs: m.Differs, TakesOver: m.TakesOver, Verdict: m.Verdict})
	case *dsecv1.WriteRequest:
		if m.GetAppend() {
			p.Kind = "append"
		}
		p.RequestJson = jsonOf(m)
	default:
		p.RequestJson = jsonOf(m)
	}
	if r.Kind == trajectory.KindSessionClose {
		p.Kind = "session_end"
	}
	return p
}

func jsonOf(m proto.Message) string {
	b, err := protojson.Marshal(m)
	if err != nil { // text that is not UTF-8, which the twins keep out
		return ""
	}
	return string(b)
}

func streamName(s sandbox.StreamName) string {
	switch s {
	case sandbox.Stdout:
		return "stdout"
	case sandbox.Stderr:
		return "stderr"
	}
	return ""
}

func parseStream(s string) (sandbox.StreamName, error) {
	switch s {
	case "stdout", "":
		return sandbox.Stdout, nil
	case "stderr":
		return sandbox.Stderr, nil
	}
	return 0, fmt.Errorf("stream %q: want stdout or stderr: %w", s, sandbox.ErrInvalid)
}

// text makes octets of unknown origin fit for a text field, bounded.
func text(s string) string {
	if len(s) > 4096 {
		s = s[:4096]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// jsonText is the text of a denial; held counts those before it that were not recorded.
func jsonText(call, detail string, held int64) string {
	b, err := json.Marshal(struct {
		Call   string `json:"call"`
		Detail string `json:"detail,omitempty"`
		Held   int64  `json:"not_recorded_before,omitempty"`
	}{call, detail, held})
	if err != nil { // two strings and a number
		return ""
	}
	return string(b)
}
