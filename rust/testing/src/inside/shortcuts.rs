//! Constructors and accessors that only tests need.

use std::sync::Arc;

use crate::evict::Eviction;
use crate::io::{FrameGrid, FrameSizes, Frames, HostArena, SizeClass};
use crate::key::KeyChain;
use crate::store::{ArenaInfo, Store};
use crate::tier::disk::{DiskConfig, DiskEntry, DiskTier};
use crate::{ChunkKey, Result};

impl Eviction {
    /// All eviction policies.
    pub const ALL: [Self; 2] = [Eviction::Adaptive, Eviction::Lru];
}

impl FrameSizes {
    /// Returns the size class for frames of `frame_bytes` bytes.
    pub fn class_of(&self, frame_bytes: u64) -> Option<SizeClass> {
        self.classes().find(|class| self.bytes(*class) == frame_bytes)
    }
}

impl HostArena {
    /// Creates an arena of zeroed frames, all of the same size. The kernel allocates each page when
    /// it is first written.
    ///
    /// Returns `InvalidConfig` if `frame_bytes` is not a multiple of 4096 or the arena would be
    /// empty, and `Io` if a system call fails.
    pub fn create(frame_bytes: u64, num_frames: u32) -> Result<(Self, Frames)> {
        let arena = Self::of_bytes(frame_bytes.saturating_mul(num_frames.into()))?;
        let frames = arena.frames(frame_bytes, &frame_bytes.into())?;
        Ok((arena, frames))
    }
}

impl KeyChain {
    /// Creates an empty prefix with the root key `root`. `block_tokens` must be at least 1.
    pub fn new(root: ChunkKey, block_tokens: u32) -> Result<Self> {
        Self::with_lookahead(root, block_tokens, 0)
    }
}

impl ArenaInfo {
    /// Returns the layout of frames of this size, or `InvalidConfig` if a slab cannot hold a frame.
    pub fn grid(&self, frame_bytes: u64) -> Result<FrameGrid> {
        FrameGrid::new(self.size_bytes, self.slab_bytes, frame_bytes)
    }
}

impl Store {
    /// Restricts saves to the first `limit_bytes` bytes of the arena. Disk reads can use all
    /// frames.
    pub fn limit_memory(&self, limit_bytes: u64) {
        self.inner.with_state(|state| state.host.limit(limit_bytes));
    }
}

impl DiskTier {
    /// Like [`Self::open_in`], but for a directory with a single namespace.
    #[expect(clippy::needless_pass_by_value, reason = "the tier owns the settings from here on")]
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_in(&config, &Arc::default())
    }
}
