package sandbox

import (
	"regexp"
	"testing"

	"pgregory.net/rapid"
)

// What is checked by hand is what the expressions say.
func TestNamesAreAsTheirExpressions(t *testing.T) {
	for name, c := range map[string]struct {
		is   func(string) bool
		want *regexp.Regexp
	}{
		"host":  {isHostID, regexp.MustCompile(`^[a-z][a-z0-9]{5,19}$`)},
		"id":    {isID, regexp.MustCompile(`^[a-z][a-z0-9]{5,19}-[a-z0-9]{16}$`)},
		"label": {isLabel, regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)},
		"key":   {isKey, regexp.MustCompile(`^[A-Za-z0-9._:/@+-]{1,200}$`)},
	} {
		t.Run(name, rapid.MakeCheck(func(t *rapid.T) {
			s := rapid.OneOf(rapid.StringMatching(c.want.String()), rapid.StringN(0, 220, -1), rapid.StringMatching(`[a-z0-9.-]{0,70}\n?`),
				rapid.StringMatching(`[a-z][a-z0-9]{4,20}-?[a-z0-9]{15,17}`), rapid.StringMatching(`[A-Za-z0-9._:/@+-]{199,202}`)).Draw(t, "name")
			if c.is(s) != c.want.MatchString(s) {
				t.Fatalf("%q: %v by hand, %v by expression", s, c.is(s), c.want.MatchString(s))
			}
		}))
	}
}
