package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// s3Server is an S3 server in this process, reached over a slow link.
type s3Server struct {
	*storetest.MemoryS3
	args []string // of a service
	env  []string
}

func newRemote(t testing.TB) *s3Server {
	t.Helper()
	r := &s3Server{MemoryS3: storetest.NewS3(ownDir(t))}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: r}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	r.args = []string{"--store", fmt.Sprintf("s3://%s/e2e?endpoint=http://%s&path_style=true", storetest.Bucket, l.Addr())}
	r.env = []string{"AWS_ACCESS_KEY_ID=" + storetest.AccessKey, "AWS_SECRET_ACCESS_KEY=" + storetest.SecretKey}
	return r
}

// onDemand is a `dsec up` whose layers lie in a store that is not local.
func onDemand(t testing.TB, r *s3Server, conf string, args ...string) *service {
	t.Helper()
	s := newService(ownDir(t), "up", append(withDefaults(r.args), args...)...)
	s.env, s.conf = r.env, conf
	t.Cleanup(func() { // after its end
		if pid := s.blobd(); pid != 0 {
			t.Errorf("blob daemon %d is left", pid)
		}
		for _, pattern := range []string{"/sys/fs/cgroup/dsec-%s-blobd", "/sys/fs/cgroup/*/dsec-%s-blobd"} {
			if left, _ := filepath.Glob(fmt.Sprintf(pattern, s.instance())); len(left) > 0 {
				t.Errorf("cgroups %v are left", left)
			}
		}
	})
	return start(t, s)
}

// blobd is the blob daemon's process; 0: none lives.
func (s *service) blobd() int {
	for _, p := range processes() {
		if strings.Contains(p.args, " blobd --run "+filepath.Join(s.run, "blobd-")) && !strings.Contains(p.name, "zombie") {
			return p.pid
		}
	}
	return 0
}

func (s *service) blobStats(t testing.TB) blob.Stats {
	t.Helper()
	c, err := blob.Dial(within(t), filepath.Join(s.run, "blobd-"+s.instance()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	st, err := c.Stats(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func (s *service) metrics(t testing.TB) (int, string) {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, "http://dsec/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+s.key())
	return s.send(t, r)
}

// bigLayer is a layer with a file of so many MiB whose sum is known.
func bigLayer(t testing.TB, s *service, seed uint64, mib int) (layer, sum string) {
	t.Helper()
	data := storetest.Random(seed, mib<<20)
	return s.layer(t, tarOf(entry{name: "srv/big", data: string(data)})), sumOf(data)
}

func sumOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func TestSandboxesStartFromAStoreThatIsNotLocal(t *testing.T) {
	r := newRemote(t)
	s := onDemand(t, r, "")
	small := s.small(t)
	big, sum := bigLayer(t, s, 1, 40)
	sb := s.box(t, func(o *client.Options) { o.Layers = []string{small, big} })
	if got := out(t, sb, "echo hello"); got != "hello\n" {
		t.Errorf("hello: %q", got)
	}
	if st := s.blobStats(t); st.Fetched == 0 || st.Fetched > 20<<20 {
		t.Errorf("%d octets were fetched for a start; want some, and far fewer than the layers have", st.Fetched)
	}
	if got := strings.Fields(out(t, sb, "sha256sum /srv/big"))[0]; got != sum {
		t.Errorf("sum %s, want %s", got, sum)
	}
	before := s.blobStats(t).Fetched
	second := s.box(t, func(o *client.Options) { o.Layers = []string{small, big} })
	if got := strings.Fields(out(t, second, "sha256sum /srv/big"))[0]; got != sum {
		t.Errorf("second sandbox: sum %s, want %s", got, sum)
	}
	if after := s.blobStats(t).Fetched; after != before {
		t.Errorf("a second sandbox fetched %d octets again", after-before)
	}
	// The same is told to whoever watches the host.
	status, text := s.metrics(t)
	for _, name := range []string{"asked_bytes_total", "cache_bytes_total", "fetched_bytes_total", "reads_total", "fetch_seconds_count", "daemon_starts_total"} {
		at := strings.Index(text, "\ndsec_blob_"+name+" ")
		if status != http.StatusOK || at < 0 || strings.HasPrefix(text[at+len("\ndsec_blob_"+name+" "):], "0\n") {
			t.Errorf("metrics (%d) do not tell %s", status, name)
		}
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), "dsec-blobs") {
		t.Errorf("the daemon's file system is attached to the tree (%v)", err)
	}
}

// The daemon killed again and again while sandboxes read: right sums, no error.
func TestBlobDaemonKilledDuringReads(t *testing.T) {
	r := newRemote(t)
	s := onDemand(t, r, "[blobs]\nlimit = \"64m\"\n")
	small := s.small(t)
	const boxes = 4
	var layers, sums [boxes]string
	var sbs [boxes]*client.Sandbox
	for i := range boxes {
		layers[i], sums[i] = bigLayer(t, s, uint64(i+10), 32)
		sbs[i] = s.box(t, func(o *client.Options) { o.Layers = []string{small, layers[i]} })
	}
	first := s.blobd()
	if first == 0 {
		t.Fatal("no blob daemon lives")
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	for i := range boxes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			res, err := sbs[i].Run(within(t), sh("sha256sum /srv/big"))
			if err != nil || !res.OK() {
				t.Errorf("read: %v, %v", err, res)
				return
			}
			if got := strings.Fields(string(res.Stdout))[0]; got != sums[i] {
				t.Errorf("sum %s, want %s", got, sums[i])
			}
		}()
	}
	go func() { wg.Wait(); close(done) }()
	kills := 0
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(150 * time.Millisecond):
			if pid := s.blobd(); pid != 0 && kills < 8 {
				syscall.Kill(pid, syscall.SIGKILL)
				kills++
			}
		}
	}
	if kills < 2 {
		t.Logf("the reads were over after %d kills", kills)
	}
	if got := out(t, sbs[0], "echo alive"); got != "alive\n" {
		t.Errorf("%q", got)
	}
}

