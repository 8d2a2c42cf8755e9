//! Tests a disk that hangs, fails or is missing: lookups of its chunks miss for a while, and
//! everything else still works.
//!
//! Tests advance the clock, so nothing here depends on the speed of the machine.
mod store_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvloft_core::KeyChain;
use kvloft_core::evict::Eviction;
use kvloft_core::key::ChunkKey;
use kvloft_core::store::{Prefix, Progress, ReadLease, Store, StoreConfig};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskConfig, DiskEntry, DiskMeta, DiskTier, SlotId};
use kvloft_testing::one_prefix::StoreExt;
use store_common::{FRAME, MemoryDisk, arena_of, chain, config, disk_settings, save, stat};

const LONG: Duration = Duration::from_secs(60);
const THREADS: u32 = 2;

fn settings(num_frames: u32, disk: &MemoryDisk) -> StoreConfig {
    let disk = disk_settings(u64::from(disk.capacity), THREADS);
    StoreConfig { disk: Some(disk), ..config(num_frames, Eviction::Lru) }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn settled(lease: &ReadLease) -> Progress {
    until("a lease settles", || lease.poll().pending_units == 0);
    lease.poll()
}

fn save_all(store: &Store, chain: &KeyChain) -> u32 {
    save(store, &arena_of(store), chain, 0..chain.num_blocks())
}

/// Returns chains of `len` blocks without a common prefix. The tokens start at `first`.
fn chains(num: u32, len: u32, first: u32) -> Vec<KeyChain> {
    let tokens = |nth: u32| (0..len).map(|at| first + nth * len + at).collect::<Vec<_>>();
    (0..num).map(|nth| chain(&tokens(nth))).collect()
}

/// Returns a store with ten prompts of 8 chunks that are only on disk, and one prompt of 16 chunks
/// that is also in host memory.
fn cold_prompts(disk: &Arc<MemoryDisk>) -> (Store, Vec<KeyChain>, KeyChain) {
    let store = disk.open(&settings(16, disk), &[]);
    let cold = chains(10, 8, 0);
    for prompt in &cold {
        assert_eq!(save_all(&store, prompt), 8);
        assert!(store.flush(LONG));
    }
    let hot = chain(&(1000..1016).collect::<Vec<_>>());
    assert_eq!(save_all(&store, &hot), 16);
    assert!(store.flush(LONG));
    (store, cold, hot)
}

#[test]
fn a_hung_disk_takes_one_frame_per_thread() {
    let disk = MemoryDisk::new(200);
    let (store, cold, hot) = cold_prompts(&disk);
    let gate = disk.read_gate.lock().unwrap();
    let leases: Vec<_> = cold.iter().map(|prompt| store.acquire(prompt)).collect();
    assert!(leases.iter().all(|lease| lease.poll().pending_units == 8));
    until("all threads read", || disk.num_reads.load(Ordering::SeqCst) == u64::from(THREADS));
    assert_eq!(
        stat(&store, "frames_reserved"),
        u64::from(THREADS),
        "queued reads must not have frames"
    );
    assert_eq!(store.lookup(&hot).host_units, 16 - THREADS, "chunks in host memory must stay");
    drop(leases);
    assert_eq!((stat(&store, "reads_pending"), stat(&store, "pins")), (0, 0));
    drop(gate);
    until("the reads end", || stat(&store, "frames_reserved") == 0);
    let kept = store.acquire(&cold[9]);
    assert_eq!(settled(&kept).ready_units, 8);
    assert_eq!(
        disk.num_reads.load(Ordering::SeqCst),
        u64::from(THREADS) + 8,
        "a read ran without a lease"
    );
    store.check().unwrap();
}

#[test]
fn a_cancelled_read_stays_for_the_lease_that_still_wants_it() {
    let disk = MemoryDisk::new(200);
    let (store, cold, _hot) = cold_prompts(&disk);
    let gate = disk.read_gate.lock().unwrap();
    let half = Prefix::new(cold[0].root(), &cold[0].keys()[..5]);
    let (first, second) = (store.acquire(&cold[0]), store.acquire(half));
    assert_eq!((first.poll().pending_units, second.poll().pending_units), (8, 5));
    first.release();
    assert_eq!(second.poll().pending_units, 5);
    drop(gate);
    assert_eq!(settled(&second).ready_units, 5);
    assert_eq!(disk.num_reads.load(Ordering::SeqCst), 5);
}

#[test]
fn a_tier_that_hangs_is_paused_and_probed_again() {
    let disk = MemoryDisk::new(200);
    let (store, cold, hot) = cold_prompts(&disk);
    let gate = disk.read_gate.lock().unwrap();
    let lease = store.acquire(&cold[0]);
    until("a thread reads", || disk.num_reads.load(Ordering::SeqCst) == u64::from(THREADS));
    assert_eq!(stat(&store, "disk_broken"), 0);
    disk.wait(5);
    assert_eq!(lease.poll(), Progress::default(), "a lease must not wait for a hung tier");
    assert_eq!((stat(&store, "disk_broken"), stat(&store, "disk_trips")), (1, 2));
    let found = store.lookup(&cold[0]);
    assert_eq!((found.stored_units, store.lookup(&hot).host_units), (0, 16 - THREADS));
    assert_eq!(store.acquire(&cold[1]).poll(), Progress::default());
    assert!(!store.take_events().is_empty());
    assert!(store.take_events().is_empty(), "each event must be reported once");
    disk.wait(2); // a probe is due, but every thread hangs
    let probe = store.acquire(&cold[0]);
    assert_eq!(
        (store.lookup(&cold[0]).stored_units, probe.poll()),
        (0, Progress::default()),
        "no thread is free to read"
    );
    drop(gate);
    until("the hung reads end", || stat(&store, "frames_reserved") == 0);
    disk.wait(2);
    assert_eq!(settled(&store.acquire(&cold[0])).ready_units, 8);
    assert_eq!(settled(&store.acquire(&cold[1])).ready_units, 8);
    store.check().unwrap();
}

#[test]
fn failed_writes_keep_chunks_on_disk() {
    for fail_frees in [false, true] {
        let disk = MemoryDisk::new(24);
        let store = disk.open(&settings(8, &disk), &[]);
        for prompt in chains(3, 8, 0) {
            assert_eq!(save_all(&store, &prompt), 8);
            assert!(store.flush(LONG));
        }
        assert_eq!(disk.chunks().len(), 24);
        disk.fail_writes.store(true, Ordering::SeqCst);
        disk.fail_frees.store(fail_frees, Ordering::SeqCst);
        for prompt in chains(100, 8, 1000) {
            // The next prompt takes this prompt's frames. A chunk that has had no write attempt by
            // then is never written, so wait for an attempt.
            let num_refused = stat(&store, "disk_write_errors");
            assert!(save_all(&store, &prompt) > 0, "host memory must still work");
            until("a write is attempted", || {
                stat(&store, "disk_broken") == 1 || stat(&store, "disk_write_errors") > num_refused
            });
        }
        assert_eq!(stat(&store, "disk_broken"), 1);
        let left = disk.chunks().len();
        assert!(left >= if fail_frees { 24 } else { 20 }, "only {left} of 24 chunks are left");
        assert!(stat(&store, "disk_write_errors") >= 1);
        assert_eq!(stat(&store, "disk_used"), left as u64);
        let read = store.acquire(&chains(1, 8, 0)[0]);
        assert!(settled(&read).ready_units >= 4, "reads must continue");
        drop(read);
        for fault in [&disk.fail_writes, &disk.fail_frees] {
            fault.store(false, Ordering::SeqCst);
        }
        assert!(disk.flush(&store));
        let new = chain(&(5000..5008).collect::<Vec<_>>());
        assert_eq!(save_all(&store, &new), 8);
        assert!(disk.flush(&store));
        assert!(disk.chunks().contains_key(&new.keys()[7]), "the tier must write again");
        assert_eq!((stat(&store, "disk_broken"), disk.chunks().len()), (0, 24));
        store.check().unwrap();
    }
}

#[test]
fn a_chunk_that_cannot_be_read_stays_and_is_read_later() {
    let disk = MemoryDisk::new(200);
    let (store, cold, _hot) = cold_prompts(&disk);
    disk.fail_reads.store(true, Ordering::SeqCst);
    assert_eq!(settled(&store.acquire(&cold[0])), Progress::default());
    disk.fail_reads.store(false, Ordering::SeqCst);
    assert!(stat(&store, "disk_read_errors") >= 2, "the read must be attempted twice");
    assert_eq!(
        store.acquire(&cold[0]).poll(),
        Progress::default(),
        "the read must not be retried immediately"
    );
    assert_eq!(settled(&store.acquire(&cold[1])).ready_units, 8, "other chunks must be read");
    disk.wait(61);
    assert_eq!(settled(&store.acquire(&cold[0])).ready_units, 8);
    assert_eq!(stat(&store, "discards"), 0);
}

#[test]
fn close_clear_and_lookups_do_not_wait_for_hung_io() {
    let disk = MemoryDisk::new(200);
    let (store, cold, _hot) = cold_prompts(&disk);
    let gates = (
        disk.read_gate.lock().unwrap(),
        disk.write_gate.lock().unwrap(),
        disk.free_gate.lock().unwrap(),
    );
    let lease = store.acquire(&cold[0]);
    until("a thread reads", || disk.num_reads.load(Ordering::SeqCst) == u64::from(THREADS));
    store.clear(); // the disk hangs, so it is cleared later
    assert!(
        store.take_events().iter().any(|event| event.contains("not cleared")),
        "no event reports that a restart will find the chunk"
    );
    for prompt in &cold {
        assert_eq!(store.lookup(prompt), kvloft_core::store::Lookup::default());
    }
    assert_eq!((stat(&store, "entries"), store.flush(Duration::ZERO)), (0, false));
    assert_eq!(disk.chunks().len(), 96);
    store.close(Duration::ZERO);
    assert_eq!(lease.frames(), []);
    drop(gates);
    drop(lease);
}

#[test]
fn a_clear_that_hung_finishes_later() {
    let disk = MemoryDisk::new(200);
    let (store, cold, _hot) = cold_prompts(&disk);
    let gate = disk.read_gate.lock().unwrap();
    let lease = store.acquire(&cold[0]);
    until("a thread reads", || disk.num_reads.load(Ordering::SeqCst) == u64::from(THREADS));
    disk.wait(5);
    store.clear();
    drop(gate);
    assert!(disk.flush(&store));
    assert_eq!((disk.chunks().len(), stat(&store, "disk_used")), (0, 0));
    drop(lease);
    store.check().unwrap();
}

#[test]
fn a_tier_that_fails_to_open_is_opened_later() {
    let disk = MemoryDisk::new(200);
    let (first, cold, hot) = cold_prompts(&disk);
    drop(first);
    let found = disk.entries();
    assert_eq!(found.len(), 96);
    disk.fail_opens.store(true, Ordering::SeqCst);
    let store = disk.open(&settings(16, &disk), &found);
    assert_eq!(stat(&store, "disk_broken"), 1);
    assert!(store.take_events().iter().any(|event| event.contains("failed to open")));
    assert_eq!(save_all(&store, &hot), 16, "host memory must work");
    assert_eq!(store.lookup(&cold[0]).stored_units, 0);
    store.discard(&cold[1].keys()[..1]);
    disk.fail_opens.store(false, Ordering::SeqCst);
    disk.wait(61);
    until("the tier is attached", || stat(&store, "disk_broken") == 0);
    assert!(disk.flush(&store));
    assert_eq!(disk.violations(), [""; 0]);
    assert_eq!(
        store.lookup(&cold[1]).stored_units,
        0,
        "the chunk was discarded before the tier opened"
    );
    assert_eq!(
        (stat(&store, "disk_used"), stat(&store, "disk_writes")),
        (88, 0),
        "hot chunks are already present"
    );
    assert_eq!(settled(&store.acquire(&cold[0])).ready_units, 8);
    store.check().unwrap();
}

/// Until the tier opens, the discarded chunk is still on disk, so `flush` must not report success.
#[test]
fn a_discard_is_pending_until_the_tier_opens() {
    let disk = MemoryDisk::new(200);
    let (first, cold, _) = cold_prompts(&disk);
    drop(first);
    let found = disk.entries();
    disk.fail_opens.store(true, Ordering::SeqCst);
    let store = disk.open(&settings(16, &disk), &found);
    assert!(store.flush(LONG), "no work must remain");
    store.discard(&cold[1].keys()[..1]);
    assert!(!store.flush(Duration::from_millis(10)), "the removal did not reach the disk");
    disk.fail_opens.store(false, Ordering::SeqCst);
    disk.wait(61);
    until("the tier is attached", || stat(&store, "disk_broken") == 0);
    assert!(disk.flush(&store));
    let left = disk.entries();
    assert!(
        left.len() < found.len() && left.iter().all(|entry| entry.meta.key != cold[1].keys()[0])
    );
}

/// The first slice of the walk covers only part of the tree, so it frees nothing and queues no
/// removal.
#[test]
fn a_discarded_long_prefix_is_removed_from_disk() {
    const CHUNKS: u32 = 1500;
    let disk = MemoryDisk::new(CHUNKS);
    let store = disk.open(&settings(CHUNKS, &disk), &[]);
    let prompt = chain(&(0..CHUNKS).collect::<Vec<_>>());
    save_all(&store, &prompt);
    assert!(disk.flush(&store));
    assert_eq!(disk.entries().len(), CHUNKS as usize);
    store.discard(&prompt.keys()[..1]);
    assert!(store.flush(LONG));
    assert_eq!(disk.entries().len(), 0);
}

/// A stopping engine may still own the directory when the next engine starts.
#[test]
fn a_directory_in_use_is_opened_after_its_owner_ends() {
    let dir = tempfile::tempdir().unwrap();
    let tier = DiskConfig {
        dir: dir.path().to_owned(),
        cap_bytes: 1 << 20,
        frame_sizes: (FRAME as u64).into(),
        namespace: [7; 32],
        description: String::new(),
    };
    let (owner, _) = DiskTier::open(tier.clone()).unwrap();
    let open = move || {
        DiskTier::open(tier.clone())
            .map(|(tier, found)| (Arc::new(tier) as Arc<dyn LocalTier>, found))
    };
    let seconds = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&seconds);
    let now = move || Duration::from_secs(clock.load(Ordering::SeqCst));
    let settings =
        StoreConfig { disk: Some(disk_settings(8, THREADS)), ..config(8, Eviction::Lru) };
    let store = Store::with_tier(&settings, None, Some(Box::new(open)), Box::new(now)).unwrap();
    assert_eq!(stat(&store, "disk_broken"), 1);
    assert!(store.take_events().iter().any(|event| event.contains("is in use by process")));
    drop(owner);
    seconds.store(61, Ordering::SeqCst);
    until("the tier is attached", || stat(&store, "disk_broken") == 0);
}

