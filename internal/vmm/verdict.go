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
