//! Tests a full file system that cannot preallocate (ext2, NFS before 4.2): the disk tier keeps the
//! chunks that fit and evicts chunks to make room, as it does when it reaches `disk_size`.
#![expect(clippy::unwrap_used, reason = "tests")]
mod store_common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::{FrameSizes, SizeClass};
use kvloft_core::store::{DiskSettings, Store, StoreConfig};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskConfig, DiskEntry, DiskMeta, DiskTier, SlotId};
use kvloft_core::{ChunkKey, KeyChain, Result};
use kvloft_testing::PageBuffer;
use kvloft_testing::faults::{Call, ENOSPC, EOPNOTSUPP, Fault, FaultFiles, Rule};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;
use store_common::{FRAME, arena_of, chain, config, save, stat, verify};

const LONG: Duration = Duration::from_secs(60);
const CAP_BYTES: u64 = 1 << 20;

/// Returns the config of a disk tier for frames of `FRAME` bytes and of the sizes in `others`.
fn disk_config(dir: &Path, others: &[u64]) -> DiskConfig {
    DiskConfig {
        dir: dir.to_owned(),
        cap_bytes: CAP_BYTES,
        frame_sizes: [&[FRAME as u64], others].concat().into(),
        namespace: [7; 32],
        description: String::new(),
    }
}

fn open(dir: &Path, files: &FaultFiles) -> Store {
    open_with(disk_config(dir, &[]), files)
}

fn open_with(config: DiskConfig, files: &FaultFiles) -> Store {
    let files = files.clone();
    open_tier(&config.frame_sizes.clone(), move || {
        let (tier, found) = DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files)?;
        Ok((Arc::new(tier) as Arc<_>, found))
    })
}

fn open_tier(
    frame_sizes: &FrameSizes,
    opener: impl Fn() -> Result<(Arc<dyn LocalTier>, Vec<DiskEntry>)> + Send + Sync + 'static,
) -> Store {
    let settings = DiskSettings {
        dir: "/nowhere".into(),
        cap_bytes: CAP_BYTES,
        num_threads: 2,
        description: String::new(),
    };
    let start = Instant::now();
    let (frame_sizes, host_bytes) = (frame_sizes.clone(), 16 * frame_sizes.largest());
    let config = config(16, Eviction::Lru);
    let config = StoreConfig { disk: Some(settings), frame_sizes, host_bytes, ..config };
    Store::with_tier(&config, None, Some(Box::new(opener)), Box::new(move || start.elapsed()))
        .unwrap()
}

/// Returns prompts of one chunk.
fn prompts(num: u32) -> Vec<KeyChain> {
    (0..num).map(|first| chain(&[first])).collect()
}

fn save_each(store: &Store, prompts: &[KeyChain]) {
    for prompt in prompts {
        assert_eq!(save(store, &arena_of(store), prompt, 0..1), 1);
        assert!(store.flush(LONG));
    }
}

fn is_loaded(store: &Store, prompt: &KeyChain) -> bool {
    let (lease, begun) = (store.acquire(prompt), Instant::now());
    while lease.poll().pending_units > 0 {
        assert!(begun.elapsed() < LONG);
        std::thread::yield_now();
    }
    let frames = lease.frames();
    frames.len() == 1
        && frames.iter().all(|leased| verify(&arena_of(store), leased.frame, leased.key).is_none())
}

