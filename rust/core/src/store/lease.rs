//! Leases are guards: dropping a write lease aborts it, dropping a read lease unpins its frames
//! (I5).
//!
//! A lease shares the locked state, so it may outlive its `Store`.

use std::sync::Arc;

use crate::evict::ChunkId;
use crate::store::load::{Held, LeasedFrame, Progress};
use crate::store::locked::Locked;
use crate::store::save::Reservation;
use crate::store::state::State;
use crate::sync::{Mutex, locked};

/// A frame reserved for one chunk, until [`crate::store::Store::commit`] takes it or it is dropped.
#[derive(Debug)]
#[must_use = "dropping a write lease aborts it"]
pub struct WriteLease {
    /// None once it is committed.
    store: Option<Arc<Locked>>,
    id: ChunkId,
    reservation: Reservation,
}

impl WriteLease {
    pub(crate) fn new(store: Arc<Locked>, id: ChunkId, reservation: Reservation) -> Self {
        Self { store: Some(store), id, reservation }
    }

    /// Returns the chunk and its frame.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    pub(crate) fn is_of(&self, store: &Arc<Locked>) -> bool {
        self.store.as_ref().is_some_and(|own| Arc::ptr_eq(own, store))
    }

    /// Ends the lease without aborting it; the caller commits the chunk.
    pub(crate) fn disarm(mut self) -> ChunkId {
        self.store = None;
        self.id
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        if let Some(store) = self.store.take() {
            store.with_state(|state| state.abort(self.id));
        }
    }
}

/// Pins one or more prefixes. Chunks after a prefix's host part may still be being read from disk.
#[derive(Debug)]
#[must_use = "dropping a read lease unpins its frames"]
pub struct ReadLease {
    store: Arc<Locked>,
    /// None once it is released, or if the store had failed when it was taken.
    held: Mutex<Option<Vec<Held>>>,
}

impl ReadLease {
    pub(crate) fn new(store: Arc<Locked>, held: Option<Vec<Held>>) -> Self {
        Self { store, held: Mutex::new(held) }
    }

    /// Returns the progress of all prefixes together. Never waits for I/O.
    pub fn poll(&self) -> Progress {
        self.with_held(|state, held| held.iter_mut().map(|held| state.poll(held)).sum())
    }

    /// Returns the frames of every chunk that is ready now, prefix by prefix in order.
    pub fn frames(&self) -> Vec<LeasedFrame> {
        self.with_held(|state, held| match held {
            [only] => state.frames(only), // without the copy, which costs a quarter more for a long prompt
            many => many.iter_mut().flat_map(|held| state.frames(held)).collect(),
        })
    }

    fn with_held<T: Default>(&self, what: impl FnOnce(&mut State, &mut [Held]) -> T) -> T {
        let mut held = locked(&self.held);
        held.as_mut()
            .and_then(|held| self.store.with_state(|state| what(state, held)))
            .unwrap_or_default()
    }

    /// Unpins the frames, as dropping does. A second call does nothing.
    pub fn release(&self) {
        let held = locked(&self.held).take();
        if let Some(held) = held {
            self.store.with_state(|state| held.into_iter().for_each(|held| state.release(held)));
        }
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.release();
    }
}
