//! Handles one engine's requests, and holds the engine's read leases and prefix cache.
//!
//! Every request is validated and limited in size. An engine can only access its own leases and
//! reservations. This module does not access sockets.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvloft_core::ChunkKey;
use kvloft_core::session::{LeaseId, Local, Session};
use kvloft_core::store::{Changes, Listener, Prefix, Progress, SaveRequest, Store};

use crate::protocol::prefix_cache::PrefixCache;
use crate::protocol::{
    Keys, MAX_CHANGES, MAX_KEYS, Request, Response, SentAnchors, SentChanges, SentPrefixes,
    SentRange,
};
use crate::server::namespace::{Count, Counters, Membership};

/// Maximum number of read leases per engine.
const MAX_LEASES: usize = 1 << 16;
/// Maximum total number of prefixes in an engine's leases. Each prefix uses about 50 bytes.
const MAX_LEASED_PREFIXES: usize = 1 << 22;

/// State of one engine's connection, except for its membership.
#[derive(Debug, Default)]
pub(crate) struct EngineHandler {
    /// Read leases and their numbers of prefixes, keyed by the engine's lease number.
    leases: HashMap<u64, (LeaseId, usize)>,
    num_leased: usize,
    /// Keys of the last long prefix that came first in a message.
    prefix_cache: PrefixCache,
    /// Created when the engine first requests changes.
    listener: Option<Listener>,
    /// Buffer for the keys of uncached prefixes and of ranges to reserve.
    scratch: Vec<ChunkKey>,
    counters: Arc<Counters>,
    /// Number of units covered by the client's last anchors. The client may truncate the prefix
    /// before looking it up.
    num_anchored: u32,
}

/// Why the server closes a connection.
pub(crate) enum Disconnect {
    Closed,
    Refused(String),
}

impl From<io::Error> for Disconnect {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

impl EngineHandler {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        Self { counters, ..Self::default() }
    }

    /// Handles a request. Returns None if the request is one-way.
    pub(crate) fn respond(
        &mut self,
        request: &Request<'_>,
        membership: &Membership,
    ) -> Result<Option<Response>, Disconnect> {
        let local = &membership.local;
        Ok(Some(match request {
            Request::Lookup(prefixes) => self.lookup(prefixes, membership, false)?,
            Request::LookupForSave(prefixes) => self.lookup(prefixes, membership, true)?,
            Request::Anchors(anchors) => self.anchors(anchors, local)?,
            Request::Acquire(lease, prefixes) => {
                Response::Progress(self.acquire(*lease, prefixes, local)?)
            }
            Request::Poll(lease) => Response::Progress(
                self.lease(*lease).map(|own| local.poll(own)).unwrap_or_default(),
            ),
            Request::Frames(lease) => {
                let frames = self.lease(*lease).map(|own| local.frames(own)).unwrap_or_default();
                self.count([(Count::LoadChunks, frames.len() as u64)], membership);
                Response::Frames(frames)
            }
            Request::Reserve(ranges) => self.reserve(ranges, local)?,
            Request::Commit(tickets) => {
                let num_saved = local.commit(tickets).into();
                self.count([(Count::SaveChunks, num_saved)], membership);
                Response::Count(num_saved)
            }
            Request::Discard(keys) => {
                Response::Count(local.discard(&keys.iter().collect::<Vec<_>>()))
            }
            Request::Clear => {
                local.clear();
                Response::Count(0)
            }
            Request::Stats(num_calls, num_chunks) => {
                let late = [(Count::LateCalls, *num_calls), (Count::LateChunks, *num_chunks)];
                self.count(late, membership);
                let stats = local.stats().into_iter();
                Response::Stats(stats.map(|(name, value)| (name.into_owned(), value)).collect())
            }
            Request::Changes(asked) => {
                let store = membership.namespace.store().ok_or(Disconnect::Closed)?;
                Response::Changes(changes(asked, store, &mut self.listener).ok_or_else(malformed)?)
            }
            Request::IsSettled => Response::Count(local.flush(Duration::ZERO).into()),
            Request::Release(_) | Request::Abort(_) | Request::LimitMemory(_) => {
                self.handle_one_way(request, local);
                return Ok(None);
            }
            Request::Hello(_) | Request::Admin(..) | Request::Bye => return Err(malformed()),
        }))
    }

    fn handle_one_way(&mut self, request: &Request<'_>, local: &Local) {
        match request {
            Request::Release(lease) => self.release(*lease, local),
            Request::Abort(tickets) => local.abort(tickets),
            Request::LimitMemory(limit_bytes) => local.limit_memory(*limit_bytes),
            _ => {}
        }
    }

    fn count(&self, counts: impl IntoIterator<Item = (Count, u64)>, membership: &Membership) {
        for (count, num) in counts {
            self.counters.add(count, num);
            membership.namespace.counters.add(count, num);
        }
    }

    fn lease(&self, lease: u64) -> Option<LeaseId> {
        self.leases.get(&lease).map(|(own, _)| *own)
    }

    /// Looks up prefixes. Lookups for saves are not counted.
    fn lookup(
        &mut self,
        sent: &SentPrefixes<'_>,
        membership: &Membership,
        is_for_save: bool,
    ) -> Result<Response, Disconnect> {
        let num_anchored = std::mem::take(&mut self.num_anchored);
        let prefixes = self.prefixes(sent)?;
        let found = membership.local.lookup_many(&prefixes);
        if !is_for_save {
            let first = prefixes.first().map(Prefix::num_units);
            let num_trimmed = first.map_or(0, |first| num_anchored.saturating_sub(first));
            let num_sent: u64 = prefixes.iter().map(|prefix| u64::from(prefix.num_units())).sum();
            let num_found = found.iter().map(|found| u64::from(found.stored_units)).sum();
            let num_asked = num_sent + u64::from(num_trimmed);
            let chunks = [(Count::LookupChunks, num_asked), (Count::LookupChunksFound, num_found)];
            self.count([(Count::Lookups, 1)].into_iter().chain(chunks), membership);
        }
        Ok(Response::Found(found))
    }

