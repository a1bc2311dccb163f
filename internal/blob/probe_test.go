package blob

import "testing"

func TestProbe(t *testing.T) {
	needFuse(t)
	resend, err := Probe()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("resend: %v", resend)
}
