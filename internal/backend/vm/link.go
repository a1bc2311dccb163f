package vm

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// link is a conversation with a guest.
type link struct {
	session *mux.Session
	keeper  *keeper.Client // nil until openKeeper
	owner   owner          // whose sandbox the guest has
}

const (
	findBound   = 90 * time.Second // for a guest that boots under load to answer
	answerBound = 30 * time.Second
	maxAnswer   = 1 << 20
)

// dialGuest finds the guest of a machine.
func dialGuest(ctx context.Context, vm vmm.VM) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, findBound)
	defer cancel()
	ctx, over := context.WithCancelCause(ctx)
	defer over(nil)
	go watchEnd(ctx, vm, over)
	c, err := vm.Agent(ctx)
	if err != nil {
		return nil, fmt.Errorf("reach the guest: %w", err)
	}
	s, err := mux.Host(ctx, c)
	if err != nil {
		c.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if text := consoleTail(context.WithoutCancel(ctx), vm); text != "" {
			err = fmt.Errorf("%w; its console says: %s", err, text)
		}
		return nil, fmt.Errorf("reach the guest: %w", err)
	}
	return &link{session: s}, nil
}

// watchEnd tells when a machine has ended by itself: its guest will never answer.
func watchEnd(ctx context.Context, vm vmm.VM, tell context.CancelCauseFunc) {
	select {
	case <-vm.Over():
	case <-ctx.Done():
		return
	}
	if s, err := vm.Status(ctx); err != nil {
		tell(fmt.Errorf("its monitor does not answer: %w", err))
	} else if s != "running" && s != "paused" {
		tell(fmt.Errorf("the machine %s: %w", s, sandbox.ErrLost))
	}
}

func (l *link) close() {
	if l == nil {
		return
	}
	if l.keeper != nil {
		l.keeper.Close()
	}
	l.session.Close()
}

// done is closed when the conversation is over.
func (l *link) done() <-chan struct{} {
	if l.keeper != nil {
		return l.keeper.Done()
	}
	return l.session.Done()
}

func (l *link) open(ctx context.Context, r *vmwire.Request) (*mux.Stream, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return l.session.Open(ctx, b)
}

// call asks the guest one thing. more follows the request on its stream.
func (l *link) call(ctx context.Context, r *vmwire.Request, more []byte) (vmwire.Answer, error) {
	var a vmwire.Answer
	ctx, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	st, err := l.open(ctx, r)
	if err != nil {
		return a, fmt.Errorf("guest: %s: %w", r.Op, err)
	}
	defer st.Close()
	stop := context.AfterFunc(ctx, func() { st.Close() })
	defer stop()
	if _, err = st.Write(more); err == nil {
		err = st.CloseWrite()
	}
	var text []byte
	if err == nil {
		text, err = io.ReadAll(io.LimitReader(st, maxAnswer))
	}
	if err == nil {
		err = json.Unmarshal(text, &a)
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return a, fmt.Errorf("guest: %s: %w", r.Op, err)
	}
	if a.Error != "" {
		err = fmt.Errorf("guest: %s: %.500q", r.Op, a.Error)
		switch syscall.Errno(a.Errno) {
		case syscall.ENOSPC, syscall.EDQUOT, syscall.ENOMEM:
			err = fmt.Errorf("%w: %w", err, sandbox.ErrExhausted)
		}
	}
	return a, err
}

// greet waits for the guest's keeper.
func (l *link) greet(ctx context.Context) (born string, err error) {
	a, err := l.call(ctx, &vmwire.Request{Op: vmwire.OpHello}, nil)
	if err == nil && a.Version != vmwire.Version {
		err = fmt.Errorf("guest: speaks version %d, want %d: %w", a.Version, vmwire.Version, sandbox.ErrUnsupported)
	}
	return a.Born, err
}

// renew sets the guest's clock and, with fresh, makes its random numbers unlike those of any other machine.
func (l *link) renew(ctx context.Context, fresh bool) error {
	r := &vmwire.Request{Op: vmwire.OpRenew}
	if fresh {
		r.Entropy = make([]byte, 64)
		rand.Read(r.Entropy)
	}
	r.Now = time.Now().UnixNano()
	_, err := l.call(ctx, r, nil)
	return err
}

func (l *link) bear(ctx context.Context, b *keeper.Birth, layer string, n *vmwire.Network) (laid map[string]string, err error) {
	text, err := json.Marshal(b)
	if err != nil {
		return nil, err
	}
	more, err := json.Marshal(&vmwire.Birth{Birth: text, Layer: layer, Network: n})
	if err != nil {
		return nil, err
	}
	a, err := l.call(ctx, &vmwire.Request{Op: vmwire.OpBirth}, more)
	if err != nil {
		return nil, err
	}
	laid = map[string]string{}
	for _, file := range laidFiles { // a hostile guest names no others
		if sum := a.Laid[file]; len(sum) == 64 {
			laid[file] = sum
		}
	}
	return laid, nil
}

// far gives the relay of the keeper's protocol the session's streams.
type far struct{ *mux.Stream }

func (f far) Offer() (uint32, keeper.Half, error) {
	return 0, nil, errors.New("the host offers no streams")
}

func (f far) Take(id uint32) (keeper.Half, error) {
	st, err := f.Session().Take(id)
	if err != nil {
		return nil, err
	}
	return st, nil
}

// openKeeper connects to the guest's keeper and has it deliver events.
func (l *link) openKeeper(ctx context.Context, x *instance) error {
	l.owner.Store(x)
	ctx, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	st, err := l.open(ctx, &vmwire.Request{Op: vmwire.OpKeeper})
	if err != nil {
		return fmt.Errorf("guest: keeper: %w", err)
	}
	near, fd, err := keeper.Socketpair()
	if err != nil {
		st.Close()
		return err
	}
	go keeper.RelayNear(near, far{st}) // ends with the client or the session; the client then says so
	f := os.NewFile(uintptr(fd), "keeper")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		near.Close()
		return err
	}
	k, err := keeper.NewClient(ctx, c.(*net.UnixConn), keeper.DialOptions{Host: "host", Handler: &l.owner})
	if err != nil {
		return err
	}
	if err := k.Deliver(ctx); err != nil {
		k.Close()
		return err
	}
	l.keeper = k
	return nil
}

// connect opens a stream and gives it as a connection, with deadlines.
func (l *link) connect(ctx context.Context, r *vmwire.Request) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	st, err := l.open(ctx, r)
	if err != nil {
		return nil, err
	}
	near, fd, err := keeper.Socketpair()
	if err != nil {
		st.Close()
		return nil, err
	}
	go keeper.Splice(st, near)
	f := os.NewFile(uintptr(fd), "stream")
	defer f.Close()
	return net.FileConn(f)
}
