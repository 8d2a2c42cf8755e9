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

use crate::client::config::ClientConfig;
use crate::client::connection::Connection;
use crate::client::handshake::NewConnection;
use crate::client::missed_calls::MissedCalls;
use crate::protocol::changes::ChangeFeed;
use crate::protocol::{Answer, Request};
use crate::socket::wait;

/// Between two attempts to connect, and two looks whether the connection stands.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// Longest pause before a server that refused is tried again: it logs each attempt.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct ClientState {
    pub(crate) connection: Option<Connection>,
    /// Used from the next `renew` on.
    pub(crate) next: Option<NewConnection>,
    pub(crate) arena: Option<(ArenaInfo, [OwnedFd; 2])>,
    /// Leases of this connection. Of those that no longer change, how far they are.
    pub(crate) leases: HashMap<LeaseId, Option<Progress>>,
    pub(crate) next_lease: u64,
    pub(crate) limit: Option<u32>,
    /// Ends of the prefixes of which the last save got no place for something.
    pub(crate) dropped: Vec<ChunkKey>,
    pub(crate) change_feed: ChangeFeed,
    /// A clear that may not have been heard.
    pub(crate) is_clear_pending: bool,
    pub(crate) stats: Vec<(String, u64)>,
    pub(crate) missed_calls: MissedCalls,
    /// As `Session::is_save_late`.
    pub(crate) is_save_late: bool,
    pub(crate) num_lost: u64,
    pub(crate) events: Vec<String>,
    pub(crate) is_closed: bool,
}

/// Attempts to connect that failed since the last connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectFailures {
    num_refused: u32,
    reason: String,
}

impl ConnectFailures {
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
pub(crate) struct ClientInner {
    pub(crate) config: ClientConfig,
    state: Mutex<ClientState>,
}

impl ClientState {
    pub(crate) fn log(&mut self, event: String) {
        if self.events.len() < MAX_EVENTS && self.events.last() != Some(&event) {
            self.events.push(event);
        }
    }

    /// The connection, if there is one. A clear that has no answer yet was sent on it, so the server
    /// handles it before all later requests.
    pub(crate) fn live_connection(&mut self) -> Option<&mut Connection> {
        let connection = self.connection.as_mut().filter(|connection| !connection.is_closed())?;
        if self.is_clear_pending {
            self.is_clear_pending = connection.is_overdue();
        }
        Some(connection)
    }

    pub(crate) fn call(
        &mut self,
        deadline: Instant,
        request: impl FnOnce(&mut Connection) -> Option<Answer>,
    ) -> Option<Answer> {
        let answer = request(self.live_connection()?);
        if answer.is_none() && Instant::now() >= deadline {
            self.missed_calls.add_call();
        }
        answer
    }

    /// Only the first prefix of a message is known to the server afterwards, so only that one is shortened.
    pub(crate) fn trim_prefix(&mut self, prefixes: &mut [Prefix<'_>], inner: &ClientInner) {
        let deadline = inner.deadline();
        if let Some(first) = prefixes.first_mut()
            && let Some(connection) =
                self.live_connection().filter(|connection| connection.prefix_cache.needs_anchors(first.keys))
        {
            connection.trim_prefix(first, inner.config.blocks_per_chunk, deadline);
            if Instant::now() >= deadline {
                self.missed_calls.add_call();
            }
        }
    }

    /// Whether a lookup is of one prefix whose save just got no place, and so no request's; once for each.
    pub(crate) fn is_repeat(&mut self, prefixes: &[Prefix<'_>]) -> bool {
        let [Prefix { keys: [.., end], .. }] = prefixes else { return false };
        let at = self.dropped.iter().position(|dropped| dropped == end);
        at.map(|at| self.dropped.swap_remove(at)).is_some()
    }

    /// What has to be heard, now or when the server goes on.
    pub(crate) fn send(&mut self, request: &Request<'_>) {
        if let Some(connection) = &mut self.connection {
            connection.send(request);
        }
    }

    pub(crate) fn adopt(&mut self, found: NewConnection, deadline: Instant) {
        let NewConnection { connection, arena, fds } = found;
        self.connection = Some(connection);
        self.leases.clear();
        let is_same_memory = self.arena.as_ref().is_some_and(|(own, _)| own.id == arena.id);
        self.arena = Some((arena, fds)); // its lifeline is this connection's in any case
        self.limit = self.limit.filter(|_| is_same_memory);
        if let Some(limit) = self.limit {
            self.send(&Request::LimitFrames(limit));
        }
        if self.is_clear_pending {
            self.send_clear(deadline);
        }
    }

    pub(crate) fn send_clear(&mut self, deadline: Instant) {
        self.is_clear_pending = true;
        if let Some(connection) = &mut self.connection
            && connection.call_always(&Request::Clear, deadline).is_some()
        {
            self.is_clear_pending = false;
        }
    }
}

impl ClientInner {
    pub(crate) fn new(config: ClientConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config.deadline
    }

    pub(crate) fn save_deadline(&self) -> Instant {
        Instant::now() + self.config.save_deadline()
    }

    pub(crate) fn server_name(&self) -> String {
        format!("the kvloft server at {}", self.config.socket.display())
    }

    /// One round of the thread that connects: looks whether the connection stands, and else tries to have another.
    pub(crate) fn maintain_connection(&self, failures: &mut ConnectFailures) {
        let stream = {
            let state = self.state();
            if state.next.is_some() {
                drop(state);
                return std::thread::park_timeout(TRY_EVERY);
            }
            state
                .connection
                .as_ref()
                .filter(|connection| !connection.is_closed())
                .map(|connection| Arc::clone(&connection.stream))
        };
        if let Some(stream) = stream {
            if wait(&*stream, PollFlags::empty(), Instant::now() + TRY_EVERY)
                && let Some(connection) = &mut self.state().connection
                && Arc::ptr_eq(&connection.stream, &stream)
            {
                connection.close();
            }
            return;
        }
        self.drop_connection();
        match NewConnection::open(&self.config) {
            Ok(found) => {
                let mut state = self.state();
                state.log(format!("{} answers; it is used from now on", self.server_name()));
                state.next = Some(found);
                *failures = ConnectFailures::default();
            }
            Err(error) => {
                // The end of a connection was told already.
                let line = failures.line(&error).filter(|_| error.kind() != ErrorKind::Io);
                if let Some(line) = line {
                    self.state().log(line);
                }
                std::thread::park_timeout(failures.pause(&error));
            }
        }
    }

    /// The connection is over.
    fn drop_connection(&self) {
        let mut state = self.state();
        if state.connection.take().is_some() {
            state.num_lost += 1;
            state.log(format!("{} is gone; requests are computed until it is back", self.server_name()));
        }
    }
}

#[cfg(test)]
mod tests;
