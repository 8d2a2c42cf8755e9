//! Keys of chunks that came to a tier or left one, not what happened to them. KV events are made of them.
//!
//! The taker of a key is told where its chunk is at that moment. So a chunk that came and went, a key that belongs to another
//! entry by now, and trees that are forgotten slice by slice say nothing wrong, and the last answer of each key is true. Keys
//! are dropped when too many wait; the next caller is told so, and asks about every key that it knows.

use std::collections::VecDeque;

use super::Store;
use super::state::State;
use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// In which tiers lookups find a chunk, if they find its parents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers {
    /// In host memory.
    pub host: bool,
    /// On disk.
    pub disk: bool,
}

/// What [`Store::changes`] has to tell.
#[derive(Debug, Default)]
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

/// Keys that wait to be taken.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    keys: VecDeque<ChunkKey>,
    capacity: usize,
    lost: bool,
}

impl Watch {
    fn push(&mut self, key: ChunkKey) {
        if self.keys.len() >= self.capacity {
            self.lose();
        }
        // All are asked for again once it is told: until then none need wait.
        if !self.lost {
            self.keys.push_back(key);
        }
    }

    fn lose(&mut self) {
        self.keys.clear();
        self.lost = true;
    }
}

impl State {
    /// The chunk came to a tier or left one, or its key does not lead to it any more.
    pub(super) fn note_change(&mut self, id: ChunkId) {
        if let Some(watch) = &mut self.watch {
            watch.push(self.index[id].key);
        }
    }

    /// Anything may have changed.
    pub(super) fn note_all(&mut self) {
        self.watch.iter_mut().for_each(Watch::lose);
    }

    fn tiers(&self, key: &ChunkKey) -> Tiers {
        let entry = self.index.get(key).map(|id| &self.index[id]);
        entry.map_or_else(Tiers::default, |entry| Tiers { host: entry.host.is_here(), disk: entry.disk.is_here() })
    }

    fn changes(&mut self, asked: &[ChunkKey], limit: usize) -> Changes {
        let (mut keys, mut lost) = (asked.to_vec(), false);
        if let Some(watch) = &mut self.watch {
            lost = std::mem::take(&mut watch.lost);
            keys.extend(watch.keys.drain(..limit.min(watch.keys.len())));
        }
        Changes { rows: keys.into_iter().map(|key| (key, self.tiers(&key))).collect(), lost }
    }
}

impl Store {
    /// Notes from now on which chunks come and go, for one caller of [`Self::changes`]; `capacity` keys wait for it at most, and
    /// what is here already is for it to ask. Until then nothing is noted.
    pub fn watch(&self, capacity: usize) {
        self.inner.with_books(|state| {
            state.watch = Some(Watch { keys: VecDeque::with_capacity(capacity), capacity, lost: false });
        });
    }

    /// Where the chunks `asked` for are now, and up to `limit` of those that came or went since they were last told.
    pub fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        self.inner.with_books(|state| state.changes(asked, limit)).unwrap_or_else(|| Changes::of_none(asked))
    }
}
