//! One chunk: its place in its prefix, in each tier, and who uses it now.

use crate::evict::ChunkId;
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::tier::disk::SlotId;

/// Where a chunk is in one tier; `P` is a place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Presence<P> {
    #[default]
    Absent,
    /// It will be here; it may not have a place yet.
    Coming(Option<P>),
    /// Here, as good as its key says.
    Here(P),
    /// Its place is being freed. It is back where that fails.
    Leaving(P),
}

impl<P: Copy> Presence<P> {
    /// Its place, if it has one.
    pub(crate) fn place(self) -> Option<P> {
        match self {
            Presence::Absent => None,
            Presence::Coming(place) => place,
            Presence::Here(place) | Presence::Leaving(place) => Some(place),
        }
    }

    pub(crate) fn is_absent(self) -> bool {
        matches!(self, Presence::Absent)
    }

    pub(crate) fn is_here(self) -> bool {
        matches!(self, Presence::Here(_))
    }
}

/// Who brings the bytes of a chunk that is coming to host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Filler {
    /// They are there, and wait for the parent.
    #[default]
    Done,
    /// A worker, under a `WriteLease`.
    Lease,
    /// A disk thread; it has no frame until the read begins.
    Read,
    /// They will not come. The chunk leaves host behind its children.
    Failed,
}

/// As a time: it does not come.
pub(crate) const NEVER: u32 = u32::MAX;

/// Whose chunk it is: see `store/tenants/table.rs`. The default has no salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct TenantId(pub(crate) u32);

/// Whether a chunk should get to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Wish {
    #[default]
    None,
    /// In the queue.
    Queued,
    /// Behind its parent, which is in the queue, being written or being freed.
    Behind,
    /// Being written.
    Writing,
}

/// One chunk.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a chunk")]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(crate) tenant: TenantId,
    /// Chunks before it; its unit in the prefix. 0 for a chunk that depends on no other one.
    pub(crate) depth: u32,
    /// Its place and those of all above it are known to be right.
    pub(crate) proven: bool,
    /// The links, the generation and the two states are the index's to change.
    pub(crate) first_child: Option<ChunkId>,
    pub(crate) prev_sibling: Option<ChunkId>,
    pub(crate) next_sibling: Option<ChunkId>,
    /// Detached children; they are not among the siblings.
    pub(crate) num_detached: u32,
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// It is forgotten, and with it all below it.
    pub(crate) detached: bool,
    /// It will be forgotten, with all below it; no key leads here any more.
    pub(crate) removing: bool,
    pub(crate) host: Presence<FrameId>,
    pub(crate) disk: Presence<SlotId>,
    pub(crate) filler: Filler,
    pub(crate) wish: Wish,
    /// Second of the store's life before which it is not read again.
    pub(crate) unreadable_until_s: u32,
    /// Second of Unix time when it was reserved for its bytes, and from which on it is not found any more.
    pub(crate) saved_s: u32,
    pub(crate) expires_s: u32,
    /// Read leases that end here or wait for it, and a disk thread that copies the frame.
    pub(crate) holds: u32,
    /// Children in or coming to host, detached ones too.
    pub(crate) host_children: u32,
    /// Children on, coming to or leaving the disk, detached ones too.
    pub(crate) disk_children: u32,
    /// What the policies were told last; None while they do not know the chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
    /// It is the end of a prefix that was used again, or kept beside it: policies that hear of it later are told so.
    pub(crate) reused: bool,
}

impl Entry {
    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some() || self.num_detached > 0
    }

    /// A disk thread shall read it, and has not begun.
    pub(crate) fn is_queued(&self) -> bool {
        self.host == Presence::Coming(None)
    }

    /// A disk thread shall write it, and has not begun.
    pub(crate) fn is_to_write(&self) -> bool {
        self.wish == Wish::Queued
    }

    /// Whether children may be admitted to host: it has a frame, or will.
    pub(crate) fn has_frame(&self) -> bool {
        self.host.place().is_some() && self.filler != Filler::Failed
    }

    /// On its way to host, as far as anybody knows.
    pub(crate) fn is_coming(&self) -> bool {
        matches!(self.host, Presence::Coming(_)) && self.filler != Filler::Failed && !self.detached && !self.removing
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
