package trajectory

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Format writes a record as lines for a person. Octets from a sandbox are escaped: nothing in them can steer a terminal.
func Format(w io.Writer, r *Record) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%6d  %s  %s", r.Seq, r.Wall.UTC().Format("15:04:05.000000"), r.Kind)
	if r.Epoch > 0 {
		fmt.Fprintf(&b, " epoch=%d", r.Epoch)
	}
	if r.Step != "" {
		fmt.Fprintf(&b, " %s", quoteUnlessPlain(r.Step))
	}
	switch r.Kind {
	case KindOutput:
		fmt.Fprintf(&b, " %s +%d (%d)", streamName(r.Stream), r.Offset, len(r.Payload))
	case KindStdin:
		fmt.Fprintf(&b, " +%d", r.Offset)
	}
	for _, f := range []struct {
		flag Flags
		name string
	}{{Late, "late"}, {Final, "final"}, {Opaque, "opaque"}} {
		if r.Flags&f.flag != 0 {
			b.WriteString(" " + f.name)
		}
	}
	if in := r.Input; in != nil {
		fmt.Fprintf(&b, " input=%d sha256:%x (%s)", in.Size, in.SHA256[:6], in.Kept)
	}
	b.WriteByte('\n')
	if r.Kind == KindOutput {
		for line := range bytes.SplitAfterSeq(r.Payload, []byte{'\n'}) {
			if len(line) > 0 {
				fmt.Fprintf(&b, "        | %s\n", escape(line))
			}
		}
	} else if len(r.Payload) > 0 {
		b.WriteString("        ")
		at := b.Len()
		if json.Compact(&b, r.Payload) != nil {
			b.Truncate(at)
			b.WriteString(escape(r.Payload))
		} else {
			text := escape(b.Bytes()[at:])
			b.Truncate(at)
			b.WriteString(text)
		}
		b.WriteByte('\n')
	}
	_, err := w.Write(b.Bytes())
	return err
}

func streamName(s sandbox.StreamName) string {
	switch s {
	case sandbox.Stdout:
		return "stdout"
	case sandbox.Stderr:
		return "stderr"
	}
	return strconv.Itoa(int(s))
}

func quoteUnlessPlain(s string) string {
	for _, c := range s {
		if c <= ' ' || c == '"' || c == 0x7f || c == utf8.RuneError || !strconv.IsPrint(c) {
			return strconv.Quote(s)
		}
	}
	return s
}

// escape keeps printable text and writes everything else as Go does in strings; the newline at the end is dropped.
func escape(p []byte) string {
	p = bytes.TrimSuffix(p, []byte{'\n'})
	var b []byte
	for len(p) > 0 {
		c, n := utf8.DecodeRune(p)
		switch {
		case c == utf8.RuneError && n == 1:
			b = fmt.Appendf(b, `\x%02x`, p[0])
		case strconv.IsPrint(c):
			b = append(b, p[:n]...)
		case c == '\t':
			b = append(b, '\t')
		default:
			q := strconv.AppendQuoteRune(nil, c)
			b = append(b, q[1:len(q)-1]...)
		}
		p = p[n:]
	}
	return string(b)
}
