//! Conformance test suite for `RemoteTier` implementations. Checks the results of random calls
//! against a model.
//!
//! A hit returns a complete frame of the requested size that was stored under the requested key;
//! any other read returns a miss or an error. Hints are returned in the same order as the keys.
//! Every call returns by its deadline or shortly afterwards, even if it gets no response.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvloft_core::tier::remote::RemoteTier;
use kvloft_core::{ChunkKey, ErrorKind};

/// A call and a number that selects its argument.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    /// Stores a new version of a frame.
    Put(u32),
    /// Reads a frame.
    Get(u32),
    /// Reads a frame into a buffer that is too small or too large.
    Misread(u32),
    /// Looks up some of the keys.
    Look(u32),
    /// Evicts a frame the way another client would, if the [`Place`] supports this.
    Evict(u32),
    /// Makes a call while the remote side is not responding.
    Hang(u32),
}

impl Op {
    /// Returns the operation for a pair of numbers.
    pub fn from_numbers(what: u8, which: u32) -> Self {
        match what % 32 {
            0..=9 => Self::Put(which),
            10..=19 => Self::Get(which),
            20..=22 => Self::Misread(which),
            23..=27 => Self::Look(which),
            28..=30 => Self::Evict(which),
            _ => Self::Hang(which),
        }
    }
}

/// An environment for testing one tier implementation.
pub trait Place {
    /// Opens an empty tier.
    fn open(&self) -> Arc<dyn RemoteTier>;
    /// Evicts a frame the way another client would. Returns false if this is not supported.
    fn evict(&self, _key: &ChunkKey) -> bool {
        false
    }
    /// Makes the remote side stop responding, or makes it respond again. Returns false if this is
    /// not supported.
    fn hang(&self, _hangs: bool) -> bool {
        false
    }
    /// Returns true if frames may disappear without being evicted.
    fn may_lose(&self) -> bool {
        false
    }
}

const FRAME: usize = 4096;
const NUM_KEYS: u32 = 8;
/// Timeout for calls that get a response, far longer than any call takes.
const LONG: Duration = Duration::from_secs(600);
/// Timeout for calls that get no response.
const SHORT: Duration = Duration::from_millis(20);
/// Additional time allowed for calls that get no response, because the machine may be busy.
const GRACE: Duration = Duration::from_secs(10);

fn key_of(chunk: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&chunk.to_le_bytes()).as_bytes())
}

fn frame_of(chunk: u32, version: u32) -> Vec<u8> {
    let mut frame = vec![0; FRAME];
    blake3::Hasher::new()
        .update(&chunk.to_le_bytes())
        .update(&version.to_le_bytes())
        .finalize_xof()
        .fill(&mut frame);
    frame
}

/// Returns an error with a formatted message if the condition does not hold.
macro_rules! hold {
    ($condition:expr, $($why:tt)+) => {
        if !$condition {
            return Err(format!($($why)+));
        }
    };
}

/// Runs the operations. Returns an error that describes the first violated property.
pub fn check(place: &dyn Place, ops: &[Op]) -> Result<(), String> {
    let mut walk = Walk { place, tier: place.open(), versions: BTreeMap::new(), next: 0 };
    for &op in ops {
        match op {
            Op::Put(n) => walk.put(n % NUM_KEYS)?,
            Op::Get(n) => walk.get(n % NUM_KEYS)?,
            Op::Misread(n) => walk.misread(n % NUM_KEYS, (n / NUM_KEYS).is_multiple_of(2))?,
            Op::Look(n) => walk.look(n)?,
            Op::Evict(n) => walk.evict(n % NUM_KEYS)?,
            Op::Hang(n) => walk.hang(n % NUM_KEYS, n / NUM_KEYS)?,
        }
    }
    (0..NUM_KEYS).try_for_each(|chunk| walk.get(chunk))
}

/// A model of the tier: the versions of each frame that may be present, and whether one of them
/// must be.
struct Walk<'a> {
    place: &'a dyn Place,
    tier: Arc<dyn RemoteTier>,
    versions: BTreeMap<u32, (Vec<u32>, bool)>,
    next: u32,
}

fn later() -> Instant {
    Instant::now() + LONG
}

