//! Tests a disk tier that is slow to open: the store works before the tier opens, and uses the tier
//! afterwards.
#![expect(clippy::unwrap_used, reason = "tests")]
mod store_common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::pool::Pool;
use kvloft_core::store::{Opener, Store, StoreConfig};
use kvloft_core::tier::disk::DiskRoot;
use kvloft_core::{Error, ErrorKind, Result};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;
use store_common::{FRAME, arena_of, chain, config, disk_settings, save};

const LONG: Duration = Duration::from_secs(60);
type Answer = Result<()>;

/// A disk that opens only when a test sends the result.
struct Slow {
    tier: Arc<MemoryTier>,
    num_tries: Arc<AtomicU64>,
    answers: Sender<Answer>,
    heard: Arc<Mutex<Receiver<Answer>>>,
}

impl Slow {
    fn new() -> Self {
        let (answers, heard) = channel();
        let heard = Arc::new(Mutex::new(heard));
        Self { tier: MemoryTier::new(8), num_tries: Arc::default(), answers, heard }
    }

    fn open(&self) -> Result<Store> {
        let (tier, heard, tries) =
            (Arc::clone(&self.tier), Arc::clone(&self.heard), Arc::clone(&self.num_tries));
        let opener: Opener = Box::new(move || {
            tries.fetch_add(1, Ordering::SeqCst);
            heard
                .lock()
                .unwrap()
                .recv_timeout(LONG)
                .unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "no response")))?;
            Ok((Arc::clone(&tier) as Arc<_>, Vec::new()))
        });
        let pool = Pool::create(DiskRoot::shared(), 8 * FRAME as u64, FRAME as u64, || {}).unwrap();
        let config = StoreConfig { disk: Some(disk_settings(8, 2)), ..config(8, Eviction::Lru) };
        let start = Instant::now();
        let clock = Box::new(move || start.elapsed());
        Store::with_tier(&config, Some((&pool, None)), Some(opener), clock)
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn told(store: &Store) -> String {
    store.take_events().join("; ")
}

#[test]
fn a_store_works_while_its_disk_opens() {
    let disk = Slow::new();
    let store = disk.open().unwrap(); // does not wait for the disk
    assert!(told(&store).contains("not open after 1 s; using host memory only"));
    assert_eq!(save(&store, &arena_of(&store), &chain(&[1, 2, 3]), 0..3), 3);
    assert_eq!(store.lookup(&chain(&[1, 2, 3])).stored_units, 3);
    assert!(disk.tier.chunks().is_empty());
    disk.answers.send(Ok(())).unwrap();
    assert!(store.flush(LONG));
    assert_eq!(disk.tier.chunks().len(), 3);
    assert_eq!(disk.num_tries.load(Ordering::SeqCst), 1, "the first attempt was not discarded");
    assert_eq!(told(&store), "disk tier: opened with 0 chunks");
    store.check().unwrap();
}

#[test]
fn a_failed_late_open_is_logged_and_retried() {
    let disk = Slow::new();
    let store = disk.open().unwrap();
    told(&store);
    disk.answers.send(Err(Error::new(ErrorKind::Busy, "in use elsewhere"))).unwrap();
    let mut all = String::new();
    until("the failure is logged", || {
        all += &told(&store);
        all.contains("failed to open; using host memory only and retrying: in use elsewhere")
    });
    disk.answers.send(Ok(())).unwrap();
    save(&store, &arena_of(&store), &chain(&[1]), 0..1);
    until("it is open", || store.flush(LONG));
    assert_eq!(told(&store).matches("disk tier: opened with").count(), 1);
    assert_eq!((disk.tier.chunks().len(), disk.num_tries.load(Ordering::SeqCst)), (1, 2));
}

#[test]
fn a_store_closes_while_its_disk_opens() {
    let disk = Slow::new();
    let store = disk.open().unwrap();
    store.close(Duration::ZERO);
    drop(store);
    disk.answers.send(Ok(())).unwrap();
    until("the disk is released", || Arc::strong_count(&disk.tier) == 1);
}

#[test]
fn a_setting_that_can_never_work_is_an_error_at_once_and_another_failure_is_not() {
    let disk = Slow::new();
    disk.answers.send(Err(Error::new(ErrorKind::InvalidConfig, "no directory"))).unwrap();
    assert_eq!(disk.open().unwrap_err().kind(), ErrorKind::InvalidConfig);
    disk.answers.send(Err(Error::new(ErrorKind::Io, "I/O error"))).unwrap();
    let store = disk.open().unwrap();
    assert!(told(&store).contains("retrying: I/O error"));
    disk.answers.send(Ok(())).unwrap(); // for the next attempt, or for the end of the test
}
