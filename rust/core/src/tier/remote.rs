//! Interface of tiers that are shared with other clients. The store does not use this interface
//! yet.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::key::ChunkKey;

/// A tier that stores frames by key and is not owned by this process.
///
/// The result of `contains_many` is only a hint, because other clients can put and evict chunks at
/// any time. A missing chunk is a miss, not an error, and does not affect other tiers. All methods
/// are thread-safe.
///
/// No call returns much later than its deadline. `Corrupt` means that the chunk is damaged, `Io`
/// that the network or the remote side failed or did not respond in time, and `Closed` that the
/// connection was closed. The caller's breaker treats both `Io` and `Closed` as failures of the
/// tier.
pub trait RemoteTier: fmt::Debug + Send + Sync {
    /// Returns whether each key was present, in the order of `keys`.
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>>;

    /// Reads the frame of `key`. Returns true if `into` contains exactly the frame that was put
    /// under this key, and false if there is no such frame. Returns `Corrupt` if the stored frame
    /// is damaged or its size is not `into.len()`. The content of `into` is undefined unless the
    /// result is true.
    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool>;

    /// Offers a frame. The remote side may drop the frame, but must never return only a part of it.
    /// It may also keep an existing frame, because all frames with the same key are identical.
    /// After an error, it is unknown whether the frame is present.
    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()>;
}
