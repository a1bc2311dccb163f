package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Files works on files inside a sandbox as one user.
type Files struct {
	s    *Sandbox
	user string
}

// Files returns the file calls, acting as the sandbox's user.
func (s *Sandbox) Files() *Files { return &Files{s: s} }

// FilesAs returns the file calls, acting as the given user (name, uid or uid:gid).
func (s *Sandbox) FilesAs(user string) *Files { return &Files{s: s, user: user} }

func (f *Files) at(path string) *dsecv1.Path {
	p := &dsecv1.Path{Sandbox: f.s.ID, User: f.user}
	p.Path, p.PathRaw = octets(path)
	return p
}

// Stat describes a path; with follow, what a link at its end points to.
func (f *Files) Stat(ctx context.Context, path string, follow bool) (*dsecv1.FileInfo, error) {
	r, err := call(ctx, f.s.c, f.s.c.FileService.Stat, &dsecv1.StatRequest{At: f.at(path), Follow: follow})
	if err != nil {
		return nil, err
	}
	return r.Info, nil
}

// List returns the entries of a folder, to the depth given (1: the folder itself).
func (f *Files) List(ctx context.Context, path string, depth int) ([]*dsecv1.FileInfo, error) {
	ctx, cancel := f.s.c.bound(ctx)
	defer cancel()
	st, err := f.s.c.FileService.List(ctx, connect.NewRequest(&dsecv1.ListFilesRequest{At: f.at(path), Depth: int32(depth)}))
	if err != nil {
		return nil, wrap(err)
	}
	defer st.Close()
	var out []*dsecv1.FileInfo
	for st.Receive() {
		out = append(out, st.Msg().Entries...)
	}
	return out, wrap(st.Err())
}

// ReadFile returns a whole file. For large ones use Read.
func (f *Files) ReadFile(ctx context.Context, path string) ([]byte, error) {
	var b bytes.Buffer
	if _, err := f.Read(ctx, path, 0, 0, &b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Read copies length octets (0: to the end) from the offset to w and returns how many there were.
func (f *Files) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	st, err := f.s.c.FileService.Read(ctx, connect.NewRequest(&dsecv1.ReadRequest{At: f.at(path), Offset: offset, Length: length}))
	if err != nil {
		return 0, wrap(err)
	}
	defer st.Close()
	var n int64
	for st.Receive() {
		m, err := w.Write(st.Msg().Data)
		if n += int64(m); err != nil {
			return n, err
		}
	}
	return n, wrap(st.Err())
}

// WriteOptions of a write or append.
type WriteOptions struct {
	Step     string // step key: the same step is never applied twice
	Mode     uint32 // of a new file; 0 is 0644
	Parents  bool
	Modified time.Time
	Append   bool
	Start    int64 // append: the size expected; -1 for whatever it is
}

// WriteFile replaces or creates a file.
func (f *Files) WriteFile(ctx context.Context, path string, data []byte, mode uint32) error {
	_, err := f.Write(ctx, path, bytes.NewReader(data), WriteOptions{Mode: mode, Parents: true})
	return err
}

// Write streams r into a file.
func (f *Files) Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (*dsecv1.WriteResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a body that broke off must not look like a whole one
	st := f.s.c.FileService.Write(ctx)
	head := &dsecv1.WriteRequest{At: f.at(path), Step: o.Step, Mode: o.Mode, Parents: o.Parents, Append: o.Append, StartOffset: o.Start, SetMode: o.Mode != 0}
	if !o.Modified.IsZero() {
		head.Modified = timestamppb.New(o.Modified)
	}
	err := sendChunks(r, func(b []byte, first bool) error {
		m := &dsecv1.WriteRequest{}
		if first {
			m = head
		}
		m.Data = b
		return st.Send(m)
	})
	if err != nil {
		return nil, err
	}
	res, err := st.CloseAndReceive()
	if err != nil {
		return nil, wrap(err)
	}
	return res.Msg, nil
}

// sendChunks reads r in pieces and sends each; at least one is sent. The server's own refusal comes from the receive that follows, so an
// end of file from send is no error here.
func sendChunks(r io.Reader, send func(b []byte, first bool) error) error {
	buf := make([]byte, 256<<10)
	for first := true; ; first = false {
		n, err := io.ReadFull(r, buf)
		end := err == io.EOF || err == io.ErrUnexpectedEOF
		if err != nil && !end {
			return err
		}
		if n > 0 || first {
			if err := send(bytes.Clone(buf[:n]), first); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return wrap(err)
			}
		}
		if end {
			return nil
		}
	}
}

