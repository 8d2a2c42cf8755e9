//! What an engine asks of a server's store: each call of a `Session`, as questions to it. It must not know how the connection stands.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use kvloft_core::session::{ArenaInfo, LeaseId, Session};
use kvloft_core::store::{Changes, Got, LeasedFrame, Lookup, Prefix, Progress, Reservation, ToSave};
use kvloft_core::{ChunkKey, Result};

use crate::client::Remote;
use crate::client::batches::{bounded, messages, one_by_one, sent_range};
use crate::client::reconnect::State;
use crate::protocol::{Answer, Keys, MAX_KEYS, MAX_PREFIXES, Request};

/// Between two looks of a flush.
const SETTLE_EVERY: Duration = Duration::from_millis(20);

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
        let is_again = self.state().goes_on(prefixes);
        let found = self.look_up(prefixes, is_again);
        let has_lost = |state: &mut State| {
            let (first, link) = (found.first()?.as_ref()?, state.link.as_mut()?);
            // A single key is something attached, which has nothing to do with the prefix that is known.
            let is_known = prefixes.first()?.keys.len() > 1;
            Some(is_known && link.known.has_lost(first.stored_blocks))
        };
        let must_repeat = has_lost(&mut self.state()) == Some(true);
        let found = if must_repeat { self.look_up(prefixes, is_again) } else { found };
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
        let requests: Vec<_> = parts.iter().map(|part| Request::Reserve(part.to_vec())).collect();
        let answers = self.ask_for_saves(&requests);
        let each_of = |answer| if let Answer::Reserved(reserved) = answer { Some(reserved) } else { None };
        let mut answers = one_by_one(&parts, answers, each_of);
        let (mut reserved, mut got) = (Vec::new(), Vec::with_capacity(asked.len()));
        let mut num_unanswered = 0;
        for (range, each) in ranges.iter().zip(asked) {
            let answer = range.map(|_| answers.next().flatten());
            num_unanswered += if matches!(answer, Some(None)) { each.range.num_chunks() } else { 0 };
            let nothing = || (Vec::new(), each.range.num_chunks());
            let (rows, num_dropped) = answer.flatten().unwrap_or_else(nothing);
            reserved.extend_from_slice(&rows);
            got.push(Got { num_reserved: rows.len(), num_dropped });
        }
        let dropped = asked.iter().zip(&got).filter(|(each, got)| got.num_dropped > 0 && !each.is_attached);
        let mut state = self.state();
        if state.is_save_late {
            state.late.drop_chunks(num_unanswered.into());
        }
        state.dropped = dropped.filter_map(|(each, _)| each.prefix.keys.last().copied()).collect();
        Ok((reserved, got))
    }

    fn commit(&self, tickets: &[u64]) -> u32 {
        let answer = self.ask_anyway(&Request::Commit(tickets.to_vec()), self.shared.save_deadline());
        if let Some(Answer::Count(number)) = answer { u32::try_from(number).unwrap_or(u32::MAX) } else { 0 }
    }

    fn abort(&self, tickets: &[u64]) {
        self.state().tell_server(&Request::Abort(tickets.to_vec()));
    }

    fn discard(&self, keys: &[ChunkKey]) -> u64 {
        let answer = self.ask_anyway(&Request::Discard(Keys::Own(keys)), self.shared.deadline());
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
        let late = self.state().late.take_new();
        let answer = self.ask(&Request::Stats(late));
        let mut state = self.state();
        if let Some(Answer::Stats(stats)) = answer {
            state.stats = stats;
        }
        let own = [
            ("server_late", state.late.num()),
            ("server_late_chunks", state.late.num_chunks()),
            ("server_lost", state.num_lost),
        ];
        let of_store = state.stats.iter().map(|(name, value)| (Cow::Owned(name.clone()), *value));
        of_store.chain(own.map(|(name, value)| (Cow::Borrowed(name), value))).collect()
    }

    fn limit_frames(&self, num_frames: u32) {
        let mut state = self.state();
        state.limit = Some(num_frames);
        state.tell_server(&Request::LimitFrames(num_frames));
    }

    fn take_events(&self) -> Vec<String> {
        let mut state = self.state();
        let late = state.late.line(Instant::now(), &self.shared.at(), self.shared.config.deadline);
        std::mem::take(&mut state.events).into_iter().chain(late).collect()
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

    fn is_save_late(&self) -> bool {
        self.state().is_save_late
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
        (state.link, state.next, state.arena) = (None, None, None);
        drop(state);
        self.wake();
    }
}
