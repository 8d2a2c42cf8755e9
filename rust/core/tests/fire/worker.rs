//! A caller of the store. Runs random operations and checks each result against the recorder.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvloft_core::KeyChain;
use kvloft_core::store::{LeasedFrame, Prefix, ReadLease, Store, WriteLease};
use kvloft_testing::one_prefix::StoreExt;

use super::recorder::{Dice, FRAME, Recorder, write_bytes};

/// State that all workers of one store share.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) store: &'a Store,
    pub(crate) recorder: &'a Recorder,
    pub(crate) stop: &'a AtomicBool,
    /// Incremented by every operation.
    pub(crate) pulse: &'a AtomicU64,
    pub(crate) cap_bytes: u64,
}

/// A lease, and the lowest version that it may return for each chunk.
#[derive(Debug)]
pub(crate) struct Loan<'a> {
    chain: &'a KeyChain,
    lease: ReadLease,
    floors: Vec<u64>,
    /// Frames that were checked before and must not change, with their versions.
    seen: Vec<(LeasedFrame, u64)>,
}

#[derive(Debug)]
pub(crate) struct Worker<'a> {
    shared: &'a Shared<'a>,
    arena: File,
    dice: Dice,
    loans: Vec<Loan<'a>>,
    saves: Vec<(WriteLease, usize, u64)>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) bytes_compared: u64,
}

const MAX_LOANS: usize = 3;

impl<'a> Worker<'a> {
    pub(crate) fn new(shared: &'a Shared<'a>, seed: u64) -> Self {
        // Read the arena's file, not a mapping, so that checks are independent of the store's
        // access.
        let arena =
            File::options().read(true).write(true).open(&shared.store.arena().path).unwrap();
        let dice = Dice(seed);
        Self {
            shared,
            arena,
            dice,
            loans: Vec::new(),
            saves: Vec::new(),
            counts: BTreeMap::new(),
            bytes_compared: 0,
        }
    }

