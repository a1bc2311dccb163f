package sandbox

import (
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"strings"
)

// MaxIDLength bounds an ID so that "<port>-<id>" is still a DNS label (63 octets, RFC 1035).
const MaxIDLength = 56

// ID names a sandbox for ever: "<host>-<random>", a DNS label. The host part is the identity (not the address) of the host
// that created it, which lets any gateway forward without a lookup.
type ID string

// HostID is the identity of a host: 6 to 20 lower-case letters and digits, chosen once and kept in the host's state.
type HostID string

var lower32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// Names are checked several times on the way of every request, by hand: as regular expressions they took a hundredth of a create.

func lowerOrDigit(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }

// isHostID is ^[a-z][a-z0-9]{5,19}$.
func isHostID(s string) bool {
	if len(s) < 6 || len(s) > 20 || s[0] < 'a' || s[0] > 'z' {
		return false
	}
	for i := range len(s) {
		if !lowerOrDigit(s[i]) {
			return false
		}
	}
	return true
}

// isID is ^[a-z][a-z0-9]{5,19}-[a-z0-9]{16}$.
func isID(s string) bool {
	at := len(s) - 17
	if at < 0 || s[at] != '-' || !isHostID(s[:at]) {
		return false
	}
	for i := at + 1; i < len(s); i++ {
		if !lowerOrDigit(s[i]) {
			return false
		}
	}
	return true
}

// isLabel is a DNS label: ^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$.
func isLabel(s string) bool {
	if len(s) < 1 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if !lowerOrDigit(s[i]) && s[i] != '-' {
			return false
		}
	}
	return true
}

// isKey is ^[A-Za-z0-9._:/@+-]{1,200}$.
func isKey(s string) bool {
	if len(s) < 1 || len(s) > 200 {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case lowerOrDigit(c), 'A' <= c && c <= 'Z', c == '.', c == '_', c == ':', c == '/', c == '@', c == '+', c == '-':
		default:
			return false
		}
	}
	return true
}

func randomText(octets int) string {
	b := make([]byte, octets)
	rand.Read(b)
	return lower32.EncodeToString(b)
}

// NewHostID returns a fresh identity for a host.
func NewHostID() HostID { return HostID("h" + randomText(5)) }

// NewID returns a fresh sandbox ID of the host.
func NewID(host HostID) ID { return ID(string(host) + "-" + randomText(10)) }

// NewKey returns a fresh idempotency key, for callers that gave none.
func NewKey() string { return "k-" + randomText(15) }

// ParseID checks a sandbox ID that came over the wire.
func ParseID(s string) (ID, error) {
	if len(s) > MaxIDLength || !isID(s) {
		return "", fmt.Errorf("sandbox id %.80q: want <host>-<16 letters or digits>: %w", s, ErrInvalid)
	}
	return ID(s), nil
}

// Host is the identity of the host that made the sandbox.
func (id ID) Host() HostID {
	host, _, _ := strings.Cut(string(id), "-")
	return HostID(host)
}

// ParseHostID checks the identity of a host.
func ParseHostID(s string) (HostID, error) {
	if !isHostID(s) {
		return "", fmt.Errorf("host id %.80q: want 6 to 20 lower-case letters and digits, a letter first: %w", s, ErrInvalid)
	}
	return HostID(s), nil
}

// CheckName reports whether s may name a sandbox: a DNS label of at most 56 octets that does not look like an ID.
func CheckName(s string) error {
	switch {
	case len(s) > MaxIDLength || !isLabel(s):
		return fmt.Errorf("name %.80q: want a DNS label (a-z, 0-9, inner hyphens) of at most %d characters: %w", s, MaxIDLength, ErrInvalid)
	case isID(s):
		return fmt.Errorf("name %.80q: looks like a sandbox id; choose another: %w", s, ErrInvalid)
	}
	return nil
}

// CheckKey reports whether s may be an idempotency key, a job name or a command ID. The field's name is put into the error.
func CheckKey(field, s string) error {
	if !isKey(s) {
		return fmt.Errorf("%s %.80q: want 1 to 200 of A-Z a-z 0-9 . _ : / @ + -: %w", field, s, ErrInvalid)
	}
	return nil
}
