// Package upper makes the writable folders of sandboxes, each with a size limit that holds.
//
// It hides how the limit is kept. Drivers, the best first: subvolumes with a quota of a btrfs that the state folder lies on
// (when quotas are on there already), subvolumes of a btrfs in a pool file, project quotas of ext4 or xfs, an ext4 image on a
// loop device for each sandbox, tmpfs. [Open] takes the first that works; it is tried for real, by writing past a limit, and
// [Pool.Describe] says why the others were not taken.
//
// Invariants: a pool file is allocated in full before mkfs, and nothing discards into it, else a full disk of the host would
// turn the pool read-only for every sandbox; an upper that List shows is complete, because it is made aside and moved into
// place; Remove moves it away first, so a crash leaves it either whole or as trash that the next Run sweeps. Dir and Work of
// an upper are in one file system and, on btrfs, one subvolume. Uppers are lost when the machine crashes: overlays on them
// are mounted volatile.
//
// [Open] makes mounts and loop devices but starts nothing; [Pool.Run] owns the one goroutine that does the slow parts of
// removals. A mount that an earlier process left is used again, never doubled. A Pool holds a lock on its state folder.
package upper
