//! Chunk keys: 32 bytes that stand for a whole prefix.

/// A chained digest: it stands for the whole prefix up to the chunk's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey(pub [u8; 32]);
