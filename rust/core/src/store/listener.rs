//! [`Listener`] reports the chunks added to or removed from a tier. These reports feed KV events.
//!
//! The change log holds keys, not events. A listener receives each key along with the tiers that
//! hold the chunk at the time of the `changes` call. The latest report for a key is therefore
//! always correct, even if the chunk was removed and re-added or a tree removal is in progress. A
//! full log drops its oldest keys. A listener that missed keys receives `lost` and must query every
//! key it has recorded. All listeners share one log and keep only a position in it, so extra
//! listeners cost almost no memory.

use std::sync::Arc;

use crate::key::ChunkKey;
use crate::store::change_log::{Changes, Tiers};
use crate::store::locked::Locked;
use crate::store::open::Store;
use crate::store::state::State;
use crate::sync::{Mutex, locked};

impl State {
    fn tiers(&self, key: &ChunkKey) -> Tiers {
        let entry = self.index.get(key).map(|id| &self.index[id]);
        entry.map_or_else(Tiers::default, |entry| Tiers {
            host: entry.host.is_visible(),
            disk: entry.disk.is_stored(),
            pending: entry.is_pending(),
        })
    }

    fn changes(&self, asked: &[ChunkKey], next: &mut u64, limit: usize) -> Changes {
        let row = |key| (key, self.tiers(&key));
        let mut rows: Vec<_> = asked.iter().copied().map(row).collect();
        let mut lost = false;
        if let Some(log) = &self.change_log {
            let (keys, has_lost) = log.take(next, limit);
            rows.extend(keys.map(row));
            lost = has_lost;
        }
        Changes { rows, lost }
    }

    /// Adds a listener. Returns the listener's position in the log.
    fn listen(&mut self, capacity: usize) -> u64 {
        let log = self.change_log.get_or_insert_default();
        log.num_listeners += 1;
        log.capacity = log.capacity.max(capacity).max(1);
        // Allocate up front, because growing the log later would stall other threads.
        log.keys.reserve(log.capacity - log.keys.len());
        log.end()
    }

    fn stop_listening(&mut self) {
        if let Some(log) = &mut self.change_log {
            log.num_listeners -= 1;
        }
        self.change_log.take_if(|log| log.num_listeners == 0);
    }
}

/// Receives changes from a store. Changes are logged only while there is a listener.
#[derive(Debug)]
#[must_use = "dropping a listener unsubscribes it"]
pub struct Listener {
    store: Arc<Locked>,
    next: Mutex<u64>,
}

impl Listener {
    /// Returns the tiers of the `asked` chunks and of up to `limit` chunks that have changed since
    /// the last call.
    pub fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        let mut next = locked(&self.next);
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
    /// Starts logging changes. The listener must query the chunks that were stored before this
    /// call.
    ///
    /// The log keeps at least the last `capacity` keys, at 32 bytes each. With several listeners,
    /// the largest capacity applies.
    pub fn watch(&self, capacity: usize) -> Listener {
        let next = self.inner.with_state(|state| state.listen(capacity)).unwrap_or_default();
        Listener { store: Arc::clone(&self.inner), next: Mutex::new(next) }
    }
}
