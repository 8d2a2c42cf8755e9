//! The part of kvloft's test support that needs private items; the rest is the crate
//! `kvloft-testing`.
//!
//! `Store::check`, which recounts the store's invariants, has the same feature (`testing`).

pub mod fuzz;
mod page_buffer;

pub use page_buffer::PageBuffer;
