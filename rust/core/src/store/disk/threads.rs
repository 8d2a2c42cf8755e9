//! Disk threads take jobs under the lock and do the I/O without holding it.
//!
//! A panic inside the disk tier counts as a failed job. A panic under the lock poisons the lock:
//! the threads exit, and every later lookup misses.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::evict::ChunkId;
use crate::io::{Frame, SizeClass};
use crate::key::ChunkKey;
use crate::store::disk::jobs::{Job, JobResult, Written};
use crate::store::disk::reopen::Emptying;
use crate::store::disk::slots::SlotFor;
use crate::store::locked::Locked;
use crate::store::state::State;
use crate::sync::thread::{self, JoinHandle};
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::{LocalTier, NoSlot};
use crate::{Error, ErrorKind, Result};

/// A write stops evicting once it has freed space for this many slots of its size. One slot is not
/// enough, because other threads may take the freed slots.
const SLOT_TRIES: u32 = 4;
/// Maximum number of chunks to evict to make one larger chunk fit the tier or its tenant's quota.
const MAX_EVICTIONS: u32 = 64;
/// Number of attempts to write a chunk. If the file system is full, the second attempt reuses an
/// evicted chunk's slot.
const WRITE_TRIES: u32 = 2;
/// Maximum time a thread sleeps. Threads poll because timed work, such as a probe or a reopen, is
/// not signaled.
const POLL_EVERY: Duration = Duration::from_millis(200);
/// Delay before the first retry after the tier fails to open. The delay doubles after each failed
/// attempt.
const FIRST_REOPEN: Duration = Duration::from_secs(1);
const LONGEST_REOPEN: Duration = Duration::from_secs(60);

enum Work {
    Open,
    /// Close a tier whose directory was removed and whose chunks have been dropped.
    Close,
    /// Check that the tier's directory still exists.
    Check(u64, Arc<dyn LocalTier>),
    Job(u64, Job, Arc<dyn LocalTier>),
}

pub(crate) fn spawn(inner: &Arc<Locked>, nth: usize) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let thread = thread::Builder::new().name(format!("kvloft-disk-{nth}"));
    let work = move || while do_next(&inner) {};
    thread.spawn(work).map_err(|error| Error::io("cannot start a disk thread", error))
}

/// Opens the tier, retrying until it opens. Returns false if the store is closing.
fn open(inner: &Locked) -> bool {
    let Some(opener) = &inner.opener else { return false };
    let mut wait = FIRST_REOPEN;
    loop {
        let Some(mut state) = inner.lock() else { return false };
        if state.disk.stopping {
            return false;
        }
        if !state.disk.is_closed() {
            return true;
        }
        if !state.must_open() {
            if inner.work.wait_timeout(state, POLL_EVERY).is_err() {
                return false;
            }
            continue;
        }
        drop(state);
        match guarded(opener) {
            Ok((disk, mut found)) => {
                found.reverse();
                inner.change_tier(Some(Arc::clone(&disk)));
                let uncleared = disk.uncleared();
                let is_wanted =
                    inner.with_state(|state| state.end_opening(found, uncleared)).unwrap_or(false);
                inner.idle.notify_all();
                if !is_wanted {
                    disk.close();
                }
                return is_wanted;
            }
            Err(error) => {
                inner.with_state(|state| state.postpone(wait, error));
                inner.idle.notify_all();
                wait = (wait * 2).min(LONGEST_REOPEN);
            }
        }
    }
}

/// Calls `work` and turns a panic into an `Io` error.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the disk tier panicked")))
}

/// Waits for work and does it. Returns false if the store is closing.
fn do_next(inner: &Locked) -> bool {
    match wait_for_work(inner) {
        None => false,
        Some(Work::Open) => open(inner),
        Some(Work::Close) => close_removed(inner),
        Some(Work::Check(ticket, disk)) => {
            let removed = guarded(|| Ok(disk.removed())).unwrap_or_default();
            inner.with_state(|state| state.end_check(ticket, removed.as_deref())).is_some()
        }
        Some(Work::Job(ticket, job, disk)) => do_job(inner, &*disk, ticket, job),
    }
}

/// Closes a removed tier, so that its space is freed before the new tier claims any.
fn close_removed(inner: &Locked) -> bool {
    if let Some(disk) = inner.change_tier(None) {
        let _ = guarded(|| {
            disk.close();
            Ok(())
        });
    }
    inner.with_state(State::reopen).is_some()
}

