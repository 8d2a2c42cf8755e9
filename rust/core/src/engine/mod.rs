//! One engine's view of a store: translates prefixes, block tables and rank reports to the keys and
//! tickets of a session.
//!
//! A prefix has one chunk per unit and KV cache group. A ticket is settled once, by the last rank's
//! report (I10), and committed only if no rank reported a failure (I3). A save reads its blocks
//! after the step that planned it has been launched. By then, the request may have finished and its
//! blocks may belong to another request, which must not write to them until the save has read them
//! (I2). Tickets are assigned per engine and always ascend, independently of the store's
//! reservation numbers, so a late report never settles a different save.

mod group;
mod hit;
mod misfits;
mod save;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::group::{Group, GroupKind};
use self::misfits::Misfits;
pub use self::save::{SaveRow, StateRow};
use crate::chunk_batch::{ChunkBatch, NULL_BLOCK, UnitsByTier};
use crate::in_flight::{InFlight, Settled};
use crate::key::KeyChain;
use crate::session::{LeaseId, Session};
use crate::store::{Lookup, Prefix};
use crate::{Error, Result};

/// A read lease on the chunks needed by a prefix of `num_units` units.
#[derive(Debug, Clone, Copy)]
pub struct Lease {
    id: LeaseId,
    num_units: u32,
    num_chunks: u32,
}

/// A session and one engine's saves in flight.
#[derive(Debug)]
pub struct EngineSession {
    session: Box<dyn Session>,
    num_ranks: u32,
    groups: Vec<Group>,
    /// Indices into `groups`, full-attention groups first, because a server indexes their chunks as
    /// prefixes.
    order: Vec<usize>,
    in_flight: Mutex<InFlight>,
    /// The misfits of each group.
    misfits: Mutex<Vec<Misfits>>,
}

impl EngineSession {
    /// Creates an engine's view of a session. Each of the `num_ranks` ranks must report every
    /// ticket once. Returns `InvalidConfig` if there are no groups or a group's sizes are invalid.
    pub fn new(session: Box<dyn Session>, num_ranks: u32, groups: Vec<Group>) -> Result<Self> {
        if groups.is_empty() {
            return Err(Error::invalid("a model needs at least one KV cache group"));
        }
        groups.iter().try_for_each(Group::check)?;
        let mut order: Vec<_> = (0..groups.len()).collect();
        order.sort_by_key(|nth| !groups[*nth].is_full());
        Ok(Self {
            session,
            num_ranks,
            misfits: Mutex::new(groups.iter().map(|_| Misfits::default()).collect()),
            groups,
            order,
            in_flight: Mutex::new(InFlight::new()),
        })
    }

