//! The client for a store on a server. The module `session` implements `Session` for [`Client`].
//!
//! Each call returns by its deadline. A call is a miss if there is no connection or if no response
//! arrives by the deadline. A background thread reconnects. On a new connection, the client first
//! resends any unconfirmed clear, because the cleared chunks could still be on disk.

pub(crate) mod admin;
mod connection;
pub(crate) mod handshake;
mod missed_calls;
mod reconnect;
mod session;
mod state;

use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use kvloft_core::store::{Lookup, Prefix, SaveRequest};
use kvloft_core::{ErrorKind, Event, Result};

use crate::client::connection::Connection;
use crate::client::handshake::{ClientConfig, NewConnection};
use crate::client::reconnect::ConnectFailures;
use crate::client::state::{ClientInner, ClientState};
use crate::protocol::{Keys, MAX_KEYS, Request, Response, SentRange};
use crate::threads::spawn;

/// Maximum number of keys in a message with more than one item. Larger batches are split, so that
/// the server can handle one message while the client encodes the next.
const KEYS_PER_MESSAGE: usize = 1024;

/// A client for a store on a server.
#[derive(Debug)]
pub struct Client {
    pub(crate) inner: Arc<ClientInner>,
    thread: JoinHandle<()>,
}

impl Client {
    /// Connects to the server. If this fails or the server rejects the engine (for example, because
    /// of its connection limit), retries in the background. Every lookup is a miss until a
    /// connection is established. Returns `InvalidConfig` if the server belongs to another user.
    pub fn open(config: ClientConfig) -> Result<Self> {
        let inner = Arc::new(ClientInner::new(config));
        let mut failures = ConnectFailures::default();
        match NewConnection::open(&inner.config) {
            Ok(new) => inner.state().adopt(new, inner.deadline()),
            Err(error) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Err(error) => {
                failures
                    .log_line(&error)
                    .into_iter()
                    .for_each(|line| inner.state().log(Event::problem(line)));
            }
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

    pub(crate) fn state(&self) -> MutexGuard<'_, ClientState> {
        self.inner.state()
    }

    /// Switches to a new connection if one is available, and processes received responses. Returns
    /// true if a clear has not been confirmed yet.
    pub(crate) fn is_clear_pending(&self) -> bool {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        if let Some(new) = state.next.take() {
            state.adopt(new, deadline);
        }
        let _updated = state.live_connection();
        state.is_clear_pending
    }

    pub(crate) fn call(&self, request: &Request<'_>) -> Option<Response> {
        let deadline = self.inner.deadline();
        self.state().request(request, deadline)
    }

    /// Sends the requests returned by `make` and waits for the responses. Returns an empty list if
    /// there is no connection or an earlier response is overdue.
    pub(crate) fn call_all<'a>(
        &self,
        make: impl FnOnce(&mut Connection) -> Vec<Request<'a>>,
    ) -> Vec<Option<Response>> {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        let Some(connection) = state.live_connection() else { return Vec::new() };
        if connection.is_overdue() {
            return Vec::new();
        }
        let requests = make(connection);
        let responses = connection.call_all(&requests, deadline);
        if responses.iter().any(Option::is_none) && Instant::now() >= deadline {
            state.missed_calls.num += 1;
        }
        responses
    }

    /// Looks up prefixes, splitting them into messages of limited size. Returns None for each
    /// prefix that got no response.
    pub(crate) fn lookup_batches(
        &self,
        prefixes: &[Prefix<'_>],
        is_for_save: bool,
    ) -> Vec<Option<Lookup>> {
        let mut prefixes: Vec<_> = prefixes.iter().map(clamp_prefix).collect();
        self.state().trim_prefix(&mut prefixes, &self.inner);
        let parts = split_batches(&prefixes, |prefix| prefix.keys.len());
        let request = if is_for_save { Request::LookupForSave } else { Request::Lookup };
        let responses = self.call_all(|connection| {
            parts
                .iter()
                .map(|part| request(connection.prefix_cache.prefixes_to_send(part)))
                .collect()
        });
        let found =
            |response| if let Response::Found(found) = response { Some(found) } else { None };
        join_responses(&parts, responses, found).collect()
    }

    /// Sends reservations and waits for the responses until the save deadline. Responses that do
    /// not arrive in time are None or are missing from the end of the list.
    pub(crate) fn call_for_saves(&self, requests: &[Request<'_>]) -> Vec<Option<Response>> {
        let deadline = self.inner.save_deadline();
        let mut state = self.state();
        state.is_save_late = false;
        let Some(connection) = state.live_connection() else { return Vec::new() };
        let must_wait = !connection.is_unresponsive;
        let responses = connection.call_for_saves(requests, deadline);
        let is_overdue = !connection.is_closed
            && (responses.len() < requests.len() || responses.iter().any(Option::is_none));
        state.is_save_late = is_overdue;
        if is_overdue && must_wait {
            state.missed_calls.num += 1;
        }
        responses
    }

    /// Sends a request even if an earlier response is overdue.
    pub(crate) fn call_always(&self, request: &Request<'_>, deadline: Instant) -> Option<Response> {
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

fn clamp_prefix<'a>(prefix: &Prefix<'a>) -> Prefix<'a> {
    Prefix { keys: &prefix.keys[..prefix.keys.len().min(MAX_KEYS)], ..*prefix }
}

/// Returns the range to send, or None if it extends past the first `MAX_KEYS` keys of the prefix.
fn sent_range<'a>(asked: &SaveRequest<'a>) -> Result<Option<SentRange<'a>>> {
    asked.check()?;
    let SaveRequest { prefix, units, class, is_independent } = asked.clone();
    // The server needs only one key before the range: the key of the first chunk's parent.
    let first = units.start.saturating_sub(1);
    // For independent chunks, the server also needs the key after the range, which identifies the
    // full-attention chunk at the end of the prefix.
    let end = prefix.num_units().min(units.end.saturating_add(is_independent.into()));
    let at = |unit: u32| unit.saturating_sub(prefix.first) as usize;
    let (root, keys) = (prefix.root, Keys::Own(&prefix.keys[at(first.min(end))..at(end)]));
    let range = SentRange { root, first, keys, units, class, is_independent };
    Ok((end as usize <= MAX_KEYS).then_some(range))
}

/// Splits items into messages of at most `KEYS_PER_MESSAGE` keys. An item with more keys is sent in
/// a message of its own.
fn split_batches<T>(asked: &[T], num_keys: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let (mut parts, mut start, mut total) = (Vec::new(), 0, 0);
    for (at, item) in asked.iter().enumerate() {
        let num = num_keys(item) + 1; // plus one, so that items without keys also count
        if at > start && total + num > KEYS_PER_MESSAGE {
            parts.push(&asked[start..at]);
            (start, total) = (at, 0);
        }
        total += num;
    }
    parts.extend(asked.get(start..).filter(|rest| !rest.is_empty()));
    parts
}

/// Returns one result per item. If a message got no response, the results of all its items are
/// None.
fn join_responses<Q, T>(
    parts: &[&[Q]],
    responses: Vec<Option<Response>>,
    of: impl Fn(Response) -> Option<Vec<T>>,
) -> impl Iterator<Item = Option<T>> {
    let mut responses = responses.into_iter();
    let each = parts.iter().map(move |part| {
        let found =
            responses.next().flatten().and_then(&of).filter(|found| found.len() == part.len());
        let missing = if found.is_some() { 0 } else { part.len() };
        found.into_iter().flatten().map(Some).chain((0..missing).map(|_| None))
    });
    each.flatten()
}
