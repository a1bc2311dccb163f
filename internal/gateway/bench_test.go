package gateway

import (
	"context"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
)

func cpu() float64 {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e3
}

// BenchmarkStart tells the CPU time (us, of client, gateway and host together) of a command through the gateway, of one straight to the
// host, and so of the hop.
func BenchmarkStart(b *testing.B) {
	c := newCluster(b, 1)
	sb := c.mustCreate(b, &dsecv1.CreateRequest{})
	p, err := rpc.Dial(c.hosts[0].addr, rpc.PeerConfig{Token: token})
	if err != nil {
		b.Fatal(err)
	}
	tr := &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(c.url, "http://"))
	}}
	through := dsecv1connect.NewCommandServiceClient(&http.Client{Transport: tr}, c.url)
	ctx := rpc.WithProject(context.Background(), "default")
	for name, cl := range map[string]dsecv1connect.CommandServiceClient{"gateway": through, "host": p.Commands} {
		b.Run(name, func(b *testing.B) {
			b.SetParallelism(4)
			before := cpu()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					r := connect.NewRequest(&dsecv1.StartRequest{Sandbox: sb.Id, Id: "1", Argv: []string{"true"}, WaitMs: 60000})
					r.Header().Set("Authorization", "Bearer "+c.key)
					if _, err := cl.Start(ctx, r); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric((cpu()-before)/float64(b.N), "cpu-us/op")
		})
	}
}
