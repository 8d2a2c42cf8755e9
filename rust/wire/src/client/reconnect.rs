//! What a client knows of its server, and the thread that looks after the connection: whether it stands, and for another where it
//! does not. What it finds is used when the client says so. It must not know what is asked.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvloft_core::session::{ArenaInfo, LeaseId};
use kvloft_core::store::{Prefix, Progress};
use kvloft_core::{ChunkKey, Error, ErrorKind};
use rustix::event::PollFlags;

use crate::client::connection::Link;
use crate::client::deadline::Late;
use crate::client::handshake::Found;
use crate::protocol::changes::Hearing;
use crate::protocol::{Answer, Request};
use crate::settings::RemoteConfig;
use crate::socket::wait;

/// Between two attempts to connect, and two looks whether the connection stands.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// Longest pause before a server that refused is tried again: it logs each attempt.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) link: Option<Link>,
    /// Used from the next `renew` on.
    pub(crate) next: Option<Found>,
    pub(crate) arena: Option<(ArenaInfo, [OwnedFd; 2])>,
    /// Leases of this link. Of those that no longer change, how far they are.
    pub(crate) leases: HashMap<LeaseId, Option<Progress>>,
    pub(crate) next_lease: u64,
    pub(crate) limit: Option<u32>,
    /// Ends of the prefixes of which the last save got no place for something.
    pub(crate) dropped: Vec<ChunkKey>,
    pub(crate) hearing: Hearing,
    /// A clear that may not have been heard.
    pub(crate) owes_clear: bool,
    pub(crate) stats: Vec<(String, u64)>,
    pub(crate) late: Late,
    /// As `Session::is_save_late`.
    pub(crate) is_save_late: bool,
    pub(crate) num_lost: u64,
    pub(crate) events: Vec<String>,
    pub(crate) is_closed: bool,
}

/// Attempts to connect that failed since the last connection.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    num_refused: u32,
    reason: String,
}

impl Failures {
    /// What a person reads of it: nothing if it was said before.
    pub(crate) fn line(&mut self, error: &Error) -> Option<String> {
        let reason = error.to_string();
        let is_new = self.reason != reason;
        self.reason.clone_from(&reason);
        is_new.then(|| format!("{reason}; running without the cache and retrying in the background"))
    }

    /// How long to wait for the next attempt.
    fn pause(&mut self, error: &Error) -> Duration {
        self.num_refused += u32::from(error.kind() != ErrorKind::Io);
        TRY_EVERY.saturating_mul(1 << self.num_refused.min(12)).min(MAX_PAUSE)
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: RemoteConfig,
    state: Mutex<State>,
}

impl State {
    pub(crate) fn tell(&mut self, event: String) {
        if self.events.len() < MAX_EVENTS && self.events.last() != Some(&event) {
            self.events.push(event);
        }
    }

    /// The connection, if there is one. A clear that has no answer yet was sent on it, so the server
    /// handles it before all later requests.
    pub(crate) fn link(&mut self) -> Option<&mut Link> {
        let link = self.link.as_mut().filter(|link| !link.is_dead())?;
        if self.owes_clear {
            self.owes_clear = link.is_late();
        }
        Some(link)
    }

    pub(crate) fn ask(
        &mut self,
        deadline: Instant,
        request: impl FnOnce(&mut Link) -> Option<Answer>,
    ) -> Option<Answer> {
        let answer = request(self.link()?);
        if answer.is_none() && Instant::now() >= deadline {
            self.late.note();
        }
        answer
    }

    /// Only the first prefix of a message is known to the server afterwards, so only that one is shortened.
    pub(crate) fn shorten(&mut self, prefixes: &mut [Prefix<'_>], shared: &Shared) {
        let deadline = shared.deadline();
        if let Some(first) = prefixes.first_mut()
            && let Some(link) = self.link().filter(|link| link.known.is_far_from(first.keys))
        {
            link.shorten(first, shared.config.blocks_per_chunk, deadline);
            if Instant::now() >= deadline {
                self.late.note();
            }
        }
    }

    /// Whether a lookup is of one prefix whose save just got no place, and so no request's; once for each.
    pub(crate) fn goes_on(&mut self, prefixes: &[Prefix<'_>]) -> bool {
        let [Prefix { keys: [.., end], .. }] = prefixes else { return false };
        let at = self.dropped.iter().position(|dropped| dropped == end);
        at.map(|at| self.dropped.swap_remove(at)).is_some()
    }

    /// What has to be heard, now or when the server goes on.
    pub(crate) fn tell_server(&mut self, request: &Request<'_>) {
        if let Some(link) = &mut self.link {
            link.tell(request);
        }
    }

    pub(crate) fn adopt(&mut self, found: Found, deadline: Instant) {
        let Found { link, arena, fds } = found;
        self.link = Some(link);
        self.leases.clear();
        let is_same_memory = self.arena.as_ref().is_some_and(|(own, _)| own.id == arena.id);
        self.arena = Some((arena, fds)); // its lifeline is this connection's in any case
        self.limit = self.limit.filter(|_| is_same_memory);
        if let Some(limit) = self.limit {
            self.tell_server(&Request::LimitFrames(limit));
        }
        if self.owes_clear {
            self.send_clear(deadline);
        }
    }

    pub(crate) fn send_clear(&mut self, deadline: Instant) {
        self.owes_clear = true;
        if let Some(link) = &mut self.link
            && link.ask_anyway(&Request::Clear, deadline).is_some()
        {
            self.owes_clear = false;
        }
    }
}

impl Shared {
    pub(crate) fn new(config: RemoteConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config.deadline
    }

    pub(crate) fn save_deadline(&self) -> Instant {
        Instant::now() + self.config.save_deadline()
    }

    pub(crate) fn at(&self) -> String {
        format!("the kvloft server at {}", self.config.socket.display())
    }

    /// One round of the thread that connects: looks whether the connection stands, and else tries to have another.
    pub(crate) fn look(&self, failures: &mut Failures) {
        let stream = {
            let state = self.state();
            if state.next.is_some() {
                drop(state);
                return std::thread::park_timeout(TRY_EVERY);
            }
            state.link.as_ref().filter(|link| !link.is_dead()).map(|link| Arc::clone(&link.stream))
        };
        if let Some(stream) = stream {
            if wait(&*stream, PollFlags::empty(), Instant::now() + TRY_EVERY)
                && let Some(link) = &mut self.state().link
                && Arc::ptr_eq(&link.stream, &stream)
            {
                link.die();
            }
            return;
        }
        self.lose();
        match Found::at(&self.config) {
            Ok(found) => {
                let mut state = self.state();
                state.tell(format!("{} answers; it is used from now on", self.at()));
                state.next = Some(found);
                *failures = Failures::default();
            }
            Err(error) => {
                // The end of a connection was told already.
                let line = failures.line(&error).filter(|_| error.kind() != ErrorKind::Io);
                if let Some(line) = line {
                    self.state().tell(line);
                }
                std::thread::park_timeout(failures.pause(&error));
            }
        }
    }

    /// The connection is over.
    fn lose(&self) {
        let mut state = self.state();
        if state.link.take().is_some() {
            state.num_lost += 1;
            state.tell(format!("{} is gone; requests are computed until it is back", self.at()));
        }
    }
}

#[cfg(test)]
mod tests;
