#!/usr/bin/env bash
# Regenerates the committed Go of the wire. The plugins' versions are those of go.mod.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(mktemp -d); trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
m=module=github.com/dsec-dev/dsec
PATH=$bin:$PATH protoc -I api --go_out=. --go_opt=$m --connect-go_out=. --connect-go_opt=$m api/dsec/v1/*.proto
