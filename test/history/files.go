package history

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// files holds that the log tells what is in the sandbox: the steps that changed files, done again on an empty folder in the order of the
// log, give the files that are there. What is not certain (ended interrupted or unknown, or beside another) is not compared.
func (c *checker) files(s *story) {
	b := s.box
	if b.Files == nil || s.over {
		return
	}
	m := s.told()
	g := &group{box: b, step: "files"}
	for p, want := range m.all {
		if got, ok := b.Files[p]; (!ok || got != want) && !m.isVague(p) {
			c.fail(g, "files", "%s is %s (there: %v), by the log %s", p, brief([]byte(got)), ok, brief([]byte(want)))
		}
	}
	for p := range b.Files {
		if _, ok := m.all[p]; !ok && !m.isVague(p) {
			c.fail(g, "files", "%s is there, and by the log it is not", p)
		}
	}
}

// Certain lists the paths of a sandbox, in their order, whose octets its log tells for certain; folders end with a slash.
func Certain(b *Box) (out []string) {
	s := tell(b)
	if b.Files == nil || s.over {
		return nil
	}
	m := s.told()
	for _, p := range slices.Sorted(maps.Keys(b.Files)) {
		if !m.isVague(p) {
			out = append(out, p)
		}
	}
	return out
}

// told is what the log tells of the sandbox's files.
func (s *story) told() *model {
	b := s.box
	m := &model{root: b.Root, all: map[string]string{}, vague: map[string]bool{}}
	var open []*dsecv1.LogRecord
	place := map[*dsecv1.LogRecord][]string{}
	kept := map[int64]*model{} // at the ends of snapshots
	for _, r := range b.Log {
		for _, l := range s.lives {
			if l.from == r.GetSeq() && l.call != "" {
				open = nil
				m = s.remade(m, l, kept)
			}
		}
		op := stepOps[r.GetKind()]
		if r.GetKind() == "end" {
			for _, a := range s.steps[r.GetStep()] {
				if a.end == r && a.op == Snapshot {
					kept[r.GetSeq()] = m.copy()
				}
			}
		}
		switch {
		case op != "" && op != Command && op != Snapshot:
			q := requestOf(r)
			place[r] = q.paths()
			for _, o := range open {
				if meet(place[r], place[o]) {
					m.blur(place[r])
					m.blur(place[o])
				}
			}
			open = append(open, r)
		case r.GetKind() == "end":
			for _, a := range s.steps[r.GetStep()] {
				if a.end == r && slices.Contains(open, a.start) {
					m.apply(a)
					open = slices.DeleteFunc(open, func(o *dsecv1.LogRecord) bool { return o == a.start })
				}
			}
		}
	}
	for _, o := range open {
		m.blur(place[o])
	}
	return m
}

// remade is what a restore makes of its base: what it did again is done, what it left out or came to something else is not certain.
func (s *story) remade(m *model, l *life, kept map[int64]*model) *model {
	base := &model{root: m.root, all: map[string]string{}, vague: map[string]bool{}}
	if k := kept[l.baseSeq]; k != nil {
		base = k.copy()
	} else if l.baseSeq > 0 {
		base.vague[m.root] = true
	}
	for _, d := range l.redos {
		a := s.attemptAt(d.step, d.seq)
		switch {
		case a == nil || a.op == Command:
		case d.state == "ended" && d.verdict == "equal":
			base.apply(a)
		default:
			q := requestOf(a.start)
			base.blur(q.paths())
		}
	}
	return base
}

func (m *model) copy() *model {
	return &model{root: m.root, all: maps.Clone(m.all), vague: maps.Clone(m.vague)}
}

type place struct {
	Path string `json:"path"`
}

// request is what matters of a recorded change of files.
type request struct {
	At, From           place
	To                 string
	Parents, Recursive bool
	Replace            bool
}

func requestOf(r *dsecv1.LogRecord) (q request) {
	_ = json.Unmarshal([]byte(r.GetRequestJson()), &q) // what is not there is not compared
	return q
}

func (q *request) paths() (out []string) {
	for _, p := range []string{q.At.Path, q.From.Path, q.To} {
		if p != "" {
			out = append(out, path.Clean(p))
		}
	}
	return out
}

func within(outer, p string) bool { return p == outer || strings.HasPrefix(p, outer+"/") }

func meet(a, b []string) bool {
	return slices.ContainsFunc(a, func(x string) bool {
		return slices.ContainsFunc(b, func(y string) bool { return within(x, y) || within(y, x) })
	})
}

type model struct {
	root  string
	all   map[string]string // folders end with a slash
	vague map[string]bool
}

func (m *model) blur(paths []string) {
	for _, p := range paths {
		m.vague[p] = true
	}
}

func (m *model) isVague(p string) bool {
	p = strings.TrimSuffix(p, "/")
	for v := range m.vague {
		if within(v, p) || within(p, v) {
			return true
		}
	}
	return false
}

func (m *model) parents(p string) {
	for d := path.Dir(p); d != m.root && within(m.root, d); d = path.Dir(d) {
		m.all[d+"/"] = ""
	}
}

func (m *model) drop(p string) {
	for k := range m.all {
		if within(p, strings.TrimSuffix(k, "/")) {
			delete(m.all, k)
		}
	}
}

func (m *model) apply(a *attempt) {
	q := requestOf(a.start)
	paths := q.paths()
	o, end := a.end.GetOutcome(), a.end
	whole := end.GetLength() == int64(len(end.GetData()))
	switch {
	case o.GetKind() != "exited" || len(paths) == 0 || o.GetCode() != 0 && (a.op == Write || a.op == Append || a.op == Upload) || !whole:
		m.blur(paths)
		return
	case o.GetCode() != 0:
		return
	case m.isVague(paths[0]) && a.op == Move: // carries what is not certain along
		m.blur(paths)
		return
	}
	p := paths[0]
	switch a.op {
	case Write:
		m.parents(p)
		m.all[p] = string(end.GetData())
	case Append:
		m.parents(p)
		m.all[p] += string(end.GetData())
	case MakeDir:
		m.parents(p)
		m.all[p+"/"] = ""
	case Remove:
		m.drop(p)
	case Move:
		if p == paths[1] {
			return
		}
		m.drop(paths[1])
		for k, v := range m.all {
			if within(p, strings.TrimSuffix(k, "/")) {
				delete(m.all, k)
				m.all[paths[1]+strings.TrimPrefix(k, p)] = v
			}
		}
	case Upload:
		m.parents(p)
		m.all[p+"/"] = ""
		m.unpack(p, end.GetData())
	}
}

func (m *model) unpack(dir string, data []byte) {
	for t := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := t.Next()
		if err != nil {
			return
		}
		p := path.Join(dir, h.Name)
		m.parents(p)
		if h.Typeflag == tar.TypeDir {
			m.all[p+"/"] = ""
			continue
		}
		b, _ := io.ReadAll(t)
		m.all[p] = string(b)
	}
}
