package keeper

import (
	"context"
	"fmt"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// session is a living shell.
type session struct{ b *box }

func (s *session) onLost() {}

func (b *box) startInSession(context.Context, *sandbox.Command) error {
	return fmt.Errorf("sessions: %w", sandbox.ErrUnsupported)
}
func (b *box) openSession(context.Context, *sandbox.Session) error {
	return fmt.Errorf("sessions: %w", sandbox.ErrUnsupported)
}
func (b *box) closeSession(string) error { return fmt.Errorf("sessions: %w", sandbox.ErrUnsupported) }
func (b *box) sessionTimeout(*command)   {}
func (b *box) signalSession(*command, int) error {
	return fmt.Errorf("sessions: %w", sandbox.ErrUnsupported)
}
func (b *box) files(context.Context, string) (int, error) {
	return -1, fmt.Errorf("files: %w", sandbox.ErrUnsupported)
}
