//! Frames and leases of engines that have disconnected, until no process can write to them.
//!
//! Workers and forked children can outlive the scheduler that reserved a frame. A membership therefore stays reserved until its lifeline
//! is closed; no timeout releases it. This file must not know sockets.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::server::lifeline::Lifeline;
use crate::server::namespace::Membership;

#[derive(Debug)]
struct Quarantined {
    membership: Membership,
    lifeline: Lifeline,
    closed: Option<Instant>,
}

/// Memberships of disconnected engines.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// The driver stops a dead process's GPU copies shortly after its descriptors are closed.
    gpu_settle: Duration,
    engines: Mutex<Vec<Quarantined>>,
}

impl Quarantine {
    pub(crate) fn new(gpu_settle: Duration) -> Self {
        Self { gpu_settle, engines: Mutex::default() }
    }

    fn engines(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the membership if it holds a reservation or a lease.
    pub(crate) fn add(&self, membership: Membership, lifeline: Lifeline) {
        if membership.local.num_open() != (0, 0) {
            self.engines().push(Quarantined { membership, lifeline, closed: None });
        }
    }

    /// Releases the engines that no process can write to.
    pub(crate) fn release_closed(&self) {
        let now = Instant::now();
        let is_over = |each: &mut Quarantined| {
            if each.closed.is_none() && each.lifeline.is_closed() {
                each.closed = Some(now);
            }
            each.closed.is_some_and(|closed| now.duration_since(closed) >= self.gpu_settle)
        };
        let over: Vec<_> = self.engines().extract_if(.., is_over).collect();
        drop(over); // outside the lock
    }

    /// Reservations and read leases in quarantine.
    pub(crate) fn num_open(&self) -> (usize, usize) {
        let engines = self.engines();
        engines.iter().map(|each| each.membership.local.num_open()).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}
