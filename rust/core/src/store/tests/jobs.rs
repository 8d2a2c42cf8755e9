//! Tests disk jobs in random order, without threads. The test takes jobs, does their I/O in memory
//! and applies the results step by step, interleaved with scheduler and worker calls.
//!
//! The test covers event orders that threads rarely produce, and every failure is reproducible.
//! After each step, the test checks the invariants (`check`), the disk's contract, the bytes in
//! leased frames and the result of `flush`. At the end, it checks that no work is left.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::super::disk::jobs::{Job, JobResult, Written};
use super::super::disk::reopen::Emptying;
use super::super::load::Held;
use super::super::lookup::Prefix;
use super::super::state::State;
use super::steps::{Io, NUM_PROMPTS, Step, prompt_chain, step};
use crate::evict::{ChunkId, Eviction};
use crate::index::{DiskState, HostState};
use crate::io::{Frame, FrameId};
use crate::key::ChunkKey;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::host::HostTier;
use crate::{Error, ErrorKind};

/// Must equal `SLOT_TRIES` in `threads`.
const SLOT_TRIES: u32 = 4;

/// A job in flight and its progress.
#[derive(Debug)]
pub(super) enum Under {
    Read {
        id: ChunkId,
        slot: SlotId,
        key: ChunkKey,
        frame: Frame,
        outcome: Option<Result<(), Error>>,
    },
    Write {
        id: ChunkId,
        meta: DiskMeta,
        frame: Frame,
        tries: u32,
        place: WriteStep,
    },
    Free {
        slots: Vec<SlotId>,
        is_retry: bool,
        failed: bool,
    },
    Clear {
        slots: Vec<SlotId>,
        is_cleared: Option<bool>,
    },
}

#[derive(Debug)]
pub(super) enum WriteStep {
    None,
    Evicting(ChunkId, SlotId),
    Reserved(SlotId),
    Over(Written),
}

pub(super) struct Run {
    pub(super) state: State,
    num_slots: u32,
    num_threads: usize,
    /// Disk contents: maps each slot in use to its chunk, or to None if the slot is only reserved.
    slots: BTreeMap<u32, Option<DiskMeta>>,
    /// Slots whose records could be neither read nor cleared when the tier opened. Each may hold an
    /// unknown chunk until it is freed.
    uncleared: BTreeSet<u32>,
    /// True if chunks were discarded or cleared since the tier opened.
    any_removed: bool,
    pub(super) in_flight: Vec<(u64, Under)>,
    /// Reserved chunks. The key is None if the chunk has been removed.
    writes: Vec<(ChunkId, Option<ChunkKey>)>,
    reads: Vec<Held>,
    committed: BTreeSet<ChunkKey>,
}

impl Run {
    pub(super) fn new(
        num_frames: u32,
        num_slots: u32,
        eviction: Eviction,
        num_threads: usize,
    ) -> Self {
        let host = HostTier::create(u64::from(num_frames) * 4096, &4096_u64.into()).unwrap();
        let policies = (eviction.policy(num_frames as usize), eviction.policy(num_slots as usize));
        let mut state = State::new(host, policies.0, policies.1);
        assert!(state.end_opening(Vec::new(), Vec::new()));
        Self {
            state,
            num_slots,
            num_threads,
            slots: BTreeMap::new(),
            uncleared: BTreeSet::new(),
            any_removed: false,
            in_flight: Vec::new(),
            writes: Vec::new(),
            reads: Vec::new(),
            committed: BTreeSet::new(),
        }
    }

    /// Opens the tier with this number of uncleared slots.
    fn open_with_uncleared(&mut self, num_uncleared: u32) {
        self.uncleared = (self.num_slots..self.num_slots + num_uncleared).collect();
        let slots = self.uncleared.iter().copied().map(SlotId).collect();
        assert!(self.state.end_opening(Vec::new(), slots));
    }

