//! The slabs of a store, and requests for them.

use crate::io::SizeClass;

/// How this tier uses a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlabState {
    /// The slab does not belong to this tier or is not in use.
    Foreign,
    /// The slab belongs to this tier and holds frames of a single size.
    Own(SizeClass),
    /// Like `Own`, but the slab is draining, so its free frames are not handed out.
    Draining(SizeClass),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Slab {
    pub(super) state: SlabState,
    /// Number of frames in use in the slab.
    pub(super) num_used: u32,
}

/// A request for one of this store's slabs, made by another store or by a size class of this store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Only slabs numbered below this limit are suitable.
    pub(crate) end: u32,
    /// The size class of this store that needs the slab, or None if another store needs it.
    pub(super) class: Option<SizeClass>,
}
