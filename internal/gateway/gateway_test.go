package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

var discard = slog.New(slog.DiscardHandler)

func fleetOf(c *cluster) *placement.Fleet {
	f := &placement.Fleet{}
	for _, h := range c.hosts {
		f.Hosts = append(f.Hosts, placement.Host{ID: h.id})
	}
	return f
}

func orderFirst(f *placement.Fleet, text string) sandbox.HostID { return placement.Order(f, text)[0] }

func TestEveryCallNeedsAKey(t *testing.T) {
	c := newCluster(t, 1)
	for _, path := range []string{"/dsec.v1.SandboxService/List", "/dsec.v1.LayerService/ListLayers", "/v1/files/x?path=/a", "/metrics", "/v1/ports/x/80/", "/nothing"} {
		for _, key := range []string{"", "wrong", "dsec_aaaaaaaaaaaa_bbbb"} {
			r, _ := http.NewRequest("POST", c.url+path, strings.NewReader("{}"))
			r.Header.Set("Content-Type", "application/json")
			if key != "" {
				r.Header.Set("Authorization", "Bearer "+key)
			}
			resp, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 401 || !strings.Contains(string(body), "API key") {
				t.Errorf("%s with key %q: %d %s", path, key, resp.StatusCode, body)
			}
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		resp, err := http.Get(c.url + path)
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("%s: %v, %v", path, resp, err)
		}
		resp.Body.Close()
	}
	info, err := c.Info.GetInfo(context.Background(), connect.NewRequest(&dsecv1.GetInfoRequest{}))
	if err != nil || info.Msg.Protocol != rpc.Protocol || info.Msg.Role != "gateway" {
		t.Errorf("%v, %v", info, err)
	}
	secret, _, err := c.keys.CreateKey(context.Background(), "default", "", time.Now().Add(200*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(201 * time.Millisecond)
	c.dial(secret)
	if _, err := c.create(t, &dsecv1.CreateRequest{}); !errors.Is(err, rpc.ErrUnauthenticated) || !strings.Contains(err.Error(), "expired") {
		t.Errorf("expired key: %v", err)
	}
}

func TestProjectsAreApart(t *testing.T) {
	c := newCluster(t, 2)
	ctx := context.Background()
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Key: "k", Name: "n"})
	below, err := c.Iam.CreateKey(ctx, connect.NewRequest(&dsecv1.CreateKeyRequest{Project: "default/team", Note: "team"}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Iam.CreateKey(ctx, connect.NewRequest(&dsecv1.CreateKeyRequest{Project: "other"})); !errors.Is(rpc.FromError(err), sandbox.ErrDenied) {
		t.Errorf("key of another project: %v", err)
	}
	top := c.key
	c.dial(below.Msg.Key)
	for _, ref := range []string{sb.Id, "n"} {
		if _, err := c.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: ref})); !errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
			t.Errorf("%s from another project: %v", ref, err)
		}
	}
	own := c.mustCreate(t, &dsecv1.CreateRequest{Key: "k", Name: "n"}) // layers of the project above are seen
	if own.Project != "default/team" || own.Id == sb.Id {
		t.Errorf("%v", own)
	}
	// A key opens the projects below its own, by header.
	get := func(key, project string) int {
		r, _ := http.NewRequest("POST", c.url+"/dsec.v1.SandboxService/Get", strings.NewReader(`{"id":"`+own.Id+`"}`))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-API-Key", key)
		r.Header.Set("Dsec-Project", project)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	for _, tc := range []struct {
		key, project string
		want         int
	}{{top, "default/team", 200}, {top, "default", 404}, {top, "default/tema", 404}, {top, "other", 403}, {below.Msg.Key, "default", 403}, {below.Msg.Key, "", 200}} {
		if got := get(tc.key, tc.project); got != tc.want {
			t.Errorf("%.20s for %q: %d, want %d", tc.key, tc.project, got, tc.want)
		}
	}
	c.dial(top)
	list, err := c.Iam.ListKeys(ctx, connect.NewRequest(&dsecv1.ListKeysRequest{}))
	if err != nil || len(list.Msg.Keys) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := c.Iam.RevokeKey(ctx, connect.NewRequest(&dsecv1.RevokeKeyRequest{Id: below.Msg.Info.Id})); err != nil {
		t.Fatal(err)
	}
	if got := get(below.Msg.Key, ""); got != 401 {
		t.Errorf("revoked key: %d", got)
	}
}

