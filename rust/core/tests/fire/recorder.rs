//! Records acknowledged chunks independently of the store: every chunk's versions, and the bytes
//! that a leased frame must hold.
//!
//! Each save of a chunk is a new version with different bytes. At each position of a prefix, a
//! lease must return a committed version of the right chunk. If a discard returned before the lease
//! was taken, the version must be newer than the discard.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvloft_core::KeyChain;
use kvloft_core::key::{ChunkKey, root_key};
use kvloft_core::store::LeasedFrame;

pub(crate) const FRAME: usize = 4096;
const FAMILIES: u32 = 24;
const VARIANTS: u32 = 8;

/// A generator of reproducible random numbers (`SplitMix64`).
#[derive(Debug, Clone)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.roll() % end as u64).unwrap()
    }

    pub(crate) fn in_100(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Reserved,
    Committed,
    Aborted,
}

#[derive(Debug, Default)]
struct Chunk {
    children: Vec<usize>,
    versions: Mutex<Vec<Version>>,
    /// All versions below this number have been removed.
    floor: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) prompts: Vec<KeyChain>,
    ids: HashMap<ChunkKey, usize>,
    chunks: Vec<Chunk>,
}

/// Writes the bytes of a chunk version: the chunk and version numbers, followed by noise derived
/// from these numbers.
pub(crate) fn write_bytes(chunk: usize, version: u64, into: &mut [u8; FRAME]) {
    let mut noise = Dice((chunk as u64) << 40 ^ version);
    let (words, _) = into.as_chunks_mut::<8>();
    for word in &mut *words {
        *word = noise.roll().to_le_bytes();
    }
    words[0] = (chunk as u64).to_le_bytes();
    words[1] = version.to_le_bytes();
}

fn word(bytes: &[u8], nth: usize) -> u64 {
    u64::from_le_bytes(bytes[nth * 8..nth * 8 + 8].try_into().unwrap())
}

impl Recorder {
    pub(crate) fn new() -> Self {
        let mut made = Self { prompts: Vec::new(), ids: HashMap::new(), chunks: Vec::new() };
        for family in 0..FAMILIES {
            for variant in 0..VARIANTS {
                let len = 4 + (family * 7 + variant * 11) % 28;
                let shared = len * variant / (2 * VARIANTS);
                let token = |at: u32| {
                    family * 1000 + if at < shared { 0 } else { 1 + variant } + at * 100_000
                };
                let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
                chain.append_tokens(&(0..len).map(token).collect::<Vec<_>>()).unwrap();
                made.learn(&chain);
                made.prompts.push(chain);
            }
        }
        made
    }

    /// Records every chunk of the prompt.
    fn learn(&mut self, chain: &KeyChain) {
        let mut parent = None;
        for key in chain.keys() {
            let new = self.chunks.len();
            let id = *self.ids.entry(*key).or_insert(new);
            if id == new {
                self.chunks.push(Chunk::default());
                if let Some(parent) = parent {
                    let parent: &mut Chunk = &mut self.chunks[parent];
                    parent.children.push(id);
                }
            }
            parent = Some(id);
        }
    }

    pub(crate) fn id(&self, key: &ChunkKey) -> usize {
        self.ids[key]
    }

    fn with_versions<T>(&self, chunk: usize, work: impl FnOnce(&mut Vec<Version>) -> T) -> T {
        work(&mut self.chunks[chunk].versions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a new version for a reserved frame.
    pub(crate) fn reserve(&self, chunk: usize) -> u64 {
        self.with_versions(chunk, |versions| {
            versions.push(Version::Reserved);
            versions.len() as u64 - 1
        })
    }

    fn set(&self, chunk: usize, version: u64, to: Version) {
        self.with_versions(chunk, |versions| versions[usize::try_from(version).unwrap()] = to);
    }

    /// Records a commit. Must be called before the commit itself.
    pub(crate) fn commit(&self, chunk: usize, version: u64) {
        self.set(chunk, version, Version::Committed);
    }

    pub(crate) fn abort(&self, chunk: usize, version: u64) {
        self.set(chunk, version, Version::Aborted);
    }

    /// Returns the chunk and its descendants, each with its number of versions. Must be called
    /// before a discard.
    pub(crate) fn below(&self, chunk: usize) -> Vec<(usize, u64)> {
        let (mut found, mut next) = (Vec::new(), vec![chunk]);
        while let Some(id) = next.pop() {
            found.push((id, self.with_versions(id, |versions| versions.len() as u64)));
            next.extend(&self.chunks[id].children);
        }
        found
    }

    /// Like `below`, but for all chunks.
    pub(crate) fn all(&self) -> Vec<(usize, u64)> {
        (0..self.chunks.len())
            .map(|id| (id, self.with_versions(id, |versions| versions.len() as u64)))
            .collect()
    }

    /// Records that the discard has returned: these versions must not be found again.
    pub(crate) fn forget(&self, forgotten: &[(usize, u64)]) {
        for &(id, floor) in forgotten {
            self.chunks[id].floor.fetch_max(floor, Ordering::SeqCst);
        }
    }

    /// Allows removed chunks to be found again, because removals may not have reached the disk.
    pub(crate) fn remember(&self) {
        for chunk in &self.chunks {
            chunk.floor.store(0, Ordering::SeqCst);
        }
    }

    /// Returns, for each block's chunk, the lowest version that a lease taken after this call may
    /// return.
    pub(crate) fn floors(&self, chain: &KeyChain) -> Vec<u64> {
        chain
            .keys()
            .iter()
            .map(|key| self.chunks[self.id(key)].floor.load(Ordering::SeqCst))
            .collect()
    }

    /// Checks that `frames` hold the first chunks of `chain`. The error describes the difference.
    pub(crate) fn check_places(chain: &KeyChain, frames: &[LeasedFrame]) -> Result<(), String> {
        for (unit, leased) in frames.iter().enumerate() {
            if chain.keys().get(unit) != Some(&leased.key) {
                return Err(format!("{leased:?} is not the next chunk of its prefix"));
            }
        }
        Ok(())
    }

    /// Checks that a frame holds the bytes of a committed version of the chunk that is not older
    /// than `floor`. Returns the version. The error describes the difference.
    pub(crate) fn check_bytes(
        &self,
        key: &ChunkKey,
        floor: u64,
        bytes: &[u8; FRAME],
    ) -> Result<u64, String> {
        let chunk = self.id(key);
        let (whose, version) = (word(bytes, 0), word(bytes, 1));
        let state = self.with_versions(chunk, |versions| {
            versions.get(usize::try_from(version).unwrap()).copied()
        });
        if whose != chunk as u64 || state != Some(Version::Committed) || version < floor {
            return Err(format!(
                "chunk {chunk} holds version {version} of chunk {whose} ({state:?}); versions \
                 below {floor} were removed"
            ));
        }
        let mut right = [0; FRAME];
        write_bytes(chunk, version, &mut right);
        if *bytes == right {
            return Ok(version);
        }
        let at = bytes.iter().zip(&right).position(|(a, b)| a != b);
        Err(format!("chunk {chunk}, version {version}: the byte at {at:?} is wrong"))
    }
}
