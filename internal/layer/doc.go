// Package layer holds versioned layers: it builds them, names them and composes environments of them.
//
// A layer is an immutable tree of files. Its [ID] is the sha256 of the canonical tree (docs/format/layer.md), so it does not
// depend on a name, a layout, the writer or how it is stored; a [Descriptor] lists its stored forms, of which there is one
// now: an EROFS image. Layers are stacked by overlayfs and keep its marks: a whiteout is a character device 0:0, an opaque
// folder has trusted.overlay.opaque="y".
//
// [FromTar], [FromDir] and [FromUpper] build an image from hostile input: names are confined to the tree, sizes and counts
// are bounded ([Limits]), links are never followed. An image that a tenant made is never mounted; it is always built here.
//
// A [Catalogue] gives layers names with versions (ns/name@3), and environments made of them, per project path. Its names lie
// in facts, its objects in a store: blobs/<hex> holds a form, layers/<hex>.json a descriptor, which is published after the
// blob and removed before it. A name that is found always has its layer: removal and publication each write their own record
// first and look at the other's after, so one of the two sees the other.
package layer
