//! An in-memory `LocalTier` that fails, hangs and panics on demand, and records every call that
//! violates the `LocalTier` contract.

use kvloft_core::io::SizeClass;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvloft_core::tier::disk::{DiskEntry, DiskMeta, DiskStats, SlotId};
use kvloft_core::tier::{LocalTier, NoSlot};
use kvloft_core::{ChunkKey, Error, ErrorKind, Result};

/// A tier that keeps its slots in memory.
#[derive(Debug, Default)]
pub struct MemoryTier {
    /// Number of slots, or the total size of all slots in bytes if `frame_sizes` is not empty.
    pub capacity: u32,
    /// Frame size of each size class, in bytes. If empty, there is a single class for frames of any
    /// size.
    pub frame_sizes: Vec<u64>,
    /// If true, writes fail.
    pub fail_writes: AtomicBool,
    /// If true, reads fail.
    pub fail_reads: AtomicBool,
    /// If true, the next read fails.
    pub fail_next_read: AtomicBool,
    /// If true, reads report corruption.
    pub corrupt_reads: AtomicBool,
    /// If true, slots that hold a chunk cannot be freed.
    pub fail_frees: AtomicBool,
    /// If true, the tier's storage can be removed.
    pub is_removable: AtomicBool,
    /// If true, the tier's storage has been removed.
    pub is_removed: AtomicBool,
    /// True once the tier has been cleared.
    pub is_cleared: AtomicBool,
    /// If true, reads and writes panic.
    pub panic_in_io: AtomicBool,
    /// Number of reads so far, including reads that are still waiting.
    pub num_reads: AtomicU64,
    /// While this lock is held, reads wait.
    pub read_gate: Mutex<()>,
    /// While this lock is held, writes wait.
    pub write_gate: Mutex<()>,
    /// While this lock is held, calls that free a slot wait.
    pub free_gate: Mutex<()>,
    /// True once a call that frees a slot has started.
    pub is_freeing: AtomicBool,
    closed: AtomicBool,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    reserved: BTreeSet<u32>,
    written: BTreeMap<u32, (DiskMeta, Vec<u8>)>,
    /// Slots in write order.
    order: Vec<u32>,
    violations: Vec<String>,
}

impl MemoryTier {
    /// Creates a tier of `capacity` slots.
    pub fn new(capacity: u32) -> Arc<Self> {
        Arc::new(Self { capacity, ..Self::default() })
    }

    /// Creates a tier with slots of different sizes and a total capacity of `capacity` bytes.
    pub fn with_sizes(frame_sizes: &[u64], capacity: u32) -> Arc<Self> {
        Arc::new(Self { capacity, frame_sizes: frame_sizes.to_vec(), ..Self::default() })
    }

    /// Returns the capacity that a slot of this class uses, or 0 if the class does not exist.
    fn size(&self, class: SizeClass) -> u64 {
        let is_only = self.frame_sizes.is_empty() && class.index() == 0;
        self.frame_sizes.get(class.index()).copied().unwrap_or(is_only.into())
    }

    /// Returns the metadata of all written chunks, by key.
    pub fn chunks(&self) -> HashMap<ChunkKey, DiskMeta> {
        self.slots().written.values().map(|(meta, _)| (meta.key, *meta)).collect()
    }

    /// Returns the number of slots owned by callers.
    pub fn num_slots_used(&self) -> usize {
        let slots = self.slots();
        slots.reserved.len() + slots.written.len()
    }

    /// Returns all contract violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.slots().violations.clone()
    }

    /// Returns the chunks that the tier would find if it were reopened, in write order.
    pub fn entries(&self) -> Vec<DiskEntry> {
        let slots = self.slots();
        let entry = |(sequence, &slot): (u64, &u32)| DiskEntry {
            slot: SlotId(slot),
            meta: slots.written[&slot].0,
            sequence,
        };
        (0..).zip(&slots.order).map(entry).collect()
    }

    /// Adds these chunks to the tier, each with a frame of `frame_bytes` zero bytes.
    pub fn put(&self, found: &[DiskEntry], frame_bytes: usize) {
        let mut slots = self.slots();
        for &DiskEntry { slot, meta, .. } in found {
            slots.written.insert(slot.0, (meta, vec![0; frame_bytes]));
            slots.order.push(slot.0);
        }
    }

    /// Reopens a closed tier for its next owner.
    pub fn open_again(&self) {
        self.slots().reserved.clear();
        self.closed.store(false, Ordering::SeqCst);
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn io(&self, flag: &AtomicBool) -> Result<()> {
        assert!(!self.panic_in_io.load(Ordering::SeqCst), "panic requested by the test");
        let failed = || Error::io("requested by the test", std::io::Error::from_raw_os_error(5));
        if flag.load(Ordering::SeqCst) { Err(failed()) } else { Ok(()) }
    }

    fn enter(&self) -> Result<()> {
        let closed = self.closed.load(Ordering::SeqCst);
        if closed { Err(Error::new(ErrorKind::Closed, "the tier is closed")) } else { Ok(()) }
    }
}

