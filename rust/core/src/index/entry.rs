//! One chunk: its place in its prefix, in each tier, and who uses it now.

use super::Presence;
use crate::evict::ChunkId;
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::tier::disk::SlotId;

/// Who brings the bytes of a chunk that is coming to host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filler {
    /// They are there, and wait for the parent.
    Nobody,
    /// A worker, under a `WriteLease`.
    Lease,
    /// A disk thread; it has no frame until the read begins.
    Read,
    /// They will not come. The chunk leaves host behind its children.
    Failed,
}

/// Whether a chunk should get to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// No.
    None,
    /// In the queue.
    Queued,
    /// Behind its parent, which is in the queue, being written or being freed.
    Behind,
    /// Being written.
    Writing,
}

/// What an entry begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewEntry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    /// Chunks before it.
    pub(crate) depth: u32,
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
    /// Its place and those of all above it are known to be right.
    pub(crate) proven: bool,
}

/// One chunk.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a chunk")]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(super) first_child: Option<ChunkId>,
    pub(super) prev_sibling: Option<ChunkId>,
    pub(super) next_sibling: Option<ChunkId>,
    /// Detached children; they are not among the siblings.
    pub(super) num_detached: u32,
    pub(super) generation: u32,
    /// Which `clear` it came after.
    pub(super) epoch: u32,
    pub(super) live: bool,
    /// It is forgotten, and with it all below it.
    pub(crate) detached: bool,
    /// It will be forgotten, with all below it; no key leads here any more.
    pub(crate) doomed: bool,
    pub(crate) proven: bool,
    pub(crate) depth: u32,
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
    pub(crate) host: Presence<FrameId>,
    pub(crate) disk: Presence<SlotId>,
    pub(crate) filler: Filler,
    pub(crate) wish: Wish,
    /// Second of the store's life before which it is not read again.
    pub(crate) unreadable_until_s: u32,
    /// Read leases that end here or wait for it, and a disk thread that copies the frame.
    pub(crate) holds: u32,
    /// Children in or coming to host, detached ones too.
    pub(crate) host_children: u32,
    /// Children on, coming to or leaving the disk, detached ones too.
    pub(crate) disk_children: u32,
    /// What the policies were told last; None while they do not know the chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
}

impl Entry {
    pub(super) fn new(new: NewEntry, next_sibling: Option<ChunkId>, generation: u32, epoch: u32) -> Self {
        Self {
            key: new.key,
            parent_key: new.parent_key,
            parent: new.parent,
            first_child: None,
            prev_sibling: None,
            next_sibling,
            num_detached: 0,
            generation,
            epoch,
            live: true,
            detached: false,
            doomed: false,
            proven: new.proven,
            depth: new.depth,
            first_block: new.first_block,
            num_blocks: new.num_blocks,
            host: Presence::Absent,
            disk: Presence::Absent,
            filler: Filler::Nobody,
            wish: Wish::None,
            unreadable_until_s: 0,
            holds: 0,
            host_children: 0,
            disk_children: 0,
            host_evictable: None,
            disk_evictable: None,
        }
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// The block behind its last one.
    pub(crate) fn end_block(&self) -> u32 {
        self.first_block + self.num_blocks
    }

    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some() || self.num_detached > 0
    }

    /// A disk thread shall read it, and has not begun.
    pub(crate) fn is_queued(&self) -> bool {
        self.host == Presence::Coming(None)
    }

    /// Whether children may be admitted to host: it has a frame, or will.
    pub(crate) fn has_frame(&self) -> bool {
        self.host.place().is_some() && self.filler != Filler::Failed
    }

    /// On its way to host, as far as anybody knows.
    pub(crate) fn is_coming(&self) -> bool {
        matches!(self.host, Presence::Coming(_)) && self.filler != Filler::Failed && !self.detached && !self.doomed
    }

    /// A disk thread or a worker has its frame.
    pub(crate) fn is_filling(&self) -> bool {
        matches!(self.host, Presence::Coming(Some(_))) && matches!(self.filler, Filler::Lease | Filler::Read)
    }

    /// A disk thread reads the slot, or will.
    pub(crate) fn is_read(&self) -> bool {
        matches!(self.host, Presence::Coming(_)) && self.filler == Filler::Read
    }
}