/// Runs a job and applies its result. Returns false if another thread panicked under the lock.
fn do_job(inner: &Locked, disk: &dyn LocalTier, ticket: u64, job: Job) -> bool {
    let result = match job {
        Job::Read { id, slot, key, mut frame } => {
            let (outcome, num_errors) = read(disk, slot, &key, frame.bytes_mut());
            JobResult::Read { id, frame, outcome, num_errors }
        }
        Job::Write { id, meta, frame } => {
            let outcome = write(inner, disk, id, &meta, &frame);
            JobResult::Write { id, frame, outcome }
        }
        Job::Free { slots, is_retry } => {
            JobResult::Free { not_freed: free(disk, slots, is_retry), is_retry }
        }
        Job::Clear(mut slots) => {
            retain_unfreed(disk, &mut slots); // `clear` skips reserved slots
            let not_freed = guarded(|| disk.clear());
            let is_cleared = not_freed.is_ok();
            slots.extend(not_freed.unwrap_or_default());
            // A slot that is listed twice, or that was freed in the meantime, would later be freed
            // while it holds another chunk.
            slots.sort_unstable();
            slots.dedup();
            retain_unfreed(disk, &mut slots);
            JobResult::Clear(slots, is_cleared)
        }
    };
    let entered = inner.with_state(|state| state.end_job(ticket, result));
    inner.idle.notify_all();
    entered.is_some()
}

/// Waits for work, removing, indexing and dropping chunks in the meantime. Returns None if the
/// store is closing.
fn wait_for_work(inner: &Locked) -> Option<Work> {
    let mut is_fresh = false;
    loop {
        let mut state = inner.lock()?;
        if state.disk.stopping {
            return None;
        }
        if state.disk.is_closed() {
            return Some(Work::Open);
        }
        let emptying = state.empty_removed();
        if emptying == Emptying::Done {
            return Some(Work::Close);
        }
        // Release the lock after each slice so that other threads can take it.
        if emptying == Emptying::Working
            || state.recover_some()
            || state.drop_some_blocked()
            || state.is_removing()
        {
            state.remove_slice();
            drop(state);
            inner.idle.notify_all();
            thread::yield_now();
            continue;
        }
        let disk = inner.tier()?;
        if disk.is_removable()
            && let Some(ticket) = state.begin_check()
        {
            return Some(Work::Check(ticket, disk));
        }
        if let Some((ticket, job)) = state.next_job() {
            return Some(Work::Job(ticket, job, disk));
        }
        if std::mem::take(&mut state.disk.is_search_cut_short) {
            drop(state);
            thread::yield_now();
            continue;
        }
        if is_fresh {
            (state, _) = inner.work.wait_timeout(state, POLL_EVERY).ok()?;
            is_fresh = state.disk.has_jobs();
        } else {
            // There is no work, so refresh the file sizes without holding the lock.
            drop(state);
            let seen = guarded(|| Ok(disk.stats())).unwrap_or_default();
            let gauges = &mut inner.lock()?.stats;
            (gauges.disk_slots, gauges.disk_bytes) = (seen.slots, seen.bytes);
            is_fresh = true;
        }
    }
}

