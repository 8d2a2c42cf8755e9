//! Tests a disk tier whose directory is removed or moved while a store has it open: chunks that
//! were only on that disk become misses, and the store opens the directory again.
#![expect(clippy::unwrap_used, reason = "tests")]
mod store_common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::pool::Pool;
use kvloft_core::store::{DiskSettings, LeasedFrame, Store, StoreConfig, TierName};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::DiskRoot;
use kvloft_core::tier::disk::{DiskConfig, DiskTier};
use kvloft_core::{Error, ErrorKind, KeyChain};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;
use store_common::{
    FRAME, arena_of, chain, config, disk_settings, prompt_chain, save, stat, verify,
};

const LONG: Duration = Duration::from_secs(60);

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn save_all(store: &Store, chain: &KeyChain) -> u32 {
    save(store, &arena_of(store), chain, 0..chain.num_blocks())
}

fn prompt(first: u32, num_blocks: u32) -> KeyChain {
    chain(&(first..first + num_blocks).collect::<Vec<_>>())
}

fn host_and_stored(store: &Store, chain: &KeyChain) -> (u32, u32) {
    let found = store.lookup(chain);
    (found.host_units, found.stored_units)
}

/// In-memory disks: each open creates a new, empty disk. Only tests advance the clock.
#[derive(Default)]
struct Disks {
    opened: Mutex<Vec<Arc<MemoryTier>>>,
    fail_opens: AtomicBool,
    now_s: AtomicU64,
}

impl Disks {
    fn open_store(self: &Arc<Self>, num_frames: u32, num_threads: u32) -> Store {
        const NUM_SLOTS: u32 = 2000;
        let (disks, clock) = (Arc::clone(self), Arc::clone(self));
        let opener = move || {
            if disks.fail_opens.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Io, "failure requested by the test"));
            }
            let tier = MemoryTier::new(NUM_SLOTS);
            tier.is_removable.store(true, Ordering::SeqCst);
            disks.opened.lock().unwrap().push(Arc::clone(&tier));
            Ok((tier as Arc<dyn LocalTier>, Vec::new()))
        };
        let disk = Some(disk_settings(NUM_SLOTS.into(), num_threads));
        let config = StoreConfig { disk, ..config(num_frames, Eviction::Lru) };
        let now = move || Duration::from_secs(clock.now_s.load(Ordering::SeqCst));
        Store::with_tier(&config, None, Some(Box::new(opener)), Box::new(now)).unwrap()
    }

    fn nth(&self, nth: usize) -> Arc<MemoryTier> {
        Arc::clone(&self.opened.lock().unwrap()[nth])
    }

    fn num_opened(&self) -> usize {
        self.opened.lock().unwrap().len()
    }

    fn wait(&self, seconds: u64) {
        self.now_s.fetch_add(seconds, Ordering::SeqCst);
    }

    fn remove(&self, nth: usize) {
        self.nth(nth).is_removed.store(true, Ordering::SeqCst);
        self.wait(1);
    }
}

/// Saves a cold prompt and a hot prompt. The cold prompt ends up only on disk and has more chunks
/// than one slice drops. The hot prompt has 8 chunks and ends up in host memory and on disk.
fn cold_and_hot(store: &Store) -> (KeyChain, KeyChain) {
    let (cold, hot) = (prompt(0, 700), prompt(1000, 8));
    for end in (7..=700).step_by(7) {
        save(store, &arena_of(store), &cold, 0..end);
        assert!(store.flush(LONG));
    }
    for nth in 0..100 {
        save_all(store, &prompt(2000 + 8 * nth, 8)); // evicts the cold prompt from host memory
        assert!(store.flush(LONG));
    }
    assert_eq!(save_all(store, &hot), 8);
    assert!(store.flush(LONG));
    assert_eq!((host_and_stored(store, &cold), host_and_stored(store, &hot)), ((0, 700), (8, 8)));
    (cold, hot)
}

#[test]
fn test_chunks_of_a_removed_disk_are_misses_and_those_in_host_are_written_to_a_new_one() {
    let disks = Arc::<Disks>::default();
    let store = disks.open_store(720, 2);
    let (cold, hot) = cold_and_hot(&store);
    disks.remove(0);
    until("the removal is noticed", || stat(&store, "disk_removals") == 1);
    until("a new disk is open", || disks.num_opened() == 2);
    assert!(store.flush(LONG));
    assert_eq!((host_and_stored(&store, &cold), host_and_stored(&store, &hot)), ((0, 0), (8, 8)));
    let in_host = stat(&store, "frames_visible");
    assert_eq!((stat(&store, "disk_used"), disks.nth(1).chunks().len() as u64), (in_host, in_host));
    let events = store.take_events();
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(
        events[0].starts_with("disk tier: /memory was removed; dropping its 1508 chunks"),
        "{events:?}"
    );
    assert!(events[1].contains("disk tier: opened with"), "{events:?}");
    store.check().unwrap();
    assert_eq!((disks.nth(0).violations(), disks.nth(1).violations()), (Vec::new(), Vec::new()));
}

