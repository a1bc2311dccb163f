package host

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const (
	filesIdle    = 10 * time.Second // an unused file connection is kept for so long
	maxFileConns = 16               // users with a file connection in one sandbox
	fileWait     = 2 * time.Minute  // one change without a body
)

// fileConn is the file server of one user in a sandbox. Fields but the channel are under the box's lock.
type fileConn struct {
	ready chan struct{} // closed when files or err is set
	files *guest.Files
	err   error
	users int
	timer *time.Timer
}

// fileServer returns the file client of a user, whose release must be called. The caller has called use.
func (b *box) fileServer(ctx context.Context, inst sandbox.Instance, user string) (f *guest.Files, release func(), err error) {
	user = cmp.Or(user, b.spec.User)
	b.mu.Lock()
	c := b.files[user]
	if c != nil && c.files != nil && c.files.Err() != nil {
		delete(b.files, user)
		c = nil
	}
	fresh := c == nil
	if fresh {
		if len(b.files) >= maxFileConns && !b.dropFiles() {
			b.mu.Unlock()
			return nil, nil, fmt.Errorf("files of %s as %s: %d users have files open at once: %w", b.id, user, maxFileConns, sandbox.ErrExhausted)
		}
		c = &fileConn{ready: make(chan struct{})}
		if b.files == nil {
			b.files = map[string]*fileConn{}
		}
		b.files[user] = c
	}
	c.users++
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	b.mu.Unlock()
	if fresh {
		b.connectFiles(c, inst, user)
	}
	release = func() { b.releaseFiles(c, user) }
	select {
	case <-c.ready:
	case <-ctx.Done():
		release()
		return nil, nil, ctx.Err()
	}
	if c.err != nil {
		release()
		return nil, nil, c.err
	}
	return c.files, release, nil
}

func (b *box) connectFiles(c *fileConn, inst sandbox.Instance, user string) {
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	conn, err := inst.Files(ctx, user)
	b.mu.Lock()
	defer b.mu.Unlock()
	defer close(c.ready)
	if err == nil && b.ending {
		conn.Close()
		err = b.gone()
	}
	if err != nil {
		c.err = fmt.Errorf("files of %s as %s: %w", b.id, user, err)
		if b.files[user] == c {
			delete(b.files, user)
		}
		return
	}
	c.files = guest.NewFiles(conn)
}

func (b *box) releaseFiles(c *fileConn, user string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.users--
	if c.users > 0 || c.files == nil {
		return
	}
	if b.ending || b.state.Ended() || b.files[user] != c {
		go c.files.Close()
		return
	}
	c.timer = time.AfterFunc(filesIdle, func() {
		b.mu.Lock()
		unused := c.users == 0 && b.files[user] == c
		if unused {
			delete(b.files, user)
		}
		b.mu.Unlock()
		if unused {
			c.files.Close()
		}
	})
}

// dropFiles frees the place of a connection that nobody uses now; the lock is held.
func (b *box) dropFiles() bool {
	for user, c := range b.files {
		if c.users == 0 && c.files != nil {
			delete(b.files, user)
			if c.timer != nil {
				c.timer.Stop()
			}
			go c.files.Close()
			return true
		}
	}
	return false
}

// closeFiles ends all file connections: calls under way end with ErrLost.
func (b *box) closeFiles() {
	b.mu.Lock()
	var all []*guest.Files
	for _, c := range b.files {
		if c.timer != nil {
			c.timer.Stop()
		}
		if c.files != nil {
			all = append(all, c.files)
		}
	}
	b.files = nil
	b.mu.Unlock()
	for _, f := range all {
		f.Close()
	}
}

// withFiles wakes the sandbox and gives its file client, for calls that change nothing.
func (b *box) withFiles(ctx context.Context, user string, do func(*guest.Files) error) error {
	inst, err := b.use(ctx)
	if err != nil {
		return err
	}
	defer b.done()
	f, release, err := b.fileServer(ctx, inst, user)
	if err != nil {
		return err
	}
	defer release()
	return do(f)
}

