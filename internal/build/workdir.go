package build

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/dsec-dev/dsec/client"
)

// workdirOwner is the user to whom the folder of the steps is to belong where the build makes it: who runs commands later. A builder that is
// not root needs it itself, so it is the builder's then, and "".
func (b *builder) workdirOwner() string {
	if b.workdir == "" || b.user == "" || b.user == "root" || b.user == "0" || b.builderUser() != "root" {
		return ""
	}
	return b.user
}

// makeWorkdir makes the folder of the steps where it is missing, as one would expect of a build file that names it. What it returns is called
// after the step: a step may be the one that makes the account of the folder's owner.
func (b *builder) makeWorkdir(ctx context.Context, sb *client.Sandbox) (after func(context.Context) error, err error) {
	none := func(context.Context) error { return nil }
	if b.workdir == "" {
		return none, nil
	}
	_, err = sb.FilesAs("root").Stat(ctx, b.workdir, true)
	missing := errors.Is(err, client.ErrNotFound)
	if err != nil && !missing {
		return nil, err
	}
	owner := b.workdirOwner()
	if owner == "" {
		if missing {
			return none, sb.FilesAs(b.builderUser()).MakeDir(ctx, b.workdir, true)
		}
		return none, nil
	}
	if _, uid, gid, err := account(ctx, sb, owner); err == nil {
		if missing {
			return none, b.makeOwned(ctx, sb, path.Clean(b.workdir), uid, gid)
		}
		return none, nil // an earlier step's matter, or the image's
	}
	if missing {
		err = sb.FilesAs("root").MakeDir(ctx, b.workdir, true)
	}
	return func(ctx context.Context) error {
		_, uid, gid, err := account(ctx, sb, owner)
		if err != nil {
			return nil // in a later step perhaps; who never is can't run commands either, which the check or the first one says
		}
		if !missing {
			if ours, err := b.missing(ctx, b.start, b.workdir); err != nil || !ours {
				return err
			}
		}
		return b.own(ctx, sb, uid, gid)
	}, err
}

// missing tells whether a stack has nothing under the path.
func (b *builder) missing(ctx context.Context, stack []string, p string) (bool, error) {
	sb, err := b.on(ctx, stack, "root")
	if err != nil {
		return false, fmt.Errorf("workdir %s: %w", p, err)
	}
	defer sb.Close()
	_, err = sb.FilesAs("root").Stat(ctx, p, true)
	if errors.Is(err, client.ErrNotFound) {
		return true, nil
	}
	return false, err
}

// makeOwned makes a folder of an account. Nothing of the image is run for it.
func (b *builder) makeOwned(ctx context.Context, sb *client.Sandbox, at string, uid, gid int) error {
	return b.upload(ctx, sb, path.Dir(at), func(w io.Writer) error {
		t := tar.NewWriter(w)
		h := &tar.Header{Typeflag: tar.TypeDir, Name: path.Base(at) + "/", Mode: 0o755, Uid: uid, Gid: gid, ModTime: time.Now(), Format: tar.FormatPAX}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		return t.Close()
	})
}

// own puts a folder of an account in place of the one of the steps, which the build made, with what is in it; that stays whose it is. A folder that
// a step removed stays away.
func (b *builder) own(ctx context.Context, sb *client.Sandbox, uid, gid int) error {
	at := path.Clean(b.workdir)
	files := sb.FilesAs("root")
	info, err := files.Stat(ctx, at, false)
	if errors.Is(err, client.ErrNotFound) || err == nil && (info.Type != "dir" || int(info.Uid) == uid) || at == "/" {
		return nil
	}
	if err != nil {
		return err
	}
	fresh := at + ".dsec-own"
	if err := b.makeOwned(ctx, sb, fresh, uid, gid); err != nil {
		return err
	}
	list, err := files.List(ctx, at, 1)
	if err != nil {
		return err
	}
	for _, e := range list {
		if err := files.Move(ctx, path.Join(at, e.Path), path.Join(fresh, e.Path)); err != nil {
			return err
		}
	}
	if err := files.Remove(ctx, at, false); err != nil {
		return err
	}
	return files.Move(ctx, fresh, at)
}
