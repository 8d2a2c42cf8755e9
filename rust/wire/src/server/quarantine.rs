//! Keeps the frames and leases of disconnected engines until no process can write to the frames.
//!
//! Workers and forked children can outlive the scheduler that reserved a frame, so a membership
//! stays in quarantine until its lifeline closes. There is no timeout.
//!
//! A lifeline is a pipe. The engine receives the write end together with the arena, and each worker
//! reopens the write end before it maps the arena. When a process exits, the kernel closes its
//! write end, regardless of the PID namespace. The read end therefore reports a hangup once no
//! process has the write end open. A forked child inherits both the mapping and the write end, and
//! thus keeps the lifeline open.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::server::namespace::Membership;
use crate::socket::wait;
use crate::threads::locked;

/// The server's end of an engine's lifeline.
#[derive(Debug)]
pub(crate) struct Lifeline(OwnedFd);

impl Lifeline {
    /// Returns a new lifeline and its write end, which the server sends to the engine.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        Ok((Self(read), write))
    }

    /// Returns true if all processes have closed the write end.
    pub(crate) fn is_closed(&self) -> bool {
        wait(&self.0, PollFlags::empty(), Instant::now())
    }
}

/// Watches a client's process, because a forked child can keep the connection open after that
/// process exits.
#[derive(Debug)]
pub(crate) struct ProcessWatch(Option<OwnedFd>);

impl ProcessWatch {
    /// Watches the process with id `pid`. A process in a different PID namespace has id 0 and
    /// cannot be watched.
    pub(crate) fn new(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.as_ref().is_some_and(|fd| wait(fd, PollFlags::IN, Instant::now()))
    }
}

#[derive(Debug)]
struct Quarantined {
    membership: Membership,
    lifeline: Lifeline,
    closed: Option<Instant>,
}

/// Memberships of disconnected engines.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// How long to wait after a lifeline closes before releasing its membership. A dead process's
    /// GPU copies can continue briefly after its descriptors are closed.
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

    /// Adds a membership if it has reservations or leases, and drops it otherwise. The reservations
    /// are never committed, so other engines can save the same chunks.
    pub(crate) fn add(&self, membership: Membership, lifeline: Lifeline) {
        if membership.local.num_open() != (0, 0) {
            membership.local.release_keys();
            self.entries().push(Quarantined { membership, lifeline, closed: None });
        }
    }

    /// Releases each membership once no process can write to its frames.
    pub(crate) fn release_closed(&self) {
        let now = Instant::now();
        let is_released = |each: &mut Quarantined| {
            if each.closed.is_none() && each.lifeline.is_closed() {
                each.closed = Some(now);
            }
            each.closed.is_some_and(|closed| now.duration_since(closed) >= self.gpu_settle)
        };
        let released: Vec<_> = self.entries().extract_if(.., is_released).collect();
        drop(released); // after the lock is released
    }

    pub(crate) fn num_open(&self) -> (usize, usize) {
        let entries = self.entries();
        entries
            .iter()
            .map(|each| each.membership.local.num_open())
            .fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}
