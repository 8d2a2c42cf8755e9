//! The part of kvloft's test support that needs private items of kvloft-core. This module is
//! compiled as part of that crate if the feature `testing` is enabled.
//!
//! The same feature enables `Store::check`, which recomputes the store's invariants.

pub mod fuzz;
mod page_buffer;
mod shortcuts;

pub use page_buffer::PageBuffer;
