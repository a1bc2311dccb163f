package client

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Job is a group of sandboxes with a lease that this client renews: when the client dies, the job ends within the lease.
type Job struct {
	Name   string
	c      *Client
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// OpenJob makes or joins a job; an empty name makes a new one under a name of its own. With lease > 0 (60 s at most) it is renewed
// in the background every third of it until Close; onLeaseEnd is stop (default), pause or keep.
func (c *Client) OpenJob(ctx context.Context, name string, lease time.Duration, onLeaseEnd string) (*Job, error) {
	return c.OpenJobOf(ctx, &dsecv1.Job{Name: name, LeaseMs: lease.Milliseconds(), OnLeaseEnd: onLeaseEnd})
}

// OpenJobOf is [Client.OpenJob] with all that a job can say: also how long its records are kept, and what restores do with its commands.
func (c *Client) OpenJobOf(ctx context.Context, job *dsecv1.Job) (*Job, error) {
	if job.Name == "" {
		job.Name = "job-" + strings.ToLower(rand.Text())
	}
	name, lease := job.Name, time.Duration(job.LeaseMs)*time.Millisecond
	if _, err := call(ctx, c, c.JobService.Put, &dsecv1.PutJobRequest{Job: job}); err != nil {
		return nil, err
	}
	j := &Job{Name: name, c: c, cancel: func() {}}
	if lease > 0 {
		renew, cancel := context.WithCancel(context.Background())
		j.cancel = cancel
		j.done.Go(func() { j.renew(renew, lease/3) })
	}
	return j, nil
}

func (j *Job) renew(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			// A failed renewal is tried again at the next tick: three fit into a lease.
			bound, cancel := context.WithTimeout(ctx, every)
			_, _ = call(bound, j.c, j.c.JobService.Renew, &dsecv1.RenewJobRequest{Name: j.Name})
			cancel()
		}
	}
}

// Pause freezes all sandboxes of the job.
func (j *Job) Pause(ctx context.Context) (*dsecv1.SelectorResult, error) {
	return call(ctx, j.c, j.c.JobService.Pause, &dsecv1.PauseJobRequest{Name: j.Name})
}

// Resume takes the job up again, as after the death of the process that drove it: it wakes all sandboxes and learns the recorded steps
// ([Client.FastForward]), so that commands that were done are answered at once, what runs is joined, and the rest goes on.
func (j *Job) Resume(ctx context.Context) (*dsecv1.SelectorResult, error) {
	r, err := call(ctx, j.c, j.c.JobService.Resume, &dsecv1.ResumeJobRequest{Name: j.Name})
	if err != nil {
		return nil, err
	}
	_, err = j.c.FastForward(ctx, j.Name)
	return r, err
}

// Stop ends all sandboxes of the job.
func (j *Job) Stop(ctx context.Context) (*dsecv1.SelectorResult, error) {
	return call(ctx, j.c, j.c.JobService.Stop, &dsecv1.StopJobRequest{Name: j.Name})
}

// RunContainer is [Client.RunContainer] in this job.
func (j *Job) RunContainer(ctx context.Context, o Options) (*Sandbox, error) {
	o.Job = j.Name
	return j.c.RunContainer(ctx, o)
}

// Detach stops renewing and leaves the sandboxes to the lease.
func (j *Job) Detach() {
	j.cancel()
	j.done.Wait()
}

// Close stops the job's sandboxes and the renewing.
func (j *Job) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	_, err := j.Stop(ctx)
	j.Detach()
	return err
}
