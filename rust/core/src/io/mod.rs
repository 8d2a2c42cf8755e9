//! Access to memory and files. This is the only module in the crate that contains unsafe code.
//!
//! `frame` assigns numbers to frames, `arena` maps their memory, `numa` places it on NUMA nodes,
//! `part` writes and checks trailers, `memory` determines the available memory, and `direct`
//! accesses files.

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
