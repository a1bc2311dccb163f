package replay

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sort"
	"strings"
)

// Most is how many octets of a stream are looked at as text; longer ones are compared by their hash.
const Most = 1 << 20

// Done is how a step ended.
type Done struct {
	Kind   string // exited | signalled | timed_out | ...: the kinds of an Outcome
	Code   int
	Signal int
	Error  string
	Stdout Stream
	Stderr Stream
	// Paths are what the step changed; known says that this side can tell, else Blind says why not.
	Paths      []Path
	PathsKnown bool
	Blind      string
	// Volatile are declared paths in which something moved: listed, not compared.
	Volatile []string
}

// Stream is what a step wrote to one stream.
type Stream struct {
	Data      []byte // from the first octet on; all, when there are no more than Most and none were dropped
	Total     int64  // octets written
	Truncated bool   // octets in the midst were not kept
	SHA256    string // of all octets, hex; may be empty
}

// Path is a changed path. Times are no part of it.
type Path struct {
	Name   string
	Type   string
	Mode   uint32
	Size   int64
	SHA256 string
	Link   string
	Gone   bool
}

// Verdict of a comparison.
type Verdict string

const (
	Equal         Verdict = "equal"
	EqualAfter    Verdict = "equal after"
	Different     Verdict = "different"
	NotComparable Verdict = "not comparable"
)

// Report is what a comparison found.
type Report struct {
	Verdict     Verdict  `json:"verdict"`
	Normalisers []string `json:"normalisers,omitempty"` // whose tokens differed
	Reason      string   `json:"reason,omitempty"`      // what differs, or why it can't be compared
	Diff        string   `json:"diff,omitempty"`        // readable; "-" was recorded, "+" is now
	Volatile    []string `json:"volatile,omitempty"`    // declared paths that changed on either side, which are not compared
	Paths       int      `json:"paths,omitempty"`       // changed paths that were compared
	PathsBlind  string   `json:"paths_blind,omitempty"` // why changed paths were not compared, where one side has them
}

func (r Report) String() string {
	s := string(r.Verdict)
	if len(r.Normalisers) > 0 {
		s += " " + strings.Join(r.Normalisers, ", ")
	}
	if r.Reason != "" {
		s += ": " + r.Reason
	}
	if r.PathsBlind != "" {
		s += " (changed paths not compared: " + r.PathsBlind + ")"
	}
	if len(r.Volatile) > 0 {
		s += " (volatile: " + strings.Join(r.Volatile, ", ") + ")"
	}
	return s
}

// uncertain are the ends that say nothing of what the step would have come to.
var uncertain = map[string]string{
	"unknown":     "its end was not seen",
	"interrupted": "it was interrupted",
	"killed":      "it was ended with its sandbox",
	"timed_out":   "it timed out",
}

// Compare says whether a step came to the same again.
func (c *Comparer) Compare(was, now Done) Report {
	r := c.compare(was, now)
	r.Volatile = slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(was.Volatile), now.Volatile...))))
	switch {
	case was.PathsKnown && now.PathsKnown:
		r.Paths = len(was.Paths)
	case was.PathsKnown || was.Blind != "":
		r.PathsBlind = cmp.Or(was.Blind, now.Blind, "the other side does not tell")
	}
	return r
}

func (c *Comparer) compare(was, now Done) Report {
	if why := uncertain[was.Kind]; why != "" {
		return Report{Verdict: NotComparable, Reason: why}
	}
	if why := uncertain[now.Kind]; why != "" && now.Kind != "timed_out" {
		return Report{Verdict: NotComparable, Reason: "done again, " + why}
	}
	var reasons, diffs, used []string
	blind := ""
	if was.Kind != now.Kind || was.Code != now.Code || was.Signal != now.Signal {
		reasons = append(reasons, fmt.Sprintf("%s, now %s", was.end(), now.end()))
	}
	for _, s := range []struct {
		name     string
		was, now Stream
	}{{"stdout", was.Stdout, now.Stdout}, {"stderr", was.Stderr, now.Stderr}} {
		r := c.stream(s.name, s.was, s.now)
		switch r.Verdict {
		case NotComparable:
			blind = r.Reason
		case Different:
			reasons, diffs = append(reasons, r.Reason), append(diffs, r.Diff)
		}
		used = append(used, r.Normalisers...)
	}
	if was.PathsKnown && now.PathsKnown {
		d, names := c.diffPaths(was.Paths, now.Paths)
		used = append(used, names...)
		if d != "" {
			reasons, diffs = append(reasons, "changed paths differ"), append(diffs, d)
		}
	}
	sort.Strings(used)
	used = slices.Compact(used)
	switch {
	case len(reasons) > 0:
		return Report{Verdict: Different, Reason: strings.Join(reasons, "; "), Diff: strings.Join(diffs, "")}
	case blind != "":
		return Report{Verdict: NotComparable, Reason: blind}
	case len(used) > 0:
		return Report{Verdict: EqualAfter, Normalisers: used}
	}
	return Report{Verdict: Equal}
}

