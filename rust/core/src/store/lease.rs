//! Leases as guards: dropping a write lease aborts it, dropping a read lease unpins (I5).
//!
//! They hold on to the store's inside, so that a lease may outlive its `Store`. They must not know how frames are found.

use std::sync::{Arc, PoisonError};

use crate::evict::ChunkId;
use crate::store::load::{Held, LeasedFrame, Progress};
use crate::store::locked::Locked;
use crate::store::save::Reservation;
use crate::store::state::State;
use crate::sync::Mutex;

/// A frame reserved for one chunk, until [`crate::store::Store::commit`] takes it or it is dropped.
#[derive(Debug)]
#[must_use = "dropping a write lease aborts it"]
pub struct WriteLease {
    /// None once it was committed.
    store: Option<Arc<Locked>>,
    id: ChunkId,
    reservation: Reservation,
}

impl WriteLease {
    pub(crate) fn new(store: Arc<Locked>, id: ChunkId, reservation: Reservation) -> Self {
        Self { store: Some(store), id, reservation }
    }

    /// Which chunk goes where.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    /// Whether it belongs to the store whose inside this is.
    pub(crate) fn is_of(&self, store: &Arc<Locked>) -> bool {
        self.store.as_ref().is_some_and(|own| Arc::ptr_eq(own, store))
    }

    /// Ends the lease without aborting it: the caller commits the chunk.
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

/// Pins on one or more prefixes. Chunks behind a prefix's host part may still be on their way from disk.
#[derive(Debug)]
#[must_use = "dropping a read lease unpins its frames"]
pub struct ReadLease {
    store: Arc<Locked>,
    /// None once it was released, or if the store had failed when it was taken.
    held: Mutex<Option<Vec<Held>>>,
}

impl ReadLease {
    pub(crate) fn new(store: Arc<Locked>, held: Option<Vec<Held>>) -> Self {
        Self { store, held: Mutex::new(held) }
    }

    /// How much is ready and how much is still being read, of all prefixes together. Never blocks on I/O.
    pub fn poll(&self) -> Progress {
        self.ask(|state, held| held.iter_mut().map(|held| state.poll(held)).sum())
    }

    /// Frames of every chunk that is ready now, prefix by prefix in order.
    pub fn frames(&self) -> Vec<LeasedFrame> {
        self.ask(|state, held| match held {
            [only] => state.frames(only), // as it is: copied, a long prompt's would cost a quarter more
            many => many.iter_mut().flat_map(|held| state.frames(held)).collect(),
        })
    }

    fn ask<T: Default>(&self, what: impl FnOnce(&mut State, &mut [Held]) -> T) -> T {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_mut().and_then(|held| self.store.with_state(|state| what(state, held))).unwrap_or_default()
    }

    /// Unpins, as dropping does; again does nothing.
    pub fn release(&self) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
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
