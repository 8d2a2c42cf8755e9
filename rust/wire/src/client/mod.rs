//! The client: a store that is another process. `session` makes it a `Session`.
//!
//! Each call ends at its deadline. Without an answer in time, or a server at all, it is a miss. A thread connects again; what it
//! finds is used from the next `renew` on, so that no plan names frames of two arenas. A clear that the server has not confirmed
//! is sent again before anything is asked of the next one: else the disk could bring back what is wrong by now.

pub(crate) mod admin;
mod batches;
pub(crate) mod config;
mod connection;
mod handshake;
mod missed_calls;
mod reconnect;
mod session;

use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use kvloft_core::store::{Lookup, Prefix};
use kvloft_core::{ErrorKind, Result};

use crate::client::batches::{clamp_prefix, join_answers, split_batches};
use crate::client::config::ClientConfig;
use crate::client::connection::Connection;
use crate::client::handshake::NewConnection;
use crate::client::reconnect::{ClientInner, ClientState, ConnectFailures};
use crate::protocol::{Answer, Request};
use crate::threads::spawn;

/// The store of a server.
#[derive(Debug)]
pub struct Client {
    pub(crate) inner: Arc<ClientInner>,
    thread: JoinHandle<()>,
}

impl Client {
    /// Connects, or retries in the background: until then, everything is a miss. `InvalidConfig` for a socket of another user's
    /// process; a server that refuses, being full or of another version, may accept the engine later.
    pub fn open(config: ClientConfig) -> Result<Self> {
        let inner = Arc::new(ClientInner::new(config));
        let mut failures = ConnectFailures::default();
        match NewConnection::open(&inner.config) {
            Ok(found) => inner.state().adopt(found, inner.deadline()),
            Err(error) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Err(error) => failures.line(&error).into_iter().for_each(|line| inner.state().log(line)),
        }
        let own = Arc::clone(&inner);
        let connect = move || {
            while !own.state().is_closed {
                own.maintain_connection(&mut failures);
            }
        };
        let thread = spawn("connect", connect)?;
        Ok(Self { inner, thread })
    }

    /// Has the thread look at once.
    pub(crate) fn wake(&self) {
        self.thread.thread().unpark();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ClientState> {
        self.inner.state()
    }

    /// Whether a clear is still to be heard; takes in that it was.
    pub(crate) fn is_clear_pending(&self) -> bool {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        if let Some(found) = state.next.take() {
            state.adopt(found, deadline);
        }
        let _heard = state.live_connection();
        state.is_clear_pending
    }

    pub(crate) fn call(&self, request: &Request<'_>) -> Option<Answer> {
        let deadline = self.inner.deadline();
        self.state().call(deadline, |connection| connection.call(request, deadline))
    }

    /// Asks all that is made, at once; no answers where an answer is overdue.
    pub(crate) fn call_all<'a>(&self, make: impl FnOnce(&mut Connection) -> Vec<Request<'a>>) -> Vec<Option<Answer>> {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        let Some(connection) = state.live_connection() else { return Vec::new() };
        if connection.is_overdue() {
            return Vec::new();
        }
        let requests = make(connection);
        let answers = connection.call_all(&requests, deadline);
        if answers.iter().any(Option::is_none) && Instant::now() >= deadline {
            state.missed_calls.add_call();
        }
        answers
    }

    /// None: no answer.
    pub(crate) fn lookup_batches(&self, prefixes: &[Prefix<'_>], is_again: bool) -> Vec<Option<Lookup>> {
        let mut prefixes: Vec<_> = prefixes.iter().map(clamp_prefix).collect();
        self.state().trim_prefix(&mut prefixes, &self.inner);
        let parts = split_batches(&prefixes, |prefix| prefix.keys.len());
        let request = if is_again { Request::LookAgain } else { Request::Lookup };
        let answers = self.call_all(|connection| parts.iter().map(|part| request(connection.prefixes(part))).collect());
        let found = |answer| if let Answer::Found(found) = answer { Some(found) } else { None };
        join_answers(&parts, answers, found).collect()
    }

    /// Reservations, with a deadline of their own. Fewer answers than requests, or None among them: no answer came in time.
    pub(crate) fn call_for_saves(&self, requests: &[Request<'_>]) -> Vec<Option<Answer>> {
        let deadline = self.inner.save_deadline();
        let mut state = self.state();
        state.is_save_late = false;
        let Some(connection) = state.live_connection() else { return Vec::new() };
        let must_wait = !connection.is_unresponsive();
        let answers = connection.call_for_saves(requests, deadline);
        let is_overdue =
            !connection.is_closed() && (answers.len() < requests.len() || answers.iter().any(Option::is_none));
        state.is_save_late = is_overdue;
        if is_overdue && must_wait {
            state.missed_calls.add_call();
        }
        answers
    }

    /// What has to be heard in any case.
    pub(crate) fn call_always(&self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        self.state().call(deadline, |connection| connection.call_always(request, deadline))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut state = self.state();
        state.is_closed = true;
        (state.connection, state.next, state.arena) = (None, None, None);
    }
}
