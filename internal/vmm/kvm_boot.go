package vmm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// ProbeBoot is the probe's second stage: boot starts a machine with the kernel under KVM and hears its guest. It alone is right about a
// kernel, and a machine that hangs says nothing, so boot must be bounded. The verdict is kept in file (empty: nowhere) for this start of the
// host, its modules, the monitor's version and the kernel.
func ProbeBoot(ctx context.Context, file string, v Verdict, f Features, k *Kernel, boot func(context.Context) error) Verdict {
	key := fmt.Sprintf("%s|%s %s|%s", probeKey(), f.Driver, f.Version, k.Sum)
	kept := map[string]verdictFile{} // by driver: one of each is kept
	if text, err := os.ReadFile(file); file != "" && err == nil {
		json.Unmarshal(text, &kept)
	}
	if old, ok := kept[f.Driver]; ok && old.Key == key && old.Verdict.Boots != nil {
		v.Boots, v.Reason = old.Verdict.Boots, old.Verdict.Reason
		return v
	}
	err := boot(ctx)
	up := err == nil
	v.Boots = &up
	if err != nil {
		v.Reason = err.Error()
	}
	if file == "" || ctx.Err() != nil {
		return v
	}
	kept[f.Driver] = verdictFile{key, v}
	if text, err := json.Marshal(kept); err == nil {
		os.MkdirAll(filepath.Dir(file), 0o700)
		if os.WriteFile(file+".new", text, 0o600) == nil {
			os.Rename(file+".new", file)
		}
	}
	return v
}
