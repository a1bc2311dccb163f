package replay

import (
	"regexp"
	"slices"
	"strings"
)

// normaliser recognises one kind of token. Expressions are RE2's: linear in the text, whatever a sandbox writes.
type normaliser struct {
	name string
	expr string
}

// edge is where a token begins: at a word, or behind a tab or newline that JSON or a quoted text writes as two octets. Those stay.
const edge = `(?:\b|\\[nrt])`

// The order decides where two match at one place: what is longer and surer comes first. None crosses a line.
var normalisers = []normaliser{
	{"time", strings.Join([]string{
		edge + `\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})\b)?`,
		`\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? (?:(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d|\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) \d{4})(?: \d{2}:\d{2}:\d{2})?(?: (?:AM|PM))?(?: [A-Z]{3,4})?(?: \d{4})?\b`,
		edge + `\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?\b(?: ?(?:AM|PM)\b)?`,
		`\b1[5-9]\d{8}\.\d{1,9}\b`,
	}, "|")},
	{"date", strings.Join([]string{
		edge + `(?:19|20)\d{2}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])\b`,
		`\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d,? (?:\d{4}|\d{2}:\d{2})\b`,
		`\b(?:19|20)\d{2}/(?:0[1-9]|1[0-2])/(?:0[1-9]|[12]\d|3[01])\b`,
	}, "|")},
	{"temporary name", strings.Join([]string{
		`\btmp\.[A-Za-z0-9]{6,12}\b`,
		`/tmp/tmp[a-z0-9_]{8}\b`,
		`/tmp/cc[A-Za-z0-9]{6}\.[a-z]{1,3}\b`,
		`\bgo-build\d{4,12}\b`,
		`\bpytest-of-[a-z0-9_-]+/pytest-\d+\b`,
		`\bpip-[a-z-]{3,20}-[a-z0-9_]{8}\b`,
	}, "|")},
	{"address", `\b0x[0-9a-fA-F]{6,16}\b`},
	{"pid", `\b(?i:pid)[ =:#]{1,2}\d{1,7}\b|\b[A-Za-z][A-Za-z0-9_.-]{0,40}\[\d{2,7}\]: `},
	{"duration", strings.Join([]string{
		edge + `(?:\d{1,6}h)?\d{1,6}m\d{1,6}(?:\.\d{1,9})?s\b`,
		edge + `\d{1,12}(?:\.\d{1,9})? ?(?:ns|us|ms|s|secs?|seconds?|minutes?|hours?)\b`,
		edge + `\d{1,12}(?:\.\d{1,9})? ?µs`,
		`"Elapsed":\d{1,9}(?:\.\d{1,18})?\b`, // of go test -json
	}, "|")},
}

// Normalisers lists the names of all.
func Normalisers() []string {
	names := make([]string, len(normalisers))
	for i, n := range normalisers {
		names[i] = n.name
	}
	return names
}

// Comparer compares steps. It is safe for concurrent use.
type Comparer struct {
	all   *regexp.Regexp
	names []string // by number of the group, from 1
}

// New makes a Comparer with the normalisers of those names; none given, with all. An unknown name is left out.
func New(names ...string) *Comparer {
	c := &Comparer{names: []string{""}}
	var parts []string
	for _, n := range normalisers {
		if len(names) == 0 || slices.Contains(names, n.name) {
			parts = append(parts, "("+n.expr+")")
			c.names = append(c.names, n.name)
		}
	}
	if len(parts) > 0 {
		c.all = regexp.MustCompile(strings.Join(parts, "|"))
	}
	return c
}

// token is what a normaliser replaced.
type token struct {
	name, text string
}

// normalise replaces all tokens by their names in angle brackets.
func (c *Comparer) normalise(p []byte) (text []byte, tokens []token) {
	if c.all == nil {
		return p, nil
	}
	at := 0
	for _, m := range c.all.FindAllSubmatchIndex(p, -1) {
		for g := 1; g < len(c.names); g++ {
			if m[2*g] < 0 {
				continue
			}
			from := m[0]
			if p[from] == '\\' {
				from += 2
			}
			text = append(text, p[at:from]...)
			text = append(text, '<')
			text = append(text, c.names[g]...)
			text = append(text, '>')
			tokens = append(tokens, token{c.names[g], string(p[from:m[1]])})
			at = m[1]
			break
		}
	}
	return append(text, p[at:]...), tokens
}