/// Reads a chunk, retrying once after any error except corruption. Returns the last result and the
/// number of errors, excluding corruption.
fn read(disk: &dyn LocalTier, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> (Result<()>, u64) {
    let is_io_error = |outcome: &Result<()>| {
        outcome.as_ref().is_err_and(|error| error.kind() != ErrorKind::Corrupt)
    };
    let first = guarded(|| disk.read(slot, key, into));
    if !is_io_error(&first) {
        return (first, 0);
    }
    let second = guarded(|| disk.read(slot, key, into));
    let num_errors = 1 + u64::from(is_io_error(&second));
    (second, num_errors)
}

/// Frees slots and returns the remaining slots. The first attempt stops at the first error, because
/// the whole disk may be failing. A retry tries all slots, because some may be in bad sectors.
fn free(disk: &dyn LocalTier, mut slots: Vec<SlotId>, is_retry: bool) -> Vec<SlotId> {
    if is_retry {
        retain_unfreed(disk, &mut slots);
    }
    while !is_retry
        && let Some(&slot) = slots.last()
        && guarded(|| disk.free(slot)).is_ok()
    {
        slots.pop();
    }
    slots
}

fn retain_unfreed(disk: &dyn LocalTier, slots: &mut Vec<SlotId>) {
    slots.retain(|&slot| guarded(|| disk.free(slot)).is_err());
}

/// Writes a chunk to a free slot, evicting other chunks if needed.
fn write(
    inner: &Locked,
    disk: &dyn LocalTier,
    id: ChunkId,
    meta: &DiskMeta,
    frame: &Frame,
) -> Written {
    match keep_quota(inner, disk, id) {
        Ok(true) => {}
        Ok(false) => return Written::NoQuota,
        Err(_) => return Written::Failed(None),
    }
    for _ in 0..WRITE_TRIES {
        let slot = match find_slot(inner, disk, frame.id().class()) {
            Ok(slot) => slot,
            Err(outcome) => return outcome,
        };
        let Err(error) = guarded(|| disk.write(slot, meta, frame.bytes())) else {
            return Written::In(slot);
        };
        if guarded(|| disk.free(slot)).is_err() {
            return Written::Failed(Some(slot));
        }
        if !error.is_no_space() {
            return Written::Failed(None);
        }
    }
    Written::NoRoom
}

/// Evicts a tenant's other chunks until the given chunk fits the tenant's quota. Returns false if
/// the tenant has nothing left to evict or if `MAX_EVICTIONS` evictions are not enough.
///
/// Returns an error if a slot could not be freed, in which case the slot's chunk is still stored.
fn keep_quota(inner: &Locked, disk: &dyn LocalTier, id: ChunkId) -> Result<bool> {
    for _ in 0..MAX_EVICTIONS {
        match inner.with_state(|state| state.slot_for(id)) {
            Some(SlotFor::Fits) => return Ok(true),
            Some(SlotFor::After(victim, slot)) => {
                let freed = guarded(|| disk.free(slot));
                inner.with_state(|state| {
                    state.stats.quota_disk_evictions += u64::from(freed.is_ok());
                    state.end_disk_eviction(victim, freed.is_ok());
                });
                freed?;
            }
            Some(SlotFor::None) | None => return Ok(false),
        }
    }
    Ok(false)
}

/// Returns a slot for a write, evicting chunks if needed. Otherwise, returns the outcome of the
/// write:
///
/// - `NotYet` if another thread is still creating slots,
/// - `NoRoom` if no chunk can be evicted, if evictions do not free a slot, or if only slots of this
///   size can be reused but the next two victims have a different size,
/// - `Failed` if a slot could not be freed, in which case the slot's chunk is still stored.
fn find_slot(inner: &Locked, disk: &dyn LocalTier, class: SizeClass) -> Result<SlotId, Written> {
    let enough = u64::from(SLOT_TRIES) * disk.frame_bytes(class);
    let (mut freed_bytes, mut has_evicted_other) = (0, false);
    for num_evicted in 0..=MAX_EVICTIONS {
        let only = match guarded(|| Ok(disk.reserve(class))) {
            Ok(Ok(slot)) => return Ok(slot),
            Ok(Err(NoSlot::Growing)) => return Err(Written::NotYet),
            Ok(Err(NoSlot::Full)) => None,
            // A single victim of a different size must not stop all writes.
            Ok(Err(NoSlot::FullExceptSameSize)) => Some(class).filter(|_| has_evicted_other),
            Err(_) => return Err(Written::Failed(None)),
        };
        if freed_bytes >= enough || num_evicted == MAX_EVICTIONS {
            break;
        }
        let evicted = inner.with_state(|state| state.begin_disk_eviction(only));
        let Some((victim, slot)) = evicted.flatten() else { break };
        let freed = guarded(|| disk.free(slot)).is_ok();
        inner.with_state(|state| state.end_disk_eviction(victim, freed));
        if !freed {
            return Err(Written::Failed(None));
        }
        freed_bytes += disk.frame_bytes(slot.class());
        has_evicted_other |= slot.class() != class;
    }
    Err(Written::NoRoom)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::test_support::memory_tier::MemoryTier;

    #[test]
    fn test_a_slot_that_cannot_be_freed_does_not_block_others() {
        let tier = MemoryTier::new(3);
        let [one, bad, two] = [(); 3].map(|()| tier.reserve(SizeClass(0)).expect("a slot"));
        let (key, parent) = (ChunkKey([1; 32]), ChunkKey([0; 32]));
        tier.write(bad, &DiskMeta { key, parent, depth: 0, saved_s: 0 }, &[0; 64])
            .expect("written");
        tier.fail_frees.store(true, Ordering::SeqCst);
        let left = free(&*tier, vec![one, bad, two], false);
        assert_eq!(left, [one, bad]);
        assert_eq!(free(&*tier, left, true), [bad]);
    }
}
