package vmm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// keptBoots are the verdicts of a file, by driver.
func keptBoots(file string) map[string]verdictFile {
	kept := map[string]verdictFile{}
	if text, err := os.ReadFile(file); file != "" && err == nil {
		json.Unmarshal(text, &kept)
	}
	return kept
}

// KeptBoot adds to a verdict what the second stage found for a driver on this start of the host, if it was run.
func KeptBoot(file string, v Verdict, driver string) Verdict {
	if old, ok := keptBoots(file)[driver]; ok && strings.HasPrefix(old.Key, probeKey()+"|") && v.KVM == "native" {
		v.Boots = old.Verdict.Boots
		if v.Boots != nil && !*v.Boots {
			v.Reason = old.Verdict.Reason
		}
	}
	return v
}

// ProbeBoot is the probe's second stage: boot starts a machine with the kernel under KVM and hears its guest. It alone is right about a
// kernel, and a machine that hangs says nothing, so boot must be bounded; it is called once more when it fails. The verdict is kept in file (empty: nowhere) for this start of the
// host, its modules, the monitor's version and the kernel.
func ProbeBoot(ctx context.Context, file string, v Verdict, f Features, k *Kernel, boot func(context.Context) error) Verdict {
	key := fmt.Sprintf("%s|%s %s|%s", probeKey(), f.Driver, f.Version, k.Sum)
	kept := keptBoots(file)
	if old, ok := kept[f.Driver]; ok && old.Key == key && old.Verdict.Boots != nil {
		v.Boots, v.Reason = old.Verdict.Boots, old.Verdict.Reason
		return v
	}
	err := boot(ctx)
	if err != nil && ctx.Err() == nil { // it holds for long, and a busy host may be slow for once
		err = boot(ctx)
	}
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
