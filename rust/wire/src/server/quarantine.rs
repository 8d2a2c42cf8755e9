//! Frames and leases of engines that have disconnected, until no process can write to them.
//!
//! Workers and forked children can outlive the scheduler that reserved a frame. A seat therefore stays reserved until its lifeline
//! is closed; no timeout releases it. This file must not know sockets.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::server::lifeline::Lifeline;
use crate::server::namespace::Seat;

#[derive(Debug)]
struct Quarantined {
    seat: Seat,
    lifeline: Lifeline,
    closed: Option<Instant>,
}

/// Seats of engines that have disconnected.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// The driver stops a dead process's GPU copies shortly after its descriptors are closed.
    gpu_settle: Duration,
    seats: Mutex<Vec<Quarantined>>,
}

impl Quarantine {
    pub(crate) fn new(gpu_settle: Duration) -> Self {
        Self { gpu_settle, seats: Mutex::default() }
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the seat if it holds a reservation or a lease.
    pub(crate) fn add(&self, seat: Seat, lifeline: Lifeline) {
        if seat.local.num_open() != (0, 0) {
            self.seats().push(Quarantined { seat, lifeline, closed: None });
        }
    }

    /// Releases the seats that no process can write to.
    pub(crate) fn release_closed(&self) {
        let now = Instant::now();
        let is_over = |each: &mut Quarantined| {
            if each.closed.is_none() && each.lifeline.is_closed() {
                each.closed = Some(now);
            }
            each.closed.is_some_and(|closed| now.duration_since(closed) >= self.gpu_settle)
        };
        let over: Vec<_> = self.seats().extract_if(.., is_over).collect();
        drop(over); // outside the lock
    }

    /// Reservations and read leases in quarantine.
    pub(crate) fn num_open(&self) -> (usize, usize) {
        let seats = self.seats();
        seats.iter().map(|each| each.seat.local.num_open()).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}
