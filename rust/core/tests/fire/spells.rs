//! Fault periods. One thread starts and ends the periods for all stores, and checks the directory's
//! size.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvloft_testing::faults::{CHANGES, Call, EIO, ENOSPC, EROFS, Fault, FaultFiles, Rule, du};

use super::recorder::{Dice, FRAME};

const READS: &[Call] = &[Call::Read];
const WRITES: &[Call] = &[Call::Write];
const BOTH: &[Call] = &[Call::Read, Call::Write];
const ALL: &[Call] = &[Call::Open, Call::Read, Call::Write, Call::SetLen, Call::Allocate];

/// The failing disk and its size limit.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) files: FaultFiles,
    pub(crate) dir: PathBuf,
    /// If true, the thread injects no faults.
    peace: AtomicBool,
    is_calm: AtomicBool,
    over: AtomicBool,
    /// True if the disk may have damaged bytes without reporting an error.
    pub(crate) has_lied: AtomicBool,
    /// True if the disk may fail calls and hang, but never returns wrong bytes.
    pub(crate) is_honest: AtomicBool,
    limit: Mutex<Limit>,
    most_over_cap: AtomicU64,
    pub(crate) num_measured: AtomicU64,
}

#[derive(Debug, Default)]
struct Limit {
    bytes: u64,
    /// The size limit of the store that is opening the directory, and a flag that is set once its
    /// disk tier is open.
    next: Option<(u64, Arc<AtomicBool>)>,
}

impl Disk {
    pub(crate) fn new(dir: &Path, seed: u64) -> Self {
        Self {
            files: FaultFiles::new(seed),
            dir: dir.to_owned(),
            peace: AtomicBool::new(true),
            is_calm: AtomicBool::new(false),
            over: AtomicBool::new(false),
            has_lied: AtomicBool::new(false),
            is_honest: AtomicBool::new(true),
            limit: Mutex::default(),
            most_over_cap: AtomicU64::new(0),
            num_measured: AtomicU64::new(0),
        }
    }

    /// Announces that a store is opening. Returns the flag to set once its tier is open.
    pub(crate) fn expect_cap(&self, cap_bytes: u64) -> Arc<AtomicBool> {
        let opened = Arc::new(AtomicBool::new(false));
        let mut limit = self.limit.lock().unwrap();
        limit.bytes = limit.bytes.max(cap_bytes);
        limit.next = Some((cap_bytes, Arc::clone(&opened)));
        opened
    }

    /// Compares the directory's size with the limit and returns the largest excess so far.
    pub(crate) fn measure(&self) -> u64 {
        let mut limit = self.limit.lock().unwrap();
        if let Some((cap_bytes, _)) =
            limit.next.as_ref().filter(|(_, opened)| opened.load(Ordering::SeqCst))
        {
            limit.bytes = *cap_bytes;
        }
        let above = du(&self.dir).saturating_sub(limit.bytes);
        drop(limit);
        self.num_measured.fetch_add(1, Ordering::Relaxed);
        self.most_over_cap.fetch_max(above, Ordering::SeqCst).max(above)
    }

    /// Resumes the faults.
    pub(crate) fn end_peace(&self) {
        self.is_calm.store(false, Ordering::SeqCst);
        self.peace.store(false, Ordering::SeqCst);
    }

    /// Ends the faults. Returns once nothing hangs and no fault can occur.
    pub(crate) fn calm(&self) {
        self.peace.store(true, Ordering::SeqCst);
        while !self.is_calm.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// Runs the thread that injects faults.
    pub(crate) fn burn(&self, mut dice: Dice) {
        while !self.over.load(Ordering::SeqCst) {
            if self.peace.load(Ordering::SeqCst) {
                self.files.heal();
                self.is_calm.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(500));
                continue;
            }
            for _ in 0..=dice.below(2) {
                self.files.inject(self.spell(&mut dice));
            }
            // Shorten every read that no earlier rule matches.
            if dice.in_100(80) {
                self.files.inject(Rule::new(Fault::Short(1024 + dice.below(3000))).on(READS));
            }
            self.wait(Duration::from_micros(500 + dice.roll() % 30_000));
            self.files.heal();
            if dice.in_100(10) {
                self.wait(Duration::from_micros(dice.roll() % 5_000));
            }
        }
        self.files.heal();
    }

