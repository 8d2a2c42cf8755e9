//! What there is room for where a server's disk directory is. It must not know who looks, nor when.

use std::collections::BTreeMap;

/// What a person is told of the directory's file system. As of the last look that came to an end: a disk may hang.
#[derive(Debug, Clone)]
pub(crate) struct DiskRoom {
    /// Bytes that this user may still write there.
    pub(crate) free_bytes: u64,
    /// Bytes of each namespace that was not open, by its directory's name; one that is now counts its own.
    pub(crate) closed: BTreeMap<String, u64>,
}
