//! A connected engine, as the server has it: its read leases, what is known of its prefixes, and what its questions get.
//!
//! Whatever arrives is refused or bounded; an engine reaches only leases and reservations of its own. It must not know sockets.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvloft_core::ChunkKey;
use kvloft_core::session::{LeaseId, Local, Session};
use kvloft_core::store::{Got, Listener, Prefix, Progress, ToSave};

use crate::protocol::prefix_cache::Known;
use crate::protocol::{Answer, Keys, MAX_KEYS, Request, SentAnchors, SentPrefixes, SentRange};
use crate::server::counters::{Answered, Tally};
use crate::server::namespace::Seat;

/// Read leases of one engine.
const MAX_LEASES: usize = 1 << 16;
/// Prefixes of all of them, each some 50 bytes.
const MAX_HELD: usize = 1 << 22;

/// What an engine has here but its seat.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    /// By the engine's numbers, and of how many prefixes each is.
    leases: HashMap<u64, (LeaseId, usize)>,
    num_held: usize,
    /// The last long prefix that came first in a message.
    known: Known,
    /// Hears which chunks come and go, for an engine that asked.
    listener: Option<Listener>,
    /// Keys of other prefixes, one after the other; of a reservation's only those that it needs are meant.
    scratch: Vec<ChunkKey>,
    tally: Arc<Tally>,
    /// Blocks of the prefix that the next question is about, where it is sent without what is not there.
    num_anchored: u32,
}

