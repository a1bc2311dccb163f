package initproc

import _ "embed"

//go:generate sh src/build.sh amd64 init_amd64

//go:embed init_amd64
var image []byte
