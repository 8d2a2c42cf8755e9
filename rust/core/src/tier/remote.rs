//! Interface of tiers that are shared with other clients. The store does not use this interface
//! yet.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::key::ChunkKey;

/// A tier that stores frames by key and is not owned by this process.
///
/// Its contents are a hint: other clients can put and evict chunks at any time. A missing chunk is
/// a miss, not an error, and does not affect other tiers. All methods can be called from any
/// thread.
///
/// Each call returns soon after its deadline at the latest. `Corrupt` means that the chunk is
/// damaged. `Io` means that the network or the remote side failed or did not respond in time, and
/// `Closed` that the connection was closed; the caller's breaker treats both as failures of the
/// tier.
pub trait RemoteTier: fmt::Debug + Send + Sync {
    /// Returns, for each key in order, whether it was present.
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>>;

    /// Reads the frame of `key`. Returns true if `into` contains exactly the frame that was put
    /// under this key, and false if there is no such frame. Returns `Corrupt` if the stored frame
    /// is damaged or does not have `into.len()` bytes. Unless the result is true, the content of
    /// `into` is undefined.
    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool>;

    /// Offers a frame. The remote side may drop it, but must never return a part of it. An existing
    /// frame may stay, because all frames of a key are equal. After an error, it is unknown whether
    /// the frame is present.
    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()>;
}
