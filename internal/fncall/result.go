package fncall

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
)

func sortStrings(s []string) { slices.Sort(s) }

// plain is a result without its files.
func (e *Engine) plain(x *Exit, l Limits) *dsecv1.CallResult {
	v, limit := Judge(x.Facts, l)
	e.m.verdicts.WithLabelValues(string(v)).Inc()
	r := &dsecv1.CallResult{Verdict: string(v), Limit: limit, Code: int32(x.Code), Signal: int32(x.Signal), CpuUs: x.CPU.Microseconds(), WallUs: x.Wall.Microseconds(),
		Memory: x.Memory, MemoryHit: x.OOM, ProcessesHit: x.Processes, Leftover: int32(x.Leftover), StdoutTruncated: x.StdoutCut, StderrTruncated: x.StderrCut,
		EventsTotal: x.EventsTotal, Warm: x.Ahead}
	if x.Signal != 0 {
		r.Code = int32(128 + x.Signal)
	}
	r.Stdout, r.StdoutRaw = rpc.Twin(string(x.Stdout))
	r.Stderr, r.StderrRaw = rpc.Twin(string(x.Stderr))
	for _, ev := range x.Events {
		r.Events = append(r.Events, &dsecv1.CallEvent{Call: ev.Call, Count: ev.Count, Fatal: ev.Fatal})
	}
	switch {
	case x.Failure != "":
		r.Error = rpc.Text([]byte(x.Failure))
	case x.NotBegun != "":
		r.Error = rpc.Text([]byte(x.NotBegun))
	case v == SEC:
		r.Error = "made a system call that ends a program"
		for _, ev := range x.Events {
			if ev.Fatal {
				r.Error += ": " + ev.Call
			}
		}
	case v == SIG:
		r.Error = signalName(x.Signal)
	}
	return r
}

func signalName(n int) string {
	if name := unix.SignalName(unix.Signal(n)); name != "" {
		return "ended by " + name
	}
	return fmt.Sprintf("ended by signal %d", n)
}

// close closes the files of an exit.
func (x *Exit) close() {
	for _, f := range x.Files {
		if f.From != nil {
			f.From.Close()
		}
	}
}

// result is that of a run, with the files that were asked for. What goes beyond room octets with the streams is told of instead.
func (e *Engine) result(x *Exit, l Limits, in *input, project string, room int64) (*dsecv1.CallResult, error) {
	defer x.close()
	r := e.plain(x, l)
	r.Id = in.id
	room -= int64(sizeOf(r))
	var missing []string
	for i, f := range x.Files {
		if i >= len(in.outputs) {
			break
		}
		o := in.outputs[i]
		if f.Err != "" {
			if !o.GetOptional() || f.Err != unix.ENOENT.Error() {
				missing = append(missing, fmt.Sprintf("output %.80q: %s", f.Path, f.Err))
			}
			continue
		}
		if !o.GetKeep() {
			n := int64(len(f.Data))
			if f.From != nil {
				st, err := f.From.Stat()
				if err != nil {
					return nil, fmt.Errorf("output %.80q: %w", f.Path, err)
				}
				n = st.Size()
			}
			if n > room {
				missing = append(missing, fmt.Sprintf("output %.80q: there are more and longer files than fit into one answer; ask to keep it", f.Path))
				continue
			}
			room -= n
		}
		out := &dsecv1.CallFile{Executable: f.Exec}
		out.Path, out.PathRaw = rpc.Twin(f.Path)
		var from io.Reader = bytes.NewReader(f.Data)
		if f.From != nil {
			from = f.From
		}
		var err error
		if o.GetKeep() {
			out.Content, _, err = e.cache.Put(project, from, maxKept)
		} else {
			out.Data, err = io.ReadAll(io.LimitReader(from, maxCopy))
		}
		if err != nil {
			return nil, fmt.Errorf("output %.80q: %w", f.Path, err)
		}
		r.Files = append(r.Files, out)
	}
	if len(missing) > 0 {
		if r.Error != "" {
			missing = append([]string{r.Error}, missing...)
		}
		r.Error = strings.Join(missing, "; ")
	}
	return r, nil
}

func sizeOf(r *dsecv1.CallResult) int {
	n := len(r.Stdout) + len(r.StdoutRaw) + len(r.Stderr) + len(r.StderrRaw) + 200
	for _, f := range r.Files {
		n += len(f.Data)
	}
	return n
}
