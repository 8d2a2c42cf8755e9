//! Interface of tiers that other clients share. The store does not use one yet.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::key::ChunkKey;

/// A tier of frames by key that this process does not own.
///
/// Its contents are a hint: others can put and evict chunks at any time. A missing chunk is a miss,
/// not an error, and deletes nothing in any tier. Any number of threads can call it.
///
/// Each call ends at its deadline, apart from the time to detect it. Only `Corrupt` is an error of
/// the chunk: `Io` if the network or the other side refused or did not answer in time, `Closed`
/// once the connection is closed. The caller's breaker counts both.
pub trait RemoteTier: fmt::Debug + Send + Sync {
    /// Returns whether each of the keys was present, in their order.
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>>;

    /// Reads the frame of `key`. True: `into` holds exactly the whole frame that was put under this
    /// key. False if there is none. `Corrupt` if the stored frame does not have `into.len()` bytes,
    /// or is damaged. Unless it returns true, the content of `into` is undefined.
    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool>;

    /// Offers a frame. The other side can drop it, but must never return a part of it. An existing
    /// one can stay: all frames of a key are equal. On Err it is unknown whether it is present.
    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()>;
}