// MakeDir makes a folder; with parents, also those above it, and it is no error when it is there.
func (f *Files) MakeDir(ctx context.Context, path string, parents bool) error {
	_, err := call(ctx, f.s.c, f.s.c.FileService.MakeDir, &dsecv1.MakeDirRequest{At: f.at(path), Parents: parents})
	return err
}

// Move renames a file or folder.
func (f *Files) Move(ctx context.Context, from, to string) error {
	q := &dsecv1.MoveRequest{From: f.at(from), Replace: true}
	q.To, q.ToRaw = octets(to)
	_, err := call(ctx, f.s.c, f.s.c.FileService.Move, q)
	return err
}

// Remove removes a file, or a folder with all in it when recursive.
func (f *Files) Remove(ctx context.Context, path string, recursive bool) error {
	_, err := call(ctx, f.s.c, f.s.c.FileService.Remove, &dsecv1.RemoveRequest{At: f.at(path), Recursive: recursive})
	return err
}

// Watch calls fn for each change below path until ctx ends or fn returns false.
func (f *Files) Watch(ctx context.Context, path string, recursive bool, fn func(*dsecv1.WatchResponse) bool) error {
	st, err := f.s.c.FileService.Watch(ctx, connect.NewRequest(&dsecv1.WatchRequest{At: f.at(path), Recursive: recursive}))
	if err != nil {
		return wrap(err)
	}
	defer st.Close()
	for st.Receive() {
		if !fn(st.Msg()) {
			return nil
		}
	}
	return wrap(st.Err())
}

// Download streams the tree at path as a tar into w and returns what could not be put into it.
func (f *Files) Download(ctx context.Context, path string, w io.Writer) (skipped []string, err error) {
	st, err := f.s.c.FileService.Download(ctx, connect.NewRequest(&dsecv1.DownloadRequest{At: f.at(path)}))
	if err != nil {
		return nil, wrap(err)
	}
	defer st.Close()
	for st.Receive() {
		if _, err := w.Write(st.Msg().Data); err != nil {
			return skipped, err
		}
		skipped = append(skipped, st.Msg().Skipped...)
	}
	return skipped, wrap(st.Err())
}

// Upload lays a tar stream into the folder at path, which is made with its parents.
func (f *Files) Upload(ctx context.Context, path string, r io.Reader) (*dsecv1.UploadResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st := f.s.c.FileService.Upload(ctx)
	err := sendChunks(r, func(b []byte, first bool) error {
		m := &dsecv1.UploadRequest{Data: b}
		if first {
			m.At, m.Parents = f.at(path), true
		}
		return st.Send(m)
	})
	if err != nil {
		return nil, err
	}
	res, err := st.CloseAndReceive()
	if err != nil {
		return nil, wrap(err)
	}
	return res.Msg, nil
}

// PortURL is the gateway's address of a port inside; requests to it need the API key (header Authorization or X-API-Key).
func (s *Sandbox) PortURL(port int) *url.URL {
	u, _ := url.Parse(s.c.base + "/v1/ports/" + url.PathEscape(s.ID) + "/" + strconv.Itoa(port) + "/")
	return u
}

// PortClient is an HTTP client whose requests reach a port inside, whatever host their URL names.
func (s *Sandbox) PortClient(port int) *http.Client {
	return &http.Client{Transport: portTransport{s, port}}
}

type portTransport struct {
	s    *Sandbox
	port int
}

func (t portTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.s.PortURL(t.port)
	r = r.Clone(r.Context())
	r.URL.Scheme, r.URL.Host = base.Scheme, base.Host
	r.URL.RawPath = ""
	r.URL.Path = fmt.Sprintf("%s%s", base.Path, trimSlash(r.URL.Path))
	r.Header.Set("X-API-Key", t.s.c.key)
	return t.s.c.http.Transport.RoundTrip(r)
}

func trimSlash(p string) string {
	for len(p) > 0 && p[0] == '/' {
		p = p[1:]
	}
	return p
}
