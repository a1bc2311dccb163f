package trajectory_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// TestMain lets this binary be the process that TestKill kills.
func TestMain(m *testing.M) {
	if dir := os.Getenv("DSEC_TEST_APPEND"); dir != "" {
		appendForever(dir)
	}
	os.Exit(m.Run())
}

func appendForever(dir string) {
	l, err := trajectory.Open(small(dir), quiet)
	if err != nil {
		fmt.Println("open", err)
		os.Exit(1)
	}
	go l.Run(context.Background())
	var out sync.Mutex
	for k := range 4 {
		go func() {
			key := fmt.Sprint(k)
			st, err := l.Stat(testID(key))
			if err != nil {
				l.Append(context.Background(), testID(key), []trajectory.Record{create()}, sandbox.DurabilityProcess)
				st.LastSeq = 1
			}
			for i := st.LastSeq + 1; ; i++ {
				rec := trajectory.Record{Kind: trajectory.KindStepEnd, Step: fmt.Sprint(i), Payload: make([]byte, i*37%3000)}
				seq, err := l.Append(context.Background(), testID(key), []trajectory.Record{rec}, sandbox.DurabilityProcess)
				if err != nil || seq != i {
					fmt.Println("append", seq, i, err)
					os.Exit(1)
				}
				out.Lock()
				fmt.Println("ack", key, seq)
				out.Unlock()
			}
		}()
	}
	select {}
}

// TestKill kills a real process at random moments: what it acknowledged is there.
func TestKill(t *testing.T) {
	dir := t.TempDir()
	acked := map[string]uint64{}
	for round := range 10 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "DSEC_TEST_APPEND="+dir)
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Duration(20+13*round)*time.Millisecond, func() { cmd.Process.Kill() })
		for in := bufio.NewScanner(pipe); in.Scan(); {
			var key string
			var seq uint64
			if n, _ := fmt.Sscanf(in.Text(), "ack %s %d", &key, &seq); n == 2 {
				acked[key] = seq
			} else if !strings.HasPrefix("ack", in.Text()) {
				t.Fatal(in.Text())
			}
		}
		cmd.Wait()
		l, err := trajectory.Open(small(dir), quiet)
		if err != nil {
			t.Fatal(err)
		}
		for key, seq := range acked {
			recs := readAll(t, l, key)
			if uint64(len(recs)) < seq {
				t.Fatalf("round %d: %s has %d records, %d were acknowledged", round, key, len(recs), seq)
			}
			for i, r := range recs {
				if r.Seq != uint64(i)+1 || i > 0 && (r.Step != fmt.Sprint(r.Seq) || uint64(len(r.Payload)) != r.Seq*37%3000) {
					t.Fatalf("record %d is %d of step %s", i+1, r.Seq, r.Step)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(acked) == 0 {
		t.Fatal("nothing was acknowledged")
	}
	t.Log(acked)
}

// TestConcurrent appends from many callers while Run seals, others follow, and trajectories come and go.
func TestConcurrent(t *testing.T) {
	l := open(t, small(t.TempDir()))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	run := make(chan error, 1)
	stop, end := context.WithCancel(ctx)
	go func() { run <- l.Run(stop) }()
	const callers, each = 16, 200
	var wg sync.WaitGroup
	for k := range callers {
		key := fmt.Sprint(k)
		add(t, l, key, create())
		wg.Go(func() {
			d := sandbox.DurabilityProcess
			if k%4 == 0 {
				d = sandbox.DurabilityHost
			}
			for i := range each {
				recs := []trajectory.Record{output("s", int64(i)*500, strings.Repeat("x", 500)), {Kind: trajectory.KindSignal, Step: "s"}}
				if seq, err := l.Append(ctx, testID(key), recs, d); err != nil || seq != uint64(2*i+2) {
					t.Error(seq, err)
					return
				}
			}
		})
		wg.Go(func() {
			want := uint64(1)
			for r, err := range l.Follow(ctx, testID(key), trajectory.Query{}) {
				if err != nil || r.Seq != want {
					t.Error(r.Seq, want, err)
					return
				}
				if want++; want > 2*each+1 {
					break
				}
			}
			if k%2 == 0 {
				if err := l.Remove(ctx, testID(key)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	end()
	if err := <-run; err != nil {
		t.Error(err)
	}
	cancel()
	if n := len(l.Trajectories()); n != callers/2 {
		t.Errorf("%d trajectories, want %d", n, callers/2)
	}
	for k := 1; k < callers; k += 2 {
		if n := len(readAll(t, l, fmt.Sprint(k))); n != 2*each+1 {
			t.Errorf("%d has %d records", k, n)
		}
	}
}