/// Why a connection ends.
pub(crate) enum End {
    Gone,
    Refused(String),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl Engine {
    pub(crate) fn new(tally: Arc<Tally>) -> Self {
        Self { tally, ..Self::default() }
    }

    pub(crate) fn answer(&mut self, request: &Request<'_>, seat: &Seat) -> Result<Option<Answer>, End> {
        let local = &seat.local;
        Ok(Some(match request {
            Request::Lookup(prefixes) | Request::LookAgain(prefixes) => {
                let (per_chunk, whole) = (seat.space.hello.blocks_per_chunk, std::mem::take(&mut self.num_anchored));
                let prefixes = self.prefixes(prefixes)?;
                let found = local.lookup_many(&prefixes);
                let num_blocks =
                    |(nth, prefix): (usize, &Prefix<'_>)| prefix.num_blocks().max(if nth == 0 { whole } else { 0 });
                let asked = Answered::lookup(prefixes.iter().enumerate().map(num_blocks), &found, per_chunk);
                if matches!(request, Request::Lookup(_)) {
                    self.count(asked, seat);
                }
                Answer::Found(found)
            }
            Request::Acquire(lease, prefixes) => {
                self.num_anchored = 0;
                let (is_full, num_held) = (self.leases.len() >= MAX_LEASES, self.num_held);
                let prefixes = self.prefixes(prefixes)?;
                let num = prefixes.len();
                if is_full || num_held + num > MAX_HELD {
                    return Ok(Some(Answer::Progress(Progress::default())));
                }
                let own = local.acquire_all(&prefixes);
                self.release(*lease, local);
                self.leases.insert(*lease, (own, num));
                self.num_held += num;
                Answer::Progress(local.poll(own))
            }
            Request::Anchors(anchors) => self.anchors(anchors, local)?,
            Request::Poll(lease) => {
                Answer::Progress(self.leases.get(lease).map(|(lease, _)| local.poll(*lease)).unwrap_or_default())
            }
            Request::Frames(lease) => {
                let frames = self.leases.get(lease).map(|(lease, _)| local.frames(*lease)).unwrap_or_default();
                self.count(Answered::Loaded(frames.len() as u64), seat);
                Answer::Frames(frames)
            }
            Request::Release(lease) => {
                self.release(*lease, local);
                return Ok(None);
            }
            Request::Reserve(ranges) => {
                let asked = self.ranges(ranges, seat.space.hello.blocks_per_chunk)?;
                let (reserved, got) = local.reserve_many(&asked).map_err(|_| no_message())?;
                let mut reserved = reserved.into_iter();
                let rows = |got: Got| (reserved.by_ref().take(got.num_reserved).collect(), got.num_dropped);
                Answer::Reserved(got.into_iter().map(rows).collect())
            }
            Request::Commit(tickets) => {
                let num_saved = local.commit(tickets).into();
                self.count(Answered::Saved(num_saved), seat);
                Answer::Count(num_saved)
            }
            Request::Abort(tickets) => {
                local.abort(tickets);
                return Ok(None);
            }
            Request::Discard(keys) => {
                Answer::Count(local.discard(&keys.iter().map(|key| ChunkKey(*key)).collect::<Vec<_>>()))
            }
            Request::Clear => {
                local.clear();
                Answer::Count(0)
            }
            Request::Stats([num_calls, num_chunks]) => {
                self.count(Answered::Late(*num_calls, *num_chunks), seat);
                Answer::Stats(local.stats().into_iter().map(|(name, value)| (name.into_owned(), value)).collect())
            }
            Request::LimitFrames(num_frames) => {
                local.limit_frames(*num_frames);
                return Ok(None);
            }
            Request::Changes(asked) => {
                let store = seat.space.store().ok_or(End::Gone)?;
                Answer::Changes(asked.answer(store, &mut self.listener).ok_or_else(no_message)?)
            }
            Request::IsSettled => Answer::Count(local.flush(Duration::ZERO).into()),
            Request::Hello(_) | Request::Status(_) | Request::Forget(..) | Request::Evict(..) | Request::Bye => {
                return Err(no_message());
            }
        }))
    }

    fn count(&self, answered: Answered, seat: &Seat) {
        self.tally.add(answered);
        seat.space.tally.add(answered);
    }

    fn release(&mut self, lease: u64, local: &Local) {
        if let Some((own, num)) = self.leases.remove(&lease) {
            self.num_held -= num;
            local.release(own);
        }
    }

    /// How many of a prefix's anchors are there; it is known as far as the last of those.
    fn anchors(&mut self, sent: &SentAnchors<'_>, local: &Local) -> Result<Answer, End> {
        let all = sent.all().ok_or_else(no_message)?;
        let found = local.anchors(&all);
        self.num_anchored = sent.last;
        self.known.begin((found.num_known as usize).checked_sub(1).map(|last| all[last]));
        Ok(Answer::Anchors(found))
    }

    /// What was sent of prefixes, the first one behind what is known of it.
    fn prefixes(&mut self, sent: &SentPrefixes<'_>) -> Result<Vec<Prefix<'_>>, End> {
        let num_same = usize::try_from(sent.num_same).unwrap_or(usize::MAX);
        let num_sent: usize = sent.all.iter().map(|(_, keys)| keys.iter().len()).sum();
        if num_same.saturating_add(num_sent) > MAX_KEYS {
            return Err(no_message());
        }
        let num_first = sent.all.first().map_or(0, |(_, keys)| keys.iter().len().saturating_add(num_same));
        let is_long = num_first > 1;
        let (first, others) = sent.all.split_at(is_long.into());
        let mut keys = first.iter().flat_map(|(_, keys)| keys.iter()).map(|key| ChunkKey(*key));
        let is_whole = if is_long { self.known.go_on(num_same, &mut keys) } else { num_same == 0 };
        if !is_whole {
            return Err(no_message());
        }
        self.scratch.clear();
        self.scratch.extend(others.iter().flat_map(|(_, keys)| keys.iter()).map(|key| ChunkKey(*key)));
        let mut rest = self.scratch.as_slice();
        let whole = |(root, keys): &(ChunkKey, Keys<'_>)| {
            let (own, behind) = rest.split_at(keys.iter().len());
            rest = behind;
            Prefix::new(*root, own)
        };
        let first = first.iter().map(|(root, _)| self.known.prefix(*root));
        Ok(first.chain(others.iter().map(whole)).collect())
    }

    /// What is to be reserved. Before the keys of each are others', or none: they are not looked at.
    fn ranges(&mut self, sent: &[SentRange<'_>], per_chunk: u32) -> Result<Vec<ToSave<'_>>, End> {
        let num_sent: usize = sent.iter().map(|one| one.keys.iter().len()).sum();
        let is_wrong = |one: &SentRange<'_>| {
            let before = u64::from(one.range.start) * u64::from(per_chunk);
            u64::from(one.first) > before.saturating_sub(1) || one.first as usize + one.keys.iter().len() > MAX_KEYS
        };
        if num_sent > MAX_KEYS || sent.iter().any(is_wrong) {
            return Err(no_message());
        }
        let longest = sent.iter().map(|one| one.first as usize).max().unwrap_or(0);
        self.scratch.resize(longest, ChunkKey::default());
        self.scratch.extend(sent.iter().flat_map(|one| one.keys.iter()).map(|key| ChunkKey(*key)));
        let mut end = longest;
        let range = |one: &SentRange<'_>| {
            end += one.keys.iter().len();
            let start = end - one.keys.iter().len() - one.first as usize;
            let prefix = Prefix::new(one.root, &self.scratch[start..end]);
            ToSave { prefix, range: one.range, is_attached: one.is_attached }
        };
        Ok(sent.iter().map(range).collect())
    }
}

pub(crate) fn no_message() -> End {
    End::Refused("this is no message of kvloft's".to_owned())
}
