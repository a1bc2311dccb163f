package replay

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of a diff for a person.
const (
	diffLines   = 40  // that differ
	diffWidth   = 200 // characters of a line
	diffContext = 1   // lines before what differs
	diffSquare  = 1 << 21
)

// diff shows the lines that differ after normalising, as they were written.
func (c *Comparer) diff(name string, was, now []byte) string {
	if !utf8.Valid(was) || !utf8.Valid(now) || bytes.IndexByte(was, 0) >= 0 || bytes.IndexByte(now, 0) >= 0 {
		return diffOctets(name, was, now)
	}
	a, b := lines(was), lines(now)
	na, nb := make([]string, len(a)), make([]string, len(b))
	for i, l := range a {
		t, _ := c.normalise([]byte(l))
		na[i] = string(t)
	}
	for i, l := range b {
		t, _ := c.normalise([]byte(l))
		nb[i] = string(t)
	}
	from := 0
	for from < len(na) && from < len(nb) && na[from] == nb[from] {
		from++
	}
	ea, eb := len(na), len(nb)
	for ea > from && eb > from && na[ea-1] == nb[eb-1] {
		ea, eb = ea-1, eb-1
	}
	var out strings.Builder
	fmt.Fprintf(&out, "@@ %s line %d @@\n", name, from+1)
	for i := max(0, from-diffContext); i < from; i++ {
		out.WriteString("  " + show([]byte(a[i])) + "\n")
	}
	left := diffLines
	line := func(sign, text string) {
		if left--; left >= 0 {
			out.WriteString(sign + " " + show([]byte(text)) + "\n")
		}
	}
	for _, e := range edits(na[from:ea], nb[from:eb]) {
		switch {
		case e.b < 0:
			line("-", a[from+e.a])
		case e.a < 0:
			line("+", b[from+e.b])
		}
	}
	if left < 0 {
		fmt.Fprintf(&out, "  ... %d more lines differ\n", -left)
	}
	return out.String()
}

// lines splits after newlines; that a last line has none is told.
func lines(p []byte) []string {
	var out []string
	for l := range strings.Lines(string(p)) {
		if t, ok := strings.CutSuffix(l, "\n"); ok {
			out = append(out, t)
		} else {
			out = append(out, l+`\ no newline`)
		}
	}
	return out
}

// edit is a line of a (b is -1), of b (a is -1), or of both.
type edit struct{ a, b int }

// edits is a shortest way from a to b; where the two are too long for that, all of a and then all of b.
func edits(a, b []string) []edit {
	var out []edit
	if len(a)*len(b) > diffSquare {
		for i := range a {
			out = append(out, edit{i, -1})
		}
		for i := range b {
			out = append(out, edit{-1, i})
		}
		return out
	}
	w := len(b) + 1
	common := make([]int32, (len(a)+1)*w) // of what is left from here
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				common[i*w+j] = common[(i+1)*w+j+1] + 1
			} else {
				common[i*w+j] = max(common[(i+1)*w+j], common[i*w+j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			out = append(out, edit{i, j})
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && common[(i+1)*w+j] >= common[i*w+j+1]:
			out = append(out, edit{i, -1})
			i++
		default:
			out = append(out, edit{-1, j})
			j++
		}
	}
	return out
}

// diffOctets shows where octets that are no text begin to differ.
func diffOctets(name string, was, now []byte) string {
	at := 0
	for at < len(was) && at < len(now) && was[at] == now[at] {
		at++
	}
	from := at &^ 15
	cut := func(p []byte) []byte { return p[min(from, len(p)):min(from+16, len(p))] }
	return fmt.Sprintf("@@ %s octet %d @@\n- %08x  % x\n+ %08x  % x\n", name, at, from, cut(was), from, cut(now))
}

// show makes a line fit for a terminal: nothing in it can steer one.
func show(p []byte) string {
	var b []byte
	n := 0
	for len(p) > 0 {
		if n++; n > diffWidth {
			return string(b) + "..."
		}
		r, size := utf8.DecodeRune(p)
		switch {
		case r == utf8.RuneError && size == 1:
			b = fmt.Appendf(b, `\x%02x`, p[0])
		case r == '\t' || strconv.IsPrint(r):
			b = append(b, p[:size]...)
		default:
			q := strconv.AppendQuoteRune(nil, r)
			b = append(b, q[1:len(q)-1]...)
		}
		p = p[size:]
	}
	return string(b)
}