    pub(super) fn take(&mut self, step: &Step) {
        match *step {
            Step::Reserve { prompt, start, stop } => {
                let reserved = self.reserve(prompt, start, stop);
                self.writes.extend(reserved);
            }
            Step::Save { prompt, stop } => {
                for write in self.reserve(prompt, 0, stop) {
                    self.commit(write);
                }
            }
            Step::Settle { nth, commit } if !self.writes.is_empty() => {
                let write = self.writes.swap_remove(nth % self.writes.len());
                if commit {
                    self.commit(write);
                } else {
                    self.state.abort(write.0);
                }
            }
            Step::Acquire { prompt, num_blocks } => {
                let chain = prompt_chain(prompt);
                let prefix = Prefix::new(chain.root(), &chain.keys()[..num_blocks]);
                let held = self.state.acquire(&prefix);
                self.reads.push(held);
            }
            Step::Remove { budget } => {
                self.state.remove_some(budget);
            }
            Step::Wait { millis } => {
                let now = self.state.now + Duration::from_millis(millis);
                self.state.set_time(now);
            }
            Step::Release { nth } if !self.reads.is_empty() => {
                let held = self.reads.swap_remove(nth % self.reads.len());
                self.state.release(held);
            }
            Step::Discard { prompt, block } => self.discard(prompt, block),
            Step::Clear => {
                self.clear();
            }
            Step::RemoveDirectory => {
                self.state.disk.check_at = Duration::ZERO;
                if let Some(look) = self.state.begin_check() {
                    self.state.end_check(look, Some(Path::new("/memory")));
                }
            }
            Step::Take if self.in_flight.len() < self.num_threads => self.take_job(),
            Step::Go { nth, io } if !self.in_flight.is_empty() => {
                self.go(nth % self.in_flight.len(), io);
            }
            Step::Settle { .. } | Step::Release { .. } | Step::Take | Step::Go { .. } => {}
        }
        self.check();
    }

    fn commit(&mut self, (id, key): (ChunkId, Option<ChunkKey>)) {
        self.committed.extend(key);
        self.state.commit(id);
    }

    fn clear(&mut self) {
        self.state.clear();
        self.any_removed = true;
        self.forget_keys(|_| true);
    }

    fn discard(&mut self, prompt: usize, block: usize) {
        self.any_removed = true;
        let key = prompt_chain(prompt).keys()[block];
        self.state.discard(&[key]);
        let below = (0..NUM_PROMPTS).map(prompt_chain).filter(|chain| chain.keys()[block] == key);
        let gone: BTreeSet<_> = below.flat_map(|chain| chain.keys()[block..].to_vec()).collect();
        self.forget_keys(|key| gone.contains(key));
    }

    fn forget_keys(&mut self, is_gone: impl Fn(&ChunkKey) -> bool) {
        self.committed.retain(|key| !is_gone(key));
        for (_, key) in &mut self.writes {
            *key = key.filter(|key| !is_gone(key));
        }
    }

    fn reserve(
        &mut self,
        prompt: usize,
        start: u32,
        stop: u32,
    ) -> Vec<(ChunkId, Option<ChunkKey>)> {
        let chain = prompt_chain(prompt);
        let asked = (Prefix::from(&chain), start.min(stop)..stop).into();
        let reserved = self.state.reserve(&asked).chunks;
        for (_, reservation) in &reserved {
            let mut frame = self
                .state
                .host
                .lend(reservation.frame)
                .expect("a reserved frame has one owner (I4)");
            frame.bytes_mut()[..32].copy_from_slice(&reservation.key.0);
            self.state.host.return_frame(frame);
        }
        reserved.into_iter().map(|(id, reservation)| (id, Some(reservation.key))).collect()
    }

    pub(super) fn take_job(&mut self) {
        match self.state.empty_removed() {
            Emptying::No => {}
            Emptying::Working => return,
            Emptying::Done => {
                assert!(self.in_flight.is_empty(), "a job is in flight on a closed tier");
                self.slots.clear();
                self.uncleared.clear();
                self.any_removed = false;
                return self.state.reopen();
            }
        }
        if self.state.must_open() {
            assert!(self.state.end_opening(Vec::new(), Vec::new()));
            self.state.recover_some();
        }
        let Some((ticket, job)) = self.state.next_job() else { return };
        let under = match job {
            Job::Read { id, slot, key, frame } => {
                Under::Read { id, slot, key, frame, outcome: None }
            }
            Job::Write { id, meta, frame } => {
                assert_eq!(
                    frame.bytes()[..32],
                    meta.key.0,
                    "a frame is written with the wrong chunk"
                );
                Under::Write { id, meta, frame, tries: 0, place: WriteStep::None }
            }
            Job::Free { slots, is_retry } => Under::Free { slots, is_retry, failed: false },
            Job::Clear(slots) => {
                assert!(
                    self.in_flight.is_empty(),
                    "the disk is cleared while other jobs are in flight"
                );
                Under::Clear { slots, is_cleared: None }
            }
        };
        self.in_flight.push((ticket, under));
    }

