//! What engines held that went without a word, until nothing of theirs can write to its frames any more.
//!
//! A worker, or a GPU that copies for it, may outlive its scheduler's end for a moment; a frame that it still fills must not be
//! another's. The process is watched by a pidfd, so that its number may be used again. It must not know sockets.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::settings::Patience;
use crate::socket::wait;
use crate::space::Seat;

/// A process that may still run.
#[derive(Debug)]
pub(crate) struct Watch(Option<OwnedFd>);

impl Watch {
    /// Process 0 is not visible from here, so nothing is known of it.
    pub(crate) fn new(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    fn is_dead(&self) -> bool {
        self.0.as_ref().is_some_and(|fd| wait(fd, PollFlags::IN, Instant::now()))
    }
}

#[derive(Debug)]
struct Kept {
    seat: Seat,
    watch: Watch,
    ended: Instant,
    died: Option<Instant>,
}

/// Seats of engines that are gone.
#[derive(Debug)]
pub(crate) struct Quarantine {
    patience: Patience,
    kept: Mutex<Vec<Kept>>,
}

impl Quarantine {
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seat is kept if it holds anything.
    pub(crate) fn add(&self, seat: Seat, watch: Watch) {
        if seat.local.num_open() != (0, 0) {
            self.kept().push(Kept { seat, watch, ended: Instant::now(), died: None });
        }
    }

    /// Frees what waited long enough.
    pub(crate) fn look(&self) {
        let now = Instant::now();
        let patience = self.patience;
        let is_over = |kept: &mut Kept| {
            if kept.died.is_none() && kept.watch.is_dead() {
                kept.died = Some(now);
            }
            let is_dead = kept.died.is_some_and(|died| now.duration_since(died) >= patience.after_death);
            is_dead || now.duration_since(kept.ended) >= patience.longest
        };
        let over: Vec<_> = self.kept().extract_if(.., is_over).collect();
        drop(over); // not under the lock
    }

    /// Reservations and read leases that are kept.
    pub(crate) fn num_open(&self) -> (usize, usize) {
        let kept = self.kept();
        kept.iter().map(|kept| kept.seat.local.num_open()).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}
