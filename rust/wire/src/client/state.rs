//! A client's state: its connection, leases and counters, its view of the stored chunks, and the
//! requests to repeat on a new connection.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvloft_core::session::{ArenaInfo, LeaseId};
use kvloft_core::store::{Changes, Prefix, Progress};
use kvloft_core::{ChunkKey, Event};
use rustix::event::PollFlags;

use crate::client::connection::Connection;
use crate::client::handshake::{ClientConfig, NewConnection};
use crate::client::missed_calls::MissedCalls;
use crate::protocol::{Keys, MAX_CHANGES, Request, Response, SentChanges};
use crate::socket::wait;
use crate::threads::locked;

/// Minimum timeout for reservations and commits. Lookups can time out sooner because inference
/// requests wait for them. If a reservation or commit times out, a save is delayed or lost.
const MIN_SAVE_DEADLINE: Duration = Duration::from_millis(100);
/// Maximum number of log lines queued for `take_events`.
const MAX_EVENTS: usize = 64;
/// After this long without a response, all previously reported chunks are treated as lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct ClientState {
    pub(crate) connection: Option<Connection>,
    /// The connection that the next `renew` switches to.
    pub(crate) next: Option<NewConnection>,
    /// The last connection's arena. Its descriptors stay open until the server has exited.
    pub(crate) arena: Option<(ArenaInfo, Option<[OwnedFd; 2]>)>,
    /// This connection's leases, each with its progress if no reads are pending.
    pub(crate) leases: HashMap<LeaseId, Option<Progress>>,
    pub(crate) next_lease: u64,
    pub(crate) limit_bytes: Option<u64>,
    /// The last key of each prefix for which the most recent reservation dropped chunks.
    pub(crate) dropped: Vec<ChunkKey>,
    pub(crate) change_feed: ChangeFeed,
    /// True while the server has not confirmed a clear.
    pub(crate) is_clear_pending: bool,
    pub(crate) stats: Vec<(String, u64)>,
    pub(crate) missed_calls: MissedCalls,
    /// See `Session::is_save_late`.
    pub(crate) is_save_late: bool,
    /// Number of lost connections.
    pub(crate) num_lost: u64,
    pub(crate) events: Vec<Event>,
    pub(crate) is_closed: bool,
}

/// Requests the changes to a server's store. Reports a loss if the server stops responding.
#[derive(Debug, Default)]
pub(crate) struct ChangeFeed {
    /// See `Session::watch`.
    pub(crate) capacity: u32,
    last: FeedState,
}

/// Outcome of the last request.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum FeedState {
    Answered,
    /// No request has been answered in time since this instant.
    Late(Instant),
    /// All previously reported chunks are treated as lost.
    #[default]
    Lost,
}

/// Settings and state shared by a client and its background thread.
#[derive(Debug)]
pub(crate) struct ClientInner {
    pub(crate) config: ClientConfig,
    state: Mutex<ClientState>,
}

impl ClientState {
    /// Queues a line for the engine's log. Drops repeated lines and lines beyond [`MAX_EVENTS`].
    pub(crate) fn log(&mut self, event: Event) {
        let is_repeated = self.events.last().is_some_and(|last| **last == *event);
        if self.events.len() < MAX_EVENTS && !is_repeated {
            self.events.push(event);
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| !connection.is_closed)
    }

    /// Returns the connection if it is open. A pending clear has already been sent on this
    /// connection, so the server handles the clear before any later request.
    pub(crate) fn live_connection(&mut self) -> Option<&mut Connection> {
        let connection = self.connection.as_mut().filter(|connection| !connection.is_closed)?;
        if self.is_clear_pending {
            self.is_clear_pending = connection.is_overdue();
        }
        Some(connection)
    }

    /// Makes a call on the connection. Counts the call as missed if it times out.
    pub(crate) fn call(
        &mut self,
        deadline: Instant,
        request: impl FnOnce(&mut Connection) -> Option<Response>,
    ) -> Option<Response> {
        let answer = request(self.live_connection()?);
        if answer.is_none() && Instant::now() >= deadline {
            self.missed_calls.num += 1;
        }
        answer
    }

    pub(crate) fn request(&mut self, request: &Request<'_>, deadline: Instant) -> Option<Response> {
        self.call(deadline, |connection| connection.call(request, deadline))
    }

