//! Disk jobs in every order, without threads: the test takes jobs, does their I/O in memory and enters the outcome, step by
//! step, between the calls of schedulers and workers.
//!
//! What threads do only now and then happens here by choice, and every case can be repeated. Checked at each step: the books
//! (`check`), the disk's contract, that no frame holds another chunk's bytes, and that `flush` would tell the truth; at the
//! end, that nothing waits for ever and nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::jobs::{Job, Written};
use super::super::load::Held;
use super::super::lookup::Chunks;
use super::super::save::SaveRange;
use super::super::state::State;
use crate::evict::{ChunkId, Eviction};
use crate::index::{DiskState, HostState};
use crate::io::{Frame, FrameId};
use crate::key::{ChunkKey, KeyChain, root_key};
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::host::HostTier;
use crate::{Error, ErrorKind};

const NUM_PROMPTS: usize = 6;
const PROMPT_BLOCKS: u32 = 6;
/// As the disk threads do.
const SLOT_TRIES: u32 = 4;

#[derive(Debug, Clone)]
enum Step {
    Reserve {
        prompt: usize,
        stop: u32,
        tail: u32,
    },
    /// Reserve and commit.
    Save {
        prompt: usize,
        stop: u32,
    },
    Settle {
        nth: usize,
        commit: bool,
    },
    Acquire {
        prompt: usize,
    },
    Release {
        nth: usize,
    },
    Discard {
        prompt: usize,
        block: usize,
    },
    Clear,
    /// A disk thread asks for a job.
    Take,
    /// A job under way goes on: its next I/O, or its outcome is entered.
    Go {
        nth: usize,
        io: Io,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Io {
    Works,
    Fails,
    Corrupts,
}

fn step() -> impl Strategy<Value = Step> {
    let io = prop_oneof![6 => Just(Io::Works), 1 => Just(Io::Fails), 1 => Just(Io::Corrupts)];
    prop_oneof![
        3 => (0..NUM_PROMPTS, 1..=PROMPT_BLOCKS, 0..3u32).prop_map(|(prompt, stop, tail)| Step::Reserve { prompt, stop, tail }),
        4 => (0..64usize, prop::bool::weighted(0.85)).prop_map(|(nth, commit)| Step::Settle { nth, commit }),
        4 => (0..NUM_PROMPTS, 1..=PROMPT_BLOCKS).prop_map(|(prompt, stop)| Step::Save { prompt, stop }),
        5 => (0..NUM_PROMPTS).prop_map(|prompt| Step::Acquire { prompt }),
        4 => (0..64usize).prop_map(|nth| Step::Release { nth }),
        2 => (0..NUM_PROMPTS, 0..PROMPT_BLOCKS as usize).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => prop::bool::weighted(0.2).prop_map(|clear| if clear { Step::Clear } else { Step::Take }),
        10 => Just(Step::Take),
        16 => (0..64usize, io).prop_map(|(nth, io)| Step::Go { nth, io }),
    ]
}

/// Prompts share prefixes: bit d of `prompt` is block d's token.
fn prompt_chain(prompt: usize) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
    let tokens: Vec<u32> = (0..PROMPT_BLOCKS).map(|at| u32::from(prompt >> at & 1 == 1)).collect();
    chain.append_tokens(&tokens).unwrap();
    chain
}

/// A job under way, and how far it is.
#[derive(Debug)]
enum Under {
    Read { id: ChunkId, slot: SlotId, key: ChunkKey, frame: Frame, outcome: Option<Result<(), Error>> },
    Write { id: ChunkId, meta: DiskMeta, frame: Frame, tries: u32, slot: Option<SlotId>, outcome: Option<Written> },
    Free { slots: Vec<SlotId> },
    Clear { is_cleared: bool },
}

struct Run {
    state: State,
    per_chunk: u32,
    num_slots: u32,
    num_threads: usize,
    /// What is on disk: slots in use, and the chunk in each that is written.
    slots: BTreeMap<u32, Option<DiskMeta>>,
    under_way: Vec<Under>,
    writes: Vec<ChunkId>,
    reads: Vec<Held>,
    committed: BTreeSet<ChunkKey>,
}

impl Run {
    fn new(num_frames: u32, num_slots: u32, per_chunk: u32, eviction: Eviction, num_threads: usize) -> Self {
        let host = HostTier::create(4096, num_frames).unwrap();
        let policies = (eviction.policy(num_frames as usize), eviction.policy(num_slots as usize));
        Self {
            state: State::new(host, policies.0, Some(policies.1)),
            per_chunk,
            num_slots,
            num_threads,
            slots: BTreeMap::new(),
            under_way: Vec::new(),
            writes: Vec::new(),
            reads: Vec::new(),
            committed: BTreeSet::new(),
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Reserve { prompt, stop, tail } => {
                let reserved = self.reserve(prompt, stop, tail);
                self.writes.extend(reserved);
            }
            Step::Save { prompt, stop } => {
                for id in self.reserve(prompt, stop, 0) {
                    self.commit(id);
                }
            }
            Step::Settle { nth, commit } if !self.writes.is_empty() => {
                let id = self.writes.swap_remove(nth % self.writes.len());
                if commit {
                    self.commit(id);
                } else {
                    self.state.abort(id);
                }
            }
            Step::Acquire { prompt } => {
                let chain = prompt_chain(prompt);
                let held = self.state.acquire(&Chunks::new(&chain, self.per_chunk));
                self.reads.push(held);
            }
            Step::Release { nth } if !self.reads.is_empty() => {
                let held = self.reads.swap_remove(nth % self.reads.len());
                self.state.release(&held);
            }
            Step::Discard { prompt, block } => {
                let key = prompt_chain(prompt).keys()[block];
                self.state.discard(&[key]);
                self.committed.remove(&key);
            }
            Step::Clear => {
                self.state.clear();
                self.committed.clear();
            }
            Step::Take if self.under_way.len() < self.num_threads => self.take_job(),
            Step::Go { nth, io } if !self.under_way.is_empty() => self.go(nth % self.under_way.len(), io),
            Step::Settle { .. } | Step::Release { .. } | Step::Take | Step::Go { .. } => {}
        }
        self.check();
    }