func TestListGoesThroughAllHostsInPages(t *testing.T) {
	c := newCluster(t, 3)
	want := map[string]bool{}
	for range 23 {
		want[c.mustCreate(t, &dsecv1.CreateRequest{}).Id] = true
	}
	for _, size := range []int32{0, 1, 4, 1000} {
		got, token, pages := map[string]bool{}, "", 0
		for {
			r, err := c.Sandboxes.List(context.Background(), connect.NewRequest(&dsecv1.ListRequest{PageSize: size, PageToken: token}))
			if err != nil {
				t.Fatal(err)
			}
			if size > 0 && len(r.Msg.Sandboxes) > int(size) {
				t.Fatalf("%d on a page of %d", len(r.Msg.Sandboxes), size)
			}
			for _, sb := range r.Msg.Sandboxes {
				if got[sb.Id] {
					t.Fatalf("%s twice", sb.Id)
				}
				got[sb.Id] = true
			}
			if token, pages = r.Msg.NextPageToken, pages+1; token == "" {
				break
			}
		}
		if len(got) != len(want) {
			t.Errorf("pages of %d: %d of %d in %d pages", size, len(got), len(want), pages)
		}
	}
	c.hosts[1].stop()
	r, err := c.Sandboxes.List(context.Background(), connect.NewRequest(&dsecv1.ListRequest{}))
	if err != nil || len(r.Msg.Errors) != 1 || r.Msg.Errors[0].Id != "hbbbbbbbb" || r.Msg.Errors[0].Code != "unavailable" {
		t.Errorf("a host is away: %v, %v", r, err)
	}
	for _, bad := range []string{"x", "!!"} {
		if _, err := c.Sandboxes.List(context.Background(), connect.NewRequest(&dsecv1.ListRequest{PageToken: bad})); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
			t.Errorf("token %q: %v", bad, err)
		}
	}
}

// A host that takes calls and does not answer holds up nothing but what is its own.
func TestHostThatHangs(t *testing.T) {
	c := newCluster(t, 3)
	names := map[string]*fakeHost{}
	for i := range 5 {
		sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: fmt.Sprintf("box-%d", i)})
		names[sb.Name] = c.host(sb.Id)
	}
	c.g.askTime = time.Second
	h := c.hosts[1]
	h.mu.Lock()
	h.hang = true
	h.mu.Unlock()
	ctx := context.Background()
	r, err := c.Sandboxes.List(ctx, connect.NewRequest(&dsecv1.ListRequest{}))
	if err != nil || len(r.Msg.Errors) != 1 || r.Msg.Errors[0].Id != string(h.id) {
		t.Errorf("%v, %v", r, err)
	}
	for name, on := range names {
		_, err := c.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: name}))
		if err = rpc.FromError(err); on == h && !errors.Is(err, rpc.ErrUnavailable) || on != h && err != nil {
			t.Errorf("%s on %s: %v", name, on.id, err)
		}
	}
	if _, err := c.create(t, &dsecv1.CreateRequest{Name: "box-0", Key: "other"}); err == nil {
		t.Error("a second sandbox of the name")
	}
}

