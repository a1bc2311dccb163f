package mux_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/mux"
)

// port is a serial port: it has no connections, octets of an earlier host stay in it, and a read while the host is away gives nothing.
type port struct {
	mu   sync.Mutex
	host net.Conn // the guest's end of the present host's connection
	old  bytes.Buffer
}

func (p *port) plug(t *testing.T) net.Conn {
	t.Helper()
	a, b := net.Pipe()
	p.mu.Lock()
	p.host = b
	p.mu.Unlock()
	t.Cleanup(func() { a.Close(); b.Close() })
	return a
}

func (p *port) Read(b []byte) (int, error) {
	p.mu.Lock()
	if p.old.Len() > 0 {
		n, _ := p.old.Read(b)
		p.mu.Unlock()
		return n, nil
	}
	c := p.host
	p.mu.Unlock()
	if c == nil {
		return 0, nil
	}
	n, err := c.Read(b)
	if err != nil {
		p.mu.Lock()
		if p.host == c {
			p.host = nil
		}
		p.mu.Unlock()
		return n, nil
	}
	return n, nil
}

func (p *port) Write(b []byte) (int, error) {
	for {
		p.mu.Lock()
		c := p.host
		p.mu.Unlock()
		if c == nil { // it waits for a host
			time.Sleep(time.Millisecond)
			continue
		}
		if n, err := c.Write(b); err == nil {
			return n, nil
		}
		time.Sleep(time.Millisecond)
	}
}

// echo answers each stream with what comes, after its first octets.
func echo(st *mux.Stream, body []byte) {
	if string(body) == "refuse" {
		st.Reset("not today")
		return
	}
	st.Accept()
	st.Write(body)
	io.Copy(st, st)
	st.CloseWrite()
}

func serve(p *port) {
	mux.Serve(p, echo, func() error { time.Sleep(time.Millisecond); return nil })
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestManyStreamsOverOne(t *testing.T) {
	p := &port{}
	c := p.plug(t)
	go serve(p)
	s, err := mux.Host(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			st, err := s.Open(within(t), []byte{byte(i)})
			if err != nil {
				t.Error(err)
				return
			}
			want := make([]byte, 300_000+i)
			rand.Read(want)
			go func() {
				st.Write(want)
				st.CloseWrite()
			}()
			got, err := io.ReadAll(st)
			if err != nil || !bytes.Equal(got, append([]byte{byte(i)}, want...)) {
				t.Errorf("stream %d: %d octets came back, %v", i, len(got), err)
			}
		})
	}
	wg.Wait()
	if _, err := s.Open(within(t), []byte("refuse")); !errors.Is(err, mux.ErrRefused) {
		t.Errorf("%v, want ErrRefused", err)
	}
}

// A stream that nobody reads stops no other.
func TestStreamThatNobodyReads(t *testing.T) {
	p := &port{}
	c := p.plug(t)
	go serve(p)
	s, err := mux.Host(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	stuck, err := s.Open(within(t), []byte("a"))
	if err != nil {
		t.Fatal(err)
	}
	go stuck.Write(make([]byte, 4*mux.Window))
	for range 20 {
		st, err := s.Open(within(t), []byte("b"))
		if err != nil {
			t.Fatal(err)
		}
		st.CloseWrite()
		if got, err := io.ReadAll(st); err != nil || string(got) != "b" {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

// A host that went away in the middle of anything is followed by one that finds the guest, whatever is left on the way.
func TestHostThatComesBack(t *testing.T) {
	for name, left := range map[string][]byte{
		"nothing":              nil,
		"half a header":        {4, 0xd5, 0, 0, 1},
		"a frame without body": {4, 0xd5, 0, 0, 1, 0, 0, 0, 0, 0x80, 0, 0, 1, 2, 3},
		"noise":                bytes.Repeat([]byte{0xd5, 7, 1, 0xff}, 500),
	} {
		t.Run(name, func(t *testing.T) {
			p := &port{}
			p.old.Write(left)
			go serve(p)
			for range 3 {
				c := p.plug(t)
				s, err := mux.Host(within(t), c)
				if err != nil {
					t.Fatal(err)
				}
				st, err := s.Open(within(t), []byte("x"))
				if err != nil {
					t.Fatal(err)
				}
				st.Write([]byte("y"))
				st.CloseWrite()
				if got, err := io.ReadAll(st); err != nil || string(got) != "xy" {
					t.Errorf("%q, %v", got, err)
				}
				s.Close()
				if _, err := s.Open(within(t), nil); !errors.Is(err, mux.ErrEnded) {
					t.Errorf("open in a session that ended: %v", err)
				}
				c.Close()
			}
		})
	}
}

// What a guest sends against the form ends the session, and costs no more memory than a frame.
func FuzzHostileGuest(f *testing.F) {
	f.Add([]byte{2, 0xd5, 0, 0, 1, 0, 0, 0x80, 0, 0, 0, 0})
	f.Add([]byte{7, 0xd5, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{4, 0xd5, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, far := net.Pipe()
		go func() {
			hello := make([]byte, 12+32)
			if _, err := io.ReadFull(far, hello); err != nil {
				return
			}
			far.Write(hello)
			go io.Copy(io.Discard, far)
			far.Write(b)
			far.Close()
		}()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		s, err := mux.Host(ctx, c)
		if err != nil {
			return
		}
		if st, err := s.Open(ctx, []byte("x")); err == nil {
			io.Copy(io.Discard, io.LimitReader(st, 1<<20))
		}
		select {
		case <-s.Done():
		case <-ctx.Done():
			t.Error("the session outlives its stream")
		}
	})
}
