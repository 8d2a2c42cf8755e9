//! Memory and files: the only folder with unsafe code.
//!
//! `frame` numbers frames, `arena` maps them, `numa` places them on NUMA nodes,
//! `part` writes and checks a part's trailer, `memory` reads how much memory is available. Must not
//! depend on the meaning of keys, the index or leases; it only checks bounds.

pub mod arena;
pub mod direct;
mod frame;
pub mod memory;
pub mod numa;
pub mod part;

pub use arena::{Arena, Frame, Frames, HostArena};
pub use frame::{FRAME_ALIGN, FrameGrid, FrameId, FrameSizes, MAX_FRAMES, MAX_SIZES, SizeClass};
pub use memory::available_bytes;
pub use numa::prefer_numa_node;
pub use part::{Damage, PartSpec, TRAILER_BYTES};
