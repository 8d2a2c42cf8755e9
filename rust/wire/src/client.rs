//! The client: a `Session` whose store is another process.
//!
//! Each call ends at its deadline. Without an answer in time, or a server at all, it is a miss. A thread connects again; what it
//! finds is used from the next `renew` on, so that no plan names frames of two arenas. A clear that the server has not confirmed
//! is sent again before anything is asked of the next one: else the disk could bring back what is wrong by now.

use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvloft_core::session::{ArenaInfo, LeaseId, Session};
use kvloft_core::store::{Changes, Got, LeasedFrame, Lookup, Prefix, Progress, Reservation, ToSave};
use kvloft_core::{ChunkKey, ErrorKind, Result};
use rustix::event::PollFlags;

use crate::batches::{bounded, messages, one_by_one, sent_range};
use crate::link::{Found, Link};
use crate::listening::Hearing;
use crate::message::{Answer, Keys, MAX_KEYS, MAX_PREFIXES, Request};
use crate::server::spawn;
use crate::socket::wait;

/// Between two attempts to connect, and two looks whether the connection stands.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// Between two looks of a flush.
const SETTLE_EVERY: Duration = Duration::from_millis(20);
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 64;

/// What is asked for of a server.
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// Where it listens.
    pub socket: PathBuf,
    /// Longest wait of a call.
    pub deadline: Duration,
    /// As in `StoreConfig`.
    pub namespace: [u8; 32],
    /// As in `StoreConfig`.
    pub frame_bytes: u64,
    /// As in `StoreConfig`.
    pub blocks_per_chunk: u32,
    /// As in `DiskSettings`.
    pub description: String,
}

#[derive(Debug, Default)]
struct State {
    link: Option<Link>,
    /// Used from the next `renew` on.
    next: Option<Found>,
    arena: Option<(ArenaInfo, OwnedFd)>,
    /// Leases of this link. Of those that no longer change, how far they are.
    leases: HashMap<LeaseId, Option<Progress>>,
    next_lease: u64,
    limit: Option<u32>,
    hearing: Hearing,
    /// A clear that may not have been heard.
    owes_clear: bool,
    stats: Vec<(String, u64)>,
    num_late: u64,
    num_lost: u64,
    events: Vec<String>,
    is_closed: bool,
}

#[derive(Debug)]
struct Shared {
    config: RemoteConfig,
    state: Mutex<State>,
}

