//! The client: a store that is another process. `session` makes it a `Session`.
//!
//! Each call ends at its deadline. Without an answer in time, or a server at all, it is a miss. A thread connects again; what it
//! finds is used from the next `renew` on, so that no plan names frames of two arenas. A clear that the server has not confirmed
//! is sent again before anything is asked of the next one: else the disk could bring back what is wrong by now.

pub(crate) mod admin;
mod batches;
mod connection;
mod deadline;
mod handshake;
mod reconnect;
mod session;

use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use kvloft_core::store::{Lookup, Prefix};
use kvloft_core::{ErrorKind, Result};

use crate::client::batches::{bounded, messages, one_by_one};
use crate::client::connection::Link;
use crate::client::handshake::Found;
use crate::client::reconnect::{Failures, Shared, State};
use crate::protocol::{Answer, Request};
use crate::settings::RemoteConfig;
use crate::threads::spawn;

/// The store of a server.
#[derive(Debug)]
pub struct Remote {
    pub(crate) shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Remote {
    /// Connects, or retries in the background: until then, everything is a miss. `InvalidConfig` for a socket of another user's
    /// process; a server that refuses, being full or of another version, may accept the engine later.
    pub fn open(config: RemoteConfig) -> Result<Self> {
        let shared = Arc::new(Shared::new(config));
        let mut failures = Failures::default();
        match Found::at(&shared.config) {
            Ok(found) => shared.state().adopt(found, shared.deadline()),
            Err(error) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Err(error) => failures.line(&error).into_iter().for_each(|line| shared.state().tell(line)),
        }
        let own = Arc::clone(&shared);
        let connect = move || {
            while !own.state().is_closed {
                own.look(&mut failures);
            }
        };
        let thread = spawn("connect", connect)?;
        Ok(Self { shared, thread })
    }

    /// Has the thread look at once.
    pub(crate) fn wake(&self) {
        self.thread.thread().unpark();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// Whether a clear is still to be heard; takes in that it was.
    pub(crate) fn owes_clear(&self) -> bool {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        if let Some(found) = state.next.take() {
            state.adopt(found, deadline);
        }
        let _heard = state.link();
        state.owes_clear
    }

    pub(crate) fn ask(&self, request: &Request<'_>) -> Option<Answer> {
        let deadline = self.shared.deadline();
        self.state().ask(deadline, |link| link.ask(request, deadline))
    }

    /// Asks all that is made, at once; no answers where an answer is overdue.
    pub(crate) fn ask_all<'a>(&self, make: impl FnOnce(&mut Link) -> Vec<Request<'a>>) -> Vec<Option<Answer>> {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        let Some(link) = state.link() else { return Vec::new() };
        if link.is_late() {
            return Vec::new();
        }
        let requests = make(link);
        let answers = link.ask_all(&requests, deadline);
        if answers.iter().any(Option::is_none) && Instant::now() >= deadline {
            state.late.note();
        }
        answers
    }

    /// None: no answer.
    pub(crate) fn look_up(&self, prefixes: &[Prefix<'_>], is_again: bool) -> Vec<Option<Lookup>> {
        let mut prefixes: Vec<_> = prefixes.iter().map(bounded).collect();
        self.state().shorten(&mut prefixes, &self.shared);
        let parts = messages(&prefixes, |prefix| prefix.keys.len());
        let request = if is_again { Request::LookAgain } else { Request::Lookup };
        let answers = self.ask_all(|link| parts.iter().map(|part| request(link.prefixes(part))).collect());
        let found = |answer| if let Answer::Found(found) = answer { Some(found) } else { None };
        one_by_one(&parts, answers, found).collect()
    }

    /// Reservations, with a deadline of their own. Fewer answers than requests, or None among them: no answer came in time.
    pub(crate) fn ask_for_saves(&self, requests: &[Request<'_>]) -> Vec<Option<Answer>> {
        let deadline = self.shared.save_deadline();
        let mut state = self.state();
        state.is_save_late = false;
        let Some(link) = state.link() else { return Vec::new() };
        let must_wait = !link.is_silent();
        let answers = link.ask_for_saves(requests, deadline);
        let is_late = !link.is_dead() && (answers.len() < requests.len() || answers.iter().any(Option::is_none));
        state.is_save_late = is_late;
        if is_late && must_wait {
            state.late.note();
        }
        answers
    }

    /// What has to be heard in any case.
    pub(crate) fn ask_anyway(&self, request: &Request<'_>, deadline: Instant) -> Option<Answer> {
        self.state().ask(deadline, |link| link.ask_anyway(request, deadline))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let mut state = self.state();
        state.is_closed = true;
        (state.link, state.next, state.arena) = (None, None, None);
    }
}
