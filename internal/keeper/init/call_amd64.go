package initproc

import _ "embed"

//go:generate sh src/build.sh amd64 call_amd64 call

//go:embed call_amd64
var callImage []byte