func TestGroupCallsReachAllHosts(t *testing.T) {
	c := newCluster(t, 3)
	ctx := context.Background()
	var ids []string
	for i := range 12 {
		ids = append(ids, c.mustCreate(t, &dsecv1.CreateRequest{Job: "j", Key: fmt.Sprint(i)}).Id)
	}
	r, err := c.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Selector: &dsecv1.Selector{Ids: append(ids[:4:4], "nobody", "haaaaaaaa-aaaaaaaaaaaaaaaa")}}))
	if err != nil || len(r.Msg.Sandboxes) != 4 || len(r.Msg.Errors) != 1 || r.Msg.Errors[0].Id != "nobody" {
		t.Fatalf("%v, %v", r, err)
	}
	r, err = c.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Selector: &dsecv1.Selector{Job: "j"}}))
	if err != nil || len(r.Msg.Sandboxes) != 8 || len(r.Msg.Errors) != 0 {
		t.Fatalf("%v, %v", r, err)
	}
}

func TestJobsLiveOnAllHosts(t *testing.T) {
	c := newCluster(t, 3)
	ctx := context.Background()
	put := func(j *dsecv1.Job) error {
		_, err := c.Jobs.Put(ctx, connect.NewRequest(&dsecv1.PutJobRequest{Job: j}))
		return rpc.FromError(err)
	}
	if err := put(&dsecv1.Job{Name: "j", LeaseMs: 20000}); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []*dsecv1.Job{nil, {}, {Name: "-"}, {Name: "j", LeaseMs: 60001}, {Name: "j", OnLeaseEnd: "burn"}, {Name: "j", RetentionMs: -1}} {
		if err := put(bad); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	for i := range 9 {
		c.mustCreate(t, &dsecv1.CreateRequest{Job: "j", Key: fmt.Sprint(i)})
	}
	list, err := c.Jobs.List(ctx, connect.NewRequest(&dsecv1.ListJobsRequest{}))
	if err != nil || len(list.Msg.Jobs) != 1 || list.Msg.Jobs[0].Running != 9 {
		t.Fatalf("%v, %v", list, err)
	}
	delete(c.hosts[2].jobs, "default j") // as if it had joined later
	if _, err := c.Jobs.Renew(ctx, connect.NewRequest(&dsecv1.RenewJobRequest{Name: "j"})); err != nil {
		t.Fatal(err)
	}
	if j := c.hosts[2].jobs["default j"]; j.GetLeaseMs() != 20000 {
		t.Errorf("a host has no lease: %v", j)
	}
	if _, err := c.Jobs.Renew(ctx, connect.NewRequest(&dsecv1.RenewJobRequest{Name: "other"})); !errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
		t.Errorf("unknown job: %v", err)
	}
	r, err := c.Jobs.Stop(ctx, connect.NewRequest(&dsecv1.StopJobRequest{Name: "j"}))
	if err != nil || len(r.Msg.Sandboxes) != 9 {
		t.Fatalf("%v, %v", r, err)
	}
	if _, err := c.Jobs.Stop(ctx, connect.NewRequest(&dsecv1.StopJobRequest{Name: "other"})); !errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
		t.Errorf("unknown job: %v", err)
	}
	c.hosts[0].stop()
	if err := put(&dsecv1.Job{Name: "j2"}); !errors.Is(err, rpc.ErrUnavailable) {
		t.Errorf("a host that can't be told: %v", err)
	}
}

func TestCommandsAndStreamsAreForwarded(t *testing.T) {
	c := newCluster(t, 2)
	ctx := context.Background()
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "n"})
	for _, ref := range []string{sb.Id, "n"} {
		r, err := c.Commands.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{Sandbox: ref, Argv: []string{"echo", "hi"}}))
		if err != nil || string(r.Msg.Stdout) != "echo hi" || r.Msg.Command.Id == "" {
			t.Fatalf("%v, %v", r, err)
		}
	}
	stream, err := c.attach(ctx, sb.Id)
	if err != nil {
		t.Fatal(err)
	}
	n, ended := int64(0), false
	for stream.Receive() {
		ended = stream.Msg().GetEnded() != nil
		if ch := stream.Msg().GetChunk(); ch != nil {
			if ch.Offset != n {
				t.Fatalf("offset %d, want %d", ch.Offset, n)
			}
			n++
		}
	}
	if stream.Err() != nil || n != 1000 || !ended {
		t.Errorf("%d, %v", n, stream.Err())
	}
	logs, err := c.Logs.Read(ctx, connect.NewRequest(&dsecv1.ReadLogRequest{Key: sb.Key}))
	if err != nil || !logs.Receive() || logs.Msg().Records[0].Kind != "create" {
		t.Errorf("%v, %v", err, logs.Err())
	}
	logs, _ = c.Logs.Read(ctx, connect.NewRequest(&dsecv1.ReadLogRequest{Key: "unknown"}))
	if logs.Receive() || !errors.Is(rpc.FromError(logs.Err()), sandbox.ErrNotFound) {
		t.Errorf("%v", logs.Err())
	}
}

