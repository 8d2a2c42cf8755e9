//! Storage under fire: runs the real store and disk tier on files with injected faults, and checks
//! loads against a record of acknowledged chunks.
//!
//! Stores with different size limits open the same directory one after another: after a clean
//! close, after faults, and while calls hang. `KV_FIRE_SECONDS` sets the duration (default 10), and
//! `KV_FIRE_SEED` seeds the random choices. The test prints its counts as a line of JSON.
#![expect(clippy::unwrap_used, reason = "tests")]

mod counting;
mod recorder;
mod spells;
mod worker;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use counting::{Counting, Reads};
use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, Store, StoreConfig};
use kvloft_core::tier::disk::{DiskConfig, DiskTier};
use recorder::{Dice, FRAME, Recorder};
use spells::{Disk, damage_at_rest};
use worker::{Shared, Worker, until};

/// The store's clock runs this many times faster than real time, so that breakers open and close,
/// back-offs end and hangs are detected within milliseconds.
const HASTE: u32 = 500;
const WORKERS: u64 = 4;
/// A run is considered hung if it completes no operation for this long.
const HANGS: Duration = Duration::from_secs(120);

struct Fire {
    disk: Arc<Disk>,
    recorder: Recorder,
    reads: Arc<Reads>,
    seed: u64,
    pulse: Arc<AtomicU64>,
    counts: BTreeMap<&'static str, u64>,
    bytes_compared: u64,
    longest_close: Duration,
    /// Closed stores whose threads may still be hung in a call.
    hung: Vec<Store>,
}

/// How a store is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The faults end first, and everything is written to disk.
    Clean,
    /// The store closes during faults, which then end.
    UnderFire,
    /// The next store also opens during faults, possibly while calls of this store hang.
    Overlap,
}

impl Fire {
    fn new(dir: &Path, seed: u64) -> Self {
        Self {
            disk: Arc::new(Disk::new(dir, seed)),
            recorder: Recorder::new(),
            reads: Arc::default(),
            seed,
            pulse: Arc::default(),
            counts: BTreeMap::new(),
            bytes_compared: 0,
            longest_close: Duration::ZERO,
            hung: Vec::new(),
        }
    }

    fn count(&mut self, what: &'static str, num: u64) {
        *self.counts.entry(what).or_default() += num;
    }

