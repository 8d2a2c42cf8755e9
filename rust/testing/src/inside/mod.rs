//! Test support that needs kvloft-core's private items. The feature `testing` compiles this module
//! as part of that crate.
//!
//! The same feature enables `Store::check`, which recomputes the store's invariants.

pub mod fuzz;
mod page_buffer;
mod shortcuts;

pub use page_buffer::PageBuffer;