    fn commit(&mut self, id: ChunkId) {
        self.committed.insert(self.state.index[id].key);
        self.state.commit(id);
    }

    fn reserve(&mut self, prompt: usize, stop: u32, tail: u32) -> Vec<ChunkId> {
        let chain = prompt_chain(prompt);
        let stop = stop.min(PROMPT_BLOCKS / self.per_chunk);
        let tail_blocks = tail.min(self.per_chunk - 1).min(PROMPT_BLOCKS - stop * self.per_chunk);
        let (reserved, _) =
            self.state.reserve(&Chunks::new(&chain, self.per_chunk), SaveRange { start: 0, stop, tail_blocks });
        for (_, reservation) in &reserved {
            let mut frame = self.state.host.lend(reservation.frame).expect("a reserved frame is nobody else's (I4)");
            frame.bytes_mut()[..32].copy_from_slice(&reservation.key.0);
            self.state.host.give_back(frame);
        }
        reserved.into_iter().map(|(id, _)| id).collect()
    }

    fn take_job(&mut self) {
        let under = match self.state.next_job() {
            None => return,
            Some(Job::Read { id, slot, key, frame }) => Under::Read { id, slot, key, frame, outcome: None },
            Some(Job::Write { id, meta, frame }) => {
                assert_eq!(frame.bytes()[..32], meta.key.0, "a frame is written as another chunk");
                Under::Write { id, meta, frame, tries: 0, slot: None, outcome: None }
            }
            Some(Job::Free(slots)) => Under::Free { slots },
            Some(Job::Clear) => {
                assert!(self.under_way.is_empty(), "the disk is cleared under other jobs");
                Under::Clear { is_cleared: false }
            }
        };
        self.under_way.push(under);
    }

    /// One more piece of a job: each is what its thread does between two looks at the lock, or under it.
    fn go(&mut self, nth: usize, io: Io) {
        let is_over = match self.under_way.swap_remove(nth) {
            Under::Read { id, slot, key, mut frame, outcome: None } => {
                let outcome = self.read(slot, &key, &mut frame, io);
                Some(Under::Read { id, slot, key, frame, outcome: Some(outcome) })
            }
            Under::Read { id, frame, outcome: Some(outcome), .. } => {
                self.state.end_read(id, frame, outcome, 1);
                None
            }
            Under::Write { id, frame, outcome: Some(outcome), .. } => {
                self.state.end_write(id, frame, outcome, 1);
                None
            }
            Under::Write { id, meta, frame, tries, slot: None, .. } => {
                let free = (0..self.num_slots).find(|slot| !self.slots.contains_key(slot));
                let (mut slot, mut outcome) = (None, None);
                if let Some(free) = free {
                    self.slots.insert(free, None);
                    slot = Some(SlotId(free));
                } else if tries == SLOT_TRIES {
                    outcome = Some(Written::NoRoom);
                } else if let Some(victim) = self.state.evict_from_disk() {
                    self.free(victim);
                } else {
                    outcome = Some(Written::NoRoom);
                }
                Some(Under::Write { id, meta, frame, tries: tries + 1, slot, outcome })
            }
            Under::Write { id, meta, frame, tries, slot: Some(slot), .. } => {
                let outcome = if io == Io::Works {
                    self.write(slot, meta);
                    Written::In(slot)
                } else {
                    self.free(slot);
                    Written::Failed
                };
                Some(Under::Write { id, meta, frame, tries, slot: Some(slot), outcome: Some(outcome) })
            }
            Under::Free { mut slots } => {
                if let Some(slot) = slots.pop() {
                    self.free(slot);
                    Some(Under::Free { slots })
                } else {
                    self.state.end_free();
                    None
                }
            }
            Under::Clear { is_cleared: false } => {
                self.slots.clear();
                Some(Under::Clear { is_cleared: true })
            }
            Under::Clear { is_cleared: true } => {
                self.state.end_clear();
                None
            }
        };
        match is_over {
            Some(under) => self.under_way.push(under),
            None => self.state.end_job(),
        }
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, frame: &mut Frame, io: Io) -> Result<(), Error> {
        let there = self.slots.get(&slot.0).copied().flatten();
        assert_eq!(there.map(|meta| meta.key), Some(*key), "{slot:?} is read for a chunk that is not there");
        frame.bytes_mut()[..32].copy_from_slice(if io == Io::Works { &key.0 } else { &[0xee; 32] });
        match io {
            Io::Works => Ok(()),
            Io::Fails => Err(Error::new(ErrorKind::Io, "asked to fail")),
            Io::Corrupts => Err(Error::new(ErrorKind::Corrupt, "asked to be corrupt")),
        }
    }

