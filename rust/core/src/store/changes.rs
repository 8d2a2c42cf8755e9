//! Keys of chunks that came to a tier or left one, not what happened to them. KV events are made of them.
//!
//! The taker of a key is told where its chunk is at that moment. So a chunk that came and went, a key that belongs to another
//! entry by now, and trees that are forgotten slice by slice say nothing wrong, and the last answer of each key is true. Keys
//! are dropped when too many wait; a listener that lacks some is told so, and asks about every key that it knows. All listeners
//! share one queue, each with a place of its own in it, so that another one costs no memory.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use super::Store;
use super::inner::Inner;
use super::state::State;
use crate::evict::ChunkId;
use crate::key::ChunkKey;
use crate::sync::Mutex;

/// In which tiers lookups find a chunk, if they find its parents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tiers {
    /// In host memory.
    pub host: bool,
    /// On disk.
    pub disk: bool,
}

impl Tiers {
    /// As a number: 1 in host, 2 on disk.
    #[must_use]
    pub fn bits(self) -> u8 {
        u8::from(self.host) + 2 * u8::from(self.disk)
    }

    /// What [`Self::bits`] says; None for other numbers.
    #[must_use]
    pub fn of_bits(bits: u8) -> Option<Self> {
        (bits < 4).then_some(Self { host: bits & 1 != 0, disk: bits & 2 != 0 })
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
pub(crate) struct Watch {
    keys: VecDeque<ChunkKey>,
    capacity: usize,
    /// Number of the first of `keys`.
    first: u64,
    num_listeners: usize,
}

impl Watch {
    fn end(&self) -> u64 {
        self.first + self.keys.len() as u64
    }

    fn push(&mut self, key: ChunkKey) {
        if self.keys.len() == self.capacity {
            self.keys.pop_front();
            self.first += 1;
        }
        self.keys.push_back(key);
    }

    /// Whoever listens lacks some from now on.
    fn lose(&mut self) {
        self.first = self.end() + 1;
        self.keys.clear();
    }

    /// Up to `limit` keys from the place `next` on, which moves behind them; and whether some before were dropped. Then the others
    /// are left out too: all are asked for again once it is told.
    fn take(&self, next: &mut u64, limit: usize) -> (impl Iterator<Item = ChunkKey>, bool) {
        let lost = *next < self.first;
        let from = if lost { self.keys.len() } else { usize::try_from(*next - self.first).unwrap_or(usize::MAX) };
        let until = from.saturating_add(limit).min(self.keys.len());
        *next = self.first + until as u64;
        (self.keys.range(from..until).copied(), lost)
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

    fn changes(&self, asked: &[ChunkKey], next: &mut u64, limit: usize) -> Changes {
        let row = |key| (key, self.tiers(&key));
        let mut rows: Vec<_> = asked.iter().copied().map(row).collect();
        let mut lost = false;
        if let Some(watch) = &self.watch {
            let (keys, has_lost) = watch.take(next, limit);
            rows.extend(keys.map(row));
            lost = has_lost;
        }
        Changes { rows, lost }
    }

    /// One listener more; returns its place.
    fn listen(&mut self, capacity: usize) -> u64 {
        let watch = self.watch.get_or_insert_default();
        watch.num_listeners += 1;
        watch.capacity = watch.capacity.max(capacity).max(1);
        watch.keys.reserve(watch.capacity - watch.keys.len()); // a queue that grows later would hold everybody up
        watch.end()
    }

    fn stop_listening(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.num_listeners -= 1;
        }
        self.watch.take_if(|watch| watch.num_listeners == 0);
    }
}

/// Hears which chunks come and go in a store. While there is none, nothing is noted.
#[derive(Debug)]
#[must_use = "dropping a listener ends it"]
pub struct Listener {
    store: Arc<Inner>,
    next: Mutex<u64>,
}

impl Listener {
    /// Where the chunks `asked` for are now, and up to `limit` of those that came or went since this listener was last told.
    pub fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let told = self.store.with_books(|state| state.changes(asked, &mut next, limit));
        told.unwrap_or_else(|| Changes::of_none(asked))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.store.with_books(State::stop_listening);
    }
}

impl Store {
    /// Notes from now on which chunks come and go; what is here already is for the listener to ask. At least the last `capacity` keys
    /// wait for it, some 32 bytes each: as many as the most that any listener asks for.
    pub fn watch(&self, capacity: usize) -> Listener {
        let next = self.inner.with_books(|state| state.listen(capacity)).unwrap_or_default();
        Listener { store: Arc::clone(&self.inner), next: Mutex::new(next) }
    }
}
