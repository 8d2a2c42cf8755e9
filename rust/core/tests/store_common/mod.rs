//! Shared by the store's tests: small chains, frames that say whose they are, and a disk in memory that fails on demand.
#![allow(dead_code, clippy::unwrap_used, clippy::allow_attributes, reason = "tests; each file uses a part of this one")]

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::{Arena, Damage, FrameId, PartSpec};
use kvloft_core::key::{ChunkKey, KeyChain, root_key};
use kvloft_core::store::{ArenaInfo, DiskSettings, Reservation, SaveRange, Store, StoreConfig};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::{DiskEntry, DiskMeta, DiskStats, SlotId};
use kvloft_core::{Error, ErrorKind, Result};

pub(crate) const FRAME: usize = 4096;

pub(crate) fn config(num_frames: u32, blocks_per_chunk: u32, eviction: Eviction) -> StoreConfig {
    StoreConfig {
        frame_bytes: FRAME as u64,
        host_bytes: u64::from(num_frames) * FRAME as u64,
        blocks_per_chunk,
        eviction,
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
    }
}

pub(crate) fn disk_settings(num_slots: u64, num_threads: u32) -> DiskSettings {
    let cap_bytes = num_slots * FRAME as u64;
    DiskSettings { dir: "/nowhere".into(), cap_bytes, num_threads, description: String::new() }
}

/// Blocks of one token each.
pub(crate) fn chain(tokens: &[u32]) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
    chain.append_tokens(tokens).unwrap();
    chain
}

/// One of 64 prompts of 3 to 9 blocks. The bits of `prompt` are their tokens, three at a time, so they share prefixes.
pub(crate) fn prompt_chain(prompt: usize) -> KeyChain {
    let tokens: Vec<u32> = (0..(3 + prompt % 7)).map(|at| u32::from(prompt >> (at / 3) & 1 == 1)).collect();
    chain(&tokens)
}

pub(crate) fn range(start: u32, stop: u32, tail_blocks: u32) -> SaveRange {
    SaveRange { start, stop, tail_blocks }
}

pub(crate) fn stat(store: &Store, name: &str) -> u64 {
    store.stats().into_iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name}")).1
}

fn spec(key: ChunkKey) -> PartSpec<'static> {
    PartSpec { key, layout: [1; 32], page_bytes: &[], num_blocks: 1, rank: 0 }
}

pub(crate) fn arena_of(store: &Store) -> Arena {
    let ArenaInfo { path, frame_bytes, num_frames } = store.arena();
    Arena::open(path, *frame_bytes, *num_frames).unwrap()
}

/// What a worker does with a reserved frame: from now on the frame says that it is `key`'s.
pub(crate) fn fill(arena: &Arena, reservation: &Reservation) {
    arena.seal(reservation.frame, 0, FRAME, &spec(reservation.key)).unwrap();
}

/// What a worker does before it uses a frame.
pub(crate) fn verify(arena: &Arena, frame: FrameId, key: ChunkKey) -> Option<Damage> {
    arena.check(frame, 0, FRAME, &spec(key)).unwrap()
}

/// Saves full chunks and a tail at once; returns how many became visible.
pub(crate) fn save(store: &Store, arena: &Arena, chain: &KeyChain, range: SaveRange) -> u32 {
    let reserved = store.reserve(chain, range).unwrap();
    reserved.leases.iter().for_each(|lease| fill(arena, lease.reservation()));
    store.commit(reserved.leases)
}

/// Slots in memory. It panics when the store breaks its side of the contract.
#[derive(Debug, Default)]
pub(crate) struct MemoryDisk {
    pub(crate) capacity: u32,
    pub(crate) fail_writes: AtomicBool,
    pub(crate) fail_reads: AtomicBool,
    pub(crate) corrupt_reads: AtomicBool,
    pub(crate) fail_frees: AtomicBool,
    pub(crate) panic_in_io: AtomicBool,
    pub(crate) fail_opens: AtomicBool,
    /// Time of the store, in milliseconds: it stands still until a test moves it.
    pub(crate) now_ms: AtomicU64,
    pub(crate) num_reads: AtomicU64,
    /// Reads wait while this is held.
    pub(crate) read_gate: Mutex<()>,
    /// Writes wait while this is held.
    pub(crate) write_gate: Mutex<()>,
    /// Slots are not given back while this is held.
    pub(crate) free_gate: Mutex<()>,
    /// Some slot was to be given back.
    pub(crate) is_freeing: AtomicBool,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    reserved: BTreeMap<u32, Option<(DiskMeta, Vec<u8>)>>,
    violations: Vec<String>,
}

impl MemoryDisk {
    pub(crate) fn new(capacity: u32) -> Arc<Self> {
        Arc::new(Self { capacity, ..Self::default() })
    }

    /// What is written, by key.
    pub(crate) fn chunks(&self) -> HashMap<ChunkKey, DiskMeta> {
        self.slots.lock().unwrap().reserved.values().flatten().map(|(meta, _)| (meta.key, *meta)).collect()
    }