fn wait(gate: &Mutex<()>) {
    drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
}

impl MemoryTier {
    fn take(&self, class: SizeClass) -> Option<SlotId> {
        self.enter().ok()?;
        let mut slots = self.slots();
        let owned = slots.reserved.iter().chain(slots.written.keys());
        let taken: u64 = owned.map(|slot| self.size(SlotId(*slot).class())).sum();
        let size = Some(self.size(class)).filter(|size| *size > 0)?;
        if taken + size > self.capacity.into() {
            return None;
        }
        let free = |slot: &SlotId| {
            !slots.reserved.contains(&slot.0) && !slots.written.contains_key(&slot.0)
        };
        let slot = (0..self.capacity).map(|number| SlotId::new(class, number)).find(free)?;
        slots.reserved.insert(slot.0);
        Some(slot)
    }
}

impl LocalTier for MemoryTier {
    fn reserve(&self, class: SizeClass) -> Result<SlotId, NoSlot> {
        self.take(class).ok_or(NoSlot::Full)
    }

    fn frame_bytes(&self, class: SizeClass) -> u64 {
        self.size(class)
    }

    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        self.enter()?;
        wait(&self.write_gate);
        self.io(&self.fail_writes)?;
        let mut slots = self.slots();
        if meta.depth > 0 && !slots.written.values().any(|(other, _)| other.key == meta.parent) {
            slots.violations.push(format!("{meta:?} was written before its parent"));
        }
        if !slots.reserved.remove(&slot.0) {
            slots.violations.push(format!("{slot:?} was written without a reservation"));
            return Err(Error::new(ErrorKind::Io, "the slot is not reserved"));
        }
        if !self.frame_sizes.is_empty() && frame.len() as u64 != self.size(slot.class()) {
            slots.violations.push(format!("{} bytes were written to {slot:?}", frame.len()));
        }
        slots.written.insert(slot.0, (*meta, frame.to_vec()));
        slots.order.push(slot.0);
        Ok(())
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        self.enter()?;
        self.num_reads.fetch_add(1, Ordering::SeqCst);
        wait(&self.read_gate);
        into.fill(0xee);
        self.io(&self.fail_reads)?;
        if self.fail_next_read.swap(false, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, "failure requested by the test"));
        }
        let corrupt = || Error::new(ErrorKind::Corrupt, "the slot does not hold this chunk");
        if self.corrupt_reads.load(Ordering::SeqCst) {
            return Err(corrupt());
        }
        let mut slots = self.slots();
        let found = slots
            .written
            .get(&slot.0)
            .filter(|(meta, frame)| meta.key == *key && frame.len() == into.len());
        let Some((_, bytes)) = found else {
            slots.violations.push(format!("{slot:?} was read for a missing key"));
            return Err(corrupt());
        };
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        self.enter()?;
        self.is_freeing.store(true, Ordering::SeqCst);
        wait(&self.free_gate);
        let mut slots = self.slots();
        if slots.written.contains_key(&slot.0) {
            self.io(&self.fail_frees)?;
        } else if !slots.reserved.contains(&slot.0) {
            slots.violations.push(format!("{slot:?} was freed twice"));
        }
        slots.reserved.remove(&slot.0);
        slots.written.remove(&slot.0);
        slots.order.retain(|&other| other != slot.0);
        Ok(())
    }

    fn is_removable(&self) -> bool {
        self.is_removable.load(Ordering::SeqCst)
    }

    fn removed(&self) -> Option<PathBuf> {
        self.is_removed.load(Ordering::SeqCst).then(|| "/memory".into())
    }

    fn stats(&self) -> DiskStats {
        let slots = self.slots();
        DiskStats {
            slots: self.capacity.into(),
            slots_used: slots.written.len() as u64,
            slots_reserved: slots.reserved.len() as u64,
            ..DiskStats::default()
        }
    }

    fn take_events(&self) -> Vec<String> {
        Vec::new()
    }

    fn clear(&self) -> Result<Vec<SlotId>> {
        self.enter()?;
        self.io(&self.fail_frees)?;
        self.is_cleared.store(true, Ordering::SeqCst);
        let mut slots = self.slots();
        slots.written.clear();
        slots.order.clear();
        Ok(Vec::new())
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}