/// Forges a valid record with a wrong parent or depth.
#[test]
fn a_forged_record_is_a_miss() {
    let wanted = chain(&[1, 2, 3, 4]);
    let other = chain(&[7, 8, 9, 10]);
    let (root, keys) = (wanted.root(), wanted.keys());
    let entry = |slot: u32, key: ChunkKey, parent: ChunkKey, depth: u32| DiskEntry {
        slot: SlotId(slot),
        meta: DiskMeta { key, parent, depth, saved_s: 0 },
        sequence: u64::from(slot),
    };
    let forgeries = [
        vec![entry(0, keys[3], root, 0)],
        vec![entry(0, other.keys()[0], root, 0), entry(1, keys[1], other.keys()[0], 1)],
        vec![
            entry(0, other.keys()[0], root, 0),
            entry(1, keys[1], other.keys()[0], 1),
            entry(2, keys[2], keys[1], 2),
        ],
        vec![
            entry(0, keys[0], root, 0),
            entry(1, keys[2], keys[0], 1),
            entry(2, keys[3], keys[2], 2),
        ],
        vec![entry(0, keys[0], other.root(), 1)],
        vec![
            entry(0, other.keys()[0], root, 0),
            entry(1, other.keys()[1], other.keys()[0], 1),
            entry(2, other.keys()[2], other.keys()[1], 2),
            entry(3, keys[3], other.keys()[2], 3),
            entry(4, keys[0], root, 0),
            entry(5, keys[1], keys[0], 1),
            entry(6, keys[2], keys[1], 2),
        ],
    ];
    for found in forgeries {
        let disk = MemoryDisk::new(16);
        disk.put(&found, FRAME);
        let store = disk.open(&settings(8, &disk), &found);
        let lease = store.acquire(&wanted);
        let progress = settled(&lease);
        let frames = lease.frames();
        assert_eq!(frames.len(), progress.ready_units as usize);
        for (frame, key) in frames.iter().zip(keys) {
            assert_eq!(frame.key, *key, "a frame for the wrong unit");
        }
        assert!(progress.ready_units <= 3);
        drop(lease);
        assert_eq!(
            save_all(&store, &wanted),
            4 - progress.ready_units,
            "forged chunks must be replaced"
        );
        assert!(disk.flush(&store));
        assert_eq!(store.lookup(&wanted).host_units, 4);
        store.check().unwrap();
    }
}

