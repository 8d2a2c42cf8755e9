//! The part of kvloft's test support that needs private items of kvloft-core: compiled as a module
//! of that crate, with its feature `testing`.
//!
//! `Store::check`, which recounts the store's invariants, has the same feature.

pub mod fuzz;
mod page_buffer;

pub use page_buffer::PageBuffer;
