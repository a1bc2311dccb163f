package gateway

import (
	"context"
	"errors"
	"slices"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestExportStreamsEveryHost(t *testing.T) {
	c := newCluster(t, 3)
	ctx := context.Background()
	export := func() (rows []string, errs []*dsecv1.ItemError) {
		t.Helper()
		st, err := c.Logs.Export(ctx, connect.NewRequest(&dsecv1.ExportRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		for st.Receive() {
			rows, errs = append(rows, st.Msg().Rows...), append(errs, st.Msg().Errors...)
		}
		if st.Err() != nil {
			t.Fatal(st.Err())
		}
		return rows, errs
	}
	rows, errs := export()
	if len(rows) != 3 || len(errs) != 0 || !slices.IsSorted(rows) {
		t.Fatal(rows, errs)
	}
	c.hosts[1].stop()
	rows, errs = export()
	if len(rows) != 2 || len(errs) != 1 || errs[0].Id != string(c.hosts[1].id) || errs[0].Code != "unavailable" {
		t.Fatal(rows, errs)
	}
}

func TestVerdictFindsItsHost(t *testing.T) {
	c := newCluster(t, 3)
	ctx := context.Background()
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Job: "j", Key: "k"})
	one := 1.0
	for _, q := range []*dsecv1.SetVerdictRequest{{Sandbox: sb.Id}, {Job: "j", Key: "k"}} {
		q.Verdict = &dsecv1.Verdict{Reward: &one}
		r, err := c.Logs.SetVerdict(ctx, connect.NewRequest(q))
		if err != nil || r.Msg.Verdict.GetReward() != 1 {
			t.Fatal(r, err)
		}
	}
	for _, q := range []*dsecv1.SetVerdictRequest{{}, {Job: "j"}} {
		if _, err := c.Logs.SetVerdict(ctx, connect.NewRequest(q)); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
			t.Fatal(err)
		}
	}
	if _, err := c.Logs.Remove(ctx, connect.NewRequest(&dsecv1.RemoveLogsRequest{})); !errors.Is(rpc.FromError(err), sandbox.ErrInvalid) {
		t.Fatal(err)
	}
}
