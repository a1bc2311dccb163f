package keeper

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A network namespace is given again only when nothing tells of who had it before.
func TestNetnsIsGivenAgainOnlyAsMade(t *testing.T) {
	needRoot(t)
	socket := func(kind int) int {
		s, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
		}
		return s
	}
	local := &unix.SockaddrInet4{Port: 4000, Addr: [4]byte{127, 0, 0, 1}}
	for _, c := range []struct {
		name string
		use  func(p *netnsPool)
		want bool
	}{
		{"untouched", func(*netnsPool) {}, true},
		{"a socket that was closed", func(*netnsPool) { unix.Close(socket(unix.SOCK_STREAM)) }, true},
		{"a socket that is open", func(*netnsPool) { socket(unix.SOCK_STREAM) }, false},
		{"a Unix socket that is open", func(*netnsPool) { unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) }, false},
		{"a datagram to itself", func(*netnsPool) {
			s := socket(unix.SOCK_DGRAM)
			unix.Sendto(s, []byte("x"), 0, local)
			unix.Close(s)
		}, false},
		{"a datagram to nowhere", func(*netnsPool) {
			s := socket(unix.SOCK_DGRAM)
			unix.Sendto(s, []byte("x"), 0, &unix.SockaddrInet4{Port: 4000, Addr: [4]byte{10, 1, 2, 3}})
			unix.Close(s)
		}, false},
		{"a connection that was refused", func(*netnsPool) {
			s := socket(unix.SOCK_STREAM)
			unix.Connect(s, local)
			unix.Close(s)
		}, false},
		{"a connection that was closed", func(*netnsPool) {
			l, c := socket(unix.SOCK_STREAM), socket(unix.SOCK_STREAM)
			unix.Bind(l, local)
			unix.Listen(l, 1)
			unix.Connect(c, local)
			a, _, _ := unix.Accept(l)
			for _, s := range []int{c, a, l} {
				unix.Close(s)
			}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread() // never unlocked: the thread's namespace changes
				p := newNetnsPool(1)
				fd, err := p.next()
				if err != nil {
					t.Error(err)
					return
				}
				if p.fresh == "" {
					t.Error("what a namespace tells of itself can't be read")
				}
				c.use(p)
				if !p.give(fd) {
					t.Error("not taken back")
				}
				for range 2 { // the files are left open after the first look
					if got := p.asMade(fd); got != c.want {
						t.Errorf("as made: %v, want %v", got, c.want)
					}
				}
				(<-p.back).close()
			}()
			<-done
		})
	}
}