    fn acquire(
        &mut self,
        lease: u64,
        sent: &SentPrefixes<'_>,
        local: &Local,
    ) -> Result<Progress, Disconnect> {
        self.num_anchored = 0;
        let (is_full, num_leased) = (self.leases.len() >= MAX_LEASES, self.num_leased);
        let prefixes = self.prefixes(sent)?;
        let num = prefixes.len();
        if is_full || num_leased + num > MAX_LEASED_PREFIXES {
            return Ok(Progress::default());
        }
        let own = local.acquire_all(&prefixes);
        self.release(lease, local);
        self.leases.insert(lease, (own, num));
        self.num_leased += num;
        Ok(local.poll(own))
    }

    fn reserve(&mut self, sent: &[SentRange<'_>], local: &Local) -> Result<Response, Disconnect> {
        let asked = self.ranges(sent)?;
        local.reserve_many(&asked).map(Response::Reserved).map_err(|_| malformed())
    }

    fn release(&mut self, lease: u64, local: &Local) {
        if let Some((own, num)) = self.leases.remove(&lease) {
            self.num_leased -= num;
            local.release(own);
        }
    }

    /// Looks up anchors and resets the prefix cache to the last known anchor.
    fn anchors(&mut self, sent: &SentAnchors<'_>, local: &Local) -> Result<Response, Disconnect> {
        let all = sent.all().ok_or_else(malformed)?;
        let found = local.anchors(&all);
        self.num_anchored = sent.last;
        self.prefix_cache.reset((found.num_known as usize).checked_sub(1).map(|last| all[last]));
        Ok(Response::Anchors(found))
    }

    /// Returns the prefixes in a message, after completing the first prefix from the prefix cache.
    fn prefixes(&mut self, sent: &SentPrefixes<'_>) -> Result<Vec<Prefix<'_>>, Disconnect> {
        let num_same = usize::try_from(sent.num_same).unwrap_or(usize::MAX);
        let num_sent: usize = sent.all.iter().map(|(_, keys)| keys.iter().len()).sum();
        if num_same.saturating_add(num_sent) > MAX_KEYS {
            return Err(malformed());
        }
        let num_first =
            sent.all.first().map_or(0, |(_, keys)| keys.iter().len().saturating_add(num_same));
        let is_long = num_first > 1;
        let (first, others) = sent.all.split_at(is_long.into());
        let mut keys = first.iter().flat_map(|(_, keys)| keys.iter());
        let is_whole =
            if is_long { self.prefix_cache.extend(num_same, &mut keys) } else { num_same == 0 };
        if !is_whole {
            return Err(malformed());
        }
        self.scratch.clear();
        self.scratch.extend(others.iter().flat_map(|(_, keys)| keys.iter()));
        let mut rest = self.scratch.as_slice();
        let whole = |(root, keys): &(ChunkKey, Keys<'_>)| {
            Prefix::new(*root, rest.split_off(..keys.iter().len()).unwrap_or_default())
        };
        let first = first.iter().map(|(root, _)| self.prefix_cache.prefix(*root));
        Ok(first.chain(others.iter().map(whole)).collect())
    }

    fn ranges(&mut self, sent: &[SentRange<'_>]) -> Result<Vec<SaveRequest<'_>>, Disconnect> {
        let num_sent: usize = sent.iter().map(|range| range.keys.iter().len()).sum();
        let is_long =
            |range: &SentRange<'_>| range.first as usize + range.keys.iter().len() > MAX_KEYS;
        if num_sent > MAX_KEYS || sent.iter().any(is_long) {
            return Err(malformed());
        }
        self.scratch.clear();
        self.scratch.extend(sent.iter().flat_map(|range| range.keys.iter()));
        let mut rest = self.scratch.as_slice();
        let range =
            |&SentRange { root, first, keys, ref units, class, is_independent }: &SentRange<'_>| {
                let keys = rest.split_off(..keys.iter().len()).unwrap_or_default();
                let prefix = Prefix { root, keys, first };
                SaveRequest { prefix, units: units.clone(), class, is_independent }
            };
        Ok(sent.iter().map(range).collect())
    }
}

/// Returns the changes for `listener`, which is created by the first request. Returns None if the
/// request has too many keys.
///
/// The first response on a connection sets `lost`, because earlier connections' reports may be
/// stale.
fn changes(
    sent: &SentChanges<'_>,
    store: &Store,
    listener: &mut Option<Listener>,
) -> Option<Changes> {
    if sent.asked.iter().len() > MAX_CHANGES as usize {
        return None;
    }
    let asked: Vec<_> = sent.asked.iter().collect();
    let [capacity, limit] =
        [sent.capacity, sent.limit].map(|number| number.min(MAX_CHANGES) as usize);
    let is_first = listener.is_none();
    let Changes { rows, lost } =
        listener.get_or_insert_with(|| store.watch(capacity)).changes(&asked, limit);
    Some(Changes { rows, lost: lost || is_first })
}

pub(crate) fn malformed() -> Disconnect {
    Disconnect::Refused("malformed request".to_owned())
}

#[cfg(test)]
mod tests;