#[test]
fn a_large_tree_is_removed_at_once_and_freed_in_slices() {
    const LEAVES: u32 = 3000;
    let store = Store::open(&config(LEAVES + 1, Eviction::Lru)).unwrap();
    let leaves: Vec<_> = (0..LEAVES).map(|leaf| chain(&[1, 10 + leaf])).collect();
    for leaf in &leaves {
        assert!(save_all(&store, leaf) >= 1);
    }
    let hub = leaves[0].keys()[0];
    let kept = store.acquire(&leaves[7]);
    assert!(store.discard(&[hub]) < 600, "one call must process only one slice");
    assert!(stat(&store, "entries") > 1000);
    for leaf in &leaves[..50] {
        assert_eq!(store.lookup(leaf).host_units, 0);
    }
    assert_eq!(save_all(&store, &leaves[5]), 2, "the prompt must be savable immediately");
    assert_eq!(store.lookup(&leaves[5]).host_units, 2);
    assert_eq!(
        store.lookup(&leaves[6]).host_units,
        1,
        "descendants of the old chunk must not be found under the new chunk"
    );
    assert_eq!(kept.frames().len(), 2);
    assert!(store.flush(LONG));
    store.check().unwrap();
    assert_eq!((stat(&store, "entries"), stat(&store, "frames_visible")), (2, 4));
    drop(kept);
    store.clear();
    assert_eq!((stat(&store, "entries"), stat(&store, "frames_free")), (0, u64::from(LEAVES) + 1));
}