#[test]
fn test_no_disk_is_opened_while_a_job_of_the_removed_one_is_under_way() {
    let disks = Arc::<Disks>::default();
    let store = disks.open_store(720, 3);
    cold_and_hot(&store);
    let cold = prompt(0, 2); // two reads leave one of three threads free to check the directory
    let (old, arena) = (disks.nth(0), arena_of(&store));
    let gate = old.read_gate.lock().unwrap();
    let lease = store.acquire(&cold);
    until("chunks are read", || old.num_reads.load(Ordering::SeqCst) > 0);
    disks.remove(0);
    until("the removal is noticed", || stat(&store, "disk_removals") == 1);
    assert_eq!(lease.poll().pending_units, 0, "a lease is waiting for a removed disk");
    assert_eq!(store.lookup(&cold).stored_units, 0, "an unreadable chunk is offered");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(disks.num_opened(), 1);
    drop(gate);
    until("a new disk is open", || disks.num_opened() == 2);
    assert!(store.flush(LONG));
    let lease = store.acquire(&cold);
    assert!(lease.frames().iter().all(|leased| verify(&arena, leased.frame, leased.key).is_none()));
    assert_eq!(
        (stat(&store, "pins"), stat(&store, "reads_pending")),
        (lease.frames().len() as u64, 0)
    );
    store.check().unwrap();
    assert_eq!((old.violations(), disks.nth(1).violations()), (Vec::new(), Vec::new()));
}

#[test]
fn test_a_disk_that_is_removed_again_and_again_is_opened_once_a_minute() {
    let disks = Arc::<Disks>::default();
    let store = disks.open_store(8, 2);
    save_all(&store, &prompt(0, 4));
    assert!(store.flush(LONG));
    disks.remove(0);
    until("the tier is reopened", || disks.num_opened() == 2 && stat(&store, "disk_broken") == 0);
    disks.remove(1);
    until("the removal is noticed", || stat(&store, "disk_removals") == 2);
    disks.wait(50);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((disks.num_opened(), stat(&store, "disk_broken")), (2, 1));
    disks.wait(10);
    until("the tier is reopened", || disks.num_opened() == 3 && stat(&store, "disk_broken") == 0);
    assert!(store.flush(LONG));
    assert_eq!(disks.nth(2).chunks().len(), 4);
}

#[test]
fn test_a_removed_disk_that_cannot_be_opened_is_retried() {
    let disks = Arc::<Disks>::default();
    let store = disks.open_store(8, 2);
    save_all(&store, &prompt(0, 4));
    assert!(store.flush(LONG));
    disks.fail_opens.store(true, Ordering::SeqCst);
    disks.remove(0);
    let events = Mutex::new(String::new());
    until("a failure is logged", || {
        let mut events = events.lock().unwrap();
        *events += &store.take_events().join("; ");
        events.contains("failed to open; using host memory only and retrying")
    });
    assert_eq!(host_and_stored(&store, &prompt(0, 4)), (4, 4), "host memory must work");
    disks.fail_opens.store(false, Ordering::SeqCst);
    disks.wait(61);
    until("the tier is open", || stat(&store, "disk_broken") == 0);
    assert!(store.flush(LONG));
    assert_eq!(disks.nth(1).chunks().len(), 4);
}

#[test]
fn test_chunks_forgotten_on_a_removed_disk_do_not_return_with_its_directory() {
    let disks = Arc::<Disks>::default();
    let store = disks.open_store(8, 2);
    save_all(&store, &prompt(0, 4));
    assert!(store.flush(LONG));
    disks.nth(0).fail_frees.store(true, Ordering::SeqCst);
    store.discard(&prompt(0, 4).keys()[..1]);
    disks.remove(0);
    until("a new disk is open", || disks.num_opened() == 2 && stat(&store, "disk_broken") == 0);
    let new = disks.nth(1);
    assert!(store.flush(LONG));
    assert!(new.is_cleared.load(Ordering::SeqCst), "the directory's chunks were not freed");
    assert_eq!(stat(&store, "entries"), 0);
}

