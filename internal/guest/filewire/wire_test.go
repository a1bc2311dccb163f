package filewire

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func times(t *rapid.T) time.Time {
	return time.Unix(rapid.Int64Range(-62135596800, 253402300799).Draw(t, "sec"), rapid.Int64Range(0, 999999999).Draw(t, "nsec"))
}

// octets draws strings without NUL, any other octet.
func octets(t *rapid.T, name string, limit int) string {
	return strings.ReplaceAll(string(rapid.SliceOfN(rapid.Byte(), 0, limit).Draw(t, name)), "\x00", "\xff")
}

func infos(t *rapid.T) Info {
	return Info{Path: octets(t, "path", 300), Kind: rapid.SampledFrom(kinds[:]).Draw(t, "kind"), Mode: rapid.Uint32Range(0, 0o7777).Draw(t, "mode"),
		UID: rapid.Uint32().Draw(t, "uid"), GID: rapid.Uint32().Draw(t, "gid"), Nlink: rapid.Uint32().Draw(t, "nlink"), Inode: rapid.Uint64().Draw(t, "inode"),
		Size: rapid.Int64Range(0, 1<<62).Draw(t, "size"), Modified: times(t), Target: octets(t, "target", 100), Owner: octets(t, "owner", 64),
		Group: octets(t, "group", 64), Error: octets(t, "error", 256)}
}

func TestMessagesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := &Request{Op: Op(rapid.IntRange(1, 10).Draw(t, "op")), Flags: rapid.Uint32Range(0, allFlags).Draw(t, "flags"), Mode: rapid.Uint32Range(0, 0o7777).Draw(t, "mode"),
			Depth: rapid.Uint32().Draw(t, "depth"), Offset: rapid.Int64Range(-1, 1<<62).Draw(t, "offset"), Length: rapid.Int64Range(0, 1<<62).Draw(t, "length"),
			Path: "/" + octets(t, "p", 200), To: "/" + octets(t, "to", 200)}
		if q.Flags&HasTime != 0 {
			q.Modified = times(t)
		}
		for range rapid.IntRange(0, 5).Draw(t, "excludes") {
			q.Exclude = append(q.Exclude, octets(t, "exclude", 20))
		}
		got, err := DecodeRequest(q.Encode())
		if err != nil || cmp.Diff(q, got) != "" {
			t.Fatalf("%v %s", err, cmp.Diff(q, got))
		}
		r := &Result{Code: Code(rapid.IntRange(0, int(lastCode)).Draw(t, "code")), Errno: rapid.Uint32().Draw(t, "errno"), Text: octets(t, "text", 100),
			Applied: rapid.Int64Range(0, 1<<62).Draw(t, "applied"), Start: 1, Entries: 2, Left: 3}
		if rapid.Bool().Draw(t, "info") {
			i := infos(t)
			r.Info = &i
		}
		for range rapid.IntRange(0, 5).Draw(t, "skips") {
			r.Skipped = append(r.Skipped, octets(t, "skip", 20))
		}
		back, err := DecodeResult(r.Encode())
		if err != nil || cmp.Diff(r, back) != "" {
			t.Fatalf("%v %s", err, cmp.Diff(r, back))
		}
		var b Batch
		want := &Item{}
		for range rapid.IntRange(1, 5).Draw(t, "entries") {
			i := infos(t)
			b.AddInfo(&i)
			want.Entries = append(want.Entries, i)
		}
		item, err := DecodeItem(b.Bytes())
		if err != nil || cmp.Diff(want, item) != "" {
			t.Fatalf("%v %s", err, cmp.Diff(want, item))
		}
		b.AddEvent(Event{Kind: MovedTo, Path: q.To})
		item, err = DecodeItem(b.Bytes())
		if err != nil || cmp.Diff(&Item{Events: []Event{{Kind: MovedTo, Path: q.To}}}, item) != "" {
			t.Fatalf("%v %+v", err, item)
		}
	})
}

// The queue gives the octets in order, never holds more than the window, and grants exactly what was taken.
func TestQueueKeepsOrderAndBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q Queue
		var in, out []byte
		window, next := Window, byte(0)
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				body := make([]byte, rapid.SampledFrom([]int{0, 1, 100, 4000, MaxData}).Draw(t, "n"))
				for i := range body {
					next++
					body[i] = next
				}
				err := q.Push(Data, body)
				if (err == nil) != (Cost(len(body)) <= window) {
					t.Fatalf("%d with %d left: %v", len(body), window, err)
				}
				if err == nil {
					window -= Cost(len(body))
					in = append(in, body...)
				} else {
					next -= byte(len(body))
				}
			},
			"take": func(t *rapid.T) {
				p := make([]byte, rapid.IntRange(1, MaxData).Draw(t, "n"))
				out = append(out, p[:q.Take(p)]...)
				window += int(q.Grant())
			},
			"": func(t *rapid.T) {
				if !bytes.HasPrefix(in, out) || cap(q.buf) > 2*Window {
					t.Fatalf("%d in, %d out, %d held", len(in), len(out), cap(q.buf))
				}
			},
		})
	})
}

func TestFrames(t *testing.T) {
	scratch := make([]byte, MaxBody)
	b := Frame(Data, BrokenOff, 1<<40, []byte("body"))
	h, body, err := ReadFrame(bytes.NewReader(b), scratch)
	if err != nil || h != (Header{Length: 4, Type: Data, Flags: BrokenOff, ID: 1 << 40}) || string(body) != "body" {
		t.Errorf("%+v %q %v", h, body, err)
	}
	for n := range len(b) {
		_, _, err := ReadFrame(bytes.NewReader(b[:n]), scratch)
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if err != want {
			t.Errorf("%d octets: %v", n, err)
		}
	}
	if _, _, err := ReadFrame(strings.NewReader(strings.Repeat("\xff", 20)), scratch); err == nil {
		t.Error("4 GiB are taken")
	}
}

func FuzzDecodeRequest(f *testing.F) {
	f.Add((&Request{Op: OpDownload, Path: "/a", Exclude: []string{"x"}}).Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := DecodeRequest(b)
		if err != nil {
			return
		}
		if again, err := DecodeRequest(q.Encode()); err != nil || cmp.Diff(q, again) != "" {
			t.Errorf("%v %s", err, cmp.Diff(q, again))
		}
	})
}

func FuzzDecodeAnswers(f *testing.F) {
	f.Add((&Result{Code: Exists, Text: "x", Info: &Info{Kind: File}, Skipped: []string{"a", "b"}}).Encode())
	var b Batch
	b.AddInfo(&Info{Path: "x", Kind: Dir})
	f.Add(bytes.Clone(b.Bytes()))
	b.AddEvent(Event{Kind: Created, Path: "y"})
	f.Add(bytes.Clone(b.Bytes()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeResult(b); err == nil {
			if len(r.Skipped) > MaxSkipped || r.Applied < 0 || r.Left < 0 || strings.Contains(fmt.Sprint(r.Skipped, r.Text), "\x00") {
				t.Errorf("%+v", r)
			}
		}
		if it, err := DecodeItem(b); err == nil {
			for _, i := range it.Entries {
				if i.Mode > 0o7777 || i.Size < 0 || strings.Contains(i.Path+i.Target, "\x00") {
					t.Errorf("%+v", i)
				}
			}
		}
	})
}