/// The store of a server.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl State {
    fn tell(&mut self, event: String) {
        if self.events.len() < MAX_EVENTS && self.events.last() != Some(&event) {
            self.events.push(event);
        }
    }

    /// The connection, if it stands and may be asked. A clear that was not heard comes before everything.
    fn link(&mut self) -> Option<&mut Link> {
        let link = self.link.as_mut().filter(|link| !link.is_dead())?;
        if self.owes_clear {
            self.owes_clear = link.is_late();
        }
        (!self.owes_clear).then_some(link)
    }

    fn ask(&mut self, deadline: Instant, request: impl FnOnce(&mut Link) -> Option<Answer>) -> Option<Answer> {
        let answer = request(self.link()?);
        if answer.is_none() && Instant::now() >= deadline {
            self.num_late += 1;
        }
        answer
    }

    /// Only the first prefix of a message is known to the server afterwards, so only that one is shortened.
    fn shorten(&mut self, prefixes: &mut [Prefix<'_>], shared: &Shared) {
        let deadline = shared.deadline();
        if let Some(first) = prefixes.first_mut()
            && let Some(link) = self.link().filter(|link| link.known.is_far_from(first.keys))
        {
            link.shorten(first, shared.config.blocks_per_chunk, deadline);
            self.num_late += u64::from(Instant::now() >= deadline);
        }
    }

    /// What has to be heard, now or when the server goes on.
    fn tell_server(&mut self, request: &Request<'_>) {
        if let Some(link) = &mut self.link {
            link.tell(request);
        }
    }

    fn adopt(&mut self, found: Found, deadline: Instant) {
        let Found { link, arena, fd } = found;
        self.link = Some(link);
        self.leases.clear();
        if self.arena.as_ref().is_some_and(|(own, _)| own.id == arena.id) {
            if let Some(limit) = self.limit {
                self.tell_server(&Request::LimitFrames(limit));
            }
        } else {
            self.arena = Some((arena, fd));
            self.limit = None;
        }
        if self.owes_clear {
            self.send_clear(deadline);
        }
    }

    fn send_clear(&mut self, deadline: Instant) {
        self.owes_clear = true;
        if let Some(link) = &mut self.link
            && link.ask_anyway(&Request::Clear, deadline).is_some()
        {
            self.owes_clear = false;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.config.deadline
    }

    fn at(&self) -> String {
        format!("the kvloft server at {}", self.config.socket.display())
    }

    /// One round of the thread that connects: looks whether the connection stands, and else tries to have another.
    fn look(&self, refused: &mut String) {
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
                state.tell(format!("{} is there", self.at()));
                state.next = Some(found);
            }
            Err(error) => {
                if error.kind() == ErrorKind::InvalidConfig && *refused != error.to_string() {
                    *refused = error.to_string();
                    self.state().tell(refused.clone());
                }
                std::thread::park_timeout(TRY_EVERY);
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

impl Remote {
    /// Connects, or goes on trying: until then, everything is a miss. `InvalidConfig` if the server refuses, in its own words.
    pub fn open(config: RemoteConfig) -> Result<Self> {
        let shared = Arc::new(Shared { config, state: Mutex::default() });
        match Found::at(&shared.config) {
            Ok(found) => shared.state().adopt(found, shared.deadline()),
            Err(error) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Err(error) => shared.state().tell(format!("{error}; requests are computed until one does")),
        }
        let own = Arc::clone(&shared);
        let connect = move || {
            let mut refused = String::new();
            while !own.state().is_closed {
                own.look(&mut refused);
            }
        };
        let thread = spawn("connect", connect)?;
        Ok(Self { shared, thread })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// Whether a clear is still to be heard; takes in that it was.
    fn owes_clear(&self) -> bool {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        if let Some(found) = state.next.take() {
            state.adopt(found, deadline);
        }
        let _heard = state.link();
        state.owes_clear
    }

    fn ask(&self, request: &Request<'_>) -> Option<Answer> {
        let deadline = self.shared.deadline();
        self.state().ask(deadline, |link| link.ask(request, deadline))
    }

    /// Asks all that is made, at once; no answers where an answer is overdue.
    fn ask_all<'a>(&self, make: impl FnOnce(&mut Link) -> Vec<Request<'a>>) -> Vec<Option<Answer>> {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        let Some(link) = state.link() else { return Vec::new() };
        if link.is_late() {
            return Vec::new();
        }
        let requests = make(link);
        let answers = link.ask_all(&requests, deadline);
        if answers.iter().any(Option::is_none) && Instant::now() >= deadline {
            state.num_late += 1;
        }
        answers
    }

    /// None: no answer.
    fn look_up(&self, prefixes: &[Prefix<'_>]) -> Vec<Option<Lookup>> {
        let mut prefixes: Vec<_> = prefixes.iter().map(bounded).collect();
        self.state().shorten(&mut prefixes, &self.shared);
        let parts = messages(&prefixes, |prefix| prefix.keys.len());
        let answers = self.ask_all(|link| parts.iter().map(|part| Request::Lookup(link.prefixes(part))).collect());
        let found = |answer| if let Answer::Found(found) = answer { Some(found) } else { None };
        one_by_one(&parts, answers, found).collect()
    }

    /// What has to be heard in any case.
    fn ask_anyway(&self, request: &Request<'_>) -> Option<Answer> {
        let deadline = self.shared.deadline();
        self.state().ask(deadline, |link| link.ask_anyway(request, deadline))
    }
}

impl Session for Remote {
    fn arena(&self) -> Option<ArenaInfo> {
        self.state().arena.as_ref().map(|(arena, _)| arena.clone())
    }

    fn renew(&self) -> bool {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        let Some(found) = state.next.take() else { return false };
        state.adopt(found, deadline);
        true
    }

    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        let found = self.look_up(prefixes);
        let has_lost = |state: &mut State| {
            let (first, link) = (found.first()?.as_ref()?, state.link.as_mut()?);
            // A single key is something attached, which has nothing to do with the prefix that is known.
            let is_known = prefixes.first()?.keys.len() > 1;
            Some(is_known && link.known.has_lost(first.stored_blocks))
        };
        let is_again = has_lost(&mut self.state()) == Some(true);
        let found = if is_again { self.look_up(prefixes) } else { found };
        found.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId {
        let mut prefixes: Vec<_> = prefixes.iter().map(bounded).collect();
        let num_keys: usize = prefixes.iter().map(|prefix| prefix.keys.len()).sum();
        let is_bounded = num_keys <= MAX_KEYS && prefixes.len() <= MAX_PREFIXES as usize;
        let mut state = self.state();
        let id = LeaseId(state.next_lease);
        state.next_lease += 1;
        if is_bounded {
            state.shorten(&mut prefixes, &self.shared);
        }
        let deadline = self.shared.deadline();
        let answer = state.ask(deadline, |link| {
            if link.is_late() || !is_bounded {
                return None;
            }
            let sent = link.prefixes(&prefixes);
            let answer = link.ask(&Request::Acquire(id.0, sent), deadline);
            if answer.is_none() {
                link.tell(&Request::Release(id.0)); // for when the server goes on
            }
            answer
        });
        if let Some(Answer::Progress(progress)) = answer {
            state.leases.insert(id, (progress.pending_blocks == 0).then_some(progress));
        }
        id
    }

    fn poll(&self, lease: LeaseId) -> Progress {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        match state.leases.get(&lease) {
            None => return Progress::default(),
            Some(Some(progress)) if state.link.as_ref().is_some_and(|link| !link.is_dead()) => return *progress,
            Some(_) => {}
        }
        match state.ask(deadline, |link| link.ask(&Request::Poll(lease.0), deadline)) {
            Some(Answer::Progress(progress)) => {
                state.leases.insert(lease, (progress.pending_blocks == 0).then_some(progress));
                progress
            }
            _ => Progress::default(),
        }
    }

    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame> {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        if !state.leases.contains_key(&lease) {
            return Vec::new();
        }
        let answer = state.ask(deadline, |link| link.ask(&Request::Frames(lease.0), deadline));
        if let Some(Answer::Frames(frames)) = answer { frames } else { Vec::new() }
    }

    fn release(&self, lease: LeaseId) {
        let mut state = self.state();
        if state.leases.remove(&lease).is_some() {
            state.tell_server(&Request::Release(lease.0));
        }
    }

    fn reserve_many(&self, asked: &[ToSave<'_>]) -> Result<(Vec<Reservation>, Vec<Got>)> {
        let per_chunk = self.shared.config.blocks_per_chunk;
        let ranges = asked.iter().map(|each| sent_range(each, per_chunk)).collect::<Result<Vec<_>>>()?;
        let sent: Vec<_> = ranges.iter().flatten().copied().collect();
        let parts = messages(&sent, |range| range.keys.iter().len());
        let answers = self.ask_all(|_| parts.iter().map(|part| Request::Reserve(part.to_vec())).collect());
        let each_of = |answer| if let Answer::Reserved(reserved) = answer { Some(reserved) } else { None };
        let mut answers = one_by_one(&parts, answers, each_of);
        let (mut reserved, mut got) = (Vec::new(), Vec::with_capacity(asked.len()));
        for (range, each) in ranges.iter().zip(asked) {
            let nothing = || (Vec::new(), each.range.num_chunks());
            let (rows, num_dropped) = range.and_then(|_| answers.next().flatten()).unwrap_or_else(nothing);
            reserved.extend_from_slice(&rows);
            got.push(Got { num_reserved: rows.len(), num_dropped });
        }
        Ok((reserved, got))
    }

    fn commit(&self, tickets: &[u64]) -> u32 {
        let answer = self.ask_anyway(&Request::Commit(tickets.to_vec()));
        if let Some(Answer::Count(number)) = answer { u32::try_from(number).unwrap_or(u32::MAX) } else { 0 }
    }

    fn abort(&self, tickets: &[u64]) {
        self.state().tell_server(&Request::Abort(tickets.to_vec()));
    }

    fn discard(&self, keys: &[ChunkKey]) -> u64 {
        let answer = self.ask_anyway(&Request::Discard(Keys::Own(keys)));
        if let Some(Answer::Count(number)) = answer { number } else { 0 }
    }

    fn clear(&self) {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        state.send_clear(deadline);
        if state.owes_clear {
            state.tell("the kvloft server has not cleared yet; until it has, requests are computed".to_owned());
        }
    }

    fn stats(&self) -> Vec<(Cow<'static, str>, u64)> {
        let answer = self.ask(&Request::Stats);
        let mut state = self.state();
        if let Some(Answer::Stats(stats)) = answer {
            state.stats = stats;
        }
        let own = [("server_late", state.num_late), ("server_lost", state.num_lost)];
        let of_store = state.stats.iter().map(|(name, value)| (Cow::Owned(name.clone()), *value));
        of_store.chain(own.map(|(name, value)| (Cow::Borrowed(name), value))).collect()
    }

    fn limit_frames(&self, num_frames: u32) {
        let mut state = self.state();
        state.limit = Some(num_frames);
        state.tell_server(&Request::LimitFrames(num_frames));
    }

    fn take_events(&self) -> Vec<String> {
        std::mem::take(&mut self.state().events)
    }

    fn watch(&self, capacity: usize) {
        self.state().hearing.capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    }

    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        let deadline = self.shared.deadline();
        let mut state = self.state();
        let sent = state.hearing.question(asked, limit);
        let answer = state.ask(deadline, |link| link.ask(&Request::Changes(sent?), deadline));
        let told = if let Some(Answer::Changes(told)) = answer { Some(told) } else { None };
        let is_there = !state.owes_clear && state.link.as_ref().is_some_and(|link| !link.is_dead());
        state.hearing.hear(asked, told, is_there)
    }

    fn flush(&self, timeout: Duration) -> bool {
        let end = Instant::now().checked_add(timeout);
        loop {
            match self.ask(&Request::IsSettled) {
                Some(Answer::Count(1)) => return true,
                _ if end.is_some_and(|end| Instant::now() >= end) => return false,
                _ => std::thread::sleep(SETTLE_EVERY),
            }
        }
    }

    /// The server goes on with what it has: nothing has to be waited for but a clear that it has not heard yet.
    fn close(&self, timeout: Duration) {
        let end = Instant::now().checked_add(timeout);
        while self.owes_clear() && end.is_none_or(|end| Instant::now() < end) {
            std::thread::sleep(SETTLE_EVERY);
        }
        let mut state = self.state();
        state.is_closed = true;
        state.tell_server(&Request::Bye);
        (state.link, state.next) = (None, None);
        drop(state);
        self.thread.thread().unpark();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let mut state = self.state();
        state.is_closed = true;
        (state.link, state.next) = (None, None);
    }
}
