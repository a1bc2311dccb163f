package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

type exportCmd struct {
	Job    string            `help:"Of this job." placeholder:"JOB"`
	Label  map[string]string `short:"l" help:"Of sandboxes with this label; repeat." placeholder:"K=V"`
	Reward string            `help:"With such a reward: '>0', '<=0.5', '==1', none, any." placeholder:"COND"`
	Ended  bool              `help:"Of ended sandboxes alone."`
	Rows   string            `help:"One row a step, or a trajectory." enum:"steps,trajectories" default:"steps"`
	Replay bool              `name:"with-replays" help:"Also those that a replay made, which are left out unless --job or their label is given."`
	Format string            `help:"jsonl (default) or parquet; by the name of the --output file when it is not given." enum:"jsonl,parquet," default:"" placeholder:"FORM"`
	Limit  size              `help:"Octets of each stream in a row; what is cut off is told." default:"64k"`
}

// Run writes to the file that --output names; it appears whole or not at all. Rows go to standard output where none is named.
func (x *exportCmd) Run(ctx context.Context, c *cli) (err error) {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	o := client.ExportOptions{Job: x.Job, Labels: x.Label, Reward: x.Reward, Ended: x.Ended, Rows: x.Rows, OutputLimit: int64(x.Limit)}
	if x.Limit == 0 {
		o.OutputLimit = -1
	}
	var left int64
	o.Without, o.LeftOut = x.without(), func(n int64) { left = n }
	if c.Output == "text" || c.Output == "json" || c.Output == "-" {
		rows := x.rows(os.Stdout, "")
		err := errors.Join(cl.Export(ctx, o, rows), rows.close())
		if err == nil {
			x.told(ctx, cl, rows, left)
		}
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(c.Output), filepath.Base(c.Output)+".part-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	rows := x.rows(f, c.Output)
	err = cl.Export(ctx, o, rows)
	partly := errors.Is(err, client.ErrUnavailable) && rows.lines > 0
	if err != nil && !partly {
		return errors.Join(err, f.Close())
	}
	if ferr := errors.Join(rows.close(), f.Chmod(0o644), f.Close()); ferr != nil {
		return ferr
	}
	if rerr := os.Rename(f.Name(), c.Output); rerr != nil {
		return rerr
	}
	fmt.Fprintf(os.Stderr, "%s in %s\n", plural(rows.lines, "row"), plain(c.Output))
	if err == nil {
		x.told(ctx, cl, rows, left)
	}
	return err // of hosts that did not answer
}

// without are the labels that no row's sandbox has: that of replays, unless they were asked for.
func (x *exportCmd) without() []string {
	if _, asked := x.Label[replayLabel]; asked || x.Replay || x.Job != "" {
		return nil
	}
	return []string{replayLabel}
}

// rows takes the rows of an export to w.
func (x *exportCmd) rows(w io.Writer, name string) *counter {
	c := &counter{w: bufio.NewWriterSize(w, 1<<20)}
	if x.Format == "parquet" || x.Format == "" && strings.HasSuffix(name, ".parquet") {
		c.columns = newParquetWriter(c.w)
	}
	return c
}

// told says what a reader may miss in the rows.
func (x *exportCmd) told(ctx context.Context, cl *client.Client, rows *counter, left int64) {
	if left > 0 {
		say("%s left out (--with-replays)", plural(int(left), "replay"))
	}
	if rows.lines == 0 && x.Job != "" {
		sayNone(ctx, cl, x.Job)
	}
}

// counter counts the rows, each of which is one write.
type counter struct {
	w       *bufio.Writer
	lines   int
	columns *parquetWriter // nil: lines of JSON
}

func (c *counter) close() error {
	if c.columns != nil {
		if err := c.columns.Close(); err != nil {
			return err
		}
	}
	return c.w.Flush()
}

var _ io.Writer = (*counter)(nil)

func (c *counter) Write(p []byte) (int, error) {
	c.lines++
	if c.columns != nil {
		return c.columns.Write(p)
	}
	return c.w.Write(p)
}

type verdictCmd struct {
	ID       string   `arg:"" help:"Sandbox ID or name (ended ones too, by ID)."`
	Reward   *float64 `help:"Reward." placeholder:"NUMBER"`
	Metadata string   `help:"Free metadata: a JSON object." placeholder:"JSON"`
	Key      string   `help:"The same key with the same content is taken once; a verdict with a new key replaces the one before." default:"verdict" placeholder:"KEY" name:"verdict-key"`
}

// Run attaches a verdict.
func (x *verdictCmd) Run(ctx context.Context, c *cli) error {
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	v := &dsecv1.Verdict{Key: x.Key, Reward: x.Reward}
	if x.Metadata != "" {
		var m map[string]any
		if err := json.Unmarshal([]byte(x.Metadata), &m); err != nil {
			return fmt.Errorf("--metadata: want a JSON object: %w", err)
		}
		if v.Metadata, err = structpb.NewStruct(m); err != nil {
			return fmt.Errorf("--metadata: %w", err)
		}
	}
	r, err := cl.Sandbox(x.ID).SetVerdict(ctx, v)
	if err != nil {
		return err
	}
	return c.emit(r, func() { fmt.Println(verdictText(r)) })
}

func verdictText(v *dsecv1.Verdict) string {
	words := []string{v.GetKey()}
	if v.GetReward() != 0 || v != nil && v.Reward != nil {
		words = append(words, "reward "+strconv.FormatFloat(v.GetReward(), 'g', -1, 64))
	}
	if v.GetMetadata() != nil {
		if b, err := marshal(v.GetMetadata(), false); err == nil {
			words = append(words, plain(string(b)))
		}
	}
	return strings.Join(words, " ")
}