    fn open(&self, dice: &mut Dice) -> (Store, u64) {
        let cap_bytes = (64 << 10) + dice.pick(&[300_u64, 1500, 3000]) * (FRAME as u64 + 160);
        let config = StoreConfig {
            frame_sizes: (FRAME as u64).into(),
            host_bytes: dice.pick(&[40, 100, 200]) * FRAME as u64,
            eviction: dice.pick(&Eviction::ALL),
            available_bytes: None,
            namespace: [7; 32],
            now_s: 0,
            limits: kvloft_core::store::TenantLimits::default(),
            disk: Some(DiskSettings {
                dir: self.disk.dir.clone(),
                cap_bytes,
                num_threads: u32::try_from(1 + dice.below(4)).unwrap(),
                description: String::new(),
            }),
        };
        let is_open = self.disk.expect_cap(cap_bytes);
        let (files, reads, place) =
            (self.disk.files.clone(), Arc::clone(&self.reads), self.disk.dir.clone());
        let opener = move || {
            let config = DiskConfig {
                dir: place.clone(),
                cap_bytes,
                frame_sizes: (FRAME as u64).into(),
                namespace: [7; 32],
                description: String::new(),
            };
            let (tier, found) =
                DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files)?;
            is_open.store(true, Ordering::SeqCst);
            Ok((Arc::new(Counting { tier, reads: Arc::clone(&reads) }) as Arc<_>, found))
        };
        let start = Instant::now();
        let clock = Box::new(move || start.elapsed() * HASTE);
        (Store::with_tier(&config, None, Some(Box::new(opener)), clock).unwrap(), cap_bytes)
    }

    /// Opens a store, runs the workers and closes the store.
    fn live(&mut self, dice: &mut Dice, most: Duration) {
        let (store, cap_bytes) = self.open(dice);
        self.disk.end_peace();
        let end = dice.pick(&[End::Clean, End::UnderFire, End::UnderFire, End::Overlap]);
        let stop = AtomicBool::new(false);
        let time = Duration::from_millis(50 + dice.roll() % 1500).min(most);
        let shared = Shared {
            store: &store,
            recorder: &self.recorder,
            stop: &stop,
            pulse: &self.pulse,
            cap_bytes,
        };
        let mut workers: Vec<_> = (0..WORKERS).map(|_| Worker::new(&shared, dice.roll())).collect();
        let mut loans = Vec::new();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                workers.iter_mut().map(|worker| scope.spawn(|| worker.work())).collect();
            std::thread::sleep(time);
            stop.store(true, Ordering::SeqCst);
            loans = threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("a worker found no error"))
                .collect();
        });
        if end == End::Clean {
            self.disk.calm();
            until("a healed disk settles", || store.flush(Duration::from_secs(60)));
        }
        let wait = Duration::from_millis(dice.roll() % 40);
        let start = Instant::now();
        store.close(wait);
        let longest_close = self.longest_close.max(start.elapsed().saturating_sub(wait));
        // Leases outlive the store, and their frames do not change.
        for loan in &mut loans {
            workers[0].check(loan);
        }
        drop(loans);
        let finished: Vec<_> =
            workers.into_iter().map(|worker| (worker.counts, worker.bytes_compared)).collect();
        self.longest_close = longest_close;
        for (counts, bytes) in finished {
            self.bytes_compared += bytes;
            for (what, num) in counts {
                self.count(what, num);
            }
        }
        self.count("close", 1);
        self.count("open", 1);
        self.hung.push(store);
        self.bury(end, dice);
    }

    /// Checks a closed store: nothing is pinned or reserved, and the size limit was respected.
    fn bury(&mut self, end: End, dice: &mut Dice) {
        if end != End::Clean || self.disk.has_lied.load(Ordering::SeqCst) {
            self.recorder.remember();
        }
        if end == End::Overlap && self.hung.len() < 3 {
            self.count("ends that overlap", 1);
            return;
        }
        self.disk.calm();
        for store in std::mem::take(&mut self.hung) {
            let stat =
                |name: &str| store.stats().into_iter().find(|(known, _)| *known == name).unwrap().1;
            for name in ["frames_reserved", "pins", "read_leases", "write_leases", "reads_pending"]
            {
                until(name, || stat(name) == 0);
            }
            store.check().unwrap();
        }
        assert_eq!(self.disk.measure(), 0, "the directory exceeded its size limit");
        self.change_disk(dice);
    }

    /// Damages the disk, replaces it or leaves it unchanged, while no store has its files open.
    fn change_disk(&mut self, dice: &mut Dice) {
        let is_honest = self.disk.is_honest.load(Ordering::SeqCst);
        let what = dice.below(100);
        if what >= 50 || !DirIsFree::wait(&self.disk.dir) {
            return;
        }
        if what < 20 {
            // This is a new disk, so earlier chunks must not be found.
            std::fs::remove_dir_all(&self.disk.dir).unwrap();
            self.recorder.forget(&self.recorder.all());
            self.disk.has_lied.store(false, Ordering::SeqCst);
            self.disk.is_honest.store(dice.in_100(50), Ordering::SeqCst);
        } else if !is_honest {
            let num_flips = damage_at_rest(&self.disk.dir, dice);
            self.count("bits flipped at rest", num_flips);
            self.disk.has_lied.store(true, Ordering::SeqCst);
            self.recorder.remember();
        }
    }

    fn report(&self, lives: u64, seconds: f64) -> String {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let is_operation = |what: &str| !what.contains(' ');
        let operations: u64 =
            self.counts.iter().filter(|(what, _)| is_operation(what)).map(|(_, num)| num).sum();
        let quoted = |counts: &BTreeMap<&str, u64>| {
            counts
                .iter()
                .map(|(what, num)| format!("\"{what}\": {num}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        format!(
            "{{\"seed\": {}, \"seconds\": {seconds:.1}, \"lives\": {lives}, \"operations\": {operations}, \"chunk_reads\": {}, \
             \"faulted_chunk_reads\": {}, \"faulted_and_good\": {}, \"reads_refused\": {}, \"reads_corrupt\": {}, \
             \"chunk_writes\": {}, \"bytes_compared\": {}, \"wrong_bytes\": 0, \"bytes_above_cap\": {}, \
             \"sizes_measured\": {}, \"longest_close_ms\": {}, \"faults\": {{{}}}, \"counts\": {{{}}}}}",
            self.seed,
            load(&self.reads.all),
            load(&self.reads.faulted),
            load(&self.reads.faulted_good),
            load(&self.reads.refused),
            load(&self.reads.corrupt),
            load(&self.reads.writes),
            self.bytes_compared,
            self.disk.measure(),
            load(&self.disk.num_measured),
            self.longest_close.as_millis(),
            quoted(&self.disk.files.faults_by_kind()),
            quoted(&self.counts),
        )
    }
}

/// Waits until the directory has no owner: the last call inside a closed tier releases the
/// directory.
struct DirIsFree;

impl DirIsFree {
    fn wait(dir: &Path) -> bool {
        let Ok(file) = std::fs::File::open(dir) else { return false };
        let deadline = Instant::now() + Duration::from_secs(60);
        while file.try_lock().is_err() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

fn env(name: &str, default: u64) -> u64 {
    // The value is read from the environment, because tests take no arguments.
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// Aborts the process if there is no progress, so that a hang fails the test.
fn watch_pulse(pulse: &AtomicU64, over: &AtomicBool, seed: u64) {
    let (mut last, mut since) = (0, Instant::now());
    while !over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(50));
        let now = pulse.load(Ordering::SeqCst);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if since.elapsed() > HANGS {
            let _ = writeln!(std::io::stderr(), "HANG: seed {seed}, {now} operations");
            std::process::abort();
        }
    }
}

#[test]
fn acknowledged_chunks_are_hit_correctly_or_missed() {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    let (seconds, seed) = (env("KV_FIRE_SECONDS", 10), env("KV_FIRE_SEED", 14));
    // `writeln!` bypasses the test harness, which captures `eprintln!`. The seed is printed first,
    // because a failed run prints no final report.
    writeln!(std::io::stderr(), "fire: {seconds} s, seed {seed}").unwrap();
    // The store survives a panic in the tier, so panics must be counted here.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        print(info);
    }));
    let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut fire = Fire::new(&place.path().join("disk"), seed);
    let (disk, pulse, over) =
        (Arc::clone(&fire.disk), Arc::clone(&fire.pulse), Arc::new(AtomicBool::new(false)));
    std::thread::spawn(move || disk.burn(Dice(seed ^ 0xf1fe)));
    let is_over = Arc::clone(&over);
    std::thread::spawn(move || watch_pulse(&pulse, &is_over, seed));
    let (start, mut dice, mut lives) = (Instant::now(), Dice(seed), 0);
    let length = Duration::from_secs(seconds);
    while start.elapsed() < length {
        fire.live(&mut dice, length.saturating_sub(start.elapsed()));
        lives += 1;
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "something panicked");
    }
    fire.bury(End::UnderFire, &mut dice);
    fire.disk.end();
    over.store(true, Ordering::SeqCst);
    writeln!(std::io::stderr(), "{}", fire.report(lives, start.elapsed().as_secs_f64())).unwrap();
    let reads = fire.reads.faulted.load(Ordering::SeqCst);
    assert!(reads > 0 && fire.bytes_compared > 0, "there were no faults");
}