#[test]
fn chunks_in_unusable_frames_do_not_fail_a_save() {
    let store = Store::open(&config(8, Eviction::Lru)).unwrap();
    let prompts = chains(3, 4, 0);
    for prompt in &prompts[..2] {
        assert_eq!(save_all(&store, prompt), 4);
    }
    drop(store.acquire(&prompts[0])); // in the lowest frames, and used last
    store.limit_memory(4 * FRAME as u64);
    assert_eq!(save_all(&store, &prompts[2]), 4);
    assert_eq!(
        stat(&store, "host_evictions"),
        4,
        "chunks with unusable frames must not be evicted"
    );
    assert_eq!(store.lookup(&prompts[1]).host_units, 4);
    let _pinned = store.acquire(&prompts[2]);
    assert_eq!(save_all(&store, &chains(1, 4, 9000)[0]), 0, "no usable frame is available");
    assert_eq!(stat(&store, "host_evictions"), 4);
    assert_eq!(store.lookup(&prompts[1]).host_units, 4);
    store.limit_memory(8 * FRAME as u64);
    assert_eq!(
        save_all(&store, &chains(1, 4, 9500)[0]),
        4,
        "chunks that were spared must be evictable again"
    );
    store.check().unwrap();
}

#[test]
fn many_chunks_in_unusable_frames_do_not_block_saves() {
    let store = Store::open(&config(400, Eviction::Lru)).unwrap();
    let prompts = chains(100, 4, 0);
    for prompt in &prompts {
        assert_eq!(save_all(&store, prompt), 4);
    }
    for prompt in &prompts[..25] {
        drop(store.acquire(prompt)); // frames that saves can use were used last
    }
    store.limit_memory(100 * FRAME as u64);
    let pinned = store.acquire(&prompts[3]);
    let mut num_saved = 0;
    for prompt in &chains(100, 4, 9000) {
        num_saved += save_all(&store, prompt);
        store.check().unwrap();
    }
    assert_eq!(num_saved, 400);
    assert_eq!(pinned.frames().len(), 4);
    assert!(
        prompts[25..].iter().all(|prompt| store.lookup(prompt).host_units == 4),
        "these chunks must not block other chunks"
    );
    store.limit_memory(0);
    assert_eq!(save_all(&store, &chains(1, 4, 20_000)[0]), 0);
    assert_eq!(stat(&store, "host_evictions"), 400);
}

