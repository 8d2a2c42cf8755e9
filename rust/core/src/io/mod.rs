//! Memory and files: the only folder with unsafe code.
//!
//! `frame` is a frame's number, `arena` maps the shared frames, `placement` and `numa` put them on
//! NUMA nodes, `part` writes and checks a part's trailer, `memory` asks the machine how much there
//! is. It must not know keys' meaning, the index or leases; it only bounds-checks what it is
//! handed.

pub mod arena;
pub mod direct;
mod frame;
pub mod memory;
mod numa;
pub mod part;
pub mod placement;

pub use arena::{Arena, Frame, Frames, HostArena};
pub use frame::{FRAME_ALIGN, FrameGrid, FrameId, FrameSizes, MAX_FRAMES, MAX_SIZES, SizeClass};
pub use memory::available_bytes;
pub use numa::prefer_numa_node;
pub use part::{Damage, PartSpec, TRAILER_BYTES};
