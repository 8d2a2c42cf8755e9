//! What there is room for where a server's disk directory is. It must not know who looks, nor when.

/// What a person is told of the directory's file system. As of the last look that came to an end: a disk may hang.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskRoom {
    /// Bytes that this user may still write there.
    pub(crate) free_bytes: u64,
    /// Bytes of namespaces that are not open.
    pub(crate) closed_bytes: u64,
}
