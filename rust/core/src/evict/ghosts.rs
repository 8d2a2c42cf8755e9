//! Ghosts: which chunks were evicted and whether they had been reused. A table of fixed size, 32
//! bytes per chunk of capacity.
//!
//! A key belongs to one set of 16 ghosts, in which a new ghost replaces the oldest. Nothing grows
//! or is rehashed, and each call reads 64 bytes. The table is zeroed memory, which the kernel
//! allocates on the first write.

use crate::key::ChunkKey;

/// Ghosts per chunk of capacity: chats come back long after they left a small tier.
const PER_CHUNK: usize = 8;
const WAYS: usize = 16;
/// The newest ghosts of a set that count as recent: as old as the last `capacity` evictions.
const RECENT: usize = WAYS / PER_CHUNK;
/// 256 MiB: a tier of more than 8 million chunks has fewer ghosts per chunk.
const MAX_SETS: usize = 1 << 22;

/// An evicted chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ghost {
    /// Used more than once.
    pub(super) reused: bool,
    /// Evicted recently: the tier has since evicted at most about as many chunks as it holds.
    pub(super) recent: bool,
}

/// In a tag: the slot is in use.
const USED: u32 = 1;
/// In a tag: `Ghost::reused`.
const REUSED: u32 = 2;

/// Ghosts by fingerprint.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// Tags, the newest first.
    sets: Vec<[u32; WAYS]>,
    /// False before the first eviction: `take` then avoids a read of cold memory.
    has_any: bool,
}

/// Eight bytes of a key are enough for a hint.
pub(super) fn fingerprint(key: &ChunkKey) -> u64 {
    u64::from_le_bytes(*key.0.first_chunk().expect("keys have 32 bytes"))
}

impl Ghosts {
    pub(super) fn new(capacity: usize) -> Self {
        let num_sets = (capacity.saturating_mul(PER_CHUNK) / WAYS).clamp(1, MAX_SETS);
        Self { sets: vec![[0; WAYS]; num_sets], has_any: false }
    }

    /// Returns the set of a fingerprint and its tag in the set.
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
