//! Interface for tiers shared with other clients. The store does not use this interface yet.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::key::ChunkKey;

/// A tier that stores frames by key and is not owned by this process.
///
/// The result of `contains_many` is only a hint, because other clients can add and evict chunks at
/// any time. A missing chunk is a miss, not an error, and does not affect other tiers. All methods
/// are thread-safe.
///
/// No call overruns its deadline by much. `Corrupt` means that the chunk is damaged, `Io`
/// that the network or the remote side failed or did not respond in time, and `Closed` that the
/// connection was closed. The caller's circuit breaker counts both `Io` and `Closed` as
/// tier failures.
pub trait RemoteTier: fmt::Debug + Send + Sync {
    /// Returns whether each key was present, in the order of `keys`.
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>>;

    /// Reads `key`'s frame. Returns true if `into` holds exactly the frame stored under this key,
    /// or false if there is no such frame. Returns `Corrupt` if the stored frame is damaged or its
    /// size is not `into.len()`. Unless the result is true, the contents of `into` are undefined.
    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool>;

    /// Offers a frame. The remote side may drop the frame, but must never return only part of it.
    /// The remote side may also keep an existing frame, because all frames with the same key are
    /// identical. After an error, the frame may or may not be present.
    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()>;
}