/// A real disk directory, and a pool of host memory.
struct Place {
    dir: tempfile::TempDir,
    pool: Arc<Pool>,
}

impl Place {
    fn new() -> Self {
        let pool =
            Pool::create(DiskRoot::shared(), 64 * FRAME as u64, FRAME as u64, || {}).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), pool }
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn config(&self, namespace: u8) -> StoreConfig {
        let (dir, cap_bytes) = (self.disk(), 1 << 20);
        let disk = DiskSettings { dir, cap_bytes, num_threads: 2, description: String::new() };
        StoreConfig { namespace: [namespace; 32], disk: Some(disk), ..config(8, Eviction::Lru) }
    }

    fn open(&self) -> Store {
        Store::open(&self.config(7)).unwrap()
    }

    /// Opens a store with `cold` only on disk and `hot` also in host memory.
    fn cold_and_hot(&self) -> (Store, KeyChain, KeyChain) {
        let (store, cold, hot) = (self.open(), prompt(0, 8), prompt(100, 8));
        for prompt in [&cold, &hot] {
            assert_eq!(save_all(&store, prompt), 8);
            assert!(store.flush(LONG));
        }
        assert_eq!(
            (host_and_stored(&store, &cold), host_and_stored(&store, &hot)),
            ((0, 8), (8, 8))
        );
        (store, cold, hot)
    }

    /// Removes the directory with `remove`. Checks that chunks that were only on disk miss, and
    /// that chunks in host memory survive a restart.
    fn check_removal(&self, named: &Path, remove: impl Fn()) {
        let (store, cold, hot) = self.cold_and_hot();
        remove();
        until("the removal is noticed", || stat(&store, "disk_removals") == 1);
        until("the directory is open again", || stat(&store, "disk_broken") == 0);
        assert_eq!(
            (host_and_stored(&store, &cold), host_and_stored(&store, &hot)),
            ((0, 0), (8, 8))
        );
        assert!(store.flush(LONG));
        let events = store.take_events().join("\n");
        assert!(
            events.contains(&format!("disk tier: {} was removed;", named.display())),
            "{events}"
        );
        store.check().unwrap();
        drop(store);
        let store = self.open();
        assert_eq!(
            (host_and_stored(&store, &cold), host_and_stored(&store, &hot)),
            ((0, 0), (0, 8))
        );
        let lease = store.acquire(&hot);
        until("the chunks are read", || lease.poll().pending_units == 0);
        assert_eq!(lease.frames().len(), 8);
        let arena = arena_of(&store);
        assert!(
            lease.frames().iter().all(|leased| verify(&arena, leased.frame, leased.key).is_none())
        );
    }
}

fn namespace_in(dir: &Path) -> PathBuf {
    let mut all = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    all.find(|path| path.is_dir()).unwrap()
}

#[test]
fn test_a_removed_disk_path_is_made_again() {
    let place = Place::new();
    place.check_removal(&place.disk(), || fs::remove_dir_all(place.disk()).unwrap());
}

#[test]
fn test_a_moved_disk_path_is_made_again_and_the_moved_one_is_as_it_was() {
    let place = Place::new();
    let moved = place.dir.path().join("moved");
    place.check_removal(&place.disk(), || fs::rename(place.disk(), &moved).unwrap());
    fs::remove_dir_all(place.disk()).unwrap();
    fs::rename(&moved, place.disk()).unwrap();
    let store = place.open();
    assert_eq!(
        (host_and_stored(&store, &prompt(0, 8)), host_and_stored(&store, &prompt(100, 8))),
        ((0, 8), (0, 8))
    );
}

#[test]
fn test_a_removed_namespace_is_made_again() {
    let place = Place::new();
    place.check_removal(&place.disk().join("0707070707070707"), || {
        fs::remove_dir_all(namespace_in(&place.disk())).unwrap();
    });
}

/// Another process might recreate the directory before the next check.
#[test]
fn test_a_removed_namespace_whose_files_are_there_again_is_noticed() {
    let place = Place::new();
    let namespace = place.disk().join("0707070707070707");
    place.check_removal(&namespace, || {
        fs::rename(namespace_in(&place.disk()), place.dir.path().join("moved")).unwrap();
        fs::create_dir(&namespace).unwrap();
        for kind in ["frames", "index"] {
            fs::write(namespace.join(format!("{kind}-{FRAME}.dat")), "").unwrap();
        }
        fs::remove_dir_all(place.dir.path().join("moved")).unwrap();
    });
}

