//! Test support code that needs access to kvloft-core's private items. The `testing` feature
//! compiles this module into that crate.
//!
//! The same feature also enables `Store::check`, which verifies the store's invariants.

pub mod fuzz;
mod page_buffer;
mod shortcuts;

pub use page_buffer::PageBuffer;