    /// Runs until it is stopped, and returns its open leases. Drops its reservations without
    /// filling their frames.
    pub(crate) fn work(&mut self) -> Vec<Loan<'a>> {
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.step();
        }
        self.abort(usize::MAX);
        std::mem::take(&mut self.loans)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
        self.shared.pulse.fetch_add(1, Ordering::Relaxed);
    }

    fn prompt(&mut self) -> &'a KeyChain {
        // The first 16 prompts are used more often than the others.
        let end = if self.dice.in_100(5) { 16 } else { self.shared.recorder.prompts.len() };
        &self.shared.recorder.prompts[self.dice.below(end)]
    }

    fn step(&mut self) {
        match self.dice.below(1000) {
            0..400 if self.loans.len() < MAX_LOANS => self.acquire(),
            0..800 => self.look_at_loan(),
            800..840 => self.save(),
            840..880 => {
                let num = self.dice.below(40);
                self.commit(num);
            }
            880..890 => {
                let num = self.dice.below(8);
                self.abort(num);
            }
            890..970 => self.lookup(),
            970..972 => self.discard(),
            972..990 => self.stats(),
            990..995 => {
                self.shared.store.flush(Duration::from_micros(self.dice.roll() % 2000));
                self.count("flush");
            }
            995..999 => {
                self.shared.store.take_events();
                self.count("take_events");
            }
            _ if self.dice.in_100(1) => {
                let all = self.shared.recorder.all();
                self.shared.store.clear();
                self.shared.recorder.forget(&all);
                self.count("clear");
            }
            _ => {}
        }
    }

    fn acquire(&mut self) {
        let chain = self.prompt();
        let floors = self.shared.recorder.floors(chain);
        let lease = if self.dice.in_100(20) {
            let keys = &chain.keys()[..self.dice.below(8).min(chain.keys().len())];
            self.shared.store.acquire(Prefix::new(chain.root(), keys))
        } else {
            self.shared.store.acquire(chain)
        };
        self.count("acquire");
        self.loans.push(Loan { chain, lease, floors, seen: Vec::new() });
    }

    fn look_at_loan(&mut self) {
        if self.loans.is_empty() {
            return;
        }
        let at = self.dice.below(self.loans.len());
        let progress = self.loans[at].lease.poll();
        self.count("poll");
        let is_full = self.loans.len() == MAX_LOANS;
        if progress.pending_units > 0 && is_full {
            std::thread::sleep(Duration::from_micros(100));
        }
        if progress.pending_units == 0 || self.dice.in_100(5) {
            let mut loan = self.loans.swap_remove(at);
            self.check(&mut loan);
            if self.dice.in_100(15) {
                self.loans.push(loan);
            } else {
                loan.lease.release();
                self.count("release");
            }
        }
    }

    /// Checks every byte of every frame that the lease currently returns.
    pub(crate) fn check(&mut self, loan: &mut Loan<'_>) {
        let frames = loan.lease.frames();
        self.count("frames");
        let right = Recorder::check_places(loan.chain, &frames).and_then(|()| {
            let same = loan.seen.iter().zip(&frames).all(|((before, _), now)| before == now);
            if !same || frames.len() < loan.seen.len() {
                return Err(format!("leased frames changed: {:?}, now {frames:?}", loan.seen));
            }
            frames
                .iter()
                .enumerate()
                .try_for_each(|(nth, frame)| self.check_frame(loan, nth, frame))
        });
        if let Err(how) = right {
            panic!("WRONG BYTES: {how}");
        }
    }

    fn check_frame(
        &mut self,
        loan: &mut Loan<'_>,
        nth: usize,
        leased: &LeasedFrame,
    ) -> Result<(), String> {
        let mut bytes = [0; FRAME];
        self.arena.read_exact_at(&mut bytes, u64::from(leased.frame.0) * FRAME as u64).unwrap();
        let floor = loan.floors[nth];
        let version = self.shared.recorder.check_bytes(&leased.key, floor, &bytes)?;
        self.bytes_compared += FRAME as u64;
        match loan.seen.get(nth) {
            Some((_, before)) if *before != version => {
                Err(format!("a pinned frame changed: {leased:?}"))
            }
            Some(_) => Ok(()),
            None => {
                loan.seen.push((*leased, version));
                Ok(())
            }
        }
    }

    fn save(&mut self) {
        let chain = self.prompt();
        let full = chain.num_blocks();
        let start = if self.dice.in_100(80) {
            0
        } else {
            u32::try_from(self.dice.below(full as usize)).unwrap()
        };
        let stop = if self.dice.in_100(70) { full } else { (start + 4).min(full) };
        let reserved = self.shared.store.reserve(chain, start..stop).unwrap();
        self.count("reserve");
        let mut bytes = [0; FRAME];
        for lease in reserved.chunks {
            let (chunk, frame) =
                (self.shared.recorder.id(&lease.reservation().key), lease.reservation().frame);
            let version = self.shared.recorder.reserve(chunk);
            write_bytes(chunk, version, &mut bytes);
            // A few saves are aborted after a partial copy.
            let is_whole = !self.dice.in_100(3);
            let len = if is_whole { FRAME } else { self.dice.below(FRAME) };
            self.arena.write_all_at(&bytes[..len], u64::from(frame.0) * FRAME as u64).unwrap();
            if is_whole {
                self.saves.push((lease, chunk, version));
            } else {
                self.shared.recorder.abort(chunk, version);
                drop(lease);
                self.count("abort");
            }
        }
        if self.dice.in_100(85) {
            self.commit(usize::MAX);
        }
    }

    fn commit(&mut self, num: usize) {
        let num = num.min(self.saves.len());
        if num == 0 {
            return;
        }
        let saves: Vec<_> = self.saves.drain(..num).collect();
        for (_, chunk, version) in &saves {
            self.shared.recorder.commit(*chunk, *version);
        }
        self.shared.store.commit(saves.into_iter().map(|(lease, ..)| lease));
        self.count("commit");
    }

    fn abort(&mut self, num: usize) {
        for (lease, chunk, version) in
            self.saves.drain(..num.min(self.saves.len())).collect::<Vec<_>>()
        {
            self.shared.recorder.abort(chunk, version);
            drop(lease);
            self.count("abort");
        }
    }

    fn lookup(&mut self) {
        let chain = self.prompt();
        let found = self.shared.store.lookup(chain);
        self.count("lookup");
        assert!(
            found.host_units <= found.stored_units && found.stored_units <= chain.num_blocks(),
            "{found:?}"
        );
    }

    fn discard(&mut self) {
        let chain = self.prompt();
        let key = chain.keys()[self.dice.below(chain.keys().len())];
        let forgotten = self.shared.recorder.below(self.shared.recorder.id(&key));
        self.shared.store.discard(&[key]);
        self.shared.recorder.forget(&forgotten);
        self.count("discard");
    }

    fn stats(&mut self) {
        let stats: BTreeMap<_, _> = self.shared.store.stats().into_iter().collect();
        self.count("stats");
        assert_eq!(
            stats["frames_reserved"] + stats["frames_visible"] + stats["frames_free"],
            stats["frames_total"],
            "{stats:?}"
        );
        assert!(stats["disk_bytes"] <= self.shared.cap_bytes, "{stats:?}");
    }
}

/// Waits until `holds` returns true. Panics after a minute.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
}
