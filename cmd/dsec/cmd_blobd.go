package main

import (
	"errors"
	"log/slog"
	"os"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/store"
)

func blobdMain(args []string) int {
	return blob.Main(args, openBlobStores, slog.New(slog.NewTextHandler(os.Stderr, nil)))
}

// blobdCmd only documents the command: main hands it over before anything is parsed, since the daemon has flags of its own.
type blobdCmd struct{}

func (blobdCmd) Run() error { return errors.New("the blob daemon is started by its host") }

// openBlobStores opens the stores from which the daemon fetches.
func openBlobStores(specs []string) (store.Store, error) {
	if len(specs) != 1 {
		return nil, errors.New("blobd: want one store")
	}
	return store.NewDir(specs[0])
}
