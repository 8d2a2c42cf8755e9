//! The part of kvloft's test support that needs private items of kvloft-core. It is compiled as a
//! module of that crate with the feature `testing`.
//!
//! `Store::check`, which recomputes the store's invariants, needs the same feature.

pub mod fuzz;
mod page_buffer;
mod shortcuts;

pub use page_buffer::PageBuffer;