    /// Returns the session.
    pub fn session(&self) -> &dyn Session {
        &*self.session
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn misfits(&self) -> MutexGuard<'_, Vec<Misfits>> {
        self.misfits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn full_groups(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().filter(|group| group.is_full())
    }

    /// Returns true if every leading part of a stored prefix is a hit, which holds only if the
    /// model's sole group uses full attention.
    fn is_divisible(&self) -> bool {
        self.groups.len() == 1 && self.groups[0].is_full()
    }

    // -- lookups and loads ----------------------------------------------------------------------

    /// Returns the number of leading units stored in every full-attention group, which is an upper
    /// bound on hits. Without a full-attention group, returns the number of units with keys.
    pub fn lookup(&self, chain: &mut KeyChain) -> Lookup {
        let prefixes = self.prefixes(chain, u32::MAX);
        let every = Lookup { host_units: u32::MAX, stored_units: u32::MAX };
        let found =
            if prefixes.is_empty() { Vec::new() } else { self.session.lookup_many(&prefixes) };
        let least = found.iter().fold(every, |least, one| Lookup {
            host_units: least.host_units.min(one.host_units),
            stored_units: least.stored_units.min(one.stored_units),
        });
        let num_units = chain.num_blocks();
        Lookup {
            host_units: least.host_units.min(num_units),
            stored_units: least.stored_units.min(num_units),
        }
    }

    /// Returns the deepest hits in host memory and in any tier. `most` caps the number of units and
    /// must come from [`Self::lookup`].
    pub fn deepest_hit(&self, chain: &KeyChain, most: Lookup) -> Result<Lookup> {
        hit::deepest(&*self.session, &self.groups, chain, most)
    }

    fn extend_groups(&self, chain: &mut KeyChain) {
        let numbers = self.full_groups().filter_map(|group| group.number);
        numbers.for_each(|number| chain.extend_group(number));
    }

    /// Returns each full-attention group's keys for the first `num_units` units.
    fn prefixes<'a>(&self, chain: &'a mut KeyChain, num_units: u32) -> Vec<Prefix<'a>> {
        self.extend_groups(chain);
        let prefix = |group: &Group| {
            let (root, keys) = chain.kept_by(group.number);
            Prefix::new(root, &keys[..keys.len().min(num_units as usize)])
        };
        self.full_groups().map(prefix).collect()
    }

    /// Pins the chunks that a prefix of `num_units` units needs in every group, and queues reads
    /// for chunks that are only on disk.
    pub fn acquire(&self, chain: &mut KeyChain, num_units: u32) -> Result<Lease> {
        let num_units = num_units.min(chain.num_blocks());
        let independent = self.groups.iter().filter(|group| !group.is_full());
        let keys = independent.map(|group| {
            chain.independent_keys(group.number.unwrap_or_default(), group.units(num_units))
        });
        let keys = keys.collect::<Result<Vec<_>>>()?;
        let mut prefixes = self.prefixes(chain, num_units);
        prefixes.extend(
            keys.iter().flat_map(|(root, keys)| keys.chunks(1).map(|key| Prefix::new(*root, key))),
        );
        let num_chunks = prefixes.iter().map(|prefix| prefix.keys.len()).sum::<usize>();
        let id = self.session.acquire_all(&prefixes);
        Ok(Lease { id, num_units, num_chunks: u32::try_from(num_chunks).unwrap_or(u32::MAX) })
    }

    /// Returns the number of units ready to load, and the number of units after them that are still
    /// being read from disk.
    ///
    /// A hit is all or nothing unless the only group uses full attention: returns (0, 0) if a chunk
    /// cannot be read.
    pub fn poll(&self, lease: &Lease) -> (u32, u32) {
        let progress = self.session.poll(lease.id);
        let (ready, pending) = (progress.ready_units, progress.pending_units);
        if self.is_divisible() {
            (ready, pending)
        } else if ready.saturating_add(pending) < lease.num_chunks {
            (0, 0)
        } else if pending > 0 {
            (0, lease.num_units)
        } else {
            (lease.num_units, 0)
        }
    }

    /// Releases a lease. A second call has no effect.
    pub fn release(&self, lease: &Lease) {
        self.session.release(lease.id);
    }

    /// Returns each group's range of blocks to load for units `[begin, end)` of a prefix with `end`
    /// units. vLLM already has the earlier blocks, or has null blocks in place of blocks that the
    /// group does not need.
    pub fn loaded_blocks(&self, begin: u32, end: u32) -> Vec<Range<u32>> {
        let blocks = |group: &Group| {
            let each = group.blocks_per_unit;
            group.first_block(end).max(begin.saturating_mul(each))..end.saturating_mul(each)
        };
        self.groups.iter().map(blocks).collect()
    }

    /// Pairs the chunks that a lease holds for units `[begin, end)` with blocks. `tables` holds
    /// each group's block ids for [`Self::loaded_blocks`]. Returns the chunks and the number of
    /// units from each tier. If the only group uses full attention, returns all ready chunks.
    /// Otherwise, returns chunks only if all of them are ready. Returns `InvalidConfig` if a block
    /// id is negative.
    pub fn load(
        &self,
        lease: &Lease,
        begin: u32,
        end: u32,
        tables: &[Vec<i32>],
    ) -> Result<(ChunkBatch, UnitsByTier)> {
        let (leased, ranges, nothing) =
            (self.session.frames(lease.id), self.loaded_blocks(begin, end), Ok(Default::default()));
        let is_whole = leased.len() == lease.num_chunks as usize && end == lease.num_units;
        if !self.is_divisible()
            && (!is_whole || tables.iter().any(|table| table.contains(&NULL_BLOCK)))
        {
            return nothing;
        }
        let (mut batch, mut rest, mut by_tier) = (ChunkBatch::default(), leased.as_slice(), None);
        for &nth in &self.order {
            let (group, table) = (&self.groups[nth], &tables[nth]);
            let units = if self.is_divisible() { 0..end } else { group.units(end) };
            let own = rest.split_off(..units.len().min(rest.len())).unwrap_or_default();
            let number = u32::try_from(nth).unwrap_or(u32::MAX);
            let (found, num_filled) =
                batch.add_loads(number, own, units.start, group, table, ranges[nth].start)?;
            if !self.is_divisible() && num_filled != table.len() {
                return nothing;
            }
            by_tier.get_or_insert(found);
        }
        let mut by_tier = by_tier.unwrap_or_default();
        if self.full_groups().next().is_none() {
            by_tier.fill_up(end.saturating_sub(begin)); // units before all windows need no chunks
        }
        Ok((batch, by_tier))
    }

    // -- saves ----------------------------------------------------------------------------------

    /// Records one rank's report. `misfits` lists the `failed` tickets whose chunks did not fit
    /// their frames. Ignores tickets that are not in flight. Returns how many chunks became visible
    /// and how many failed for reasons other than their size.
    pub fn settle(&self, saved: &[u64], failed: &[u64], misfits: &[u64]) -> (u32, usize) {
        let mut in_flight = self.in_flight();
        for ticket in failed {
            in_flight.fail(*ticket);
        }
        for ticket in misfits {
            in_flight.mark_misfit(*ticket);
        }
        let reported = saved.iter().chain(failed);
        let settled: Vec<_> = reported.filter_map(|ticket| in_flight.report(*ticket)).collect();
        drop(in_flight);
        let done = settled.iter().filter(|save| !save.failed);
        let reservations: Vec<_> = done.filter_map(|save| save.reservation).collect();
        let aborted = settled.iter().filter(|save| save.failed);
        self.abort_reservations(aborted.filter_map(|save| save.reservation));
        let num_failed = settled.len() - reservations.len() - self.count_misfits(&settled);
        let num_visible =
            if reservations.is_empty() { 0 } else { self.session.commit(&reservations) };
        (num_visible, num_failed)
    }

    /// Records which chunks fit their frames. Returns how many chunks did not fit.
    fn count_misfits(&self, settled: &[Settled]) -> usize {
        if self.groups.iter().all(|group| group.compact.is_none()) {
            return 0;
        }
        let mut misfits = self.misfits();
        for save in settled {
            match save.misfit {
                Some(key) => misfits[save.group].add(key),
                None if save.failed => {}
                None => {
                    let is_compact = self.groups[save.group].compact == Some(save.class);
                    misfits[save.group].count_saved(is_compact);
                }
            }
        }
        settled.iter().filter(|save| save.misfit.is_some()).count()
    }

    /// Returns the number of chunks that did not fit their frames.
    pub fn num_misfits(&self) -> u64 {
        self.misfits().iter().map(|group| group.num_failed).sum()
    }

    /// Aborts saves that no rank will report.
    pub fn abort(&self, tickets: &[u64]) {
        let mut in_flight = self.in_flight();
        let known: Vec<_> =
            tickets.iter().filter_map(|ticket| in_flight.remove(*ticket)?.reservation).collect();
        drop(in_flight);
        self.abort_reservations(known);
    }

    /// Aborts all saves in flight.
    pub fn abort_all(&self) {
        let every = self.in_flight().tickets();
        self.abort(&every);
    }

    fn abort_reservations(&self, reservations: impl IntoIterator<Item = u64>) {
        let reservations: Vec<_> = reservations.into_iter().collect();
        if !reservations.is_empty() {
            self.session.abort(&reservations);
        }
    }

    /// Removes all chunks from the store and fails all saves in flight.
    pub fn clear(&self) {
        self.in_flight().fail_all();
        self.session.clear();
    }

    /// Returns the number of saves that at least one rank has yet to report.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight().len()
    }

    /// Returns the blocks that in-flight saves read. If `blocks` is given, checks only these
    /// blocks.
    pub fn being_read(&self, blocks: Option<&[i32]>) -> Vec<i32> {
        self.in_flight().being_read(blocks)
    }
}