impl Walk<'_> {
    fn put(&mut self, chunk: u32) -> Result<(), String> {
        let (versions, is_there) = self.versions.entry(chunk).or_default();
        versions.push(self.next);
        let put = self.tier.put(&key_of(chunk), &frame_of(chunk, self.next), later());
        self.next += 1;
        match put {
            Ok(()) => *is_there = !self.place.may_lose(),
            Err(error) => hold!(
                error.kind() == ErrorKind::Io && self.place.may_lose(),
                "a put failed with {error}"
            ),
        }
        Ok(())
    }

    fn get(&mut self, chunk: u32) -> Result<(), String> {
        let mut frame = vec![0xee; FRAME];
        let (versions, is_there) = self.versions.get(&chunk).cloned().unwrap_or_default();
        match self.tier.get(&key_of(chunk), &mut frame, later()) {
            Ok(true) => {
                let is_right = versions.iter().any(|&version| frame == frame_of(chunk, version));
                hold!(is_right, "chunk {chunk} has bytes that were not put under its key");
            }
            Ok(false) => hold!(!is_there, "chunk {chunk} was lost"),
            Err(error) => hold!(
                error.kind() == ErrorKind::Io && self.place.may_lose(),
                "a get failed with {error}"
            ),
        }
        Ok(())
    }

    /// Reads a frame into a buffer of the wrong size.
    fn misread(&mut self, chunk: u32, is_less: bool) -> Result<(), String> {
        let mut frame = vec![0xee; if is_less { FRAME / 2 } else { FRAME * 2 }];
        let got = self.tier.get(&key_of(chunk), &mut frame, later());
        let is_refused = got
            .as_ref()
            .map_or_else(|error| error.kind() != ErrorKind::Closed, |is_there| !is_there);
        hold!(is_refused, "chunk {chunk} was read as a frame of {} bytes: {got:?}", frame.len());
        Ok(())
    }

    fn look(&mut self, from: u32) -> Result<(), String> {
        let chunks: Vec<_> =
            (0..from % (NUM_KEYS + 1)).map(|nth| (from + 3 * nth) % NUM_KEYS).collect();
        let keys: Vec<_> = chunks.iter().map(|&chunk| key_of(chunk)).collect();
        match self.tier.contains_many(&keys, later()) {
            Ok(hints) => {
                hold!(hints.len() == keys.len(), "{} keys, {} hints", keys.len(), hints.len());
                for (chunk, hint) in chunks.iter().zip(hints) {
                    let is_there = self.versions.get(chunk).is_some_and(|(_, is_there)| *is_there);
                    hold!(
                        hint == is_there || self.place.may_lose(),
                        "the hint for chunk {chunk} is wrong"
                    );
                }
            }
            Err(error) => hold!(
                error.kind() == ErrorKind::Io && self.place.may_lose(),
                "a lookup failed with {error}"
            ),
        }
        Ok(())
    }

    fn evict(&mut self, chunk: u32) -> Result<(), String> {
        if self.place.evict(&key_of(chunk)) {
            self.versions.remove(&chunk);
        }
        self.get(chunk)
    }

    /// Calls the tier on a separate thread, so that a call that misses its deadline cannot block
    /// the suite.
    fn hang(&mut self, chunk: u32, which: u32) -> Result<(), String> {
        if !self.place.hang(true) {
            return Ok(());
        }
        let (key, frame) = (key_of(chunk), frame_of(chunk, self.next));
        if which % 3 == 1 {
            // The frame may still arrive later.
            self.versions.entry(chunk).or_default().0.push(self.next);
            self.next += 1;
        }
        let (tier, (ended, end)) = (Arc::clone(&self.tier), mpsc::channel());
        std::thread::spawn(move || {
            let (deadline, mut into) = (Instant::now() + SHORT, vec![0xee; FRAME]);
            let result = match which % 3 {
                0 => tier.get(&key, &mut into, deadline).map(drop),
                1 => tier.put(&key, &frame, deadline),
                _ => tier.contains_many(&[key], deadline).map(drop),
            };
            let _ = ended.send(result);
        });
        let result = end.recv_timeout(SHORT + GRACE);
        self.place.hang(false);
        match result {
            Err(_) => Err("a call did not return by its deadline".to_owned()),
            Ok(Err(error)) if error.kind() == ErrorKind::Io => Ok(()),
            Ok(other) => Err(format!("a call without a response returned {other:?}")),
        }
    }
}