    /// What an open of this disk finds.
    pub(crate) fn entries(&self) -> Vec<DiskEntry> {
        let slots = self.slots.lock().unwrap();
        let entry = |(slot, place): (&u32, &Option<(DiskMeta, Vec<u8>)>)| {
            let DiskMeta { key, parent, num_blocks, depth } = place.as_ref()?.0;
            Some(DiskEntry { slot: SlotId(*slot), key, parent, num_blocks, depth, sequence: u64::from(*slot) })
        };
        let mut found: Vec<_> = slots.reserved.iter().filter_map(entry).collect();
        found.sort_by_key(|entry| entry.depth);
        found
    }

    /// Makes the disk hold these chunks, with bytes that say nothing.
    pub(crate) fn put(&self, found: &[DiskEntry]) {
        let mut slots = self.slots.lock().unwrap();
        for &DiskEntry { slot, key, parent, num_blocks, depth, .. } in found {
            slots.reserved.insert(slot.0, Some((DiskMeta { key, parent, num_blocks, depth }, vec![0; FRAME])));
        }
    }

    pub(crate) fn num_slots_used(&self) -> usize {
        self.slots.lock().unwrap().reserved.len()
    }

    /// Contract breaches seen so far.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.slots.lock().unwrap().violations.clone()
    }

    /// A store on this disk and its clock.
    pub(crate) fn open(self: &Arc<Self>, config: &StoreConfig, found: &[DiskEntry]) -> Store {
        let (disk, clock, found) = (Arc::clone(self), Arc::clone(self), found.to_vec());
        let open = move || {
            disk.io(&disk.fail_opens)?;
            Ok((Arc::clone(&disk) as Arc<dyn LocalTier>, found.clone()))
        };
        let now = move || Duration::from_millis(clock.now_ms.load(Ordering::SeqCst));
        Store::with_tier(config, Some(Box::new(open)), Box::new(now)).unwrap()
    }

    pub(crate) fn wait(&self, seconds: u64) {
        self.now_ms.fetch_add(1000 * seconds, Ordering::SeqCst);
    }

    /// Flushes, while time goes by for what is tried again later.
    pub(crate) fn flush(&self, store: &Store) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if store.flush(Duration::from_millis(50)) {
                return true;
            }
            self.wait(61);
        }
        false
    }

    fn io(&self, flag: &AtomicBool) -> Result<()> {
        assert!(!self.panic_in_io.load(Ordering::SeqCst), "asked to panic");
        let failed = || Error::io("asked to fail", std::io::Error::from_raw_os_error(5));
        if flag.load(Ordering::SeqCst) { Err(failed()) } else { Ok(()) }
    }
}

impl LocalTier for MemoryDisk {
    fn reserve(&self) -> Option<SlotId> {
        let mut slots = self.slots.lock().unwrap();
        let free = (0..self.capacity).find(|slot| !slots.reserved.contains_key(slot))?;
        slots.reserved.insert(free, None);
        Some(SlotId(free))
    }

    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _gate = self.write_gate.lock().unwrap();
        self.io(&self.fail_writes)?;
        let mut slots = self.slots.lock().unwrap();
        let parent_there =
            meta.depth == 0 || slots.reserved.values().flatten().any(|(other, _)| other.key == meta.parent);
        if !parent_there {
            slots.violations.push(format!("{meta:?} was written before its parent"));
        }
        match slots.reserved.get_mut(&slot.0) {
            Some(place @ None) => *place = Some((*meta, frame.to_vec())),
            _ => slots.violations.push(format!("{slot:?} was written without being reserved")),
        }
        Ok(())
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        self.num_reads.fetch_add(1, Ordering::SeqCst);
        let _gate = self.read_gate.lock().unwrap();
        into.fill(0xee);
        self.io(&self.fail_reads)?;
        let corrupt = || Error::new(ErrorKind::Corrupt, "asked to be corrupt");
        if self.corrupt_reads.load(Ordering::SeqCst) {
            return Err(corrupt());
        }
        let mut slots = self.slots.lock().unwrap();
        let found = slots.reserved.get(&slot.0).and_then(Option::as_ref).filter(|(meta, _)| meta.key == *key).cloned();
        let Some((_, bytes)) = found else {
            slots.violations.push(format!("{slot:?} was read for a key that is not there"));
            return Err(corrupt());
        };
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        self.is_freeing.store(true, Ordering::SeqCst);
        let _gate = self.free_gate.lock().unwrap();
        self.io(&self.fail_frees)?;
        let mut slots = self.slots.lock().unwrap();
        if slots.reserved.remove(&slot.0).is_none() {
            slots.violations.push(format!("{slot:?} was freed twice"));
        }
        Ok(())
    }

    fn stats(&self) -> DiskStats {
        DiskStats::default()
    }

    fn take_events(&self) -> Vec<String> {
        Vec::new()
    }

    fn clear(&self) -> Result<()> {
        self.slots.lock().unwrap().reserved.retain(|_, place| place.is_none());
        Ok(())
    }

    fn close(&self) {}
}
