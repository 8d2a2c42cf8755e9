//! Constructors and lookups that only tests need.

use std::sync::Arc;

use crate::evict::Eviction;
use crate::io::{FrameGrid, FrameSizes, Frames, HostArena, SizeClass};
use crate::key::KeyChain;
use crate::store::{ArenaInfo, Store};
use crate::tier::disk::{DiskConfig, DiskEntry, DiskTier};
use crate::{ChunkKey, Result};

impl Eviction {
    /// Every policy.
    pub const ALL: [Self; 2] = [Eviction::Adaptive, Eviction::Lru];
}

impl FrameSizes {
    /// The class whose frames have `frame_bytes` bytes.
    pub fn class_of(&self, frame_bytes: u64) -> Option<SizeClass> {
        self.classes().find(|class| self.bytes(*class) == frame_bytes)
    }
}

impl HostArena {
    /// Creates zeroed frames of one size. The kernel allocates each page at its first write.
    ///
    /// Returns `InvalidConfig` if `frame_bytes` is not a multiple of 4096 or nothing would be
    /// mapped, and `Io` if a system call fails.
    pub fn create(frame_bytes: u64, num_frames: u32) -> Result<(Self, Frames)> {
        let arena = Self::of_bytes(frame_bytes.saturating_mul(num_frames.into()))?;
        let frames = arena.frames(frame_bytes, &frame_bytes.into())?;
        Ok((arena, frames))
    }
}

impl KeyChain {
    /// Creates an empty prefix under `root`; blocks have `block_tokens` positions, at least one.
    pub fn new(root: ChunkKey, block_tokens: u32) -> Result<Self> {
        Self::with_lookahead(root, block_tokens, 0)
    }
}

impl ArenaInfo {
    /// Where frames of `frame_bytes` lie; `InvalidConfig` if a slab does not hold one.
    pub fn grid(&self, frame_bytes: u64) -> Result<FrameGrid> {
        FrameGrid::new(self.size_bytes, self.slab_bytes, frame_bytes)
    }
}

impl Store {
    /// Restricts saves to the first `limit_bytes`. Disk reads use any.
    pub fn limit_memory(&self, limit_bytes: u64) {
        self.inner.with_state(|state| state.host.limit(limit_bytes));
    }
}

impl DiskTier {
    /// As [`Self::open_in`], in a directory with a single namespace.
    #[expect(clippy::needless_pass_by_value, reason = "the tier owns the settings from here on")]
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_in(&config, &Arc::default())
    }
}