#[test]
fn test_one_removed_file_is_enough() {
    for kind in ["frames", "index"] {
        let place = Place::new();
        let namespace = place.disk().join("0707070707070707");
        place.check_removal(&namespace, || {
            let name = format!("{kind}-{FRAME}.dat");
            fs::remove_file(namespace_in(&place.disk()).join(name)).unwrap();
        });
    }
}

#[test]
fn test_all_stores_of_a_removed_directory_open_it_again() {
    let place = Place::new();
    let stores = [1, 2, 3]
        .map(|namespace| Store::open_in(&place.config(namespace), &place.pool, None).unwrap());
    for store in &stores {
        assert_eq!(save_all(store, &prompt(0, 4)), 4);
        assert!(store.flush(LONG));
    }
    fs::remove_dir_all(place.disk()).unwrap();
    for store in &stores {
        until("the removal is noticed", || stat(store, "disk_removals") == 1);
        until("the directory is open again", || stat(store, "disk_broken") == 0);
        assert!(store.flush(LONG));
        assert_eq!(stat(store, "disk_used"), 4);
    }
    assert_eq!(fs::read_dir(place.disk()).unwrap().count(), 4, "three namespaces and the lock");
}

/// Saves and loads prompts that share prefixes, and checks each loaded frame.
fn work(store: &Store, mut random: u64, stop: &AtomicBool) -> u64 {
    let (arena, mut num_loaded) = (arena_of(store), 0);
    while !stop.load(Ordering::SeqCst) {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let prompt = prompt_chain(usize::try_from(random >> 58).unwrap());
        if random >> 40 & 1 == 0 {
            save_all(store, &prompt);
            continue;
        }
        let (lease, begun) = (store.acquire(&prompt), Instant::now());
        while lease.poll().pending_units > 0 && begun.elapsed() < LONG {
            std::thread::yield_now();
        }
        let frames = lease.frames();
        let is_right = |frame: &LeasedFrame| verify(&arena, frame.frame, frame.key).is_none();
        assert!(frames.iter().all(is_right), "wrong bytes");
        num_loaded += frames.iter().filter(|frame| frame.tier == TierName::Disk).count() as u64;
    }
    num_loaded
}

/// The store checks the directory every 2 ms, because its clock runs 500 times as fast as real
/// time.
#[test]
fn test_no_wrong_chunk_is_loaded_while_a_directory_is_removed_repeatedly() {
    let place = Place::new();
    let (dir, start) = (place.disk(), Instant::now());
    let opener = move || {
        let (dir, cap_bytes, frame_bytes) = (dir.clone(), 1 << 20, FRAME as u64);
        let config = DiskConfig {
            dir,
            cap_bytes,
            frame_sizes: frame_bytes.into(),
            namespace: [7; 32],
            description: String::new(),
        };
        let (tier, found) = DiskTier::open(config)?;
        Ok((Arc::new(tier) as Arc<dyn LocalTier>, found))
    };
    let store = Store::with_tier(
        &place.config(7),
        None,
        Some(Box::new(opener)),
        Box::new(move || start.elapsed() * 500),
    );
    let (store, stop) = (store.unwrap(), AtomicBool::new(false));
    let num_loaded: u64 = std::thread::scope(|scope| {
        let workers = [1, 2, 3].map(|seed| {
            let (store, stop) = (&store, &stop);
            scope.spawn(move || work(store, seed, stop))
        });
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(150));
            let _ = fs::remove_dir_all(place.disk()); // the store may be recreating it
        }
        stop.store(true, Ordering::SeqCst);
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert!(num_loaded > 0 && stat(&store, "disk_removals") > 2, "nothing was loaded or removed");
    until("the directory is gone", || {
        let _ = fs::remove_dir_all(place.disk());
        !place.disk().exists()
    });
    until("the tier is open again", || place.disk().exists() && stat(&store, "disk_broken") == 0);
    until("everything is written", || store.flush(LONG));
    assert_eq!(save_all(&store, &prompt(100, 8)), 8);
    until("everything is written", || store.flush(LONG));
    store.check().unwrap();
    for name in ["pins", "read_leases", "write_leases", "reads_pending", "disk_verify_failures"] {
        assert_eq!(stat(&store, name), 0, "{name}");
    }
    drop(store);
    let store = place.open();
    assert_eq!(host_and_stored(&store, &prompt(100, 8)), (0, 8));
}
