// Package build makes environments from a file of steps, which are executed in real sandboxes through the API.
//
// It hides the cache: a step's result is a snapshot that is published as layer build/<digest>, where the digest is of the
// layers below it, the step, and the octets it copies; what was built once is found again from any machine. It also hides
// what building leaves behind: package caches and temporary files that a step made are removed before its snapshot (see
// [Rules]), and what looks like a secret is reported.
//
// It runs beside the client, so nothing here is trusted by the platform, and it uses the Go SDK alone.
package build