func (c *cluster) attach(ctx context.Context, id string) (*connect.ServerStreamForClient[dsecv1.AttachResponse], error) {
	r := connect.NewRequest(&dsecv1.AttachRequest{Sandbox: id, Id: "1"})
	r.Header().Set("X-API-Key", c.key)
	return c.Commands.Attach(ctx, r)
}

// A host that restarts is waited for, by ID and by name; a command sent again is the same command.
func TestHostRestartIsNotSeen(t *testing.T) {
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: "n"})
	h := c.host(sb.Id)
	for _, ref := range []string{sb.Id, "n"} {
		h.stop()
		back := make(chan struct{})
		time.AfterFunc(20*time.Millisecond, func() { h.run(t); close(back) })
		r, err := c.Commands.Start(context.Background(), connect.NewRequest(&dsecv1.StartRequest{Sandbox: ref, Argv: []string{"true"}}))
		<-back
		if err != nil {
			t.Fatal(err)
		}
		if h.started[r.Msg.Command.Id] != 1 {
			t.Errorf("ran %d times", h.started[r.Msg.Command.Id])
		}
	}
}

func TestSnapshotIsNamedHere(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	for range 2 {
		r, err := c.Sandboxes.Snapshot(context.Background(), connect.NewRequest(&dsecv1.SnapshotRequest{Id: sb.Id, Publish: "snap", Step: "s"}))
		if err != nil || r.Msg.Published != "snap@1" || r.Msg.Layer != c.base {
			t.Fatalf("%v, %v", r, err)
		}
	}
	if _, err := c.Sandboxes.Snapshot(context.Background(), connect.NewRequest(&dsecv1.SnapshotRequest{Id: sb.Id, Publish: "a@1"})); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
		t.Errorf("bad name: %v", err)
	}
}

func TestLayersAndEnvironments(t *testing.T) {
	c := newCluster(t, 1)
	ctx := context.Background()
	two := c.importLayer(t, "base", map[string]string{"a": "b"})
	if two == c.base || c.importLayer(t, "", map[string]string{"a": "b"}) != two {
		t.Error("a layer's ID is not that of its tree")
	}
	g, err := c.Layers.GetLayer(ctx, connect.NewRequest(&dsecv1.GetLayerRequest{Ref: "base"}))
	if err != nil || g.Msg.Layer.Id != two || g.Msg.Name.Current != 2 || len(g.Msg.Name.Versions) != 2 || g.Msg.Layer.Names[0] != "base@2" {
		t.Fatalf("%v, %v", g, err)
	}
	rb, err := c.Layers.RollbackLayer(ctx, connect.NewRequest(&dsecv1.RollbackLayerRequest{Name: "base", Version: 1}))
	if err != nil || rb.Msg.Name.Current != 1 {
		t.Fatalf("%v, %v", rb, err)
	}
	for i := range 3 {
		if _, err := c.Layers.PublishEnvironment(ctx, connect.NewRequest(&dsecv1.PublishEnvironmentRequest{Environment: &dsecv1.Environment{Name: fmt.Sprintf("e%d", i), Base: "base"}})); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	token := ""
	for {
		l, err := c.Layers.ListEnvironments(ctx, connect.NewRequest(&dsecv1.ListEnvironmentsRequest{Prefix: "e", PageSize: 2, PageToken: token}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range l.Msg.Environments {
			names = append(names, e.Name)
		}
		if token = l.Msg.NextPageToken; token == "" {
			break
		}
	}
	if strings.Join(names, " ") != "e0 e1 e2" {
		t.Error(names)
	}
	if _, err := c.Layers.RemoveLayer(ctx, connect.NewRequest(&dsecv1.RemoveLayerRequest{Ref: "base@1"})); !errors.Is(rpc.FromError(err), sandbox.ErrState) {
		t.Errorf("a layer in use: %v", err)
	}
	e, err := c.Layers.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: "e0@1"}))
	if err != nil || e.Msg.Environment.Base != "base@1" || len(e.Msg.Versions) != 1 {
		t.Errorf("%v, %v", e, err)
	}
}

