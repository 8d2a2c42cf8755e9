//! Keys of chunks that came to a tier or left one, or were to come and do not; not what happened to them. KV events are made of them.
//!
//! The taker of a key is told where its chunk is at that moment. So a chunk that came and went, a key that belongs to another
//! entry by now, and trees that are forgotten slice by slice say nothing wrong, and the last answer of each key is true. Keys
//! are dropped when too many wait; a listener that lacks some is told so, and asks about every key that it knows. All listeners
//! share one queue, each with a place of its own in it, so that another one costs no memory.

use std::sync::{Arc, PoisonError};

use crate::key::ChunkKey;
use crate::store::change_log::{Changes, Tiers};
use crate::store::locked::Locked;
use crate::store::open::Store;
use crate::store::state::State;
use crate::sync::Mutex;

impl State {
    fn tiers(&self, key: &ChunkKey) -> Tiers {
        let entry = self.index.get(key).map(|id| &self.index[id]);
        entry.map_or_else(Tiers::default, |entry| Tiers {
            host: entry.host.is_visible(),
            disk: entry.disk.is_stored(),
            coming: entry.is_coming(),
        })
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
    store: Arc<Locked>,
    next: Mutex<u64>,
}

impl Listener {
    /// Where the chunks `asked` for are now, and up to `limit` of those that came or went since this listener was last told.
    pub fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let last_event = self.store.with_state(|state| state.changes(asked, &mut next, limit));
        last_event.unwrap_or_else(|| Changes::of_none(asked))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.store.with_state(State::stop_listening);
    }
}

impl Store {
    /// Notes from now on which chunks come and go; what is here already is for the listener to ask. At least the last `capacity` keys
    /// wait for it, some 32 bytes each: as many as the most that any listener asks for.
    pub fn watch(&self, capacity: usize) -> Listener {
        let next = self.inner.with_state(|state| state.listen(capacity)).unwrap_or_default();
        Listener { store: Arc::clone(&self.inner), next: Mutex::new(next) }
    }
}