#[test]
fn reads_from_disk_use_any_frame() {
    let disk = MemoryDisk::new(200);
    let (store, cold, _) = cold_prompts(&disk);
    for num_frames in [3, 0] {
        store.limit_memory(num_frames * FRAME as u64);
        let leases: Vec<_> = cold[..2].iter().map(|prompt| store.acquire(prompt)).collect();
        for lease in &leases {
            assert_eq!(
                settled(lease),
                Progress { ready_units: 8, pending_units: 0 },
                "{num_frames} frames"
            );
        }
        store.check().unwrap();
        drop(leases);
        for prompt in &cold[2..4] {
            settled(&store.acquire(prompt)); // the first two prompts are evicted
        }
    }
}

#[test]
fn a_save_without_a_usable_frame_evicts_nothing() {
    let disk = MemoryDisk::new(200);
    let (store, cold, hot) = cold_prompts(&disk);
    store.limit_memory(0);
    assert_eq!(save_all(&store, &chains(1, 4, 5000)[0]), 0);
    assert_eq!(store.lookup(&hot).host_units, 16);
    settled(&store.acquire(&cold[0]));
    assert_eq!(store.lookup(&cold[0]).host_units, 8);
}

/// Like `a_forged_record_is_a_miss`, but the forged record follows an anchor. When the forged chunk
/// is removed, the verified units before it are not looked up. Lookups report the forged chunk as
/// present until a lease verifies it.
#[test]
fn a_forged_record_behind_an_anchor_ends_the_prefix_there() {
    let (wanted, other) = (chain(&[1, 2, 3, 4, 5, 6]), chain(&[7, 8, 9, 10]));
    let keys = wanted.keys();
    let entry = |slot: u32, key: ChunkKey, parent: ChunkKey, depth: u32| DiskEntry {
        slot: SlotId(slot),
        meta: DiskMeta { key, parent, depth, saved_s: 0 },
        sequence: u64::from(slot),
    };
    let mut found: Vec<_> = (0..4_u32)
        .map(|nth| {
            let parent = nth.checked_sub(1).map_or(wanted.root(), |before| keys[before as usize]);
            entry(nth, keys[nth as usize], parent, nth)
        })
        .collect();
    let strange = other.keys();
    found.extend((0..4_u32).map(|nth| {
        let parent = nth.checked_sub(1).map_or(other.root(), |before| strange[before as usize]);
        entry(4 + nth, strange[nth as usize], parent, nth)
    }));
    found.push(entry(8, keys[4], strange[3], 4));
    let disk = MemoryDisk::new(16);
    disk.put(&found, FRAME);
    let store = disk.open(&settings(8, &disk), &found);
    let whole = Prefix::from(&wanted);
    let begun = Prefix { first: 2, keys: &keys[2..], ..whole };
    assert_eq!(store.lookup(begun).stored_units, 0, "the prefix is not proven yet");
    assert_eq!(settled(&store.acquire(Prefix { keys: &keys[..4], ..whole })).ready_units, 4);
    for _ in 0..2 {
        assert_eq!(store.lookup(begun).stored_units, 5);
        assert_eq!(stat(&store, "disk_verify_failures"), 0, "a lookup must not change anything");
    }
    let lease = store.acquire(begun);
    assert_eq!(settled(&lease).ready_units, 4);
    assert!(lease.frames().iter().map(|frame| frame.key).eq(keys[..4].iter().copied()));
    assert_eq!(stat(&store, "disk_verify_failures"), 1);
    assert_eq!(store.lookup(begun).stored_units, 4);
    assert_eq!(store.lookup(&wanted).stored_units, 4, "the store still works");
    store.check().unwrap();
}
