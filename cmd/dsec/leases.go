package main

import (
	"context"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
)

// leaseEvery is how often a host says which layers it has mounted; what gateways remove stays for longer than that in any case.
const leaseEvery = 15 * time.Minute

// leaseLayers tells the store which layers are mounted here, so that no gateway removes their contents, until ctx ends. A store that
// can't be written now is asked again at the next turn: a lease holds for days.
func (m *machine) leaseLayers(ctx context.Context) error {
	tick := time.NewTicker(leaseEvery)
	defer tick.Stop()
	held := false
	for {
		var ids []layer.ID
		for _, id := range m.backend.LayersInUse() {
			ids = append(ids, layer.ID(id))
		}
		for _, b := range m.vms {
			for _, id := range b.LayersInUse() {
				ids = append(ids, layer.ID(id))
			}
		}
		if held = held || len(ids) > 0; held {
			if err := m.layers.Lease(ctx, string(m.id), ids); err != nil && ctx.Err() == nil {
				m.logger.Warn("say which layers are in use", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// endLease gives the lease back. A store that is away does not hold up a stop: the lease runs out by itself.
func (m *machine) endLease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := m.layers.Lease(ctx, string(m.id), nil); err != nil {
		m.logger.Warn("end the lease of layers", "err", err)
	}
}
