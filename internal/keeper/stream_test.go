package keeper

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Whatever the sizes of reads, sends, acknowledgements and lost connections: the host gets the first and the last octets at
// their offsets, each at least once, and what comes after the end apart.
func TestStreamAccount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(0, 400).Draw(t, "cap")
		tail := sandbox.Tail(limit)
		s := &stream{headMax: limit - tail, tailMax: tail, sum: sha256.New(), end: -1, room: make(chan struct{}, 1)}
		var all, late []byte
		got, gotLate := map[int64]byte{}, map[int64]byte{}
		var sent []*segment
		next := byte(0)
		octets := func(n int) []byte {
			p := make([]byte, n)
			for i := range p {
				p[i] = next
				next++
			}
			return p
		}
		finished := false
		t.Repeat(map[string]func(*rapid.T){
			"read": func(t *rapid.T) {
				p := octets(rapid.IntRange(1, 300).Draw(t, "n"))
				s.account(p)
				if finished {
					late = append(late, p...)
				} else {
					all = append(all, p...)
				}
			},
			"send": func(t *rapid.T) {
				told := rapid.Bool().Draw(t, "end told")
				if g := s.next(told); g != nil {
					if g.late && !told {
						t.Fatal("what is late came before the end")
					}
					sent = append(sent, g)
				}
			},
			"ack": func(t *rapid.T) {
				if len(sent) == 0 {
					return
				}
				g := sent[0]
				sent = sent[1:]
				m := got
				if g.late {
					m = gotLate
				}
				for i, o := range g.data {
					m[g.offset+int64(i)] = o
				}
				s.ack(g)
			},
			"lose": func(t *rapid.T) { s.rewind(); sent = nil },
			"end": func(t *rapid.T) {
				if !finished {
					finished = true
					s.end = s.total
					if !s.finishLocked() {
						t.Fatal("not finished")
					}
				}
			},
		})
		if !finished {
			s.end = s.total
			s.finishLocked()
		}
		s.rewind()
		for g := s.next(true); g != nil; g = s.next(true) {
			m := got
			if g.late {
				m = gotLate
			}
			for i, o := range g.data {
				m[g.offset+int64(i)] = o
			}
			s.ack(g)
		}
		if s.held != 0 {
			t.Fatalf("%d octets held", s.held)
		}
		e, _ := s.result()
		sum := sha256.Sum256(all)
		if e.Total != int64(len(all)) || e.SHA256 != hex.EncodeToString(sum[:]) {
			t.Fatalf("%+v", e)
		}
		if int64(len(all)) <= limit && e.Truncated {
			t.Fatalf("cut below the cap: %+v", e)
		}
		if int64(len(got)) != e.Head+e.Tail {
			t.Fatalf("%d octets came, %+v", len(got), e)
		}
		for off, o := range got {
			if off >= e.Head && off < e.Total-e.Tail || all[off] != o {
				t.Fatalf("octet %d", off)
			}
		}
		var l []byte
		for i := range int64(len(gotLate)) {
			l = append(l, gotLate[e.Total+i])
		}
		if !bytes.Equal(l, late) {
			t.Fatalf("late: %d of %d", len(l), len(late))
		}
	})
}

// What a terminal holds when the time after its command is over belongs to the command, also the part whose length the kernel does not tell.
func TestTerminalHoldsMoreThanItTells(t *testing.T) {
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := unix.Open(fmt.Sprintf("/dev/pts/%d", number), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(slave)
	f := os.NewFile(uintptr(master), "terminal")
	defer f.Close()
	s, err := newStream(nil, sandbox.Stdout, f, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	s.tty = true
	const n = 8_000 // a terminal takes 8,192 that nobody reads
	if k, err := unix.Write(slave, bytes.Repeat([]byte("x"), n)); k != n || err != nil {
		t.Fatal(k, err)
	}
	if !s.fixEnd() || s.end != n || s.total != n {
		t.Errorf("end %d after %d octets, want %d", s.end, s.total, n)
	}
	if _, err := unix.Write(slave, []byte("late")); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.drain(master)
	s.mu.Unlock()
	if s.total != n || s.late != 4 {
		t.Errorf("%d octets, %d late", s.total, s.late)
	}
}
