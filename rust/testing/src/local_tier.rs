//! Conformance test suite for `LocalTier` implementations. Checks the results of random calls
//! against a model.
//!
//! Reading an acknowledged chunk returns the exact bytes or an error, never wrong bytes. A freed
//! chunk can no longer be read. A failed free changes nothing. After a restart, the tier finds
//! exactly the chunks that were acknowledged and not freed. The tier never exceeds its capacity.

use kvloft_core::io::SizeClass;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskEntry, DiskMeta, SlotId};
use kvloft_core::{ChunkKey, ErrorKind};

use super::PageBuffer;

/// A call and a number that selects its argument.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    /// Reserves a slot and writes a chunk.
    Write(u32),
    /// Reads a chunk.
    Read(u32),
    /// Frees a chunk and all its descendants.
    Free(u32),
    /// Frees all chunks.
    Clear,
    /// Closes and reopens the tier.
    Reopen,
    /// Starts or ends a period of faults, if the [`Place`] supports faults.
    Fault(u32),
}

impl Op {
    /// Returns the operation for a pair of numbers. The mix of operations resembles that of a real
    /// store.
    pub fn from_numbers(what: u8, which: u32) -> Self {
        match what % 32 {
            0..=11 => Self::Write(which),
            12..=21 => Self::Read(which),
            22..=26 => Self::Free(which),
            27 => Self::Clear,
            28 => Self::Reopen,
            _ => Self::Fault(which),
        }
    }
}

/// An open tier, and the chunks that it found when it was opened.
pub type Opened = (Arc<dyn LocalTier>, Vec<DiskEntry>);

/// An environment for testing one tier implementation.
pub trait Place {
    /// Returns the frame size of each size class, in bytes.
    fn frame_sizes(&self) -> Vec<usize>;
    /// Returns the total capacity of all slots, in bytes.
    fn capacity(&self) -> usize;
    /// Opens a tier. No other tier of this [`Place`] may be open, and no fault may be active.
    fn open(&self) -> Opened;
    /// Starts (Some) or ends (None) a period of faults.
    fn fault(&self, _which: Option<u32>) {}
    /// Returns true if a fault may have lost or damaged acknowledged chunks. If so, chunks may be
    /// missing or may reappear, but wrong bytes are still an error.
    fn may_lose(&self) -> bool {
        false
    }
}

const NUM_CHUNKS: u32 = 16;

/// Returns a chunk's parent. Chunks form a binary forest in which 0 and 1 are roots.
fn parent_of(chunk: u32) -> Option<u32> {
    (chunk / 2).checked_sub(1)
}

fn key_of(chunk: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&chunk.to_le_bytes()).as_bytes())
}

fn meta_of(chunk: u32) -> DiskMeta {
    let depth = std::iter::successors(parent_of(chunk), |&c| parent_of(c)).count();
    let parent = parent_of(chunk).map_or(ChunkKey([0; 32]), key_of);
    DiskMeta {
        key: key_of(chunk),
        parent,
        depth: u32::try_from(depth).unwrap_or(u32::MAX),
        saved_s: 0,
    }
}

fn fill(frame: &mut [u8], chunk: u32, version: u32) {
    blake3::Hasher::new()
        .update(&chunk.to_le_bytes())
        .update(&version.to_le_bytes())
        .finalize_xof()
        .fill(frame);
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
    let (tier, found) = place.open();
    hold!(found.is_empty(), "a new place holds {} chunks", found.len());
    let mut walk = Walk {
        place,
        tier,
        written: BTreeMap::new(),
        stuck: BTreeSet::new(),
        maybe: BTreeSet::new(),
        next: 0,
    };
    for &op in ops {
        match op {
            Op::Write(n) => walk.write(n % NUM_CHUNKS)?,
            Op::Read(n) => walk.read(n % NUM_CHUNKS)?,
            Op::Free(n) => walk.free(n % NUM_CHUNKS)?,
            Op::Clear => walk.clear()?,
            Op::Reopen => walk.reopen()?,
            Op::Fault(n) => place.fault((n % 2 == 0).then_some(n / 2)),
        }
        walk.count()?;
    }
    walk.reopen()?;
    (0..NUM_CHUNKS).try_for_each(|chunk| walk.read(chunk))
}

/// A model of the tier under test.
struct Walk<'a> {
    place: &'a dyn Place,
    tier: Arc<dyn LocalTier>,
    /// The (slot, version) of each acknowledged chunk that has not been freed.
    written: BTreeMap<u32, (SlotId, u32)>,
    /// Slots of failed writes that have not been freed yet.
    stuck: BTreeSet<SlotId>,
    /// (chunk, version) pairs that may be found after a restart, because their records were being
    /// written or could not be cleared.
    maybe: BTreeSet<(u32, u32)>,
    next: u32,
}

