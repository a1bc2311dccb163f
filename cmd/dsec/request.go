package main

import (
	"cmp"
	"fmt"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// requests are the messages behind the kinds of records that a client asked for.
var requests = map[string]func() proto.Message{
	"create":   func() proto.Message { return &dsecv1.HostCreateRequest{} },
	"command":  func() proto.Message { return &dsecv1.StartRequest{} },
	"session":  func() proto.Message { return &dsecv1.OpenSessionRequest{} },
	"stdin":    func() proto.Message { return &dsecv1.WriteStdinRequest{} },
	"signal":   func() proto.Message { return &dsecv1.SignalRequest{} },
	"resize":   func() proto.Message { return &dsecv1.ResizeRequest{} },
	"lifetime": func() proto.Message { return &dsecv1.SetLifetimeRequest{} },
	"snapshot": func() proto.Message { return &dsecv1.SnapshotRequest{} },
	"write":    func() proto.Message { return &dsecv1.WriteRequest{} },
	"makedir":  func() proto.Message { return &dsecv1.MakeDirRequest{} },
	"move":     func() proto.Message { return &dsecv1.MoveRequest{} },
	"remove":   func() proto.Message { return &dsecv1.RemoveRequest{} },
	"upload":   func() proto.Message { return &dsecv1.UploadRequest{} },
	"screen":   func() proto.Message { return &dsecv1.ScreenActRequest{} },
}

// requestText shows what a step of a kind asked for; of kinds that nobody asked for, and where the JSON is not that of the kind, the JSON.
func requestText(kind, j string) string {
	if make := requests[kind]; make != nil {
		m := make()
		if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(j), m) == nil {
			return messageText(m)
		}
	}
	return cut(j, 300)
}

func messageText(m proto.Message) string {
	switch m := m.(type) {
	case *dsecv1.HostCreateRequest:
		return createText(m.Spec)
	case *dsecv1.StartRequest:
		return startText(m)
	case *dsecv1.OpenSessionRequest:
		return join(m.Name, word("", m.Shell), word("in ", octetsOf(m.Cwd, m.CwdRaw)), word("as ", m.User))
	case *dsecv1.WriteStdinRequest:
		if m.Eof {
			return "closed"
		}
	case *dsecv1.SignalRequest:
		return join(cmp.Or(m.Name, strings.TrimPrefix(unix.SignalName(syscall.Signal(m.Signal)), "SIG"), fmt.Sprint(m.Signal)), word("to ", m.Id))
	case *dsecv1.ResizeRequest:
		return join(m.Id, fmt.Sprintf("to %dx%d", m.Size.GetRows(), m.Size.GetCols()))
	case *dsecv1.SetLifetimeRequest:
		return lifetimeText(m.Lifetime)
	case *dsecv1.SnapshotRequest:
		return word("as ", m.Publish)
	case *dsecv1.WriteRequest:
		if m.Append {
			return join("append to", placeText(m.At))
		}
		return placeText(m.At)
	case *dsecv1.MoveRequest:
		return join(quoteWords([]string{octetsOf(m.From.GetPath(), m.From.GetPathRaw())}), "to", placeText(&dsecv1.Path{Path: m.To, PathRaw: m.ToRaw, User: m.From.GetUser()}))
	case *dsecv1.ScreenActRequest:
		acts := make([]string, len(m.Acts))
		for i, a := range m.Acts {
			acts[i] = actText(a)
		}
		return strings.Join(acts, ", ")
	case interface{ GetAt() *dsecv1.Path }: // all else that is done to a path
		return placeText(m.GetAt())
	}
	return ""
}

func startText(m *dsecv1.StartRequest) string {
	if m.Session != "" {
		return fmt.Sprintf("[%s] %q", m.Session, octetsOf(m.Text, m.TextRaw))
	}
	argv := m.Argv
	if len(m.ArgvRaw) > 0 {
		argv = nil
		for _, a := range m.ArgvRaw {
			argv = append(argv, string(a))
		}
	}
	return quoteWords(argv)
}

// createText shows what a sandbox was made of; the JSON form has all of it.
func createText(s *dsecv1.Spec) string {
	out := s.GetEnvironment()
	if out == "" {
		layers := make([]string, len(s.GetLayers()))
		for i, l := range s.GetLayers() {
			layers[i] = short(l)
		}
		out = "layers " + strings.Join(layers, " ")
	}
	if s.GetName() != "" {
		out += ", name " + s.GetName()
	}
	return fmt.Sprintf("%s, job %s, memory %s, disk %s, %d processes, network %s, user %s", out, s.GetJob(), octetText(s.GetResources().GetMemory()),
		octetText(s.GetResources().GetDisk()), s.GetResources().GetPids(), s.GetNetwork(), s.GetUser())
}

func lifetimeText(l *dsecv1.Lifetime) string {
	limit := func(name string, ms int64, then string) string {
		if ms == 0 {
			return ""
		}
		return strings.TrimSpace(fmt.Sprintf("%s %v %s", name, time.Duration(ms)*time.Millisecond, then))
	}
	return join(limit("idle", l.GetIdleMs(), l.GetOnIdle()), limit("total", l.GetTotalMs(), l.GetOnTotal()))
}

func placeText(p *dsecv1.Path) string {
	return join(quoteWords([]string{octetsOf(p.GetPath(), p.GetPathRaw())}), word("as ", p.GetUser()))
}

func actText(a *dsecv1.ScreenAct) string {
	switch p, s := a.Pointer, a.Scroll; {
	case len(a.Keys) > 0:
		return "keys " + strings.Join(a.Keys, "+")
	case p != nil && p.Drag:
		return fmt.Sprintf("drag %d,%d to %d,%d", p.X, p.Y, p.ToX, p.ToY)
	case p != nil && p.Button != "":
		return fmt.Sprintf("click %s %d,%d", p.Button, p.X, p.Y)
	case p != nil:
		return fmt.Sprintf("move %d,%d", p.X, p.Y)
	case s != nil:
		return fmt.Sprintf("scroll %d at %d,%d", s.Steps, s.X, s.Y)
	}
	return fmt.Sprintf("type %q", a.Text)
}

// word is a text behind what leads to it, or nothing.
func word(lead, text string) string {
	if text == "" {
		return ""
	}
	return lead + text
}

// join sets a space between the texts that are not empty.
func join(texts ...string) string {
	var out []string
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return strings.Join(out, " ")
}
