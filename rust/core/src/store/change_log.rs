//! The last keys of chunks that came to a tier or left one, and how their places are told. Data only; `listener` reads it.

use std::collections::VecDeque;

use crate::key::ChunkKey;

/// In which tiers lookups find a chunk, if they find its parents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers {
    /// In host memory.
    pub host: bool,
    /// On disk.
    pub disk: bool,
    /// Not in host memory, but a save or a read of it is under way.
    pub coming: bool,
}

impl Tiers {
    /// As a number: 1 in host, 2 on disk, 4 coming.
    #[must_use]
    pub fn bits(self) -> u8 {
        u8::from(self.host) + 2 * u8::from(self.disk) + 4 * u8::from(self.coming)
    }

    /// What [`Self::bits`] says; None for other numbers.
    #[must_use]
    pub fn of_bits(bits: u8) -> Option<Self> {
        (bits < 8).then_some(Self { host: bits & 1 != 0, disk: bits & 2 != 0, coming: bits & 4 != 0 })
    }
}

/// What [`Listener::changes`] has to tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Where chunks are now: those asked for, then those that came or went, oldest first. A key may be there twice.
    pub rows: Vec<(ChunkKey, Tiers)>,
    /// Keys were dropped before: whatever is not among the rows may have changed too.
    pub lost: bool,
}

impl Changes {
    /// The answer where there is no store: everything may have changed, and nothing that was asked for is there.
    #[must_use]
    pub fn of_none(asked: &[ChunkKey]) -> Self {
        Self { rows: asked.iter().map(|key| (*key, Tiers::default())).collect(), lost: true }
    }
}

/// The last keys of chunks that came or went. They are counted, so that a listener's place is a number.
#[derive(Debug, Default)]
pub(crate) struct ChangeLog {
    pub(crate) keys: VecDeque<ChunkKey>,
    pub(crate) capacity: usize,
    /// Number of the first of `keys`.
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

    /// Whoever listens lacks some from now on.
    pub(crate) fn lose(&mut self) {
        self.first = self.end() + 1;
        self.keys.clear();
    }

    /// Up to `limit` keys from the place `next` on, which moves behind them; and whether some before were dropped. Then the others
    /// are left out too: all are asked for again once it is told.
    pub(crate) fn take(&self, next: &mut u64, limit: usize) -> (impl Iterator<Item = ChunkKey>, bool) {
        let lost = *next < self.first;
        let from = if lost { self.keys.len() } else { usize::try_from(*next - self.first).unwrap_or(usize::MAX) };
        let until = from.saturating_add(limit).min(self.keys.len());
        *next = self.first + until as u64;
        (self.keys.range(from..until).copied(), lost)
    }
}