#[test]
fn test_chunks_on_a_full_file_system_make_room_for_new_ones_and_the_write_breaker_stays_closed() {
    const ROOM: u8 = 6;
    let (dir, files) = (tempfile::tempdir().unwrap(), FaultFiles::new(1));
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Allocate]));
    let beyond = Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Write]).in_file("frames");
    files.inject(beyond.from_offset(u64::from(ROOM) * FRAME as u64));
    let (store, prompts) = (open(dir.path(), &files), prompts(100));
    save_each(&store, &prompts);
    let stats = [
        "disk_used",
        "disk_writes",
        "disk_evictions",
        "disk_dropped",
        "disk_write_errors",
        "disk_trips",
    ];
    assert_eq!(
        stats.map(|name| stat(&store, name)),
        [u64::from(ROOM), 100, 100 - u64::from(ROOM), 0, 0, 0]
    );
    assert_eq!(store.take_events().len(), 1);
    store.check().unwrap();
    drop(store);
    let store = open(dir.path(), &files);
    let (gone, kept) = prompts.split_at(100 - usize::from(ROOM));
    assert!(gone.iter().all(|prompt| store.lookup(prompt).stored_units == 0));
    assert!(kept.iter().all(|prompt| is_loaded(&store, prompt)));
}

#[test]
fn test_a_file_system_with_no_space_at_all_drops_chunks_and_the_write_breaker_stays_closed() {
    let (dir, files) = (tempfile::tempdir().unwrap(), FaultFiles::new(1));
    let (store, prompts) = (open(dir.path(), &files), prompts(400)); // more prompts than slots
    save_each(&store, &prompts[..10]);
    files.inject(Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Write]).in_file("frames"));
    save_each(&store, &prompts[10..]);
    let stats = ["disk_used", "disk_dropped", "disk_write_errors", "disk_trips"];
    assert_eq!(
        stats.map(|name| stat(&store, name)),
        [10, 390, 0, 0],
        "chunks were evicted needlessly"
    );
    files.heal();
    store.clear();
    save_each(&store, &prompts[..2]);
    assert_eq!(stat(&store, "disk_used"), 2);
}

/// Returns the metadata of a chunk that this test's prompts do not contain.
fn meta(number: u32) -> DiskMeta {
    let key = ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes());
    DiskMeta { key, parent: ChunkKey([0; 32]), depth: 0, saved_s: 0 }
}

/// Opens a store on a full in-memory tier: chunks of `other_bytes` bytes occupy the space of
/// `num_frames` frames of `frame_bytes` bytes.
fn open_full(
    [frame_bytes, other_bytes]: [usize; 2],
    num_frames: usize,
) -> (Arc<MemoryTier>, Store) {
    let capacity = num_frames * frame_bytes;
    let sizes = [frame_bytes as u64, other_bytes as u64];
    let tier = MemoryTier::with_sizes(&sizes, capacity.try_into().unwrap());
    let num = u32::try_from(capacity / other_bytes).unwrap();
    let slots = (0..num).map(|number| SlotId::new(SizeClass(1), number));
    let found: Vec<_> = (0..)
        .zip(slots)
        .map(|(number, slot)| DiskEntry { slot, meta: meta(number), sequence: number.into() })
        .collect();
    tier.put(&found, other_bytes);
    let opened = Arc::clone(&tier);
    (
        tier,
        open_tier(&sizes.to_vec().into(), move || {
            Ok((Arc::clone(&opened) as Arc<_>, opened.entries()))
        }),
    )
}

fn stats<const N: usize>(store: &Store, names: [&str; N]) -> [u64; N] {
    names.map(|name| stat(store, name))
}

const COUNTS: [&str; 4] = ["disk_used", "disk_writes", "disk_evictions", "disk_dropped"];

#[test]
fn test_as_many_smaller_chunks_are_evicted_as_a_chunk_needs() {
    let (tier, store) = open_full([8 * FRAME, FRAME], 4);
    save_each(&store, &prompts(2));
    assert_eq!(stats(&store, COUNTS), [4 * 8 - 16 + 2, 2, 16, 0]);
    assert!(
        tier.chunks().contains_key(&meta(16).key) && !tier.chunks().contains_key(&meta(15).key)
    );
    assert_eq!(tier.violations(), [""; 0]);
    store.check().unwrap();
}

