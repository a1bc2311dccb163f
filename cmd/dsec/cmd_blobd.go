package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

func blobdMain(args []string) int {
	return blob.Main(args, openBlobStores, slog.New(slog.NewTextHandler(os.Stderr, nil)))
}

// blobdCmd only documents the command: main hands it over before anything is parsed, since the daemon has flags of its own.
type blobdCmd struct{}

func (blobdCmd) Run() error { return errors.New("the blob daemon is started by its host") }

// openBlobStores opens the stores from which the daemon fetches. The first name is its folder for copies of indexes.
func openBlobStores(names []string) (store.Store, error) {
	if len(names) < 2 {
		return nil, errors.New("blobd: no store is named")
	}
	return openStores(names[1:], names[0])
}

// blobSettings are what the config file may say of layers that are read on demand.
type blobSettings struct {
	Cache     string `toml:"cache"` // folder
	Limit     string `toml:"limit"` // size
	Deadline  string `toml:"deadline"`
	Prefetch  int    `toml:"prefetch"`
	Fetches   int    `toml:"fetches"`
	DirectIO  bool   `toml:"direct_io"`
	Whole     bool   `toml:"whole"`
	Seen      bool   `toml:"seen"`
	MetaLimit string `toml:"meta_limit"` // size
}

// openLayers makes what finds the files of layers, and the supervisor of the blob daemon for those whose contents are not local.
func (p *places) openLayers(id sandbox.HostID, stores []string, st store.Store, cc container.Config, logger *slog.Logger) (*blob.Layers, *blob.Supervisor, error) {
	s := p.settings.Blobs
	if cc.Unpack { // this process reads the layers, which must not wait for a daemon of its own
		s.Whole = true
	}
	c := blob.SupervisorConfig{
		Config: blob.Config{RunDir: filepath.Join(p.RunDir, "blobd-"+instance(id)), CacheDir: filepath.Join(p.State, "blobs"),
			Prefetch: s.Prefetch, Fetches: s.Fetches},
		Group: "dsec-" + instance(id) + "-blobd",
	}
	var metaLimit int64
	err := errors.Join(setSize(&c.Limit, "blobs.limit", s.Limit), setDuration(&c.Deadline, "blobs.deadline", s.Deadline), setSize(&metaLimit, "blobs.meta_limit", s.MetaLimit))
	if err != nil {
		return nil, nil, err
	}
	if s.Cache != "" {
		if c.CacheDir = s.Cache; !filepath.IsAbs(s.Cache) {
			return nil, nil, fmt.Errorf("blobs.cache %q: want an absolute path", s.Cache)
		}
	}
	names, err := p.storeNames(stores)
	if err != nil {
		return nil, nil, err
	}
	c.Stores = []string{filepath.Join(c.CacheDir, "spool")}
	for _, n := range names {
		if !strings.Contains(n, "://") { // the daemon has another working folder
			if n, err = filepath.Abs(n); err != nil {
				return nil, nil, err
			}
		}
		c.Eager = c.Eager || strings.Contains(n, "://") // the first create need not wait for it
		c.Stores = append(c.Stores, n)
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	c.Program = []string{exe, "blobd"}
	var sup *blob.Supervisor
	var opener blob.Opener
	if _, err := os.Stat("/dev/fuse"); err == nil && !s.Whole {
		if sup, err = blob.NewSupervisor(c, keeper.NewPark(cc.RunDir), logger); err != nil {
			return nil, nil, err
		}
		opener = sup
	} else if !s.Whole {
		logger.Warn("no /dev/fuse: layers that are not local are fetched whole")
	}
	l, err := blob.NewLayers(blob.LayersConfig{Dir: filepath.Join(p.State, "layers"), Limit: metaLimit, Direct: s.DirectIO, Seen: s.Seen}, layer.New(nil, st), st, opener, logger)
	return l, sup, err
}

// blobFigures are the blob daemon's figures, for /metrics. A daemon that was started again counts from zero.
type blobFigures struct{ from *blob.Supervisor }

const statsBound = time.Second

func describeBlob(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dsec_blob_"+name, help, labels, nil)
}

// Describe tells nothing: the figures are asked for when they are collected.
func (blobFigures) Describe(chan<- *prometheus.Desc) {}

// Collect asks the daemon; one that was not needed yet has none.
func (b blobFigures) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statsBound)
	defer cancel()
	s, starts, err := b.from.Stats(ctx)
	count := func(name, help string, v int64) {
		ch <- prometheus.MustNewConstMetric(describeBlob(name, help), prometheus.CounterValue, float64(v))
	}
	gauge := func(name, help string, v int64) {
		ch <- prometheus.MustNewConstMetric(describeBlob(name, help), prometheus.GaugeValue, float64(v))
	}
	count("daemon_starts_total", "Blob daemons that this host started.", int64(starts))
	if err != nil || starts == 0 && s.Limit == 0 {
		return
	}
	count("asked_bytes_total", "Octets that reads of layers asked the blob daemon for.", s.Asked)
	count("cache_bytes_total", "Of these, octets that the cache had.", s.FromCache)
	count("fetched_bytes_total", "Octets that came from the store.", s.Fetched)
	count("evicted_bytes_total", "Octets that left the cache.", s.Evicted)
	count("reads_total", "Reads that the kernel asked for.", s.Reads)
	count("failed_units_total", "Units that the store did not give within the deadline.", s.Failed)
	count("retries_total", "Reads of the store that failed and were done again.", s.Retries)
	count("corrupt_total", "Reads of the store that gave octets of another digest.", s.Corrupt)
	count("cache_errors_total", "Reads and writes of the cache that failed.", s.CacheFails)
	count("cache_rotten_total", "Units of the cache that were found to have another digest.", s.Rotten)
	gauge("cached_bytes", "Octets in the cache.", s.Cached)
	gauge("cache_limit_bytes", "Octets that the cache may hold.", s.Limit)
	gauge("waiting_reads", "Reads that wait for the store.", s.Waiting)
	buckets, total := map[float64]uint64{}, uint64(0)
	for i, n := range s.LatencyCounts {
		total += uint64(n)
		if i < len(s.LatencyBounds) {
			buckets[s.LatencyBounds[i]] = total
		}
	}
	ch <- prometheus.MustNewConstHistogram(describeBlob("fetch_seconds", "How long the store took for a unit of 1 MiB."), total, s.LatencySum, buckets)
}
