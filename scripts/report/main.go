// Command report reads the output of `go test -json`, prints what failed and what was skipped and why, and fails when a skip's reason is
// not on the list of things that can't exist on a test machine.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"sort"
	"strings"
	"time"
)

// allowed are the reasons for which a test may be skipped; each names something that a machine may lack. The last two belong to pairs of
// which one applies: a backend with and without network open, a build with and without the guest.
var allowed = regexp.MustCompile(`(?i)kvm|apparmor|project quota|core scheduling|cgroup v2 controllers|gpu|mig\b|firecracker|torture|IPv6 is off` +
	`|the backend has network open|a dsec-guest is embedded`)

type event struct {
	Time                          time.Time
	Action, Package, Test, Output string
}

func main() {
	f, err := os.Open(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer f.Close()
	output := map[string][]string{}
	var passed, failed, skipped int
	var bad, slow []string
	reasons := map[string]int{}
	broken := map[string]bool{}     // packages with a failed test
	began := map[string]time.Time{} // of packages' first tests: before that they wait for their turn
	scan := bufio.NewScanner(f)
	scan.Buffer(make([]byte, 1<<20), 16<<20)
	for scan.Scan() {
		var e event
		if json.Unmarshal(scan.Bytes(), &e) != nil {
			fmt.Println(scan.Text()) // a build error
			continue
		}
		name := e.Package + " " + e.Test
		switch e.Action {
		case "run":
			if began[e.Package].IsZero() {
				began[e.Package] = e.Time
			}
		case "output", "build-output":
			output[name] = append(output[name], e.Output)
		case "pass":
			if e.Test != "" {
				passed++
			} else if took := e.Time.Sub(began[e.Package]).Seconds(); took > 20 && !began[e.Package].IsZero() {
				slow = append(slow, fmt.Sprintf("%6.1f s %s", took, e.Package))
			}
			delete(output, name)
		case "fail":
			if e.Test != "" {
				failed++
				broken[e.Package] = true
			} else if !broken[e.Package] {
				failed++ // the package did not build, or died
			}
			fmt.Printf("--- FAIL %s\n%s", name, tail(output[name]))
		case "build-fail":
			failed++
			fmt.Println("--- BUILD FAILED", tail(output[name]))
		case "skip":
			if e.Test == "" {
				continue
			}
			skipped++
			why := reason(output[name])
			reasons[why]++
			if !allowed.MatchString(why) {
				bad = append(bad, name+": "+why)
			}
		}
	}
	sort.Strings(slow)
	for _, s := range slow {
		fmt.Println(s)
	}
	for why, n := range reasons {
		fmt.Printf("skipped %d: %s\n", n, why)
	}
	for _, b := range bad {
		fmt.Println("skipped for a reason that is not on the list:", b)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 || len(bad) > 0 || passed == 0 {
		os.Exit(1)
	}
}

func reason(lines []string) string {
	var out []string
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "===") || strings.HasPrefix(l, "---") {
			continue
		}
		if _, after, ok := strings.Cut(l, ".go:"); ok {
			if _, text, ok := strings.Cut(after, ": "); ok {
				l = text
			}
		}
		out = append(out, l)
	}
	return strings.Join(out, " ")
}

func tail(lines []string) string {
	if len(lines) > 60 {
		lines = lines[len(lines)-60:]
	}
	return strings.Join(lines, "")
}