    /// Runs one step of a job. A thread would run each step either under the lock or between two
    /// uses of the lock.
    pub(super) fn go(&mut self, nth: usize, io: Io) {
        let (ticket, under) = self.in_flight.swap_remove(nth);
        let next = match under {
            Under::Read { id, slot, key, mut frame, outcome: None } => {
                let outcome = self.read(slot, &key, &mut frame, io);
                Ok(Under::Read { id, slot, key, frame, outcome: Some(outcome) })
            }
            Under::Read { id, frame, outcome: Some(outcome), .. } => {
                let is_refused = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Io);
                Err(JobResult::Read { id, frame, outcome, num_errors: 2 * u64::from(is_refused) })
            }
            Under::Write { id, frame, place: WriteStep::Over(outcome), .. } => {
                Err(JobResult::Write { id, frame, outcome })
            }
            Under::Write { id, meta, frame, tries, place } => {
                if matches!(place, WriteStep::Reserved(_)) && io == Io::Works {
                    self.check_parent(ticket, id, &meta);
                }
                let place = self.write_on(meta, tries, &place, io);
                Ok(Under::Write { id, meta, frame, tries: tries + 1, place })
            }
            Under::Free { mut slots, is_retry, failed } => match slots.last() {
                Some(&slot) if !failed => {
                    let freed = self.free(slot, io);
                    if freed {
                        slots.pop();
                    }
                    Ok(Under::Free { slots, is_retry, failed: !freed })
                }
                _ => Err(JobResult::Free { not_freed: slots, is_retry }),
            },
            Under::Clear { mut slots, is_cleared: None } => {
                if io == Io::Works {
                    for slot in slots.drain(..) {
                        self.free(slot, io);
                    }
                    self.slots.clear();
                } else if let Some(slot) = slots.pop() {
                    self.free(slot, Io::Works);
                } else if let Some(&some) =
                    self.slots.iter().find(|(_, meta)| meta.is_some()).map(|(slot, _)| slot)
                {
                    self.slots.remove(&some);
                }
                Ok(Under::Clear { slots, is_cleared: Some(io == Io::Works) })
            }
            Under::Clear { slots, is_cleared: Some(is_cleared) } => {
                Err(JobResult::Clear(slots, is_cleared))
            }
        };
        match next {
            Ok(under) => self.in_flight.push((ticket, under)),
            Err(end) => self.state.end_job(ticket, end),
        }
    }

    /// Continues a write: finds a slot, evicts chunks if needed, and writes.
    fn write_on(&mut self, meta: DiskMeta, tries: u32, place: &WriteStep, io: Io) -> WriteStep {
        match *place {
            WriteStep::None if io == Io::Fails => WriteStep::Over(Written::NotYet),
            WriteStep::None => {
                let free = (0..self.num_slots).find(|slot| !self.slots.contains_key(slot));
                if let Some(free) = free {
                    self.slots.insert(free, None);
                    return WriteStep::Reserved(SlotId(free));
                }
                let victim = if tries < 2 * SLOT_TRIES {
                    self.state.begin_disk_eviction(None)
                } else {
                    None
                };
                victim.map_or(WriteStep::Over(Written::NoRoom), |(id, slot)| {
                    WriteStep::Evicting(id, slot)
                })
            }
            WriteStep::Evicting(id, slot) => {
                let freed = self.free(slot, io);
                self.state.end_disk_eviction(id, freed);
                if freed { WriteStep::None } else { WriteStep::Over(Written::Failed(None)) }
            }
            WriteStep::Reserved(slot) if io == Io::Works => {
                assert_eq!(
                    self.slots.insert(slot.0, Some(meta)),
                    Some(None),
                    "{slot:?} was written without a reservation"
                );
                WriteStep::Over(Written::In(slot))
            }
            WriteStep::Reserved(slot) => {
                let freed = io == Io::Corrupts && self.free(slot, Io::Works);
                if !freed {
                    self.slots.insert(slot.0, Some(meta)); // the record may have reached the disk
                }
                WriteStep::Over(Written::Failed((!freed).then_some(slot)))
            }
            WriteStep::Over(_) => unreachable!("the write has completed"),
        }
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, frame: &mut Frame, io: Io) -> Result<(), Error> {
        let there = self.slots.get(&slot.0).copied().flatten();
        assert_eq!(
            there.map(|meta| meta.key),
            Some(*key),
            "{slot:?} does not contain the chunk to read"
        );
        frame.bytes_mut()[..32].copy_from_slice(if io == Io::Works { &key.0 } else { &[0xee; 32] });
        match io {
            Io::Works => Ok(()),
            Io::Fails => Err(Error::new(ErrorKind::Io, "failure requested by the test")),
            Io::Corrupts => Err(Error::new(ErrorKind::Corrupt, "corruption requested by the test")),
        }
    }

    /// Checks that a chunk's parent is on disk when the chunk is written. If the write hung, the
    /// parent may have been removed together with the chunk.
    fn check_parent(&self, ticket: u64, id: ChunkId, meta: &DiskMeta) {
        let is_there = self.slots.values().flatten().any(|other| other.key == meta.parent);
        let hung = self.state.disk.in_flight.iter().any(|job| job.ticket == ticket && job.hangs);
        assert!(
            meta.depth == 0 || is_there || hung && self.state.index[id].detached,
            "{meta:?} was written before its parent"
        );
    }

    fn free(&mut self, slot: SlotId, io: Io) -> bool {
        let is_uncleared = self.uncleared.contains(&slot.0);
        assert!(is_uncleared || self.slots.contains_key(&slot.0), "{slot:?} was freed twice");
        if io == Io::Works {
            self.slots.remove(&slot.0);
            self.uncleared.remove(&slot.0);
        }
        io == Io::Works
    }

    fn check(&mut self) {
        super::check::check(&self.state).unwrap();
        for prompt in 0..NUM_PROMPTS {
            let chain = prompt_chain(prompt);
            let found = self.state.find(&Prefix::from(&chain));
            let (host, any) = (found.host_units, found.stored_units);
            assert!(host <= any);
            for key in &chain.keys()[..any as usize] {
                assert!(
                    self.committed.contains(key),
                    "found a chunk that was not committed or was removed (I1, I3)"
                );
            }
        }
        for held in 0..self.reads.len() {
            let frames = self.state.frames(&mut self.reads[held]);
            for leased in frames {
                self.check_frame(leased.frame, leased.key);
            }
        }
        let frames_lent =
            self.in_flight.iter().filter(|(_, job)| matches!(job, Under::Read { .. })).count();
        let is_read = |entry: &crate::index::Entry| matches!(entry.host, HostState::Reading(_));
        let reading = self.state.index.iter().filter(|(_, entry)| is_read(entry)).count();
        assert_eq!(reading, frames_lent, "a frame must be lent exactly while its read runs");
        let disk = &self.state.disk;
        if disk.is_settled() && !self.state.is_removing() {
            self.check_flushed();
        }
    }

    /// Checks that a leased frame holds its chunk's bytes (I4). Skips lent frames, which are being
    /// written and were checked earlier.
    fn check_frame(&mut self, frame: FrameId, key: ChunkKey) {
        if let Some(frame) = self.state.host.lend(frame) {
            assert_eq!(frame.bytes()[..32], key.0, "the bytes of a leased frame changed");
            self.state.host.return_frame(frame);
        }
    }

    /// Checks that `flush` would not return too early.
    fn check_flushed(&self) {
        let mut wanted = BTreeMap::new();
        for (_, entry) in self.state.index.iter() {
            match entry.disk {
                DiskState::Stored(slot) => {
                    assert!(!entry.detached, "a removed chunk is still on disk");
                    wanted.insert(slot.0, entry.key);
                }
                DiskState::Absent => {}
                DiskState::Queued
                | DiskState::Blocked
                | DiskState::Writing
                | DiskState::Evicting(_) => {
                    panic!("flush would return too early: {entry:?}")
                }
            }
        }
        let there: BTreeMap<_, _> = self
            .slots
            .iter()
            .filter_map(|(slot, meta)| Some((*slot, meta.as_ref()?.key)))
            .collect();
        assert_eq!(there, wanted);
        assert_eq!(self.slots.len(), there.len(), "a reserved slot has no entry");
        assert!(
            !self.any_removed || self.uncleared.is_empty(),
            "a removed chunk may still be on disk"
        );
    }

    /// Runs jobs and advances the clock until no work is left.
    pub(super) fn finish_jobs(&mut self) {
        for _ in 0..1000 {
            self.state.remove_some(usize::MAX);
            self.take_job();
            if !self.in_flight.is_empty() {
                self.go(0, Io::Works);
                self.check();
                continue;
            }
            let work = &self.state.disk;
            if work.is_settled() && work.num_queued_reads == 0 {
                return;
            }
            let now = self.state.now + Duration::from_secs(61);
            self.state.set_time(now);
        }
        panic!("flush would never return: {:?}", self.state.disk);
    }

    pub(super) fn end(mut self, is_faultless: bool) {
        self.finish_jobs();
        assert_eq!(self.state.stats().reads_pending, 0);
        let counters = self.state.stats();
        let had_room = counters.disk_evictions == 0 && counters.disk_dropped == 0;
        for (_, entry) in self.state.index.iter() {
            assert!(!entry.host.awaits_read(), "a read never completes");
            assert!(
                !matches!(entry.host, HostState::Failed(_)) || self.writes.iter().any(|_| true),
                "a failed chunk was not removed"
            );
            if is_faultless && had_room {
                let is_written =
                    !entry.host.is_visible() || entry.disk.is_stored() || entry.detached;
                assert!(is_written, "the chunk was never written: {entry:?}");
            }
        }
        for (id, _) in std::mem::take(&mut self.writes) {
            self.state.abort(id);
        }
        for mut held in std::mem::take(&mut self.reads) {
            assert_eq!(self.state.poll(&mut held).pending_units, 0, "a lease never completes");
            self.state.release(held);
        }
        self.finish_jobs();
        assert_eq!(
            self.state.stats().frames_reserved,
            0,
            "a frame is reserved without a lease: {:?}",
            self.state.index
        );
        self.clear();
        self.finish_jobs();
        let gauges = self.state.stats();
        assert_eq!(
            (gauges.pins, gauges.read_leases, gauges.write_leases, gauges.entries),
            (0, 0, 0, 0)
        );
        assert_eq!((gauges.frames_free, gauges.disk_used), (gauges.frames_total, 0));
        assert!(self.slots.is_empty() && self.uncleared.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_disk_jobs_breaks_a_promise(
        steps in prop::collection::vec(step(), 1..150), num_frames in 1..8u32, num_slots in 0..12u32,
        num_threads in 1..5usize, adaptive in any::<bool>(), slice in prop_oneof![Just(0usize), Just(1), Just(256)],
        num_uncleared in prop_oneof![2 => Just(0), 1 => 1..3u32, 1 => 30..70u32],
    ) {
        let eviction = if adaptive { Eviction::Adaptive } else { Eviction::Lru };
        let mut run = Run::new(num_frames, num_slots, eviction, num_threads);
        run.open_with_uncleared(num_uncleared);
        run.state.slice = slice;
        for step in &steps {
            run.take(step);
        }
        let is_faultless = steps.iter().all(|step| !matches!(step, Step::Go { io: Io::Fails | Io::Corrupts, .. }));
        run.end(is_faultless);
    }
}

/// A chain on disk is saved again. The first chunk's save is aborted while the other chunks are
/// filled in reverse order.
#[test]
fn chunks_filled_below_a_failed_chunk_fail_with_it() {
    let mut run = Run::new(6, 12, Eviction::Lru, 1);
    run.take(&Step::Save { prompt: 0, stop: 6 });
    run.finish_jobs();
    run.take(&Step::Save { prompt: 63, stop: 6 });
    let mut writes = run.reserve(0, 0, 6);
    assert_eq!(writes.len(), 6);
    run.state.abort(writes.remove(0).0);
    run.writes = writes;
    for nth in (0..5).rev() {
        run.take(&Step::Settle { nth, commit: nth > 1 });
    }
    assert_eq!(run.state.stats().frames_reserved, 0);
    run.end(true);
}
