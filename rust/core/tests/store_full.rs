//! A file system without room that cannot allocate ahead (ext2, NFS before 4.2): the disk tier
//! keeps what fits and evicts for new chunks, as it does where `disk_size` is reached.
#![expect(clippy::unwrap_used, reason = "tests")]
mod store_common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::KeyChain;
use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, Store, StoreConfig};
use kvloft_core::tier::disk::{DiskConfig, DiskTier};
use kvloft_testing::faults::{Call, ENOSPC, EOPNOTSUPP, Fault, FaultFiles, Rule};
use store_common::{FRAME, arena_of, chain, config, save, stat, verify};

const LONG: Duration = Duration::from_secs(60);
const CAP_BYTES: u64 = 1 << 20;

fn open(dir: &Path, files: &FaultFiles) -> Store {
    let settings = DiskSettings {
        dir: dir.into(),
        cap_bytes: CAP_BYTES,
        num_threads: 2,
        description: String::new(),
    };
    let (dir, files) = (dir.to_owned(), files.clone());
    let opener = move || {
        let (cap_bytes, frame_bytes, dir) = (CAP_BYTES, FRAME as u64, dir.clone());
        let config = DiskConfig {
            dir,
            cap_bytes,
            frame_sizes: frame_bytes.into(),
            namespace: [7; 32],
            description: String::new(),
        };
        let (tier, found) = DiskTier::open_with_files(&config, &files)?;
        Ok((Arc::new(tier) as Arc<_>, found))
    };
    let start = Instant::now();
    let config = StoreConfig { disk: Some(settings), ..config(16, Eviction::Lru) };
    Store::with_tier(&config, Some(Box::new(opener)), Box::new(move || start.elapsed())).unwrap()
}

/// Prompts of one chunk.
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
    let (store, prompts) = (open(dir.path(), &files), prompts(400)); // more than there are slots
    save_each(&store, &prompts[..10]);
    files.inject(Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Write]).in_file("frames"));
    save_each(&store, &prompts[10..]);
    let stats = ["disk_used", "disk_dropped", "disk_write_errors", "disk_trips"];
    assert_eq!(
        stats.map(|name| stat(&store, name)),
        [10, 390, 0, 0],
        "chunks were evicted for nothing"
    );
    files.heal();
    store.clear();
    save_each(&store, &prompts[..2]);
    assert_eq!(stat(&store, "disk_used"), 2);
}
