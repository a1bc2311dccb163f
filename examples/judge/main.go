// Command judge is the main job of function calls: it gives Go's own test programs to dsec as an online judge gets its submissions, and
// checks the verdicts. Each program must exit with 0 and print exactly what its golden file holds, or nothing without one. Each is then
// judged twice more with a mistake put in: with an exit code of 3, which must be told as RE(3), and against an expected output in which one
// octet was changed, which must be told as a difference. Its exit code is 0 only if every verdict is right.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	var n, parallel int
	var only string
	flag.IntVar(&n, "n", 0, "judge a sample of so many programs; 0: all")
	flag.IntVar(&parallel, "parallel", 8, "calls at once")
	flag.StringVar(&only, "only", "", "only programs whose path contains this")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, n, parallel, only); err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, n, parallel int, only string) error {
	root, err := folder()
	if err != nil {
		return err
	}
	all, skipped, err := collect(root)
	if err != nil {
		return err
	}
	if len(all) < 100 {
		return fmt.Errorf("%s holds %d test programs, want at least 100: is it the test folder of a Go distribution?", root, len(all))
	}
	picked := slices.DeleteFunc(sample(all, n), func(p *program) bool { return !strings.Contains(p.path, only) })
	c, err := client.Connect(ctx, client.Config{Timeout: 10 * time.Minute})
	if err != nil {
		return err
	}
	start := time.Now()
	j := &judge{client: c}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for _, p := range picked {
		g.Go(func() error { return j.program(gctx, p) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	j.report(os.Stdout, len(all), skipped)
	fmt.Printf("%d programs, %d verdicts in %.0f s\n", len(picked), j.right+len(j.wrong), time.Since(start).Seconds())
	if len(j.wrong) > 0 {
		return fmt.Errorf("%d verdicts are wrong", len(j.wrong))
	}
	return nil
}

// folder is where Go's test programs lie.
func folder() (string, error) {
	root := os.Getenv("DSEC_GO_TEST")
	if root == "" {
		out, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			return "", fmt.Errorf("go env GOROOT: %w", err)
		}
		root = filepath.Join(strings.TrimSpace(string(out)), "test")
	}
	if _, err := os.Stat(root); err != nil {
		return "", fmt.Errorf("the Go distribution's test programs: %w (DSEC_GO_TEST names their folder)", err)
	}
	return root, nil
}

type judge struct {
	client *client.Client

	mu    sync.Mutex
	right int
	wrong []string
	kinds map[string]int
}

// mistake is a second file of the package: its init runs before main.
const mistake = "package main\n\nimport dsecos \"os\"\n\nfunc init() { dsecos.Exit(3) }\n"

// program judges one program in its three ways. An error means that the platform refused.
func (j *judge) program(ctx context.Context, p *program) error {
	res, err := j.call(ctx, p, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", p.path, err)
	}
	got := verdict(res, p.want)
	j.note(p.path, "as it is", got, "OK")
	// The same output against another golden one: a judge that does not look would say OK again.
	if got == "OK" {
		j.note(p.path, "one octet of the expected output changed", verdict(res, changed(p.want)), "WA")
	}
	res, err = j.call(ctx, p, []byte(mistake))
	if err != nil {
		return fmt.Errorf("%s: %w", p.path, err)
	}
	j.note(p.path, "exit 3 put in", verdict(res, nil), "RE(3)")
	return nil
}

// call compiles and runs a program under its own name, which some of them look for in their stacks.
func (j *judge) call(ctx context.Context, p *program, extra []byte) (*client.CallAnswer, error) {
	c := client.Call{Lang: "go-test", Code: p.path, Files: []*dsecv1.CallFile{{Path: p.file(), Data: p.code}}, CompileArgs: []string{p.file()}, HashOnly: true, Queue: 10 * time.Minute}
	if extra != nil {
		c.Files = append(c.Files, &dsecv1.CallFile{Path: "a_mistake.go", Data: extra})
		c.CompileArgs = []string{"a_mistake.go", p.file()}
	}
	return j.client.FnCall(ctx, c)
}

// verdict is the platform's, with WA for another output; RE, SIG and limits carry their number or name.
func verdict(r *client.CallAnswer, want []byte) string {
	res := r.Result
	if res == nil && r.Compile == nil {
		return r.Verdict
	}
	if res == nil {
		return strings.Join(strings.Fields(r.Verdict+" "+r.Compile.Limit+" "+r.Compile.Error+" "+output(r.Compile)), " ")
	}
	switch res.Verdict {
	case "OK":
		if out := output(res); out != string(want) {
			return "WA"
		}
		return "OK"
	case "RE":
		return fmt.Sprintf("RE(%d)", res.Code)
	case "SIG":
		return fmt.Sprintf("SIG(%d)", res.Signal)
	}
	return strings.TrimSpace(res.Verdict + " " + res.Limit + " " + res.Error)
}

func output(r *client.CallResult) string {
	if r == nil {
		return ""
	}
	return string(r.Stdout) + string(r.Stderr)
}

// changed is an expected output that differs in one octet.
func changed(want []byte) []byte {
	if len(want) == 0 {
		return []byte{'x'}
	}
	out := bytes.Clone(want)
	out[len(out)/2] ^= 1
	return out
}

func (j *judge) note(path, how, got, want string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.kinds == nil {
		j.kinds = map[string]int{}
	}
	j.kinds[how+": "+want]++
	if got == want {
		j.right++
		return
	}
	wrong := fmt.Sprintf("%s (%s): %.300q, want %s", path, how, got, want)
	j.wrong = append(j.wrong, wrong)
	fmt.Fprintln(os.Stderr, "WRONG", wrong) // at once too: all of them take a while
}

func (j *judge) report(w *os.File, all int, skipped map[string]string) {
	reasons := map[string]int{}
	for _, r := range skipped {
		reasons[r]++
	}
	fmt.Fprintf(w, "%d programs in the folder; left out:\n", all)
	for _, r := range slices.Sorted(maps.Keys(reasons)) {
		fmt.Fprintf(w, "  %3d %s\n", reasons[r], r)
	}
	for _, k := range slices.Sorted(maps.Keys(j.kinds)) {
		fmt.Fprintf(w, "%5d judged %s\n", j.kinds[k], k)
	}
	slices.Sort(j.wrong)
	for _, l := range j.wrong {
		fmt.Fprintln(w, "WRONG", l)
	}
}
