//! A log of the keys of chunks that were recently added to or removed from a tier. `listener` reads
//! the log.

use std::collections::VecDeque;

use crate::key::ChunkKey;

/// The tiers in which lookups find a chunk, provided that they also find its ancestors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers {
    /// The chunk is in host memory.
    pub host: bool,
    /// The chunk is on disk.
    pub disk: bool,
    /// The chunk is being saved, read from disk or queued for a read, and is not yet in host
    /// memory.
    pub pending: bool,
}

impl Tiers {
    /// Returns the tiers as a bit set: 1 for host memory, 2 for disk, and 4 for pending.
    #[must_use]
    pub fn bits(self) -> u8 {
        u8::from(self.host) + 2 * u8::from(self.disk) + 4 * u8::from(self.pending)
    }

    /// Converts a bit set from [`Self::bits`] to tiers. Returns None for any other number.
    #[must_use]
    pub fn of_bits(bits: u8) -> Option<Self> {
        (bits < 8).then_some(Self {
            host: bits & 1 != 0,
            disk: bits & 2 != 0,
            pending: bits & 4 != 0,
        })
    }
}

/// Result of [`Listener::changes`](super::Listener::changes).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Chunks and their tiers: the requested chunks, then the changed chunks, oldest change first.
    /// A key may appear more than once.
    pub rows: Vec<(ChunkKey, Tiers)>,
    /// True if the log dropped any keys, in which case chunks missing from `rows` may have changed
    /// too.
    pub lost: bool,
}

impl Changes {
    /// Returns the result for a missing store: no tier holds the requested chunks, and any other
    /// chunk may have changed.
    #[must_use]
    pub fn of_none(asked: &[ChunkKey]) -> Self {
        Self { rows: asked.iter().map(|key| (*key, Tiers::default())).collect(), lost: true }
    }
}

/// A log of numbered keys. A listener's position is the number of the next key that it will read.
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

    /// Drops all keys and marks them as lost for every listener.
    pub(crate) fn drop_all(&mut self) {
        self.first = self.end() + 1;
        self.keys.clear();
    }

    /// Returns up to `limit` keys, starting at position `next`, and true if any keys at or after
    /// this position were dropped. Advances `next`.
    ///
    /// Returns no keys if any were dropped, because the listener must then query all its keys
    /// anyway.
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