    fn wait(&self, time: Duration) {
        let end = std::time::Instant::now() + time;
        while std::time::Instant::now() < end && !self.peace.load(Ordering::SeqCst) {
            self.measure();
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn spell(&self, dice: &mut Dice) -> Rule {
        let at = dice.below(FRAME_BITS);
        let rare = u8::try_from(1 + dice.below(8)).unwrap();
        let often = u8::try_from(64 + dice.below(190)).unwrap();
        let mut kind = dice.below(20);
        if LIES.contains(&kind) {
            if self.is_honest.load(Ordering::SeqCst) {
                kind -= LIES.start;
            } else {
                self.has_lied.store(true, Ordering::SeqCst);
            }
        }
        match kind {
            0 => Rule::new(Fault::Refuse(EIO)).on(WRITES).chance(often),
            1 => Rule::new(Fault::Refuse(ENOSPC)).on(CHANGES).chance(often),
            2 => Rule::new(Fault::Refuse(EROFS)).on(CHANGES),
            3 => Rule::new(Fault::Refuse(EIO)).on(READS).chance(rare * 4),
            4 => Rule::new(Fault::Refuse(EIO)).on(BOTH).chance(rare * 16),
            5 => Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").chance(often),
            6 => Rule::new(Fault::Refuse(EIO)).on(ALL).chance(rare * 8),
            7 => Rule::new(Fault::Torn(at / 8, Some(EIO))).on(WRITES).chance(often),
            8 => Rule::new(Fault::Torn(at / 8, None)).on(WRITES).chance(rare * 4),
            9 => {
                Rule::new(Fault::Torn(at % 128, None)).on(WRITES).in_file("index").chance(rare * 4)
            }
            10 => Rule::new(Fault::Lost).on(WRITES).chance(rare * 4),
            11 => Rule::new(Fault::Lost).on(WRITES).in_file("index").chance(rare * 8),
            12 => Rule::new(Fault::Lost).on(WRITES).in_file("frames").chance(rare * 8),
            13 => Rule::new(Fault::Flip(at)).on(WRITES).chance(rare * 4),
            14 | 15 => Rule::new(Fault::Flip(at)).on(READS).chance(rare),
            16 => Rule::new(Fault::Hang).on(READS).chance(rare).times(4),
            17 => Rule::new(Fault::Hang).on(ALL).chance(rare * 4).times(8),
            18 => Rule::new(Fault::Short(1 + at / 8)).on(BOTH),
            _ => Rule::new(Fault::Short(16 + at / 64)).on(WRITES),
        }
    }
}

const FRAME_BITS: usize = 4096 * 8;
/// Kinds of faults in which a call succeeds although a write is lost or incomplete, or a bit is
/// flipped.
const LIES: std::ops::Range<usize> = 8..16;

/// Flips bits in the files while no tier is open.
pub(crate) fn damage_at_rest(dir: &Path, dice: &mut Dice) -> u64 {
    let files = std::fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_dir());
    let mut num_flips = 0;
    for namespace in files {
        for kind in ["frames", "index"] {
            let path = namespace.path().join(format!("{kind}-{FRAME}.dat"));
            let Ok(mut bytes) = std::fs::read(&path) else { continue };
            for _ in 0..dice.below(40).min(bytes.len()) {
                let at = dice.below(bytes.len());
                bytes[at] ^= 1 << dice.below(8);
                num_flips += 1;
            }
            // Overwrite bytes in place, so that the file keeps its blocks.
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        }
    }
    num_flips
}