// at reads where a file call goes.
func at(p *dsecv1.Path) (path string, err error) {
	path, err = rpc.Octets("at.path", p.GetPath(), p.GetPathRaw())
	if err != nil {
		return "", err
	}
	return path, sandbox.CheckPath("at.path", path)
}

// canonicalPath is what the log keeps of a place: octets in the right twin, and the user who acts.
func (b *box) canonicalPath(path, user string) *dsecv1.Path {
	p := &dsecv1.Path{User: cmp.Or(user, b.spec.User)}
	p.Path, p.PathRaw = rpc.Twin(path)
	return p
}

func fileInfo(i guest.Info) *dsecv1.FileInfo {
	p := &dsecv1.FileInfo{
		Type: string(i.Kind), Mode: i.Mode, Uid: i.UID, Gid: i.GID, Size: i.Size, Modified: rpc.Timestamp(i.Modified),
		Nlink: i.Nlink, Inode: i.Inode, Owner: text(i.Owner), Group: text(i.Group), Error: text(i.Error),
	}
	p.Path, p.PathRaw = rpc.Twin(i.Path)
	p.Target, p.TargetRaw = rpc.Twin(i.Target)
	return p
}

// keepInfo and keptInfo carry a file's description through the result of a step.
func keepInfo(r *dsecv1.LogRecord, i *dsecv1.FileInfo) *dsecv1.LogRecord {
	r.Data, _ = deterministic.Marshal(i) // text of the guest's was made valid
	return r
}

func keptInfo(r *dsecv1.LogRecord) *dsecv1.FileInfo {
	if len(r.GetData()) == 0 {
		return nil
	}
	i := &dsecv1.FileInfo{}
	if proto.Unmarshal(r.Data, i) != nil {
		return nil
	}
	return i
}

// change does a change of files without a body.
func (b *box) change(ctx context.Context, key string, t tag, req proto.Message, user string, do func(context.Context, *guest.Files) (*dsecv1.LogRecord, error)) (*dsecv1.LogRecord, bool, error) {
	if key == "" {
		key = sandbox.NewKey()
	}
	var f *guest.Files
	return b.once(ctx, key, t, req, fileWait, func(ctx context.Context, inst sandbox.Instance) (release func(), err error) {
		f, release, err = b.fileServer(ctx, inst, user)
		return release, err
	}, func(ctx context.Context, _ sandbox.Instance) (*dsecv1.LogRecord, error) { return do(ctx, f) })
}

// upload is a write, append or tree up: a step with a body. These three may be sent again under their ID after an end that is
// interrupted or unknown, and run again then.
type upload struct {
	key  string
	act  tag
	req  proto.Message // canonical, without data
	user string
	run  func(ctx context.Context, f *guest.Files, body io.Reader, before *dsecv1.LogRecord) (*dsecv1.LogRecord, error)
}

// bodied does a step with a body. The body goes to the sandbox and into the log's keeping at once, held whole nowhere.
func (b *box) bodied(ctx context.Context, u upload, body io.Reader) (r *dsecv1.LogRecord, existed bool, err error) {
	if u.key == "" {
		u.key = sandbox.NewKey()
	}
	if err := sandbox.CheckKey("step", u.key); err != nil {
		return nil, false, err
	}
	payload := encode(u.act, u.req)
	s, before, mine, err := b.claimBody(ctx, u, payload)
	if err != nil {
		return nil, false, err
	}
	if !mine {
		return b.resent(ctx, s, body)
	}
	inst, err := b.use(ctx)
	if err != nil {
		b.giveBack(s, before, err)
		return nil, false, err
	}
	defer b.done()
	f, release, err := b.fileServer(ctx, inst, u.user)
	if err != nil {
		b.giveBack(s, before, err)
		return nil, false, err
	}
	defer release()
	if err := b.beginStep(s, payload); err != nil {
		return nil, false, err
	}
	kept := &keeping{r: body, w: b.h.deps.Log.NewInputWriter()}
	r, err = u.run(ctx, f, kept, before)
	var broken *guest.Incomplete
	if errors.As(err, &broken) {
		kind := sandbox.Interrupted
		switch {
		case broken.Applied < 0:
			kind = sandbox.Unknown
		case !broken.Interrupted:
			kind = "" // the sandbox refused to go on: a full disk, say
		}
		r = &dsecv1.LogRecord{Offset: broken.Start, Outcome: &dsecv1.Outcome{Kind: string(kind), Applied: max(0, broken.Applied)}}
	}
	in, kerr := kept.finish(b.spec.Durability)
	defer in.Release()
	if kerr != nil {
		// The file is written but the log can't keep its octets: told as the step's failure, since it can't be done again from the log.
		err = errors.Join(err, fmt.Errorf("step %s: keep its octets: %w", s.id, kerr))
	}
	r, err = b.endStep(s, r, in, err)
	return r, false, err
}