// The host dies with its blob daemon while a sandbox reads; its next start serves the read.
func TestHostAndBlobDaemonKilledDuringARead(t *testing.T) {
	r := newRemote(t)
	s := onDemand(t, r, "", "--keep")
	small := s.small(t)
	big, sum := bigLayer(t, s, 3, 24)
	sb := s.box(t, func(o *client.Options) { o.Layers = []string{small, big} })
	r.SetFault(func(op, _ string) storetest.S3Fault { return storetest.S3Fault{Delay: 150 * time.Millisecond} })
	if _, err := sb.Start(within(t), client.Cmd{ID: "sum", Argv: []string{"sha256sum", "/srv/big"}}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	daemon := s.blobd()
	if daemon == 0 {
		t.Fatal("no blob daemon lives")
	}
	s.kill()
	syscall.Kill(daemon, syscall.SIGKILL)
	time.Sleep(200 * time.Millisecond)
	r.SetFault(nil)
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	res := exe(t, s.client().Sandbox(sb.ID), client.Cmd{ID: "sum", Argv: []string{"sha256sum", "/srv/big"}}) // joins
	if !res.OK() || strings.Fields(string(res.Stdout))[0] != sum {
		t.Errorf("%s, want sum %s", describe(res), sum)
	}
	if s.blobd() == 0 {
		t.Error("no blob daemon lives after the restart")
	}
	s.stopKept(t)
}

// The store is dead: reads fail with EIO at the deadline, sandboxes stay and can be stopped, and all is fine afterwards.
func TestStoreDeadInTheMiddle(t *testing.T) {
	r := newRemote(t)
	s := onDemand(t, r, "[blobs]\ndeadline = \"4s\"\n")
	small := s.small(t)
	big, sum := bigLayer(t, s, 5, 24)
	mk := func() *client.Sandbox {
		return s.box(t, func(o *client.Options) { o.Layers = []string{small, big} })
	}
	sb, other, third := mk(), mk(), mk()
	if got := out(t, sb, "head -c 10 /srv/big | wc -c"); strings.TrimSpace(got) != "10" {
		t.Fatalf("%q", got)
	}
	r.SetFault(func(string, string) storetest.S3Fault { return storetest.S3Fault{Status: 503, Code: "SlowDown"} })
	res := exe(t, sb, sh("sha256sum /srv/big"))
	if res.OK() || !strings.Contains(string(res.Stderr), "Input/output error") {
		t.Errorf("read of a dead store: %s, want an I/O error", describe(res))
	}
	if got := out(t, sb, "echo alive"); got != "alive\n" {
		t.Errorf("%q", got)
	}
	// One whose read is stuck is stopped.
	if _, err := other.Start(within(t), sh("sha256sum /srv/big")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond)
	if err := other.Close(); err != nil {
		t.Errorf("stop: %v", err)
	}
	// One whose read is stuck is paused when the read has failed.
	if _, err := third.Start(within(t), sh("cat /srv/big >/dev/null; sleep 100")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond)
	if err := third.Pause(within(t)); err != nil {
		t.Errorf("pause: %v", err)
	}
	r.SetFault(nil)
	if got := strings.Fields(out(t, sb, "sha256sum /srv/big"))[0]; got != sum {
		t.Errorf("sum afterwards %s, want %s", got, sum)
	}
}

// What a run reads comes first in a layer that is laid out by it: the next host fetches that at once.
func TestLayersAreLaidOutByWhatWasRead(t *testing.T) {
	s := newService(ownDir(t), "up", withDefaults(nil)...)
	s.conf = "[blobs]\nseen = true\n"
	start(t, s)
	var entries []entry
	for i := range 20 {
		entries = append(entries, entry{name: fmt.Sprintf("srv/f%02d", i), data: string(storetest.Random(uint64(i), 1<<20))})
	}
	layer := s.layer(t, tarOf(entries...))
	sb := s.box(t, func(o *client.Options) { o.Layers = []string{s.small(t), layer} })
	out(t, sb, "cat /srv/f17 /srv/f03 >/dev/null")
	cmd := s.dsec("layer", "profile", layer, "--run", s.run, "--local", filepath.Join(s.state, "store"), "--layout")
	b, err := cmd.Output()
	if err != nil {
		t.Fatalf("profile: %v %s", err, b)
	}
	if got := strings.Fields(string(b)); len(got) != 2 || !strings.HasSuffix(got[0], "f17") || !strings.HasSuffix(got[1], "f03") {
		t.Errorf("profile: %q, want f17 and f03", b)
	}
	cmd = s.dsec("layer", "inspect", layer, "-o", "json")
	if b, err = cmd.Output(); err != nil {
		t.Fatalf("inspect: %v %s", err, b)
	}
	next := s.box(t, func(o *client.Options) { o.Layers = []string{s.small(t), layer} })
	if got := strings.Fields(out(t, next, "sha256sum /srv/f05"))[0]; got != sumOf(storetest.Random(5, 1<<20)) {
		t.Error("wrong octets after the layer was laid out anew")
	}
	// A list that is known before is given to the build.
	tree, list := t.TempDir(), filepath.Join(t.TempDir(), "hot")
	for i := range 3 {
		must(t, os.WriteFile(filepath.Join(tree, fmt.Sprint("f", i)), storetest.Random(uint64(i+30), 1<<20), 0o644))
	}
	must(t, os.WriteFile(list, []byte("/f2\n"), 0o644))
	if b, err := s.dsec("layer", "build", "hot/l", "--dir", tree, "--hot", list).CombinedOutput(); err != nil {
		t.Fatalf("build --hot: %v %s", err, b)
	}
	r, err := s.client().GetLayer(within(t), "hot/l")
	must(t, err)
	text, err := os.ReadFile(filepath.Join(s.state, "store", "layers", strings.TrimPrefix(r.Layer.Id, "sha256:")+".json"))
	if err != nil || !strings.Contains(string(text), `"hot":1048576`) {
		t.Errorf("%s (%v), want one file of 1 MiB in front", text, err)
	}
}

// Many sandboxes start over cold layers while the bucket is collected again and again, other layers come and go, and the store is dead for a while:
// no wrong octet, no sandbox lost, errors that say what is wrong, and all is fine afterwards.
func TestGCAndADeadStoreInABurst(t *testing.T) {
	r := newRemote(t)
	dead := 3 * time.Second
	if os.Getenv("DSEC_TORTURE") != "" {
		dead = 30 * time.Second
	}
	s := onDemand(t, r, "[blobs]\nlimit = \"96m\"\n")
	small := s.small(t)
	const layers, boxes = 5, 20
	var ids, sums [layers]string
	for i := range layers {
		ids[i], sums[i] = bigLayer(t, s, uint64(i+70), 12)
	}
	stop := make(chan struct{})
	var beside sync.WaitGroup
	loop := func(do func(int)) {
		beside.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					do(i)
				}
			}
		})
	}
	collections := 0
	loop(func(int) {
		r.Advance(time.Hour)
		cmd := s.dsec("gc", r.args[1], "--grace", "2h")
		cmd.Env = append(cmd.Env, r.env...)
		b, err := cmd.CombinedOutput()
		// It may be refused by the dead store, or find that the clock has jumped under it.
		if err == nil {
			collections++
		} else if text := string(b); !strings.Contains(text, "dsec: ") {
			t.Errorf("gc: %v %s", err, b)
		}
	})
	loop(func(i int) { // comes and goes: the same contents as a layer that stays, and some of its own
		name := fmt.Sprintf("gc/l%d", i%2)
		data := append(storetest.Random(uint64(70+i%layers), 12<<20), storetest.Random(uint64(1000+i), 1<<20)...)
		if _, err := s.client().ImportLayer(within(t), name, "test", bytes.NewReader(tarOf(entry{name: "srv/other", data: string(data)}))); err != nil {
			return // while the store is dead
		}
		s.dsec("layer", "rm", name).Run()
	})
	time.AfterFunc(500*time.Millisecond, func() {
		r.SetFault(func(string, string) storetest.S3Fault { return storetest.S3Fault{Status: 503, Code: "SlowDown"} })
		time.AfterFunc(dead, func() { r.SetFault(nil) })
	})
	var wg sync.WaitGroup
	for i := range boxes {
		wg.Go(func() {
			k := i % layers
			for try := 0; ; try++ {
				sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{small, ids[k]}, Memory: 64 << 20})
				if err != nil {
					if try > 20 || strings.TrimSpace(err.Error()) == "" {
						t.Errorf("create: %v", err)
						return
					}
					time.Sleep(time.Second)
					continue
				}
				res, err := sb.Run(within(t), sh("sha256sum /srv/big"))
				switch {
				case err != nil:
					t.Errorf("read: %v", err)
				case res.OK() && strings.Fields(string(res.Stdout))[0] != sums[k]:
					t.Errorf("wrong octets: %s", describe(res))
				case !res.OK() && !strings.Contains(string(res.Stderr), "Input/output error"):
					t.Errorf("read: %s", describe(res))
				}
				if err == nil && !res.OK() { // at the deadline of a store that was dead longer
					r.SetFault(nil)
					if res, err = sb.Run(within(t), sh("sha256sum /srv/big")); err != nil || !res.OK() || strings.Fields(string(res.Stdout))[0] != sums[k] {
						t.Errorf("afterwards: %v %s", err, describe(res))
					}
				}
				if err := sb.Stop(within(t)); err != nil {
					t.Errorf("stop: %v", err)
				}
				return
			}
		})
	}
	wg.Wait()
	close(stop)
	beside.Wait()
	r.SetFault(nil)
	if collections == 0 {
		t.Error("no collection was carried out")
	}
	t.Logf("%d collections", collections)
	for range 2 {
		r.Advance(3 * time.Hour)
		cmd := s.dsec("gc", r.args[1], "--grace", "2h")
		cmd.Env = append(cmd.Env, r.env...)
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("gc: %v %s", err, b)
		}
	}
	for k := range layers { // with the cache full of others
		sb := s.box(t, func(o *client.Options) { o.Layers = []string{small, ids[k]} })
		if got := strings.Fields(out(t, sb, "sha256sum /srv/big"))[0]; got != sums[k] {
			t.Errorf("layer %d afterwards: sum %s, want %s", k, got, sums[k])
		}
	}
}
