//! Keeps the frames and leases of disconnected engines until no process can write to them.
//!
//! Workers and forked children can outlive the scheduler that reserved a frame. A membership
//! therefore stays in quarantine until its lifeline is closed; no timeout releases it. Must not
//! depend on sockets.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::server::lifeline::Lifeline;
use crate::server::namespace::Membership;
use crate::threads::locked;

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
    entries: Mutex<Vec<Quarantined>>,
}

impl Quarantine {
    pub(crate) fn new(gpu_settle: Duration) -> Self {
        Self { gpu_settle, entries: Mutex::default() }
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        locked(&self.entries)
    }

    /// Adds a membership that holds a reservation or a lease; drops any other.
    pub(crate) fn add(&self, membership: Membership, lifeline: Lifeline) {
        if membership.local.num_open() != (0, 0) {
            self.entries().push(Quarantined { membership, lifeline, closed: None });
        }
    }

    /// Releases every membership whose frames no process can write to.
    pub(crate) fn release_closed(&self) {
        let now = Instant::now();
        let is_released = |each: &mut Quarantined| {
            if each.closed.is_none() && each.lifeline.is_closed() {
                each.closed = Some(now);
            }
            each.closed.is_some_and(|closed| now.duration_since(closed) >= self.gpu_settle)
        };
        let released: Vec<_> = self.entries().extract_if(.., is_released).collect();
        drop(released); // outside the lock
    }

    pub(crate) fn num_open(&self) -> (usize, usize) {
        let entries = self.entries();
        entries
            .iter()
            .map(|each| each.membership.local.num_open())
            .fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}