    /// Truncates the first prefix to the part that might be stored on the server. Other prefixes
    /// are sent in full, because the server caches only the keys of the first prefix in a message.
    pub(crate) fn trim_prefix(&mut self, prefixes: &mut [Prefix<'_>], inner: &ClientInner) {
        let deadline = inner.deadline();
        if let Some(first) = prefixes.first_mut()
            && let Some(connection) = self
                .live_connection()
                .filter(|connection| connection.prefix_cache.needs_anchors(first.keys))
        {
            connection.trim_prefix(first, deadline);
            if Instant::now() >= deadline {
                self.missed_calls.num += 1;
            }
        }
    }

    /// Returns true for the first lookup of each prefix for which the most recent reservation
    /// dropped chunks. The lookup of such a prefix is part of the save, not of a new request.
    pub(crate) fn is_save_lookup(&mut self, prefixes: &[Prefix<'_>]) -> bool {
        let [Prefix { keys: [.., end], .. }] = prefixes else { return false };
        let at = self.dropped.iter().position(|dropped| dropped == end);
        at.map(|at| self.dropped.swap_remove(at)).is_some()
    }

    /// Sends a one-way request if there is a connection.
    pub(crate) fn send(&mut self, request: &Request<'_>) {
        if let Some(connection) = &mut self.connection {
            connection.send(request);
        }
    }

    /// Switches to a new connection. Resends any pending clear. If the arena's memory is still the
    /// same, also resends the memory limit.
    pub(crate) fn adopt(&mut self, new: NewConnection, deadline: Instant) {
        let NewConnection { connection, arena, fds } = new;
        self.connection = Some(connection);
        self.leases.clear();
        let is_same_memory = self.arena.as_ref().is_some_and(|(own, _)| own.id == arena.id);
        self.arena = Some((arena, Some(fds))); // the lifeline is new even if the memory is not
        self.limit_bytes = self.limit_bytes.filter(|_| is_same_memory);
        if let Some(limit) = self.limit_bytes {
            self.send(&Request::LimitMemory(limit));
        }
        if self.is_clear_pending {
            self.send_clear(deadline);
        }
    }

    /// Closes the arena's descriptors once its server has exited, because open descriptors keep the
    /// memory allocated. The server closes its end of the lifeline only when it exits or holds no
    /// frames for this engine.
    pub(crate) fn release_lost_arena(&mut self) {
        if let Some((_, fds)) = &mut self.arena {
            fds.take_if(|[_, lifeline]| wait(&*lifeline, PollFlags::empty(), Instant::now()));
        }
    }

    /// Sends a clear and waits for its confirmation.
    pub(crate) fn send_clear(&mut self, deadline: Instant) {
        self.is_clear_pending = true;
        if let Some(connection) = &mut self.connection
            && connection.call_always(&Request::Clear, deadline).is_some()
        {
            self.is_clear_pending = false;
        }
    }
}

impl ChangeFeed {
    /// Returns the request to send, or None if `asked` has too many keys for one request.
    pub(crate) fn request<'a>(
        &self,
        asked: &'a [ChunkKey],
        limit: usize,
    ) -> Option<SentChanges<'a>> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let sent = SentChanges { capacity: self.capacity, limit, asked: Keys::Own(asked) };
        (asked.len() <= MAX_CHANGES as usize).then_some(sent)
    }

    /// Returns the changes to report. `answer` is None if there was no response.
    pub(crate) fn apply(
        &mut self,
        asked: &[ChunkKey],
        answer: Option<Changes>,
        is_connected: bool,
    ) -> Changes {
        let before = self.last;
        if let Some(Changes { rows, lost }) = answer {
            self.last = FeedState::Answered;
            return Changes { rows, lost: lost || before != FeedState::Answered };
        }
        self.last = match before {
            FeedState::Answered if is_connected => FeedState::Late(Instant::now()),
            FeedState::Late(since) if is_connected && since.elapsed() < LOSS_TIMEOUT => before,
            _ => FeedState::Lost,
        };
        if self.last == FeedState::Lost {
            Changes { lost: before != FeedState::Lost, ..Changes::of_none(asked) }
        } else {
            Changes::default() // the caller will request the same keys again
        }
    }
}

impl ClientInner {
    pub(crate) fn new(config: ClientConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ClientState> {
        locked(&self.state)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config.deadline
    }

    pub(crate) fn save_deadline(&self) -> Instant {
        Instant::now() + self.config.deadline.max(MIN_SAVE_DEADLINE)
    }

    pub(crate) fn server_name(&self) -> String {
        format!("the kvloft server at {}", self.config.socket.display())
    }
}
