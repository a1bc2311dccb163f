package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// marshal is protojson without its spaces, which differ from build to build.
func marshal(m proto.Message, all bool) (json.RawMessage, error) {
	b, err := protojson.MarshalOptions{EmitDefaultValues: all}.Marshal(m)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Compact(&out, b)
	return out.Bytes(), err
}

// emit prints a message as one line of JSON, or calls text.
func (c *cli) emit(m proto.Message, text func()) error {
	if c.Output != "json" {
		text()
		return nil
	}
	b, err := marshal(m, true)
	if err != nil {
		return err
	}
	fmt.Println(string(b))
	return nil
}

// show prints a message whose text form is JSON too, then with indents and without what is empty.
func (c *cli) show(m proto.Message) error {
	if c.Output == "json" {
		return c.emit(m, nil)
	}
	b, err := marshal(m, false)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		return err
	}
	fmt.Println(printable(out.String()))
	return nil
}

// printable gives JSON for people: the same value, with the characters as escapes that a terminal would act on.
func printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(&b, "\\u%04x\\u%04x", hi, lo)
		default:
			fmt.Fprintf(&b, "\\u%04x", r)
		}
	}
	return b.String()
}

func emitList[M proto.Message](c *cli, list []M, text func()) error {
	if c.Output != "json" {
		text()
		return nil
	}
	raw := make([]json.RawMessage, 0, len(list))
	for _, m := range list {
		b, err := marshal(m, true)
		if err != nil {
			return err
		}
		raw = append(raw, b)
	}
	return json.NewEncoder(os.Stdout).Encode(raw)
}

// table writes aligned columns. What a client or a sandbox named is quoted where it would break the columns or steer the terminal.
func table(w io.Writer, head []string, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, c := range r {
			cells[i] = cell(c)
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	t.Flush()
}

// cell quotes what holds anything but printable characters, so that every text shows as itself and on one line.
func cell(s string) string {
	for _, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return strconv.Quote(s)
		}
	}
	return s
}

// plain shows what is not printable as escapes, so that what a sandbox wrote can't steer the terminal that shows it: control
// characters, those that change the direction of text, and octets that are no text.
func plain(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == '\t' || r != utf8.RuneError && unicode.IsPrint(r) {
			b.WriteString(s[i : i+n])
		} else {
			q := strconv.Quote(s[i : i+n])
			b.WriteString(q[1 : len(q)-1])
		}
		i += n
	}
	return b.String()
}

// lines is plain that keeps the ends of lines, for errors.
func lines(s string) string {
	all := strings.Split(s, "\n")
	for i := range all {
		all[i] = plain(all[i])
	}
	return strings.Join(all, "\n")
}

// say writes a message for people to standard error, with nothing in it that steers a terminal.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "dsec: %s\n", plain(fmt.Sprintf(format, args...)))
}

func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

func ago(t time.Time) string {
	if t.IsZero() || t.Unix() == 0 {
		return "-"
	}
	d := time.Since(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// size is a number of octets as a flag: 512m, 2g, 100k or plain.
type size int64

func (s *size) UnmarshalText(b []byte) error {
	text := strings.TrimSuffix(strings.ToLower(strings.TrimSpace(string(b))), "ib")
	text = strings.TrimSuffix(text, "b")
	shift := 0
	if n := len(text); n > 0 {
		if i := strings.IndexByte("kmgt", text[n-1]); i >= 0 {
			shift, text = 10*(i+1), text[:n-1]
		}
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 || v > float64(int64(1)<<(62-shift)) {
		return fmt.Errorf("%q: want a size such as 512m or 2g", b)
	}
	*s = size(v * float64(int64(1)<<shift))
	return nil
}

func octetText(n int64) string {
	if n < 0 {
		return "-"
	}
	f, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if f < 1024 {
			break
		}
		f, unit = f/1024, u
	}
	if unit == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, unit)
}

// short is the part of a layer's ID that a person compares.
func short(id string) string {
	h := strings.TrimPrefix(id, "sha256:")
	if len(h) > 12 && h != id {
		return h[:12]
	}
	return id
}
