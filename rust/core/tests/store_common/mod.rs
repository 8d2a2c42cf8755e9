//! Helpers for the store's tests: small chains, frames that contain their key, and an in-memory
//! disk that fails on demand.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::allow_attributes,
    reason = "tests; each file uses part of this one"
)]

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::{Arena, Damage, FrameId, PartSpec};
use kvloft_core::key::{ChunkKey, KeyChain, root_key};
use kvloft_core::store::{
    ArenaInfo, DiskSettings, Quota, Reservation, Store, StoreConfig, TenantLimits,
};
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::DiskEntry;
use kvloft_core::{Error, ErrorKind};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;

pub(crate) const FRAME: usize = 4096;

pub(crate) fn config(num_frames: u32, eviction: Eviction) -> StoreConfig {
    StoreConfig {
        frame_sizes: (FRAME as u64).into(),
        host_bytes: u64::from(num_frames) * FRAME as u64,
        eviction,
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
        now_s: 0,
        limits: TenantLimits::default(),
    }
}

pub(crate) fn disk_settings(num_slots: u64, num_threads: u32) -> DiskSettings {
    let cap_bytes = num_slots * FRAME as u64;
    DiskSettings { dir: "/nowhere".into(), cap_bytes, num_threads, description: String::new() }
}

/// Returns a chain with blocks of one token each.
pub(crate) fn chain(tokens: &[u32]) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
    chain.append_tokens(tokens).unwrap();
    chain
}

/// Returns a tenant's prompt, with blocks of one token each.
pub(crate) fn chain_of(salt: Option<&str>, prompt: u32, num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, salt).unwrap(), 1).unwrap();
    chain.append_tokens(&(0..num_blocks).map(|at| prompt * 100 + at).collect::<Vec<_>>()).unwrap();
    chain
}

/// Returns a quota of `num_frames` frames.
pub(crate) fn bytes(num_frames: u32) -> Quota {
    Quota::Bytes(u64::from(num_frames) * FRAME as u64)
}

/// Returns one of 64 prompts of 3 to 9 blocks. Each bit of `prompt` determines three tokens, so
/// prompts share prefixes.
pub(crate) fn prompt_chain(prompt: usize) -> KeyChain {
    let tokens: Vec<u32> =
        (0..(3 + prompt % 7)).map(|at| u32::from(prompt >> (at / 3) & 1 == 1)).collect();
    chain(&tokens)
}

pub(crate) fn stat(store: &Store, name: &str) -> u64 {
    store
        .stats()
        .into_iter()
        .find(|(known, _)| *known == name)
        .unwrap_or_else(|| panic!("no {name}"))
        .1
}

fn spec(key: ChunkKey) -> PartSpec<'static> {
    PartSpec { key, layout: [1; 32], page_bytes: &[], num_blocks: 1, rank: 0 }
}

pub(crate) fn arena_of(store: &Store) -> Arena {
    let ArenaInfo { path, size_bytes, .. } = store.arena();
    Arena::open(path, *size_bytes).unwrap()
}

/// Seals a reserved frame with the reservation's key, as a worker does.
pub(crate) fn fill(arena: &Arena, reservation: &Reservation) {
    arena
        .seal(u64::from(reservation.frame.number()) * FRAME as u64, FRAME, &spec(reservation.key))
        .unwrap();
}

/// Checks a frame, as a worker does before it uses the frame.
pub(crate) fn verify(arena: &Arena, frame: FrameId, key: ChunkKey) -> Option<Damage> {
    arena.check(u64::from(frame.number()) * FRAME as u64, FRAME, &spec(key)).unwrap()
}

/// Saves units in one call, and returns how many became visible.
pub(crate) fn save(store: &Store, arena: &Arena, chain: &KeyChain, units: Range<u32>) -> u32 {
    let reserved = store.reserve(chain, units).unwrap();
    reserved.chunks.iter().for_each(|lease| fill(arena, lease.reservation()));
    store.commit(reserved.chunks)
}

/// An in-memory disk with a clock.
#[derive(Debug)]
pub(crate) struct MemoryDisk {
    tier: Arc<MemoryTier>,
    pub(crate) fail_opens: AtomicBool,
    /// The store's clock, in milliseconds. Tests advance this clock.
    now_ms: AtomicU64,
}

impl Deref for MemoryDisk {
    type Target = MemoryTier;

    fn deref(&self) -> &MemoryTier {
        &self.tier
    }
}

impl MemoryDisk {
    pub(crate) fn new(capacity: u32) -> Arc<Self> {
        Self::of(MemoryTier::new(capacity))
    }

    pub(crate) fn of(tier: Arc<MemoryTier>) -> Arc<Self> {
        Arc::new(Self { tier, fail_opens: AtomicBool::new(false), now_ms: AtomicU64::new(0) })
    }

    /// Opens a store with this disk and its clock.
    pub(crate) fn open(self: &Arc<Self>, config: &StoreConfig, found: &[DiskEntry]) -> Store {
        let (disk, clock, found) = (Arc::clone(self), Arc::clone(self), found.to_vec());
        let open = move || {
            if disk.fail_opens.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Io, "failure requested by the test"));
            }
            disk.open_again();
            Ok((Arc::clone(&disk.tier) as Arc<dyn LocalTier>, found.clone()))
        };
        let now = move || Duration::from_millis(clock.now_ms.load(Ordering::SeqCst));
        Store::with_tier(config, None, Some(Box::new(open)), Box::new(now)).unwrap()
    }

    /// Returns the store's time in seconds.
    pub(crate) fn now_s(&self) -> u64 {
        self.now_ms.load(Ordering::SeqCst) / 1000
    }

    pub(crate) fn wait(&self, seconds: u64) {
        self.now_ms.fetch_add(1000 * seconds, Ordering::SeqCst);
    }

    /// Flushes while the clock advances, so that failed operations are retried.
    pub(crate) fn flush(&self, store: &Store) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            if store.flush(Duration::from_millis(50)) {
                return true;
            }
            self.wait(61);
        }
        false
    }
}