// Volatile paths are kept with an environment's version and answered, and what can't be one is refused by its index.
func TestVolatilePathsAreKept(t *testing.T) {
	c := newCluster(t, 1)
	ctx := context.Background()
	want := []string{"/root/.cache", "/var/lib/größe"}
	r, err := c.Layers.PublishEnvironment(ctx, connect.NewRequest(&dsecv1.PublishEnvironmentRequest{Environment: &dsecv1.Environment{Name: "e", Base: "base", VolatilePaths: want}}))
	if err != nil || !slices.Equal(r.Msg.Environment.VolatilePaths, want) {
		t.Fatal(r, err)
	}
	g, err := c.Layers.GetEnvironment(ctx, connect.NewRequest(&dsecv1.GetEnvironmentRequest{Ref: "e@1"}))
	if err != nil || !slices.Equal(g.Msg.Environment.VolatilePaths, want) {
		t.Fatal(g, err)
	}
	for _, bad := range []string{"", "relative", "/", "/a/../b", "/a/", "/a\x00b", "/" + strings.Repeat("x", 5000)} {
		_, err := c.Layers.PublishEnvironment(ctx, connect.NewRequest(&dsecv1.PublishEnvironmentRequest{Environment: &dsecv1.Environment{Name: "e", Base: "base", VolatilePaths: []string{"/ok", bad}}}))
		if !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) || !strings.Contains(err.Error(), "volatile_paths[1]") {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

func TestMetricsHaveNoIDs(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{})
	resp, err := (&http.Client{Transport: keyed(c.key)}).Get(c.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	for _, want := range []string{`dsec_calls_total{code="ok",procedure="/dsec.v1.SandboxService/Create",role="gateway"} 1`, `dsec_hosts{state="up"} 1`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("missing %s", want)
		}
	}
	if strings.Contains(string(b), sb.Id) || strings.Contains(string(b), c.key) {
		t.Error("an ID is a label")
	}
	// They tell of everybody: a key of a project below sees none of them, whatever project it asks for.
	if err := c.keys.CreateProject(context.Background(), "default/team"); err != nil {
		t.Fatal(err)
	}
	secret, _, err := c.keys.CreateKey(context.Background(), "default/team", "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, project := range []string{"", "default"} {
		r, err := http.NewRequest("GET", c.url+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+secret)
		if project != "" {
			r.Header.Set(rpc.HeaderProject, project)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden || strings.Contains(string(b), "dsec_calls_total") {
			t.Errorf("a key of default/team gets %d %.200s", resp.StatusCode, b)
		}
	}
}

// A layer keeps its ID whichever of its files are said to be hot; how it is stored follows them.
func TestHotFilesLieInFront(t *testing.T) {
	c := newCluster(t, 1)
	files := map[string]string{"a": strings.Repeat("a", 9000), "b": strings.Repeat("b", 9000)}
	plain := c.importHot(t, "work/hot", files)
	hot := c.importHot(t, "work/hot", files, "/b", "no/such/file")
	if hot.GetId() != plain.GetId() || hot.GetForms()[0].GetDigest() == plain.GetForms()[0].GetDigest() {
		t.Errorf("plain %v, hot %v: want one ID and other forms", plain, hot)
	}
}