impl Walk<'_> {
    fn write(&mut self, chunk: u32) -> Result<(), String> {
        let has_parent = parent_of(chunk).is_none_or(|p| self.written.contains_key(&p));
        if !has_parent || self.written.contains_key(&chunk) {
            return Ok(());
        }
        let tier = &self.tier;
        self.stuck.retain(|&slot| tier.free(slot).is_err());
        let Ok(slot) = self.tier.reserve(self.class_of(chunk)) else { return Ok(()) };
        hold!(slot.class() == self.class_of(chunk), "{slot:?} has the wrong size class");
        let taken =
            self.written.values().any(|&(other, _)| other == slot) || self.stuck.contains(&slot);
        hold!(!taken, "{slot:?} was reserved twice");
        let version = self.next;
        self.next += 1;
        let mut frame = self.buffer(slot);
        fill(&mut frame, chunk, version);
        if self.tier.write(slot, &meta_of(chunk), &frame).is_ok() {
            self.written.insert(chunk, (slot, version));
            return Ok(());
        }
        let error = self.read_into(slot, chunk, &mut frame).err();
        // If a clear was lost, the slot still holds an earlier version under the same key.
        let may_show = |known: u32| known == version || self.maybe.contains(&(chunk, known));
        let is_known = (0..=version).any(|known| may_show(known) && Self::is(&frame, chunk, known));
        hold!(error.is_some() || is_known, "a failed write returned wrong bytes");
        if self.tier.free(slot).is_err() {
            self.stuck.insert(slot);
        }
        self.maybe.insert((chunk, version));
        Ok(())
    }

    /// Returns a chunk's size class. Parents and children have different sizes.
    fn class_of(&self, chunk: u32) -> SizeClass {
        let num_sizes = u32::try_from(self.place.frame_sizes().len()).unwrap_or(u32::MAX);
        SizeClass(u8::try_from(chunk % num_sizes).unwrap_or(u8::MAX))
    }

    fn buffer(&self, slot: SlotId) -> PageBuffer {
        PageBuffer::new(self.place.frame_sizes()[slot.class().index()])
    }

    fn is(bytes: &[u8], chunk: u32, version: u32) -> bool {
        let mut expected = vec![0; bytes.len()];
        fill(&mut expected, chunk, version);
        bytes == expected
    }

    fn read_into(&self, slot: SlotId, chunk: u32, into: &mut [u8]) -> kvloft_core::Result<()> {
        into.fill(0xee);
        self.tier.read(slot, &key_of(chunk), into)
    }

    fn read(&mut self, chunk: u32) -> Result<(), String> {
        let Some(&(slot, version)) = self.written.get(&chunk) else { return Ok(()) };
        let mut frame = self.buffer(slot);
        match self.read_into(slot, chunk, &mut frame) {
            Ok(()) => {
                // If later writes were lost, the slot still holds an earlier version of the chunk.
                let mut versions = self.maybe.iter().filter(|(of, _)| *of == chunk);
                let is_earlier = versions.any(|&(_, earlier)| Self::is(&frame, chunk, earlier));
                let is_right =
                    Self::is(&frame, chunk, version) || (self.place.may_lose() && is_earlier);
                hold!(is_right, "chunk {chunk} has wrong bytes");
            }
            Err(e) if e.kind() == ErrorKind::Corrupt => {
                hold!(self.place.may_lose(), "chunk {chunk} was lost: {e}");
            }
            Err(e) => hold!(e.kind() == ErrorKind::Io, "a read failed with {e}"),
        }
        Ok(())
    }

    fn free(&mut self, chunk: u32) -> Result<(), String> {
        for child in [2 * chunk + 2, 2 * chunk + 3] {
            if self.written.contains_key(&child) {
                self.free(child)?;
            }
        }
        let is_leaf =
            ![2 * chunk + 2, 2 * chunk + 3].iter().any(|child| self.written.contains_key(child));
        let Some(&(slot, version)) = self.written.get(&chunk).filter(|_| is_leaf) else {
            return Ok(());
        };
        if self.tier.free(slot).is_err() {
            return self.read(chunk);
        }
        self.written.remove(&chunk);
        let mut frame = self.buffer(slot);
        let is_gone = self.read_into(slot, chunk, &mut frame).is_err();
        hold!(is_gone || self.place.may_lose(), "chunk {chunk} is still present after being freed");
        if !is_gone {
            hold!(Self::is(&frame, chunk, version), "chunk {chunk} has wrong bytes after free");
        }
        self.maybe.extend(self.place.may_lose().then_some((chunk, version)));
        Ok(())
    }

    fn clear(&mut self) -> Result<(), String> {
        let before = self.written.iter().map(|(&chunk, &(_, version))| (chunk, version));
        if self.tier.clear().is_ok_and(|not_freed| not_freed.is_empty()) {
            self.maybe.extend(before.filter(|_| self.place.may_lose()));
            self.written.clear();
            return Ok(());
        }
        // The failed clear may have freed some of the chunks. Any chunk that can still be read must
        // be intact.
        self.maybe.extend(before);
        self.place.fault(None);
        for (chunk, (slot, version)) in std::mem::take(&mut self.written) {
            let mut frame = self.buffer(slot);
            if self.read_into(slot, chunk, &mut frame).is_ok() {
                hold!(
                    Self::is(&frame, chunk, version),
                    "chunk {chunk} has wrong bytes after a clear"
                );
                self.written.insert(chunk, (slot, version));
            } else if self.place.may_lose() {
                // The slot is either damaged and still in use, or already free. `free` must succeed
                // either way, but must not free the slot twice.
                hold!(self.tier.free(slot).is_ok(), "a healthy tier did not free {slot:?}");
            }
        }
        // If a parent was freed but its children were not, free the children as well.
        let orphans = |walk: &Self| {
            let has_parent = |c: u32| parent_of(c).is_none_or(|p| walk.written.contains_key(&p));
            walk.written.keys().copied().find(|&chunk| !has_parent(chunk))
        };
        while let Some(orphan) = orphans(self) {
            self.free(orphan)?;
        }
        Ok(())
    }

    fn reopen(&mut self) -> Result<(), String> {
        self.tier.close();
        let mut frame = self.buffer(SlotId(0));
        let closed =
            |result: kvloft_core::Result<()>| result.is_err_and(|e| e.kind() == ErrorKind::Closed);
        hold!(self.tier.reserve(SizeClass(0)).is_err(), "a closed tier reserved a slot");
        hold!(
            closed(self.tier.clear().map(drop)) && closed(self.tier.free(SlotId(0))),
            "a closed tier freed a chunk"
        );
        hold!(closed(self.read_into(SlotId(0), 0, &mut frame)), "a closed tier read a chunk");
        self.place.fault(None);
        let (tier, found) = self.place.open();
        self.tier = tier;
        self.stuck.clear();
        let before = std::mem::take(&mut self.written);
        for entry in &found {
            self.found(entry, &before)?;
        }
        for (chunk, (slot, _)) in before {
            let kept = self.written.get(&chunk).is_some_and(|&(s, _)| s == slot);
            hold!(kept || self.place.may_lose(), "chunk {chunk} was acknowledged but was lost");
        }
        if !self.place.may_lose() {
            // By now, each chunk in `maybe` has been either found or lost.
            self.maybe.clear();
        }
        Ok(())
    }

    /// Checks an entry that was found after a restart, and adds it to the model.
    fn found(
        &mut self,
        entry: &DiskEntry,
        before: &BTreeMap<u32, (SlotId, u32)>,
    ) -> Result<(), String> {
        let chunk = (0..NUM_CHUNKS)
            .find(|&chunk| key_of(chunk) == entry.meta.key)
            .ok_or("an unknown key was found")?;
        let slot = entry.slot;
        hold!(entry.meta == meta_of(chunk), "the metadata of chunk {chunk} changed");
        let has_parent = parent_of(chunk).is_none_or(|p| self.written.contains_key(&p));
        hold!(has_parent, "chunk {chunk} was found without its parent");
        let reported = before.get(&chunk).map(|&(_, version)| version);
        let doubtful = self.maybe.iter().filter(|(c, _)| *c == chunk).map(|&(_, version)| version);
        let versions: Vec<_> = doubtful.chain(reported).collect();
        let mut frame = self.buffer(slot);
        let version = match self.read_into(slot, chunk, &mut frame) {
            Ok(()) => versions.into_iter().find(|&version| Self::is(&frame, chunk, version)),
            // The chunk is unreadable for now, so later reads are compared with its last version.
            Err(_) => versions.into_iter().next_back().filter(|_| self.place.may_lose()),
        };
        let version =
            version.ok_or_else(|| format!("chunk {chunk} was found with unacknowledged bytes"))?;
        hold!(
            self.written.insert(chunk, (slot, version)).is_none(),
            "chunk {chunk} was found twice"
        );
        Ok(())
    }

    fn count(&self) -> Result<(), String> {
        let stats = self.tier.stats();
        hold!(
            stats.slots_used == self.written.len() as u64,
            "{} slots are in use",
            stats.slots_used
        );
        hold!(
            stats.slots_reserved == self.stuck.len() as u64,
            "{} slots are reserved",
            stats.slots_reserved
        );
        let slots = self.written.values().map(|(slot, _)| slot).chain(&self.stuck);
        let held = slots.map(|slot| self.place.frame_sizes()[slot.class().index()]).sum::<usize>();
        hold!(
            held <= self.place.capacity() && stats.bytes <= stats.cap_bytes,
            "the cap was exceeded: {stats:?}"
        );
        Ok(())
    }
}
