//! Implements `Session` by sending requests to a server.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use kvloft_core::session::{ArenaInfo, LeaseId, Session};
use kvloft_core::store::{Changes, LeasedFrame, Lookup, Prefix, Progress, Reserved, SaveRequest};
use kvloft_core::{ChunkKey, Event, Result};

use crate::client::state::ClientState;
use crate::client::{Client, clamp_prefix, join_responses, sent_range, split_batches};
use crate::protocol::{Keys, MAX_KEYS, MAX_PREFIXES, Request, Response};

/// Interval between checks while a flush or close is waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Session for Client {
    fn arena(&self) -> Option<ArenaInfo> {
        self.state().arena.as_ref().map(|(arena, _)| arena.clone())
    }

    fn renew(&self) -> bool {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        let Some(new) = state.next.take() else { return false };
        state.adopt(new, deadline);
        true
    }

    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        let is_for_save = self.state().is_save_lookup(prefixes);
        let found = self.lookup_batches(prefixes, is_for_save);
        let has_lost = |state: &mut ClientState| {
            let (first, connection) = (found.first()?.as_ref()?, state.connection.as_mut()?);
            // A single key can belong to an independent chunk, so it is never cached.
            let is_known = prefixes.first()?.keys.len() > 1;
            Some(is_known && connection.prefix_cache.reset_if_lost(first.stored_units))
        };
        let must_repeat = has_lost(&mut self.state()) == Some(true);
        let found = if must_repeat { self.lookup_batches(prefixes, is_for_save) } else { found };
        found.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId {
        let mut prefixes: Vec<_> = prefixes.iter().map(clamp_prefix).collect();
        let num_keys: usize = prefixes.iter().map(|prefix| prefix.keys.len()).sum();
        let is_bounded = num_keys <= MAX_KEYS && prefixes.len() <= MAX_PREFIXES as usize;
        let mut state = self.state();
        let id = LeaseId(state.next_lease);
        state.next_lease += 1;
        if is_bounded {
            state.trim_prefix(&mut prefixes, &self.inner);
        }
        let deadline = self.inner.deadline();
        let response = state.call(deadline, |connection| {
            if connection.is_overdue() || !is_bounded {
                return None;
            }
            let sent = connection.prefix_cache.prefixes_to_send(&prefixes);
            let response = connection.call(&Request::Acquire(id.0, sent), deadline);
            if response.is_none() {
                // The server might still handle the request later.
                connection.send(&Request::Release(id.0));
            }
            response
        });
        if let Some(Response::Progress(progress)) = response {
            state.leases.insert(id, (progress.pending_units == 0).then_some(progress));
        }
        id
    }

    fn poll(&self, lease: LeaseId) -> Progress {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        match state.leases.get(&lease) {
            None => return Progress::default(),
            Some(Some(progress)) if state.is_connected() => return *progress,
            Some(_) => {}
        }
        match state.request(&Request::Poll(lease.0), deadline) {
            Some(Response::Progress(progress)) => {
                state.leases.insert(lease, (progress.pending_units == 0).then_some(progress));
                progress
            }
            _ => Progress::default(),
        }
    }

    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame> {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        if !state.leases.contains_key(&lease) {
            return Vec::new();
        }
        match state.request(&Request::Frames(lease.0), deadline) {
            Some(Response::Frames(frames)) => frames,
            _ => Vec::new(),
        }
    }

    fn release(&self, lease: LeaseId) {
        let mut state = self.state();
        if state.leases.remove(&lease).is_some() {
            state.send(&Request::Release(lease.0));
        }
    }

    fn reserve_many(&self, asked: &[SaveRequest<'_>]) -> Result<Vec<Reserved>> {
        let ranges = asked.iter().map(sent_range).collect::<Result<Vec<_>>>()?;
        let sent: Vec<_> = ranges.iter().flatten().cloned().collect();
        let parts = split_batches(&sent, |range| range.keys.iter().len());
        let requests: Vec<_> = parts.iter().map(|part| Request::Reserve(part.to_vec())).collect();
        let responses = self.call_for_saves(&requests);
        let each_of = |response| {
            if let Response::Reserved(reserved) = response { Some(reserved) } else { None }
        };
        let mut responses = join_responses(&parts, responses, each_of);
        let mut num_missed = 0;
        let result_of = |(range, each): (&Option<_>, &SaveRequest<'_>)| {
            let response = range.as_ref().and_then(|_| responses.next().flatten());
            response.unwrap_or_else(|| {
                let dropped = each.dropped();
                num_missed += dropped.num_dropped;
                dropped
            })
        };
        let reserved: Vec<_> = ranges.iter().zip(asked).map(result_of).collect();
        let dropped = asked
            .iter()
            .zip(&reserved)
            .filter(|(each, reserved)| reserved.num_dropped > 0 && !each.is_independent);
        let mut state = self.state();
        if state.is_save_late {
            state.missed_calls.num_chunks += u64::from(num_missed);
        }
        state.dropped = dropped.filter_map(|(each, _)| each.prefix.keys.last().copied()).collect();
        Ok(reserved)
    }

    fn commit(&self, tickets: &[u64]) -> u32 {
        let response =
            self.call_always(&Request::Commit(tickets.to_vec()), self.inner.save_deadline());
        if let Some(Response::Count(number)) = response {
            u32::try_from(number).unwrap_or(u32::MAX)
        } else {
            0
        }
    }

    fn abort(&self, tickets: &[u64]) {
        self.state().send(&Request::Abort(tickets.to_vec()));
    }

    fn discard(&self, keys: &[ChunkKey]) -> u64 {
        let response = self.call_always(&Request::Discard(Keys::Own(keys)), self.inner.deadline());
        if let Some(Response::Count(number)) = response { number } else { 0 }
    }

    fn clear(&self) {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        state.send_clear(deadline);
        if state.is_clear_pending {
            state.log(Event::problem(
                "the kvloft server has not confirmed the clear yet; running without the cache \
                 until it does",
            ));
        }
    }

    fn stats(&self) -> Vec<(Cow<'static, str>, u64)> {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        // While a response is overdue, the request would not be sent, and the counts taken here
        // would never be reported.
        if state.live_connection().is_some_and(|connection| !connection.is_overdue()) {
            let [num_calls, num_chunks] = state.missed_calls.take_new();
            let request = Request::Stats(num_calls, num_chunks);
            if let Some(Response::Stats(stats)) = state.request(&request, deadline) {
                state.stats = stats;
            }
        }
        let own = [
            ("server_late", state.missed_calls.num),
            ("server_late_chunks", state.missed_calls.num_chunks),
            ("server_lost", state.num_lost),
            ("server_connected", state.is_connected().into()),
        ];
        let of_store = state.stats.iter().map(|(name, value)| (Cow::Owned(name.clone()), *value));
        of_store.chain(own.map(|(name, value)| (Cow::Borrowed(name), value))).collect()
    }

    fn limit_memory(&self, limit_bytes: u64) {
        let mut state = self.state();
        state.limit_bytes = Some(limit_bytes);
        state.send(&Request::LimitMemory(limit_bytes));
    }

    fn take_events(&self) -> Vec<Event> {
        let mut state = self.state();
        let late = state.missed_calls.log_line(
            Instant::now(),
            &self.inner.server_name(),
            self.inner.config.deadline,
        );
        std::mem::take(&mut state.events).into_iter().chain(late.map(Event::problem)).collect()
    }

    fn watch(&self, capacity: usize) {
        self.state().change_feed.capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    }

    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        let deadline = self.inner.deadline();
        let mut state = self.state();
        let sent = state.change_feed.request(asked, limit);
        let response = sent.and_then(|sent| state.request(&Request::Changes(sent), deadline));
        let changes =
            if let Some(Response::Changes(changes)) = response { Some(changes) } else { None };
        let is_connected = !state.is_clear_pending && state.is_connected();
        state.change_feed.apply(asked, changes, is_connected)
    }

    fn flush(&self, timeout: Duration) -> bool {
        let end = Instant::now().checked_add(timeout);
        loop {
            match self.call(&Request::IsSettled) {
                Some(Response::Count(1)) => return true,
                _ if end.is_some_and(|end| Instant::now() >= end) => return false,
                _ => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    fn is_save_late(&self) -> bool {
        self.state().is_save_late
    }

    /// Waits only for a pending clear. The server keeps running and writes the chunks to disk.
    fn close(&self, timeout: Duration) {
        let end = Instant::now().checked_add(timeout);
        while self.is_clear_pending() && end.is_none_or(|end| Instant::now() < end) {
            std::thread::sleep(POLL_INTERVAL);
        }
        let mut state = self.state();
        state.is_closed = true;
        state.send(&Request::Bye);
        (state.connection, state.next, state.arena) = (None, None, None);
        drop(state);
        self.thread.thread().unpark();
    }
}
