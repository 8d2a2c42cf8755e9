//! Tiers that others use too: what a store may ask of them, and how little it may rely on the
//! answers.
//!
//! They must not know slots, prefixes or when a chunk should be there; the store does.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::key::ChunkKey;

/// A tier of frames by key that this process does not own.
///
/// Its contents are a hint: others may put and evict at any time. A missing chunk is a miss, not an
/// error, and deletes nothing in any tier. Calls may come from any number of threads.
///
/// Each call ends at its deadline, whatever the other side does; only the time to notice comes on
/// top. Errors say nothing about the chunk unless they are `Corrupt`: `Io` where the network or the
/// other side refused, or did not answer in time, `Closed` once the connection was closed. The
/// caller's breaker counts both.
pub trait RemoteTier: fmt::Debug + Send + Sync {
    /// Whether each of the keys was there when it was looked at, in their order.
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>>;

    /// Reads the frame of `key`. True: `into` holds exactly the whole frame that was put under this
    /// key. False: there is none. `Corrupt` where the frame there is not one of `into.len()` bytes,
    /// or is damaged. Unless it is true, `into` holds rubbish.
    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool>;

    /// Offers a frame. The other side may drop it, but never show a part of it. One that is there
    /// already may stay: frames of a key are as good as each other. On Err it may be there or not.
    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()>;
}
