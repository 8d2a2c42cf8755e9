//! A log of the keys of chunks that were recently added to a tier or removed from it. `listener`
//! reads it.

use std::collections::VecDeque;

use crate::key::ChunkKey;

/// The tiers in which lookups find a chunk, provided that they find its ancestors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers {
    /// In host memory.
    pub host: bool,
    /// On disk.
    pub disk: bool,
    /// Being saved, or requested from disk, but not in host memory yet.
    pub coming: bool,
}

impl Tiers {
    /// Returns a bit set: 1 in host memory, 2 on disk, 4 coming.
    #[must_use]
    pub fn bits(self) -> u8 {
        u8::from(self.host) + 2 * u8::from(self.disk) + 4 * u8::from(self.coming)
    }

    /// Inverse of [`Self::bits`]; None for other numbers.
    #[must_use]
    pub fn of_bits(bits: u8) -> Option<Self> {
        (bits < 8).then_some(Self {
            host: bits & 1 != 0,
            disk: bits & 2 != 0,
            coming: bits & 4 != 0,
        })
    }
}

/// Result of [`Listener::changes`](super::Listener::changes).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// The requested chunks and then the changed chunks, oldest change first, with their tiers. A
    /// key may occur more than once.
    pub rows: Vec<(ChunkKey, Tiers)>,
    /// Keys were dropped from the log: chunks that are not in `rows` may have changed too.
    pub lost: bool,
}

impl Changes {
    /// Returns the result without a store: any chunk may have changed, and no tier has the
    /// requested chunks.
    #[must_use]
    pub fn of_none(asked: &[ChunkKey]) -> Self {
        Self { rows: asked.iter().map(|key| (*key, Tiers::default())).collect(), lost: true }
    }
}

/// The log. Keys are numbered, and the position of a listener is the number of its next key.
#[derive(Debug, Default)]
pub(crate) struct ChangeLog {
    pub(crate) keys: VecDeque<ChunkKey>,
    pub(crate) capacity: usize,
    /// Number of the first key in `keys`.
    pub(crate) first: u64,
    pub(crate) num_listeners: usize,
}

impl ChangeLog {
    pub(crate) fn end(&self) -> u64 {
        self.first + self.keys.len() as u64
    }

    pub(crate) fn push(&mut self, key: ChunkKey) {
        if self.keys.len() == self.capacity {
            self.keys.pop_front();
            self.first += 1;
        }
        self.keys.push_back(key);
    }

    /// Drops all keys, and marks keys as lost for every listener.
    pub(crate) fn drop_all(&mut self) {
        self.first = self.end() + 1;
        self.keys.clear();
    }

    /// Returns up to `limit` keys starting at position `next`, and whether keys after that position
    /// were dropped. Advances `next`.
    ///
    /// If keys were dropped, returns no keys, because the listener must query all its keys anyway.
    pub(crate) fn take(
        &self,
        next: &mut u64,
        limit: usize,
    ) -> (impl Iterator<Item = ChunkKey>, bool) {
        let lost = *next < self.first;
        let from = if lost {
            self.keys.len()
        } else {
            usize::try_from(*next - self.first).unwrap_or(usize::MAX)
        };
        let until = from.saturating_add(limit).min(self.keys.len());
        *next = self.first + until as u64;
        (self.keys.range(from..until).copied(), lost)
    }
}
