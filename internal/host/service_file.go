package host

import (
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type fileService struct{ h *Host }

// bodyPiece is the octets of one message of a stream.
const bodyPiece = 256 << 10

// place finds the sandbox and the path of a file call.
func (s fileService) place(ctx context.Context, p *dsecv1.Path) (*box, string, error) {
	b, err := s.h.told(ctx, p.GetSandbox())
	if err != nil {
		return nil, "", err
	}
	path, err := at(p)
	return b, path, err
}

func (s fileService) Stat(ctx context.Context, req *connect.Request[dsecv1.StatRequest]) (*connect.Response[dsecv1.StatResponse], error) {
	b, path, err := s.place(ctx, req.Msg.GetAt())
	if err != nil {
		return nil, err
	}
	r := &dsecv1.StatResponse{}
	err = b.withFiles(ctx, req.Msg.GetAt().GetUser(), func(f *guest.Files) error {
		info, err := f.Stat(ctx, path, req.Msg.GetFollow())
		r.Info = fileInfo(info)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(r), nil
}

func (s fileService) List(ctx context.Context, req *connect.Request[dsecv1.ListFilesRequest], stream *connect.ServerStream[dsecv1.ListFilesResponse]) error {
	b, path, err := s.place(ctx, req.Msg.GetAt())
	if err != nil {
		return err
	}
	return b.withFiles(ctx, req.Msg.GetAt().GetUser(), func(f *guest.Files) error {
		return f.List(ctx, path, int(req.Msg.GetDepth()), func(all []guest.Info) error {
			r := &dsecv1.ListFilesResponse{Entries: make([]*dsecv1.FileInfo, len(all))}
			for i, info := range all {
				r.Entries[i] = fileInfo(info)
			}
			return stream.Send(r)
		})
	})
}

func (s fileService) Read(ctx context.Context, req *connect.Request[dsecv1.ReadRequest], stream *connect.ServerStream[dsecv1.ReadResponse]) error {
	m := req.Msg
	b, path, err := s.place(ctx, m.GetAt())
	if err != nil {
		return err
	}
	return b.withFiles(ctx, m.GetAt().GetUser(), func(f *guest.Files) error {
		r, err := f.Read(ctx, path, m.GetOffset(), m.GetLength())
		if err != nil {
			return err
		}
		defer r.Close()
		if err := stream.Send(&dsecv1.ReadResponse{Info: fileInfo(r.Info)}); err != nil {
			return err
		}
		return copyOut(r, func(p []byte) error { return stream.Send(&dsecv1.ReadResponse{Data: p}) })
	})
}

// copyOut sends a stream in pieces.
func copyOut(r io.Reader, send func([]byte) error) error {
	buf := make([]byte, bodyPiece)
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			if err := send(buf[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// incoming is the body of a client stream whose messages carry data.
type incoming[M any] struct {
	stream *connect.ClientStream[M]
	data   func(*M) []byte
	rest   []byte
}

func (i *incoming[M]) Read(p []byte) (int, error) {
	for len(i.rest) == 0 {
		if !i.stream.Receive() {
			if err := i.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		i.rest = i.data(i.stream.Msg())
	}
	n := copy(p, i.rest)
	i.rest = i.rest[n:]
	return n, nil
}

// header receives the first message of a client stream.
func header[M any](stream *connect.ClientStream[M]) (*M, error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("the first message, with the header, is missing: %w", sandbox.ErrInvalid)
	}
	return stream.Msg(), nil
}

// writeHeader is what a request to write asks of the file server.
func writeHeader(path string, q *dsecv1.WriteRequest) guest.WriteHeader {
	h := guest.WriteHeader{
		Path: path, Mode: q.GetMode(), SetMode: q.GetSetMode(), Parents: q.GetParents(), Append: q.GetAppend(),
		StartOffset: q.GetStartOffset(), Modified: rpc.Time(q.GetModified()), Size: -1,
	}
	if q.GetSize() > 0 {
		h.Size = q.GetSize()
	}
	return h
}

func (s fileService) Write(ctx context.Context, stream *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	first, err := header(stream)
	if err != nil {
		return nil, err
	}
	b, path, err := s.place(ctx, first.GetAt())
	if err != nil {
		return nil, err
	}
	h := writeHeader(path, first)
	if err := guest.CheckMode(h.Mode, false); err != nil {
		return nil, fmt.Errorf("write %q: %w", path, err)
	}
	canon := &dsecv1.WriteRequest{
		At: b.canonicalPath(path, first.GetAt().GetUser()), Mode: first.GetMode(), Parents: first.GetParents(), Append: first.GetAppend(),
		StartOffset: first.GetStartOffset(), Modified: first.GetModified(), Size: first.GetSize(), SetMode: first.GetSetMode(),
	}
	body := &incoming[dsecv1.WriteRequest]{stream, (*dsecv1.WriteRequest).GetData, first.GetData()}
	r, existed, err := b.bodied(ctx, upload{first.GetStep(), tagWrite, canon, first.GetAt().GetUser(),
		func(ctx context.Context, f *guest.Files, body io.Reader, before *dsecv1.LogRecord) (*dsecv1.LogRecord, error) {
			h := h
			if h.Append && h.StartOffset < 0 && before.GetOutcome().GetKind() == string(sandbox.Interrupted) {
				h.StartOffset = before.GetOffset() // where the first attempt began
			}
			res, err := f.Write(ctx, h, body)
			if err != nil {
				return nil, err
			}
			return keepInfo(&dsecv1.LogRecord{Offset: res.Start, Outcome: &dsecv1.Outcome{Applied: res.Written}}, fileInfo(res.Info)), nil
		}}, body)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.WriteResponse{Info: keptInfo(r), Written: r.GetOutcome().GetApplied(), Existed: existed}), nil
}

func (s fileService) MakeDir(ctx context.Context, req *connect.Request[dsecv1.MakeDirRequest]) (*connect.Response[dsecv1.MakeDirResponse], error) {
	m := req.Msg
	b, path, err := s.place(ctx, m.GetAt())
	if err != nil {
		return nil, err
	}
	canon := &dsecv1.MakeDirRequest{At: b.canonicalPath(path, m.GetAt().GetUser()), Mode: m.GetMode(), Parents: m.GetParents()}
	r, existed, err := b.change(ctx, m.GetStep(), tagMakeDir, canon, m.GetAt().GetUser(), func(ctx context.Context, f *guest.Files) (*dsecv1.LogRecord, error) {
		info, err := f.MakeDir(ctx, path, m.GetMode(), m.GetParents())
		if err != nil {
			return nil, err
		}
		return keepInfo(&dsecv1.LogRecord{}, fileInfo(info)), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.MakeDirResponse{Info: keptInfo(r), Existed: existed}), nil
}

func (s fileService) Move(ctx context.Context, req *connect.Request[dsecv1.MoveRequest]) (*connect.Response[dsecv1.MoveResponse], error) {
	m := req.Msg
	b, from, err := s.place(ctx, m.GetFrom())
	if err != nil {
		return nil, err
	}
	to, err := rpc.Octets("to", m.GetTo(), m.GetToRaw())
	if err == nil {
		err = sandbox.CheckPath("to", to)
	}
	if err != nil {
		return nil, err
	}
	canon := &dsecv1.MoveRequest{From: b.canonicalPath(from, m.GetFrom().GetUser()), Replace: m.GetReplace()}
	canon.To, canon.ToRaw = rpc.Twin(to)
	_, existed, err := b.change(ctx, m.GetStep(), tagMove, canon, m.GetFrom().GetUser(), func(ctx context.Context, f *guest.Files) (*dsecv1.LogRecord, error) {
		return nil, f.Move(ctx, from, to, m.GetReplace())
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.MoveResponse{Existed: existed}), nil
}

func (s fileService) Remove(ctx context.Context, req *connect.Request[dsecv1.RemoveRequest]) (*connect.Response[dsecv1.RemoveResponse], error) {
	m := req.Msg
	b, path, err := s.place(ctx, m.GetAt())
	if err != nil {
		return nil, err
	}
	canon := &dsecv1.RemoveRequest{At: b.canonicalPath(path, m.GetAt().GetUser()), Recursive: m.GetRecursive(), MissingOk: m.GetMissingOk()}
	_, existed, err := b.change(ctx, m.GetStep(), tagRemove, canon, m.GetAt().GetUser(), func(ctx context.Context, f *guest.Files) (*dsecv1.LogRecord, error) {
		return nil, f.Remove(ctx, path, m.GetRecursive(), m.GetMissingOk())
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.RemoveResponse{Existed: existed}), nil
}

// Watch wakes the sandbox when it begins; an open watch alone does not keep it awake.
func (s fileService) Watch(ctx context.Context, req *connect.Request[dsecv1.WatchRequest], stream *connect.ServerStream[dsecv1.WatchResponse]) error {
	b, path, err := s.place(ctx, req.Msg.GetAt())
	if err != nil {
		return err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return err
	}
	f, release, err := b.fileServer(ctx, inst, req.Msg.GetAt().GetUser())
	b.done()
	if err != nil {
		return err
	}
	defer release()
	return f.Watch(ctx, path, req.Msg.GetRecursive(), func(e guest.Event) error {
		r := &dsecv1.WatchResponse{Kind: string(e.Kind)}
		r.Path, r.PathRaw = rpc.Twin(e.Path)
		return stream.Send(r)
	})
}

func (s fileService) Download(ctx context.Context, req *connect.Request[dsecv1.DownloadRequest], stream *connect.ServerStream[dsecv1.DownloadResponse]) error {
	b, path, err := s.place(ctx, req.Msg.GetAt())
	if err != nil {
		return err
	}
	return b.withFiles(ctx, req.Msg.GetAt().GetUser(), func(f *guest.Files) error {
		tree, err := f.Download(ctx, path, req.Msg.GetExclude())
		if err != nil {
			return err
		}
		defer tree.Close()
		if err := copyOut(tree, func(p []byte) error { return stream.Send(&dsecv1.DownloadResponse{Data: p}) }); err != nil {
			return err
		}
		return stream.Send(&dsecv1.DownloadResponse{Skipped: skippedText(tree.Skipped())})
	})
}

// skippedText is what a transfer left out, as text; all is how much that was.
func skippedText(lines []string, all int64) []string {
	out := make([]string, 0, len(lines)+1)
	for _, l := range lines {
		out = append(out, text(l))
	}
	if left := all - int64(len(lines)); left > 0 {
		out = append(out, fmt.Sprintf("and %d more", left))
	}
	return out
}

func (s fileService) Upload(ctx context.Context, stream *connect.ClientStream[dsecv1.UploadRequest]) (*connect.Response[dsecv1.UploadResponse], error) {
	first, err := header(stream)
	if err != nil {
		return nil, err
	}
	b, path, err := s.place(ctx, first.GetAt())
	if err != nil {
		return nil, err
	}
	canon := &dsecv1.UploadRequest{At: b.canonicalPath(path, first.GetAt().GetUser()), Parents: first.GetParents(), KeepOwner: first.GetKeepOwner()}
	h := guest.UploadHeader{Path: path, Parents: first.GetParents(), KeepOwner: first.GetKeepOwner()}
	body := &incoming[dsecv1.UploadRequest]{stream, (*dsecv1.UploadRequest).GetData, first.GetData()}
	r, existed, err := b.bodied(ctx, upload{first.GetStep(), tagUpload, canon, first.GetAt().GetUser(),
		func(ctx context.Context, f *guest.Files, body io.Reader, _ *dsecv1.LogRecord) (*dsecv1.LogRecord, error) {
			res, err := f.Upload(ctx, h, body)
			if err != nil {
				return nil, err
			}
			return &dsecv1.LogRecord{Offset: res.Entries, Skipped: skippedText(res.Skipped, res.Left), Outcome: &dsecv1.Outcome{Applied: res.Applied}}, nil
		}}, body)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.UploadResponse{Entries: r.GetOffset(), Applied: r.GetOutcome().GetApplied(), Existed: existed, Skipped: r.GetSkipped()}), nil
}
