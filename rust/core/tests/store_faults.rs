//! Tests the store under pressure: random operations with few frames, few slots and a failing disk.
//!
//! Hits depend on the policy and on timing here, so the tests check properties that always hold:
//! only committed chunks are found (I1, I3), leased frames never change (I4), counts return to zero
//! (I5), frames add up (I8), and the disk is used according to its contract.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::KeyChain;
use kvloft_core::evict::Eviction;
use kvloft_core::io::Arena;
use kvloft_core::key::ChunkKey;
use kvloft_core::store::{
    Lookup, Prefix, Progress, ReadLease, Store, StoreConfig, TierName, WriteLease,
};
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;
use store_common::{
    MemoryDisk, arena_of, chain, config, disk_settings, fill, prompt_chain, save, stat, verify,
};

const LONG: Duration = Duration::from_secs(60);

fn open(num_frames: u32, eviction: Eviction, disk: &Arc<MemoryDisk>, num_threads: u32) -> Store {
    let disk_settings = disk_settings(u64::from(disk.capacity), num_threads);
    let config = StoreConfig { disk: Some(disk_settings), ..config(num_frames, eviction) };
    disk.open(&config, &[])
}

/// Polls until nothing is pending, and returns the final result.
fn settled(lease: &ReadLease) -> Progress {
    let deadline = Instant::now() + LONG;
    loop {
        let progress = lease.poll();
        if progress.pending_units == 0 || Instant::now() > deadline {
            return progress;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save { prompt: usize, len: u32, settle: Settle },
    Settle { lease: usize, commit: bool },
    Acquire { prompt: usize, wait: bool },
    Release { lease: usize },
    Discard { prompt: usize, block: usize },
    Clear,
    Flush,
    Fault { writes: bool, reads: bool, corrupt: bool, frees: bool },
    Wait { seconds: u64 },
}

#[derive(Debug, Clone, Copy)]
enum Settle {
    Commit,
    Abort,
    Later,
}

fn step() -> impl Strategy<Value = Step> {
    let settle =
        prop_oneof![4 => Just(Settle::Commit), 1 => Just(Settle::Abort), 1 => Just(Settle::Later)];
    prop_oneof![
        8 => (0..64usize, 1..10u32, settle)
            .prop_map(|(prompt, len, settle)| Step::Save { prompt, len, settle }),
        2 => (0..64usize, any::<bool>()).prop_map(|(lease, commit)| Step::Settle { lease, commit }),
        6 => (0..64usize, any::<bool>()).prop_map(|(prompt, wait)| Step::Acquire { prompt, wait }),
        4 => (0..64usize).prop_map(|lease| Step::Release { lease }),
        1 => (0..64usize, 0..9usize).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => Just(Step::Clear),
        2 => Just(Step::Flush),
        2 => (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>())
            .prop_map(|(writes, reads, corrupt, frees)| Step::Fault { writes, reads: reads && corrupt, corrupt: corrupt && !reads, frees }),
        1 => (0..90u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

struct Run {
    store: Store,
    arena: Arena,
    disk: Arc<MemoryDisk>,
    committed: BTreeSet<ChunkKey>,
    writes: Vec<WriteLease>,
    reads: Vec<ReadLease>,
}

impl Run {
    fn take(&mut self, step: &Step) {
        match *step {
            Step::Save { prompt, len, settle } => self.save(prompt, len, settle),
            Step::Settle { lease, commit } if !self.writes.is_empty() => {
                let lease = self.writes.swap_remove(lease % self.writes.len());
                if commit {
                    self.committed.insert(lease.reservation().key);
                    self.store.commit([lease]);
                }
            }
            Step::Acquire { prompt, wait } => {
                let lease = self.store.acquire(&prompt_chain(prompt));
                if wait {
                    settled(&lease);
                }
                self.reads.push(lease);
            }
            Step::Release { lease } if !self.reads.is_empty() => {
                drop(self.reads.swap_remove(lease % self.reads.len()));
            }
            Step::Settle { .. } | Step::Release { .. } => {}
            Step::Discard { prompt, block } => {
                let chain = prompt_chain(prompt);
                let block = block % chain.keys().len();
                let key = chain.keys()[block];
                self.store.discard(&[key]);
                self.committed.remove(&key);
            }
            Step::Clear => {
                self.heal();
                self.disk.wait(61);
                self.store.clear();
                self.committed.clear();
                assert!(self.disk.flush(&self.store));
                assert!(self.disk.chunks().is_empty());
            }
            Step::Flush => {
                self.heal();
                assert!(self.disk.flush(&self.store));
            }
            Step::Wait { seconds } => self.disk.wait(seconds),
            Step::Fault { writes, reads, corrupt, frees } => {
                self.disk.fail_frees.store(frees, Ordering::SeqCst);
                self.disk.fail_writes.store(writes, Ordering::SeqCst);
                self.disk.fail_reads.store(reads, Ordering::SeqCst);
                self.disk.corrupt_reads.store(corrupt, Ordering::SeqCst);
                self.disk.fail_next_read.store(corrupt, Ordering::SeqCst);
            }
        }
        self.verify();
    }

    fn heal(&self) {
        for fault in [
            &self.disk.fail_writes,
            &self.disk.fail_reads,
            &self.disk.fail_next_read,
            &self.disk.corrupt_reads,
            &self.disk.fail_frees,
        ] {
            fault.store(false, Ordering::SeqCst);
        }
    }

    fn save(&mut self, prompt: usize, len: u32, settle: Settle) {
        let chain = prompt_chain(prompt);
        let reserved = self.store.reserve(&chain, 0..len.min(chain.num_blocks())).unwrap();
        reserved.chunks.iter().for_each(|lease| fill(&self.arena, lease.reservation()));
        match settle {
            Settle::Commit => {
                self.committed.extend(reserved.chunks.iter().map(|lease| lease.reservation().key));
                self.store.commit(reserved.chunks);
            }
            Settle::Abort => drop(reserved),
            Settle::Later => self.writes.extend(reserved.chunks),
        }
    }

    fn verify(&self) {
        self.store.check().unwrap();
        assert_eq!(self.disk.violations(), [""; 0]);
        assert!(self.disk.num_slots_used() <= self.disk.capacity as usize);
        for prompt in 0..64 {
            let chain = prompt_chain(prompt);
            let found = self.store.lookup(&chain);
            assert!(found.host_units <= found.stored_units);
            let stored = &chain.keys()[..found.stored_units as usize];
            assert!(
                stored.iter().all(|key| self.committed.contains(key)),
                "found a chunk that was not committed"
            );
        }
        for lease in &self.reads {
            for frame in lease.frames() {
                assert_eq!(verify(&self.arena, frame.frame, frame.key), None);
            }
        }
    }

    fn end(mut self) {
        self.heal();
        self.writes.clear();
        self.reads.clear();
        // A read that no lease waits for still completes, and unreadable chunks are removed from
        // the disk.
        let deadline = Instant::now() + LONG;
        while stat(&self.store, "frames_reserved") > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(self.disk.flush(&self.store));
        self.verify();
        for name in [
            "pins",
            "frames_reserved",
            "write_leases",
            "read_leases",
            "disk_pending",
            "reads_pending",
        ] {
            assert_eq!(stat(&self.store, name), 0, "{name}");
        }
        assert_eq!(stat(&self.store, "disk_used"), self.disk.chunks().len() as u64);
        self.store.clear();
        assert!(self.disk.flush(&self.store));
        assert_eq!(stat(&self.store, "frames_free"), stat(&self.store, "frames_total"));
        assert_eq!((stat(&self.store, "entries"), self.disk.chunks().len()), (0, 0));
        self.store.check().unwrap();
        self.store.close(LONG);
        assert_eq!(self.disk.violations(), [""; 0]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_an_invariant(
        steps in prop::collection::vec(step(), 1..60), num_frames in 1..12u32, num_slots in 0..16u32,
        num_threads in 1..4u32, adaptive in any::<bool>(),
    ) {
        let eviction = if adaptive { Eviction::Adaptive } else { Eviction::Lru };
        let disk = MemoryDisk::new(num_slots);
        let store = open(num_frames, eviction, &disk, num_threads);
        let arena = arena_of(&store);
        let committed = BTreeSet::new();
        let mut run = Run { store, arena, disk, committed, writes: Vec::new(), reads: Vec::new() };
        for step in &steps {
            run.take(step);
        }
        run.end();
    }
}

/// Returns a store with a chain of `len` chunks that is only on disk, because other chunks fill all
/// `len` frames.
fn on_disk_only(len: u32, disk: &Arc<MemoryDisk>) -> (Store, Arena, KeyChain) {
    let store = open(len, Eviction::Lru, disk, 2);
    let arena = arena_of(&store);
    let wanted = chain(&(0..len).collect::<Vec<_>>());
    assert_eq!(save(&store, &arena, &wanted, 0..len), len);
    assert!(store.flush(LONG));
    let other = chain(&(100..100 + len).collect::<Vec<_>>());
    assert_eq!(save(&store, &arena, &other, 0..len), len);
    assert!(store.flush(LONG));
    let found = store.lookup(&wanted);
    assert_eq!((found.host_units, found.stored_units), (0, len));
    (store, arena, wanted)
}

#[test]
fn a_chain_comes_back_from_disk() {
    let disk = MemoryDisk::new(64);
    let (store, arena, wanted) = on_disk_only(8, &disk);
    let lease = store.acquire(&wanted);
    assert_eq!(settled(&lease), Progress { ready_units: 8, pending_units: 0 });
    let frames = lease.frames();
    assert_eq!(frames.iter().map(|f| f.key).collect::<Vec<_>>(), wanted.keys());
    assert!(
        frames.iter().all(|f| f.tier == TierName::Disk && verify(&arena, f.frame, f.key).is_none())
    );
    assert_eq!(store.lookup(&wanted).host_units, 8);
    assert!(store.acquire(&wanted).frames().iter().all(|f| f.tier == TierName::Host));
}

#[test]
fn two_leases_share_one_read_and_acquire_never_waits_for_it() {
    let disk = MemoryDisk::new(64);
    let (store, _arena, wanted) = on_disk_only(8, &disk);
    let gate = disk.read_gate.lock().unwrap();
    let leases = [store.acquire(&wanted), store.acquire(&wanted)];
    for lease in &leases {
        assert_eq!(lease.poll(), Progress { ready_units: 0, pending_units: 8 });
    }
    drop(gate);
    for lease in &leases {
        assert_eq!(settled(lease).ready_units, 8);
    }
    assert_eq!(stat(&store, "disk_reads"), 8);
}

#[test]
fn a_lease_dropped_during_its_reads_leaks_nothing() {
    let disk = MemoryDisk::new(64);
    let (store, _arena, wanted) = on_disk_only(8, &disk);
    let gate = disk.read_gate.lock().unwrap();
    let lease = store.acquire(&wanted);
    assert_eq!(lease.poll().pending_units, 8);
    drop(lease);
    drop(gate);
    let again = store.acquire(&wanted);
    assert_eq!(settled(&again).ready_units, 8);
    drop(again);
    store.check().unwrap();
    assert_eq!((stat(&store, "pins"), stat(&store, "frames_reserved")), (0, 0));
}

#[test]
fn failed_and_corrupt_reads_are_misses_and_are_counted() {
    for corrupt in [false, true] {
        let disk = MemoryDisk::new(64);
        let (store, _arena, wanted) = on_disk_only(8, &disk);
        let flag = if corrupt { &disk.corrupt_reads } else { &disk.fail_reads };
        flag.store(true, Ordering::SeqCst);
        let lease = store.acquire(&wanted);
        assert_eq!(settled(&lease), Progress::default());
        assert_eq!(lease.frames(), []);
        drop(lease);
        let left = if corrupt { 0 } else { 8 };
        assert_eq!(
            store.lookup(&wanted).stored_units,
            left,
            "only damaged chunks and their descendants may be removed"
        );
        let counter = if corrupt { "disk_verify_failures" } else { "disk_read_errors" };
        assert!(stat(&store, counter) >= 1);
        assert!(store.flush(LONG));
        assert_eq!(stat(&store, "disk_used"), 8 + u64::from(left));
        store.check().unwrap();
    }
}

/// A dying sector: the first read fails with an I/O error, and the retry returns damaged bytes.
#[test]
fn a_read_that_fails_and_then_finds_damage_is_a_miss() {
    let disk = MemoryDisk::new(64);
    let (store, _arena, wanted) = on_disk_only(8, &disk);
    disk.fail_next_read.store(true, Ordering::SeqCst);
    disk.corrupt_reads.store(true, Ordering::SeqCst);
    let lease = store.acquire(&wanted);
    assert_eq!(settled(&lease), Progress::default());
    drop(lease);
    assert!(store.flush(LONG), "the disk thread must be free again");
    assert_eq!((stat(&store, "disk_read_errors"), store.lookup(&wanted).stored_units), (1, 0));
    store.check().unwrap();
}

/// A save fails because its parent could not be read. The saves of its children have already
/// failed, but the children are still in the tree.
#[test]
fn a_save_that_fails_after_its_children_leaves_the_tree_after_them() {
    let disk = MemoryDisk::new(16);
    let store = open(12, Eviction::Lru, &disk, 2);
    let (arena, wanted) = (arena_of(&store), chain(&[0, 1, 2, 3]));
    assert_eq!(save(&store, &arena, &wanted, 0..4), 4);
    assert!(store.flush(LONG));
    let other = chain(&(100..112).collect::<Vec<_>>());
    assert_eq!(save(&store, &arena, &other, 0..12), 12);
    assert!(store.flush(LONG));
    assert_eq!(store.lookup(&wanted), Lookup { host_units: 0, stored_units: 4 });
    let gate = disk.read_gate.lock().unwrap();
    let first = store.acquire(Prefix::new(wanted.root(), &wanted.keys()[..1]));
    let deadline = Instant::now() + LONG;
    while disk.num_reads.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < deadline, "no thread reads");
        std::thread::sleep(Duration::from_micros(200));
    }
    let mut saves = store.reserve(&wanted, 1..4).unwrap().chunks;
    assert_eq!(saves.len(), 3, "the parent is being read");
    for save in &saves {
        fill(&arena, save.reservation());
    }
    // The first and last saves are still open when the read of their ancestor fails, but the save
    // between them is complete.
    let last = saves.pop().unwrap();
    let middle = saves.pop().unwrap();
    assert_eq!(store.commit([middle]), 0, "its parent is not visible");
    disk.fail_reads.store(true, Ordering::SeqCst);
    drop(gate);
    assert_eq!(settled(&first), Progress::default());
    drop(first);
    disk.fail_reads.store(false, Ordering::SeqCst);
    // New chunks evict the old chain from disk, leaves first.
    for token in 200..216 {
        assert_eq!(save(&store, &arena, &chain(&[token]), 0..1), 1);
        assert!(store.flush(LONG));
    }
    assert_eq!(store.lookup(&wanted), Lookup::default());
    assert_eq!(store.commit(saves), 0);
    assert_eq!(store.commit([last]), 0);
    store.check().unwrap();
    assert_eq!((stat(&store, "pins"), stat(&store, "frames_reserved")), (0, 0));
}

#[test]
fn flush_waits_for_slots_that_a_thread_is_freeing() {
    let disk = MemoryDisk::new(64);
    let (store, _arena, wanted) = on_disk_only(8, &disk);
    let gate = disk.free_gate.lock().unwrap();
    store.discard(&wanted.keys()[..1]);
    let deadline = Instant::now() + LONG;
    while !disk.is_freeing.load(Ordering::SeqCst) {
        assert!(Instant::now() < deadline, "no thread frees the slots");
        std::thread::sleep(Duration::from_micros(200));
    }
    assert!(!store.flush(Duration::from_millis(20)), "removed chunks must still occupy slots");
    drop(gate);
    assert!(store.flush(LONG));
    assert_eq!((stat(&store, "disk_used"), disk.num_slots_used()), (8, 8));
}

#[test]
fn flush_waits_for_slots_of_removed_chunks_that_are_being_read() {
    for fail_reads in [false, true] {
        let disk = MemoryDisk::new(64);
        let (store, _arena, wanted) = on_disk_only(8, &disk);
        disk.fail_reads.store(fail_reads, Ordering::SeqCst);
        let gate = disk.read_gate.lock().unwrap();
        let lease = store.acquire(&wanted);
        let deadline = Instant::now() + LONG;
        while stat(&store, "reads_pending") > 6 {
            assert!(Instant::now() < deadline, "no thread reads");
            std::thread::sleep(Duration::from_micros(200));
        }
        store.discard(&wanted.keys()[..1]);
        assert!(
            !store.flush(Duration::from_millis(20)),
            "two of the chunks are being read and must still be on disk"
        );
        drop(gate);
        assert!(store.flush(LONG));
        assert_eq!((stat(&store, "disk_used"), disk.num_slots_used()), (8, 8));
        drop(lease);
        store.check().unwrap();
    }
}

#[test]
fn a_disk_that_accepts_no_writes_only_counts_errors() {
    let disk = MemoryDisk::new(64);
    disk.fail_writes.store(true, Ordering::SeqCst);
    let store = open(4, Eviction::Lru, &disk, 2);
    let arena = arena_of(&store);
    let wanted = chain(&[1, 2, 3]);
    assert_eq!(save(&store, &arena, &wanted, 0..3), 3);
    assert!(store.flush(LONG));
    assert_eq!(store.lookup(&wanted).host_units, 3);
    assert!(stat(&store, "disk_write_errors") >= 1);
    assert_eq!((stat(&store, "disk_used"), disk.num_slots_used()), (0, 0));
    // After the disk recovers, saving the next chunk also writes its ancestors.
    disk.fail_writes.store(false, Ordering::SeqCst);
    let longer = chain(&[1, 2, 3, 4]);
    assert_eq!(save(&store, &arena, &longer, 0..4), 1);
    assert!(store.flush(LONG));
    assert_eq!(disk.chunks().len(), 4);
}

#[test]
fn close_writes_queued_chunks_although_a_slot_cannot_be_freed() {
    let disk = MemoryDisk::new(64);
    let (store, arena, wanted) = on_disk_only(8, &disk);
    disk.fail_frees.store(true, Ordering::SeqCst);
    store.discard(&wanted.keys()[7..]);
    let deadline = Instant::now() + LONG;
    while stat(&store, "disk_write_errors") == 0 {
        assert!(Instant::now() < deadline, "the slot was freed");
        std::thread::sleep(Duration::from_micros(200));
    }
    assert!(!store.must_stay_open(), "a discarded chunk is damaged wherever it is found");
    let gate = disk.write_gate.lock().unwrap();
    let prompt = chain(&[31, 32, 33, 34]);
    assert_eq!(save(&store, &arena, &prompt, 0..4), 4);
    std::thread::scope(|threads| {
        threads.spawn(|| store.close(LONG / 2)); // the free is retried after a minute
        std::thread::sleep(Duration::from_millis(100));
        drop(gate);
    });
    let stored = disk.chunks();
    assert!(prompt.keys().iter().all(|key| stored.contains_key(key)), "{} stored", stored.len());
}

#[test]
fn slow_writes_are_dropped_and_never_waited_for() {
    let disk = MemoryDisk::new(64);
    let store = open(4, Eviction::Lru, &disk, 1);
    let arena = arena_of(&store);
    let gate = disk.write_gate.lock().unwrap();
    for turn in 0..10 {
        assert!(save(&store, &arena, &chain(&[turn * 2, 1]), 0..2) > 0);
    }
    assert!(!store.flush(Duration::from_millis(20)));
    assert!(stat(&store, "disk_dropped") > 0);
    drop(gate);
    assert!(store.flush(LONG));
    store.check().unwrap();
}

#[test]
fn a_disk_smaller_than_one_chain_keeps_its_beginning() {
    let disk = MemoryDisk::new(3);
    let store = open(8, Eviction::Lru, &disk, 2);
    let arena = arena_of(&store);
    assert_eq!(save(&store, &arena, &chain(&[1, 2, 3, 4, 5, 6]), 0..6), 6);
    assert!(store.flush(LONG));
    assert_eq!(disk.num_slots_used(), 3);
    let other = chain(&[7, 8]);
    assert_eq!(save(&store, &arena, &other, 0..2), 2);
    assert!(store.flush(LONG));
    assert!(disk.chunks().contains_key(&other.keys()[1]));
    assert_eq!((disk.num_slots_used(), stat(&store, "disk_evictions")), (3, 2));
    assert_eq!(disk.violations(), [""; 0]);
}

#[test]
fn a_panicking_disk_is_a_failed_job() {
    let disk = MemoryDisk::new(64);
    let (store, arena, wanted) = on_disk_only(4, &disk);
    disk.panic_in_io.store(true, Ordering::SeqCst);
    let lease = store.acquire(&wanted);
    assert_eq!(settled(&lease), Progress::default());
    assert!(save(&store, &arena, &chain(&[9]), 0..1) <= 1);
    assert!(store.flush(LONG));
    store.check().unwrap();
    store.close(LONG);
}

#[test]
fn clear_during_reads_and_writes_leaves_nothing_behind() {
    let disk = MemoryDisk::new(64);
    let (store, arena, wanted) = on_disk_only(8, &disk);
    let read_gate = disk.read_gate.lock().unwrap();
    let lease = store.acquire(&wanted);
    std::thread::scope(|scope| {
        let clearing = scope.spawn(|| store.clear());
        while store.lookup(&wanted).stored_units > 0 {
            std::thread::yield_now();
        }
        drop(read_gate);
        clearing.join().unwrap();
    });
    assert!(disk.chunks().is_empty());
    assert_eq!(settled(&lease), Progress::default());
    drop(lease);
    assert_eq!(save(&store, &arena, &wanted, 0..8), 8);
    assert!(store.flush(LONG));
    assert_eq!(disk.chunks().len(), 8);
    assert_eq!(disk.violations(), [""; 0]);
    store.check().unwrap();
}

#[test]
fn close_ends_waiting_leases_and_keeps_chunks_on_disk() {
    let disk = MemoryDisk::new(64);
    let (store, _arena, wanted) = on_disk_only(8, &disk);
    let gate = disk.read_gate.lock().unwrap();
    let lease = store.acquire(&wanted);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| store.close(Duration::ZERO));
        while lease.poll().pending_units == 8 && !closing.is_finished() {
            std::thread::yield_now();
        }
        drop(gate);
        closing.join().unwrap();
    });
    assert_eq!(settled(&lease).pending_units, 0);
    assert_eq!(disk.chunks().len(), 16);
    drop(lease);
    store.check().unwrap();
}

/// The parent still counts an aborted child as waiting, although another prompt has reused the
/// child's entry number.
#[test]
fn a_failed_save_removes_no_other_prompt() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let (own, other) = (chain(&[1, 2]), chain(&[3]));
    let mut leases = store.reserve(&own, 0..2).unwrap().chunks;
    drop(leases.pop());
    let others = store.reserve(&other, 0..1).unwrap().chunks;
    drop(leases);
    fill(&arena_of(&store), others[0].reservation());
    assert_eq!(store.commit(others), 1);
    assert_eq!(store.lookup(&other).host_units, 1);
    store.check().unwrap();
}