#[test]
fn test_one_larger_chunk_makes_room_for_several() {
    let (tier, store) = open_full([FRAME, 4 * FRAME], 8);
    save_each(&store, &prompts(4));
    assert_eq!(stats(&store, COUNTS), [5, 4, 1, 0]);
    save_each(&store, &prompts(5)[4..]);
    assert_eq!(stats(&store, COUNTS), [5, 5, 2, 0]);
    assert_eq!(tier.violations(), [""; 0]);
}

#[test]
fn test_a_write_evicts_64_chunks_at_most() {
    let (_tier, store) = open_full([128 * FRAME, FRAME], 4);
    save_each(&store, &prompts(1));
    assert_eq!(stats(&store, COUNTS), [4 * 128 - 64, 0, 64, 1]);
    save_each(&store, &prompts(2)[1..]);
    assert_eq!(
        stats(&store, COUNTS),
        [4 * 128 - 128 + 1, 1, 128, 1],
        "the earlier 64 evictions must also be used"
    );
}

#[test]
fn test_a_write_evicts_one_chunk_whose_space_cannot_be_reused_at_most() {
    let (dir, files) = (tempfile::tempdir().unwrap(), FaultFiles::new(1));
    let config = disk_config(dir.path(), &[2 * FRAME as u64]);
    let (tier, _) = DiskTier::open(config.clone()).unwrap();
    let mut num = 0;
    while let Ok(slot) = tier.reserve(SizeClass(1)) {
        tier.write(slot, &meta(num), &PageBuffer::new(2 * FRAME)).unwrap();
        num += 1;
    }
    drop(tier);
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Punch]));
    let store = open_with(config, &files);
    save_each(&store, &prompts(9));
    let [writes, evictions, dropped, errors, trips] = stats(
        &store,
        ["disk_writes", "disk_evictions", "disk_dropped", "disk_write_errors", "disk_trips"],
    );
    assert!(writes + dropped == 9 && dropped > 0);
    assert_eq!((evictions, errors, trips), (dropped, 0, 0));
}

#[test]
fn test_a_chunk_of_a_different_size_does_not_stop_writes_if_its_space_cannot_be_reused() {
    let (dir, files) = (tempfile::tempdir().unwrap(), FaultFiles::new(1));
    let config = disk_config(dir.path(), &[2 * FRAME as u64]);
    let (tier, _) = DiskTier::open(config.clone()).unwrap();
    let fill = |class: u8, num: u32, first: u32| {
        let slots =
            (first..first + num).map_while(|nth| Some((nth, tier.reserve(SizeClass(class)).ok()?)));
        slots
            .map(|(nth, slot)| {
                tier.write(slot, &meta(nth), &PageBuffer::new((1 + usize::from(class)) * FRAME))
                    .unwrap();
            })
            .count()
    };
    assert_eq!(fill(1, 4, 0), 4);
    assert!(fill(0, 1000, 4) > 20);
    drop(tier);
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Punch]));
    let store = open_with(config, &files);
    save_each(&store, &prompts(40));
    let [writes, dropped] = stats(&store, ["disk_writes", "disk_dropped"]);
    assert!(writes + dropped == 40 && dropped <= 4, "{writes} written, {dropped} dropped");
}

/// The thread that creates the first slots is slow. Other prompts' chunks must wait for this
/// thread.
#[test]
fn test_no_chunk_is_dropped_while_the_files_grow_slowly() {
    let (dir, files) = (tempfile::tempdir().unwrap(), FaultFiles::new(1));
    files.inject(Rule::new(Fault::Hang).on(&[Call::Allocate]).times(1));
    let (store, prompts) = (open(dir.path(), &files), prompts(8));
    for prompt in &prompts {
        assert_eq!(save(&store, &arena_of(&store), prompt, 0..1), 1);
    }
    let begun = Instant::now();
    while files.num_hung() == 0 || begun.elapsed() < Duration::from_millis(500) {
        assert!(begun.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
    files.heal();
    assert!(store.flush(LONG));
    let stats = ["disk_used", "disk_dropped", "disk_evictions"];
    assert_eq!(stats.map(|name| stat(&store, name)), [8, 0, 0]);
}
