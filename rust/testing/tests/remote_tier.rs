//! Checks that the suite for remote tiers accepts a correct in-memory tier and detects each flaw in
//! a broken tier.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use proptest::prelude::*;

use kvloft_core::tier::remote::RemoteTier;
use kvloft_core::{ChunkKey, Error, ErrorKind, Result};
use kvloft_testing::remote_tier::{Op, Place, check};

/// Flaws that the suite must detect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Returns the frame of a different key if the key is missing.
    OtherKey,
    /// Waits for a response without a deadline.
    NoDeadline,
    /// Reports a hit after reading only part of the frame.
    ShortRead,
    /// Returns hints in the order of the sorted keys.
    Disorder,
}

#[derive(Debug)]
struct Memory {
    flaw: Flaw,
    frames: Mutex<HashMap<ChunkKey, Vec<u8>>>,
    hangs: Mutex<bool>,
    answers: Condvar,
}

impl Memory {
    fn wait(&self, deadline: Instant) -> Result<()> {
        let mut hangs = self.hangs.lock().unwrap();
        while *hangs {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.flaw == Flaw::NoDeadline {
                hangs = self.answers.wait(hangs).unwrap();
            } else if left.is_zero() {
                return Err(Error::new(ErrorKind::Io, "no response in time"));
            } else {
                hangs = self.answers.wait_timeout(hangs, left).unwrap().0;
            }
        }
        Ok(())
    }
}

impl RemoteTier for Memory {
    fn contains_many(&self, keys: &[ChunkKey], deadline: Instant) -> Result<Vec<bool>> {
        self.wait(deadline)?;
        let mut keys = keys.to_vec();
        if self.flaw == Flaw::Disorder {
            keys.sort();
        }
        let frames = self.frames.lock().unwrap();
        Ok(keys.iter().map(|key| frames.contains_key(key)).collect())
    }

    fn get(&self, key: &ChunkKey, into: &mut [u8], deadline: Instant) -> Result<bool> {
        self.wait(deadline)?;
        let frames = self.frames.lock().unwrap();
        let other = frames.values().next().filter(|_| self.flaw == Flaw::OtherKey);
        let Some(frame) = frames.get(key).or(other) else { return Ok(false) };
        if self.flaw == Flaw::ShortRead {
            let part = frame.len().min(into.len());
            into[..part].copy_from_slice(&frame[..part]);
            return Ok(true);
        }
        if frame.len() != into.len() {
            return Err(Error::new(ErrorKind::Corrupt, "the frame has a different size"));
        }
        into.copy_from_slice(frame);
        Ok(true)
    }

    fn put(&self, key: &ChunkKey, frame: &[u8], deadline: Instant) -> Result<()> {
        self.wait(deadline)?;
        self.frames.lock().unwrap().insert(*key, frame.to_vec());
        Ok(())
    }
}

struct InMemory(Arc<Memory>);

impl Place for InMemory {
    fn open(&self) -> Arc<dyn RemoteTier> {
        Arc::clone(&self.0) as _
    }
    fn evict(&self, key: &ChunkKey) -> bool {
        self.0.frames.lock().unwrap().remove(key);
        true
    }
    fn hang(&self, hangs: bool) -> bool {
        *self.0.hangs.lock().unwrap() = hangs;
        self.0.answers.notify_all();
        true
    }
}

fn in_memory(flaw: Flaw) -> InMemory {
    let answers = Condvar::new();
    InMemory(Arc::new(Memory { flaw, frames: Mutex::default(), hangs: Mutex::default(), answers }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

    #[test]
    fn a_correct_tier_passes(ops in prop::collection::vec((any::<u8>(), any::<u32>()), 0..40)) {
        let ops: Vec<_> = ops.into_iter().map(|(what, which)| Op::from_numbers(what, which)).collect();
        prop_assert_eq!(check(&in_memory(Flaw::None), &ops), Ok(()));
    }
}

#[test]
fn each_breach_of_the_contract_is_detected() {
    let ops =
        [Op::Put(1), Op::Put(2), Op::Get(3), Op::Misread(1), Op::Look(8), Op::Look(5), Op::Hang(0)];
    assert_eq!(check(&in_memory(Flaw::None), &ops), Ok(()));
    for (flaw, part) in [
        (Flaw::OtherKey, "chunk 3 has bytes that were not put under its key"),
        (Flaw::ShortRead, "chunk 1 was read as a frame of 2048 bytes"),
        (Flaw::Disorder, "the hint for chunk"),
        (Flaw::NoDeadline, "a call did not return by its deadline"),
    ] {
        let error = check(&in_memory(flaw), &ops).unwrap_err();
        assert!(error.contains(part), "{flaw:?}: {error}");
    }
}
