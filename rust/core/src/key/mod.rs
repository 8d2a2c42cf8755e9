//! Chunk keys: 32-byte hashes of whole prefixes.
//!
//! `root_key(namespace_digest(..), adapter, salt)` is the key of the empty prefix. A [`KeyChain`]
//! extends it block by block from the model input: token ids, embedding rows and multimodal items.
//! `docs/design/keys.md` defines the format, and `tests/vectors/keys.json` holds golden vectors.
//! Keys do not depend on stores, chunk sizes, engines or a process seed: a prefix has the same keys
//! on every machine.

mod chain;
mod content;
mod many;
mod mode;
mod root;
#[cfg(test)]
mod tests;

use std::fmt;

pub use chain::KeyChain;
pub use content::row_bytes;
pub use many::append_to_each;
pub use root::{SaltTag, namespace_digest, namespace_hex, namespace_id, root_key};

/// Key format version. The version is part of the key of every keyed hash, so different versions
/// never share a chunk key.
pub const KEY_SCHEMA: u32 = 2;

/// A chained hash of the whole prefix ending with a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ChunkKey(pub [u8; 32]);

/// Formats the key as 64 lowercase hex digits.
impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
