package fncall

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// program is what a call runs, with all that its language says.
type program struct {
	lang          *Language
	layers        []string
	env           []string // environment's, language's
	files         []source // of the request, the language's source file among them
	run           []string
	args          []string // for the compiler
	limits        Limits
	compileLimits Limits
	compileMost   Limits
}

// source is a file of a request: its octets, or the name of a kept one.
type source struct {
	path    string
	data    []byte
	content string
	owner   string
	exec    bool
}

// input is what differs between runs.
type input struct {
	id      string
	stdin   []byte
	content string // of a kept file, instead of stdin
	owner   string
	args    []string
	env     []string
	files   []source
	outputs []*dsecv1.CallOutput
	copies  []Copy
}

func (e *Engine) resolve(project string, p *dsecv1.CallProgram, limits, compileLimits *dsecv1.CallLimits, roots []*dsecv1.CallRoot) (*program, error) {
	name := p.GetLang()
	if name == "" {
		name = "cmd"
	}
	l := e.deps.Languages[name]
	if l == nil {
		return nil, fmt.Errorf("program.lang %.40q: is none of %s: %w", name, strings.Join(e.deps.Languages.Names(), ", "), sandbox.ErrInvalid)
	}
	out := &program{lang: l, run: l.Run, args: p.GetCompileArgs()}
	environment := p.GetEnvironment()
	if environment == "" {
		environment = l.Environment
	}
	var root *dsecv1.CallRoot
	for _, r := range roots {
		if r.GetEnvironment() == environment {
			root = r
		}
	}
	if root == nil || len(root.GetLayers()) == 0 {
		return nil, fmt.Errorf("program: environment %s of language %s: its layers are not given; ask a gateway: %w", environment, name, sandbox.ErrInvalid)
	}
	out.layers = root.GetLayers()
	env, _, err := rpc.Env("environment", root.GetEnv())
	if err != nil {
		return nil, err
	}
	out.env = sandbox.MergeEnv(append([]string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/box", "TMPDIR=/tmp", "LANG=C.UTF-8"}, env...), l.Env)
	argv, err := rpc.OctetLists("program.cmd", p.GetCmd(), p.GetCmdRaw())
	if err != nil {
		return nil, err
	}
	code, err := octets("program.code", p.GetCode(), p.GetCodeRaw())
	if err != nil {
		return nil, err
	}
	switch {
	case name == "cmd" && len(code) > 0:
		return nil, fmt.Errorf("program.code: needs a language; cmd runs a command: %w", sandbox.ErrInvalid)
	case name == "cmd" && len(argv) == 0 && len(l.Run) == 0:
		return nil, fmt.Errorf("program.cmd: missing: %w", sandbox.ErrInvalid)
	case name != "cmd" && len(argv) > 0:
		return nil, fmt.Errorf("program.cmd: is for language cmd alone; %s has its own: %w", name, sandbox.ErrInvalid)
	case name == "cmd":
		out.run = argv
	default:
		if code == nil && !hasFile(p.GetFiles(), l.Source) {
			return nil, fmt.Errorf("program: neither code nor a file %s: %w", l.Source, sandbox.ErrInvalid)
		}
	}
	if code != nil && name != "cmd" {
		out.files = append(out.files, source{path: l.Source, data: code})
	}
	files, err := sources("program.files", project, p.GetFiles())
	if err != nil {
		return nil, err
	}
	out.files = append(out.files, files...)
	own, err := l.Limits.Limits()
	if err != nil {
		return nil, err
	}
	if out.limits, err = limitsOf("limits", limits, own.Or(DefaultLimits())); err != nil {
		return nil, err
	}
	if own, err = l.CompileLimits.Limits(); err != nil {
		return nil, err
	}
	out.compileLimits, err = limitsOf("compile_limits", compileLimits, own.Or(DefaultCompileLimits()))
	return out, err
}

// Names are the languages' names, in order.
func (all Languages) Names() []string {
	var names []string
	for n := range all {
		names = append(names, n)
	}
	sortStrings(names)
	return names
}

// Environments are those that a request needs, beside the ones that it names itself: for the gateway.
func (all Languages) Environment(p *dsecv1.CallProgram) (string, error) {
	if p.GetEnvironment() != "" {
		return p.GetEnvironment(), nil
	}
	name := p.GetLang()
	if name == "" {
		name = "cmd"
	}
	l := all[name]
	if l == nil {
		return "", fmt.Errorf("program.lang %.40q: is none of %s: %w", name, strings.Join(all.Names(), ", "), sandbox.ErrInvalid)
	}
	return l.Environment, nil
}

func hasFile(files []*dsecv1.CallFile, path string) bool {
	for _, f := range files {
		if f.GetPath() == path || string(f.GetPathRaw()) == path {
			return true
		}
	}
	return false
}

// octets is rpc.Octets that tells nothing from empty.
func octets(field, text string, raw []byte) ([]byte, error) {
	s, err := rpc.Octets(field, text, raw)
	if err != nil || s == "" {
		return nil, err
	}
	return []byte(s), nil
}

func sources(field, project string, files []*dsecv1.CallFile) ([]source, error) {
	if len(files) > maxFiles {
		return nil, fmt.Errorf("%s: %d files, at most %d: %w", field, len(files), maxFiles, sandbox.ErrInvalid)
	}
	var out []source
	for i, f := range files {
		path, err := rpc.Octets(field+"["+strconv.Itoa(i)+"].path", f.GetPath(), f.GetPathRaw())
		if err == nil {
			err = CheckPath(path)
		}
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
		n := 0
		for _, set := range []bool{f.GetText() != "", len(f.GetData()) > 0, f.GetContent() != ""} {
			if set {
				n++
			}
		}
		if n > 1 {
			return nil, fmt.Errorf("%s[%d] %.80q: text, data and content: set one of them: %w", field, i, path, sandbox.ErrInvalid)
		}
		s := source{path: path, data: f.GetData(), content: f.GetContent(), owner: project, exec: f.GetExecutable()}
		if f.GetText() != "" {
			s.data = []byte(f.GetText())
		}
		out = append(out, s)
	}
	return out, nil
}

func limitsOf(field string, p *dsecv1.CallLimits, def Limits) (Limits, error) {
	l := Limits{Memory: p.GetMemory(), Processes: int(p.GetProcesses()), Output: p.GetOutput(), FileSize: p.GetFileSize(), Disk: p.GetDisk(),
		Files: int(p.GetFiles()), Stack: p.GetStack(), OpenFiles: int(p.GetOpenFiles())}
	var err error
	if l.CPU, err = rpc.Milliseconds(field+".cpu_ms", p.GetCpuMs()); err != nil {
		return l, err
	}
	if l.Wall, err = rpc.Milliseconds(field+".wall_ms", p.GetWallMs()); err != nil {
		return l, err
	}
	// Who sets one time alone means that one: the other must not end the run first, nor hold it for long after.
	switch {
	case l.CPU > 0 && l.Wall == 0:
		l.Wall = min(max(2*l.CPU, l.CPU+def.Wall-def.CPU), MostLimits().Wall)
	case l.Wall > 0 && l.CPU == 0 && l.Wall < def.CPU:
		l.CPU = def.CPU
	}
	// The work folder's files are memory: with a larger limit than that, a full disk would look like a want of memory.
	if l.Disk == 0 && l.Memory > 0 && l.Memory/2 < def.Disk {
		l.Disk = max(l.Memory/2, 1<<20)
	}
	l = l.Or(def)
	if err := l.Check(); err != nil {
		return l, fmt.Errorf("%s: %w", field, err)
	}
	return l, nil
}

func (e *Engine) input(project string, p *program, q *dsecv1.CallInput, outputs []*dsecv1.CallOutput) (*input, error) {
	in := &input{id: q.GetId(), content: q.GetStdinContent(), owner: project, outputs: outputs}
	var err error
	if in.stdin, err = octets("input.stdin", q.GetStdin(), q.GetStdinRaw()); err != nil {
		return nil, err
	}
	if in.content != "" && in.stdin != nil {
		return nil, fmt.Errorf("input: stdin and stdin_content: set one of them: %w", sandbox.ErrInvalid)
	}
	if in.args, err = rpc.OctetLists("input.args", q.GetArgs(), q.GetArgsRaw()); err != nil {
		return nil, err
	}
	if in.env, _, err = rpc.Env("input.env", q.GetEnv()); err != nil {
		return nil, err
	}
	if err := sandbox.CheckEnv("input.env", in.env); err != nil {
		return nil, err
	}
	if in.files, err = sources("input.files", project, q.GetFiles()); err != nil {
		return nil, err
	}
	if len(outputs) > maxCopies {
		return nil, fmt.Errorf("outputs: %d, at most %d: %w", len(outputs), maxCopies, sandbox.ErrInvalid)
	}
	for i, o := range outputs {
		path, err := rpc.Octets("outputs.path", o.GetPath(), o.GetPathRaw())
		if err == nil {
			err = CheckPath(path)
		}
		most := o.GetMax()
		if most == 0 {
			most = maxCopy
		}
		if err == nil && (most < 0 || most > maxCopy) {
			err = fmt.Errorf("max %d: want 1 to %d: %w", o.GetMax(), maxCopy, sandbox.ErrInvalid)
		}
		if err != nil {
			return nil, fmt.Errorf("outputs[%d]: %w", i, err)
		}
		in.copies = append(in.copies, Copy{Path: path, Max: most})
	}
	return in, nil
}

// prepare makes what a Runner takes; done closes the files of it.
func (e *Engine) prepare(j *job, p *program, arts []artifact, in *input) (x *Exec, done func(), err error) {
	x = &Exec{Layers: p.layers, Argv: append(append([]string(nil), p.run...), in.args...), Env: sandbox.MergeEnv(p.env, in.env), Stdin: in.stdin,
		Limits: p.limits, Copy: in.copies, Pooled: j.mode == "pooled"}
	var open []*os.File
	closeAll := func() {
		for _, f := range open {
			f.Close()
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	kept := func(owner, content string) (*os.File, error) {
		f, err := e.cache.Open(owner, content)
		if err == nil {
			open = append(open, f)
		}
		return f, err
	}
	if in.content != "" {
		if x.StdinF, err = kept(in.owner, in.content); err != nil {
			return nil, nil, fmt.Errorf("input.stdin_content: %w", err)
		}
	}
	all := map[string]bool{}
	var size int64
	add := func(list []source) error {
		for _, s := range list {
			if all[s.path] {
				return fmt.Errorf("file %.80q: is given twice: %w", s.path, sandbox.ErrInvalid)
			}
			all[s.path] = true
			f := File{Path: s.path, Data: s.data, Exec: s.exec}
			n := int64(len(s.data))
			if s.content != "" {
				if f.From, err = kept(s.owner, s.content); err != nil {
					return fmt.Errorf("file %.80q: %w", s.path, err)
				}
				st, err := f.From.Stat()
				if err != nil {
					return fmt.Errorf("file %.80q: %w", s.path, err)
				}
				n = st.Size()
			}
			if size += n; size > p.limits.Disk { // a name of a few octets may bring many
				return fmt.Errorf("file %.80q: the files have more octets than the disk, which has %d: %w", s.path, p.limits.Disk, sandbox.ErrInvalid)
			}
			x.Files = append(x.Files, f)
		}
		return nil
	}
	for _, a := range arts {
		s := source{path: a.path, content: a.content, exec: a.exec}
		if err = add([]source{s}); err != nil {
			return nil, nil, err
		}
	}
	// Of a compiled program a run sees what compiling made; sources only where nothing is compiled. Other files are both's.
	own := p.files
	if len(p.lang.Compile) > 0 {
		own = nil
		for _, f := range p.files {
			if f.path != p.lang.Source && !all[f.path] {
				own = append(own, f)
			}
		}
	}
	if err = add(own); err == nil {
		err = add(in.files)
	}
	if err != nil {
		return nil, nil, err
	}
	// An interpreter may take a variable or a file for a part of itself and run it before it opens its program: that is the call's own doing,
	// so it begins fresh, and its limits hold from the exec. A compiler begins fresh too.
	if j.mode == "warm" && p.lang.Warm && len(in.env) == 0 && len(x.Files) == 1 {
		x.Hold = p.lang.Source
		if len(in.args) == 0 { // what is one call's alone, such as secrets, waits for no other
			x.Standbys = e.cfg.Standbys
		}
	}
	return x, closeAll, nil
}

// PutFile keeps octets for later calls of a project.
func (e *Engine) PutFile(project string, data []byte) (string, error) {
	content, _, err := e.cache.Put(project, bytes.NewReader(data), maxKept)
	return content, err
}

// maxKept is the most octets of one kept file.
const maxKept = 32 << 20

// GetFile is the reverse of PutFile, also for files that a call kept.
func (e *Engine) GetFile(project, content string) ([]byte, error) {
	f, err := e.cache.Open(project, content)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxKept+1))
	if err != nil {
		return nil, fmt.Errorf("content %s: %w", content, err)
	}
	return data, nil
}

// Proto describes all languages with the limits that hold where a call says nothing.
func (all Languages) Proto() (*dsecv1.ListCallLanguagesResponse, error) {
	r := &dsecv1.ListCallLanguagesResponse{}
	for _, name := range all.Names() {
		l := all[name]
		limits, err := l.Limits.Limits()
		if err != nil {
			return nil, err
		}
		compile, err := l.CompileLimits.Limits()
		if err != nil {
			return nil, err
		}
		p := &dsecv1.CallLanguage{Name: name, Environment: l.Environment, Source: l.Source, Compile: l.Compile, Run: l.Run, Warm: l.Warm, Limits: limits.Or(DefaultLimits()).proto()}
		if len(l.Compile) > 0 {
			p.CompileLimits = compile.Or(DefaultCompileLimits()).proto()
		}
		r.Languages = append(r.Languages, p)
	}
	return r, nil
}

func (l Limits) proto() *dsecv1.CallLimits {
	return &dsecv1.CallLimits{CpuMs: l.CPU.Milliseconds(), WallMs: l.Wall.Milliseconds(), Memory: l.Memory, Processes: int32(l.Processes), Output: l.Output,
		FileSize: l.FileSize, Disk: l.Disk, Files: int32(l.Files), Stack: l.Stack, OpenFiles: int32(l.OpenFiles)}
}