    fn write(&mut self, slot: SlotId, meta: DiskMeta) {
        let is_there = |key: &ChunkKey| self.slots.values().flatten().any(|other| other.key == *key);
        assert!(meta.depth == 0 || is_there(&meta.parent), "{meta:?} is written before its parent");
        assert_eq!(self.slots.insert(slot.0, Some(meta)), Some(None), "{slot:?} is written without being reserved");
    }

    fn free(&mut self, slot: SlotId) {
        assert!(self.slots.remove(&slot.0).is_some(), "{slot:?} is freed twice");
    }

    fn check(&mut self) {
        self.state.check().unwrap();
        let found: Vec<_> = self.state.index.iter().filter(|(_, entry)| !entry.detached).map(|(_, e)| e.key).collect();
        for key in found.iter().filter(|key| self.state.visible(key).is_some()) {
            assert!(self.committed.contains(key), "found what was not committed, or was forgotten (I1, I3)");
        }
        for held in 0..self.reads.len() {
            let frames = self.state.frames(&mut self.reads[held]);
            for leased in frames {
                self.check_frame(leased.frame, leased.key);
            }
        }
        if self.state.disk.as_ref().unwrap().is_settled() {
            self.check_flushed();
        }
    }

    /// A frame that somebody holds has its chunk's bytes (I4); one that is lent is being written, and was looked at then.
    fn check_frame(&mut self, frame: FrameId, key: ChunkKey) {
        if let Some(frame) = self.state.host.lend(frame) {
            assert_eq!(frame.bytes()[..32], key.0, "a leased frame changed");
            self.state.host.give_back(frame);
        }
    }

    /// What `flush` promises when it returns.
    fn check_flushed(&self) {
        let mut wanted = BTreeMap::new();
        for (_, entry) in self.state.index.iter() {
            match entry.disk {
                DiskState::Present(slot) => {
                    assert!(!entry.detached, "a forgotten chunk is on disk");
                    wanted.insert(slot.0, entry.key);
                }
                DiskState::Writing => panic!("a chunk is being written"),
                DiskState::Absent => {}
            }
        }
        let there: BTreeMap<_, _> =
            self.slots.iter().map(|(slot, meta)| (*slot, meta.expect("reserved by nobody").key)).collect();
        assert_eq!(there, wanted);
    }

    /// Lets the threads work until there is nothing to do.
    fn finish_jobs(&mut self) {
        loop {
            self.take_job();
            if self.under_way.is_empty() {
                return;
            }
            self.go(0, Io::Works);
            self.check();
        }
    }

    fn end(mut self, is_faultless: bool) {
        self.finish_jobs();
        assert!(self.state.disk.as_ref().unwrap().is_settled(), "flush would wait for ever");
        assert_eq!(self.state.gauges().reads_pending, 0);
        let counters = self.state.counters;
        let had_room = counters.disk_evictions == 0 && counters.disk_dropped == 0;
        for (_, entry) in self.state.index.iter() {
            assert!(!matches!(entry.host, HostState::Loading(_)), "a read never ends");
            if is_faultless && had_room {
                assert!(!entry.is_visible() || entry.is_on_disk() || entry.detached, "never written: {entry:?}");
            }
        }
        for id in std::mem::take(&mut self.writes) {
            self.state.abort(id);
        }
        for mut held in std::mem::take(&mut self.reads) {
            assert_eq!(self.state.poll(&mut held).pending_blocks, 0, "a lease waits for ever");
            self.state.release(&held);
        }
        self.finish_jobs();
        self.state.clear();
        self.committed.clear();
        self.finish_jobs();
        let gauges = self.state.gauges();
        assert_eq!((gauges.pins, gauges.read_leases, gauges.write_leases, gauges.entries), (0, 0, 0, 0));
        assert_eq!((gauges.frames_free, gauges.disk_used), (gauges.frames_total, 0));
        assert!(self.slots.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_disk_jobs_breaks_a_promise(
        steps in prop::collection::vec(step(), 1..150), per_chunk in 1..4u32, num_frames in 1..8u32, num_slots in 0..12u32,
        num_threads in 1..5usize, lrfu in any::<bool>(),
    ) {
        let eviction = if lrfu { Eviction::Lrfu } else { Eviction::Lru };
        let mut run = Run::new(num_frames, num_slots, per_chunk, eviction, num_threads);
        for step in &steps {
            run.take(step);
        }
        let is_faultless = steps.iter().all(|step| !matches!(step, Step::Go { io: Io::Fails | Io::Corrupts, .. }));
        run.end(is_faultless);
    }
}
