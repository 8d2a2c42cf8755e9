//! Ghosts record which chunks were evicted and whether they had been reused. The table has a fixed
//! size of 32 bytes per chunk of capacity.
//!
//! Each key maps to a set of 16 ghosts, in which a new ghost replaces the oldest. The table never
//! grows or rehashes, and each call reads 64 bytes. The table starts as zeroed memory, and the
//! kernel allocates its pages only when they are first written.

use crate::key::ChunkKey;

/// Number of ghosts per chunk of capacity. More than one ghost per chunk is needed, because a chat
/// may continue long after a small tier has evicted its chunks.
const PER_CHUNK: usize = 8;
const WAYS: usize = 16;
/// Number of ghosts in a set, counted from the newest, that are treated as recent. The recent
/// ghosts cover roughly the last `capacity` evictions.
const RECENT: usize = WAYS / PER_CHUNK;
/// Limits the table to 256 MiB. A tier with more than 8 million chunks has fewer ghosts per chunk.
const MAX_SETS: usize = 1 << 22;

/// An evicted chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ghost {
    /// True if the chunk was used more than once.
    pub(super) reused: bool,
    /// True if at most about `capacity` chunks have been evicted since this chunk was.
    pub(super) recent: bool,
}

/// Tag bit that marks the tag's slot as used.
const USED: u32 = 1;
/// Tag bit that holds `Ghost::reused`.
const REUSED: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// The tags of each set, newest first.
    sets: Vec<[u32; WAYS]>,
    /// False before the first eviction, so that `take` can avoid reading cold memory.
    has_any: bool,
}

/// Returns the first 8 bytes of a key. Collisions are harmless because ghosts are only a hint.
pub(super) fn fingerprint(key: &ChunkKey) -> u64 {
    u64::from_le_bytes(*key.0.first_chunk().expect("keys have 32 bytes"))
}

impl Ghosts {
    pub(super) fn new(capacity: usize) -> Self {
        let num_sets = (capacity.saturating_mul(PER_CHUNK) / WAYS).clamp(1, MAX_SETS);
        Self { sets: vec![[0; WAYS]; num_sets], has_any: false }
    }

    /// Returns the set of a fingerprint, and the fingerprint's tag in the set.
    fn place(&mut self, fingerprint: u64) -> Option<(&mut [u32; WAYS], u32)> {
        let num_sets = self.sets.len() as u64;
        let set = usize::try_from(fingerprint.checked_rem(num_sets)?).ok()?;
        let tag = u32::try_from(fingerprint >> 32).ok()? & !REUSED | USED;
        Some((self.sets.get_mut(set)?, tag))
    }

    pub(super) fn put(&mut self, fingerprint: u64, reused: bool) {
        self.has_any = true;
        if let Some((set, tag)) = self.place(fingerprint) {
            set.rotate_right(1);
            set[0] = if reused { tag | REUSED } else { tag };
        }
    }

    pub(super) fn take(&mut self, fingerprint: u64) -> Option<Ghost> {
        if !self.has_any {
            return None;
        }
        let (set, tag) = self.place(fingerprint)?;
        let at = set.iter().position(|found| found & !REUSED == tag)?;
        let found = std::mem::take(&mut set[at]);
        set[at..].rotate_left(1);
        Some(Ghost { reused: found & REUSED != 0, recent: at < RECENT })
    }
}
