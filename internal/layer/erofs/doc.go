// Package erofs writes and reads EROFS images (linux fs/erofs, on-disk format of kernel 5.15 and later): uncompressed, 4 KiB blocks,
// one file, or two: metadata, and the contents as its extra device.
//
// It hides the on-disk format. A caller spools the contents of files with [Writer.Add] as they come, in any order, builds a
// tree of [Inode] that refers to them, and calls [Writer.Finish], which lays the folders and inodes behind the contents and
// writes the superblock last: an image that was not finished is never a valid one.
//
// Invariants: the octets of an image follow from the sequence of Add calls and the tree alone (no clock, no random number, no
// map order); nothing of a file's content is held but one buffer; equal contents are stored once; long runs of zeros are
// holes. Contents lie together and block-aligned: before all metadata, or in a second file (mounted with "device="). A Writer is
// for one goroutine.
//
// [Open] reads what a Writer wrote, and takes no word of it on trust; [Image.Unpack] makes files of it where no kernel mounts it.
package erofs
