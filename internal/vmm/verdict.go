package vmm

// Verdict says whether /dev/kvm runs guests.
type Verdict struct {
	KVM       string   `json:"kvm"` // native, emulated, broken or absent
	NsPerInsn float64  `json:"ns_per_insn,omitempty"`
	Failed    []string `json:"failed,omitempty"` // instructions that did not run
	Boots     *bool    `json:"boots,omitempty"`  // the second stage: nil when it was not tried
	Reason    string   `json:"reason,omitempty"`
}

// Usable reports whether guests may be run by KVM.
func (v Verdict) Usable() bool { return v.KVM == "native" && (v.Boots == nil || *v.Boots) }

// Why says what is wrong where KVM can't be used.
func (v Verdict) Why() string {
	if v.KVM == "native" && v.Boots != nil && !*v.Boots {
		return "the probe's guest runs, a machine with the guests' kernel does not come up: " + v.Reason
	}
	return v.Reason
}
