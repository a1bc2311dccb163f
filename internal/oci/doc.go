// Package oci turns OCI and Docker images into environments, and environments back into images.
//
// It hides registries (with mirrors, credentials, rate limits and connections that break), OCI layout folders, `docker save`
// archives of every age, and how their layers become ours. [Images.Pull] is the whole of it for a caller: a reference in, an
// environment's name@version out; the second time it costs one fact. A layer is converted once per store: oci/<diff id>.json
// says which of our layers the tar with that digest became.
//
// Everything that an image says is hostile: manifests and configs are bounded and checked against their digests, sizes that
// they state are not believed, a layer is published only after both its digests were right, and its tree is bounded by
// layer.Limits. Credentials reach the host they are for and its token server, nobody else, and only over TLS unless the host
// is a loopback address or was configured as insecure.
//
// A layer's digest is the right to its contents: who can name the uncompressed digest of a layer (it stands in an image's
// config, which only those can read that may read the image) may use it.
//
// Locks: Images.mu guards the tables of what is under way; nothing is called under it.
package oci