func (d Done) end() string {
	switch d.Kind {
	case "exited":
		return fmt.Sprintf("exited with %d", d.Code)
	case "signalled":
		return fmt.Sprintf("ended by signal %d", d.Signal)
	case "start_failed":
		return fmt.Sprintf("did not start (%.200s)", d.Error)
	}
	return strings.ReplaceAll(d.Kind, "_", " ")
}

// stream compares one stream.
func (c *Comparer) stream(name string, was, now Stream) Report {
	hashes := was.SHA256 != "" && now.SHA256 != ""
	whole := !was.Truncated && !now.Truncated && int64(len(was.Data)) == was.Total && int64(len(now.Data)) == now.Total
	switch {
	case hashes && was.Total == now.Total && was.SHA256 == now.SHA256:
		return Report{Verdict: Equal}
	case whole && bytes.Equal(was.Data, now.Data):
		if hashes && was.SHA256 != now.SHA256 {
			return Report{Verdict: Different, Reason: fmt.Sprintf("%s: its hash differs from that of its octets", name)}
		}
		return Report{Verdict: Equal}
	case !whole && was.Total != now.Total:
		return Report{Verdict: NotComparable, Reason: fmt.Sprintf("%s: %d octets, now %d, not all of which were kept or looked at", name, was.Total, now.Total)}
	case !whole && hashes:
		return Report{Verdict: Different, Reason: fmt.Sprintf("%s: %d octets with another hash", name, was.Total), Diff: c.diff(name, was.Data, now.Data)}
	case !whole:
		return Report{Verdict: NotComparable, Reason: fmt.Sprintf("%s: %d octets, not all of which were kept, without a hash", name, was.Total)}
	}
	a, ta := c.normalise(was.Data)
	b, tb := c.normalise(now.Data)
	if bytes.Equal(a, b) && len(ta) == len(tb) {
		var used []string
		for i := range ta {
			if ta[i].text != tb[i].text {
				used = append(used, ta[i].name)
			}
		}
		return Report{Verdict: EqualAfter, Normalisers: used}
	}
	return Report{Verdict: Different, Reason: fmt.Sprintf("%s differs", name), Diff: c.diff(name, was.Data, now.Data)}
}

// diffPaths shows how changed paths differ. Those without a counterpart of the same name may have one whose name is the same after
// normalisers: used are these.
func (c *Comparer) diffPaths(was, now []Path) (diff string, used []string) {
	old := map[string]Path{}
	for _, p := range was {
		old[p.Name] = p
	}
	var out []string
	var extra []Path
	for _, p := range now {
		o, ok := old[p.Name]
		delete(old, p.Name)
		switch {
		case !ok:
			extra = append(extra, p)
		case o != p:
			out = append(out, fmt.Sprintf("- %s\n+ %s\n", o, p))
		}
	}
	renamed := map[Path][]Path{} // by what they are after normalisers
	for _, p := range old {
		n, _ := c.normalName(p)
		renamed[n] = append(renamed[n], p)
	}
	for _, p := range extra {
		n, names := c.normalName(p)
		if same := renamed[n]; len(same) > 0 && len(names) > 0 {
			renamed[n] = same[1:]
			used = append(used, names...)
			continue
		}
		out = append(out, fmt.Sprintf("+ %s\n", p))
	}
	for _, left := range renamed {
		for _, p := range left {
			out = append(out, fmt.Sprintf("- %s\n", p))
		}
	}
	sort.Strings(out)
	return strings.Join(out, ""), used
}

// normalName is a path with its name normalised, and the normalisers that did it.
func (c *Comparer) normalName(p Path) (Path, []string) {
	name, tokens := c.normalise([]byte(p.Name))
	if len(tokens) == 0 {
		return p, nil
	}
	p.Name = string(name)
	names := make([]string, len(tokens))
	for i, t := range tokens {
		names[i] = t.name
	}
	return p, names
}

func (p Path) String() string {
	if p.Gone {
		return fmt.Sprintf("%s removed", show([]byte(p.Name)))
	}
	s := fmt.Sprintf("%s %s %04o %d octets", show([]byte(p.Name)), p.Type, p.Mode, p.Size)
	if p.SHA256 != "" {
		s += fmt.Sprintf(" sha256:%.12s", p.SHA256)
	}
	if p.Link != "" {
		s += " -> " + show([]byte(p.Link))
	}
	return s
}