// keeping passes a body on and keeps it. A failure to keep does not break the body off.
type keeping struct {
	r   io.Reader
	w   *trajectory.InputWriter
	err error
}

func (k *keeping) Read(p []byte) (int, error) {
	n, err := k.r.Read(p)
	if n > 0 && k.err == nil {
		_, k.err = k.w.Write(p[:n])
	}
	return n, err
}

func (k *keeping) finish(d sandbox.Durability) (*trajectory.Input, error) {
	if k.err != nil {
		k.w.Abort()
		return nil, k.err
	}
	return k.w.Finish(d)
}

// claimBody claims a new step, or one again that may run again; before is then its last result.
func (b *box) claimBody(ctx context.Context, u upload, payload []byte) (s *step, before *dsecv1.LogRecord, mine bool, err error) {
	sum := digest(payload, nil)
	s, mine, err = b.claimStep(ctx, u.key, u.act, sum)
	if err != nil || mine {
		return s, nil, mine, err
	}
	if err := b.same(ctx, s, u.act, sum, u.req, nil); err != nil {
		return nil, nil, false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for s.state == beginning || s.state == working {
		if err := b.waitStep(ctx, s); err != nil {
			b.mu.Lock()
			return nil, nil, false, fmt.Errorf("step %s is under way: %w", s.id, err)
		}
	}
	if s.err != nil {
		return nil, nil, false, s.err
	}
	if s.outcome.Kind != sandbox.Interrupted && (s.outcome.Kind != sandbox.Unknown || placeless(u.req)) {
		return s, nil, false, nil
	}
	if b.ending || b.state.Ended() {
		return nil, nil, false, b.gone()
	}
	before = s.result
	if before == nil {
		before = &dsecv1.LogRecord{}
	}
	s.state = beginning
	b.retries++
	return s, before, true, nil
}

// placeless says of an append that it goes wherever the file ends. When nobody saw how the first attempt ended, nobody knows where it
// began, and doing it again could double what it wrote.
func placeless(req proto.Message) bool {
	w, ok := req.(*dsecv1.WriteRequest)
	return ok && w.GetAppend() && w.GetStartOffset() < 0
}

// giveBack undoes a claim: a step that had ended before has ended as before.
func (b *box) giveBack(s *step, before *dsecv1.LogRecord, err error) {
	if before == nil {
		b.giveUp(s, err)
		return
	}
	b.mu.Lock()
	s.state = over
	s.changed.ring()
	b.mu.Unlock()
}

// resent compares the body of a step that is done with what was done, by length and hash, and touches nothing.
func (b *box) resent(ctx context.Context, s *step, body io.Reader) (*dsecv1.LogRecord, bool, error) {
	r, err := b.recorded(ctx, s)
	if err != nil {
		return r, true, err
	}
	sum := sha256.New()
	n, err := io.Copy(sum, body)
	if err != nil {
		return nil, false, fmt.Errorf("step %s: compare a resent body: %w", s.id, err)
	}
	if n != r.GetLength() || fmt.Sprintf("%x", sum.Sum(nil)) != r.GetSha256() {
		return nil, false, fmt.Errorf("step %s of sandbox %s: was used with another body: %d octets, SHA-256 %s, now %d, %x: %w", s.id, b.id, r.GetLength(), r.GetSha256(), n, sum.Sum(nil), sandbox.ErrExists)
	}
	return r, true, nil
}
