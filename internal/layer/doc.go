// Package layer holds versioned layers: it builds them, names them and composes environments of them.
//
// A layer is an immutable tree of files. Its [ID] is the sha256 of the canonical tree (docs/format/layer.md), so it does not
// depend on a name, a layout, the writer or how it is stored; a [Descriptor] lists its stored forms, the one to use first:
// EROFS images of two files, metadata and contents, or of one. Layers are stacked by overlayfs and keep its marks: a whiteout
// is a character device 0:0, an opaque folder has trusted.overlay.opaque="y".
//
// [FromTar], [FromDir] and [FromUpper] build an image from hostile input: names are confined to the tree, sizes and counts
// are bounded ([Limits]), links are never followed. An image that a tenant made is never mounted; it is always built here.
//
// What is stored is read without a mount ([erofs.Open]) and never used unless its digests are right: to merge and flatten
// layers, to write them as archives, and to lay one out anew with what is read first in front, which changes no ID.
//
// A [Catalogue] gives layers names with versions (ns/name@3), and environments made of them, per project path. Its names lie
// in facts, its objects in a store: blobs/<hex> holds a file of a form, layers/<hex>.json a descriptor, which is published
// after them and removed before them. Hosts may read a layer on demand that was removed, so its objects outlive it by a day.
// A name that is found always has its layer: removal and publication each write their own record first and look at the
// other's after, so one of the two sees the other.
package layer
