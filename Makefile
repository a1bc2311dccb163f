# make build | test | demo | bench B=create|exec|idle|images|burst|dedup|trajectory|vm|firecracker | torture | test-kernels | test-reset | generate
SHELL := /bin/bash
GO ?= go
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)
GUEST := internal/guest/binary/dist/dsec-guest
GUESTVM := internal/guest/binary/dist/dsec-guest-vm

.PHONY: build guest test test-fast torture demo bench deps generate lint clean
build: bin/dsec

guest: $(GUEST) $(GUESTVM)
$(GUESTVM): $(shell find cmd/dsec-guest internal/guest internal/sandbox internal/keeper internal/confine internal/memfile -type f -not -path '*/dist/*' -not -name '*_test.go' 2>/dev/null) go.mod
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/dsec-guest/vm
$(GUEST): $(shell find cmd/dsec-guest internal/guest internal/sandbox -name '*.go' -not -name '*_test.go' 2>/dev/null) go.mod
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/dsec-guest

.PHONY: bin/dsec
bin/dsec: $(GUEST) $(GUESTVM)
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/dsec

# What the tests and the demo need beside Go: Debian's packages, installed only where they are missing.
deps:
	@scripts/deps.sh

test: deps build debian-kernel
	scripts/deps.sh Xvnc:tigervnc-standalone-server xterm:xterm
	scripts/runsc.sh
	scripts/test.sh

# Without root and without the slow parts.
test-fast:
	$(GO) test -short ./...

torture: deps build debian-kernel
	scripts/deps.sh Xvnc:tigervnc-standalone-server xterm:xterm
	scripts/versitygw.sh
	DSEC_TORTURE=1 scripts/test.sh

# The container backend on Debian's own kernels with cgroup v2 alone, in QEMU machines: docs/ops/kernels.md.
.PHONY: test-kernels
test-kernels:
	test/kernels/run.sh

# A machine that is reset in the midst of a load, again and again: docs/ops/kernels.md.
.PHONY: test-reset
test-reset: build
	test/kernels/reset.sh

# dsec with the operator's Firecracker (DSEC_FIRECRACKER, DSEC_JAILER) in a nested machine: docs/ops/firecracker.md.
.PHONY: test-firecracker
test-firecracker:
	test/firecracker/run.sh

# A small kernel for microvm and vm, from Debian's source: docs/ops/vms.md.
.PHONY: guest-kernel
guest-kernel:
	scripts/guest-kernel.sh

# noVNC, for the view of screens in a browser: docs/ops/desktop.md.
.PHONY: novnc
novnc:
	scripts/novnc.sh

# gVisor's runsc into bin/, for the runtime gvisor: docs/ops/runtimes.md. Without it that runtime is not offered, nothing else fails.
.PHONY: runsc
runsc:
	RUNSC_MISSING=1 scripts/runsc.sh

# Debian's kernel for the tests of microvm, unless there is one.
.PHONY: debian-kernel
debian-kernel:
	@scripts/debian-kernel.sh

# The faults of test/e2e once more, in sandboxes under OCI runtimes: R="crun gvisor" by default.
.PHONY: test-runtimes
R ?= crun gvisor
test-runtimes: deps build runsc
	for r in $(R); do DSEC_E2E_RUNTIME=$$r PATH="$$PATH:$(CURDIR)/bin" $(GO) test -count=1 ./test/e2e -run '^Test(B[0-9]|Session|CrashUp)' || exit 1; done

# An editor on a desktop of Debian's packages is used by screen, keys and pointer: docs/ops/desktop.md.
.PHONY: test-desktop
test-desktop: deps build
	test/desktop/run.sh

demo: deps build
	examples/swe/run.sh
.PHONY: demo-replay
demo-replay: deps build
	examples/swe/run.sh -replay

# Go's own test programs, judged by function calls: examples/judge. N takes a sample.
.PHONY: judge
judge: deps build
	examples/judge/run.sh $(if $(N),-n $(N))

# A trainer and the host under it are killed at random moments: examples/preempt/README.md.
.PHONY: preempt
preempt: deps build
	examples/preempt/run.sh

bench: deps build
	bench/run.sh $(B) $(N)

# Needs protoc; the Go plugins come from the module that go.mod names.
generate:
	scripts/generate.sh

lint:
	$(GO) vet ./... && test -z "$$(gofmt -l $$(git ls-files '*.go' | grep -v '\.pb\.go\|\.connect\.go'))"

clean:
	rm -rf bin $(GUEST) $(GUESTVM)
