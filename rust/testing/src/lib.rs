//! Test support for kvloft's tiers and the store: never part of a wheel.
//!
//! | module | contents |
//! |---|---|
//! | [`faults`] | files that fail, hang or corrupt bytes on demand |
//! | [`one_prefix`] | calls for a single prefix; engines make calls for many |
//! | [`memory_tier`] | a `LocalTier` in memory that fails, hangs and panics on demand |
//! | [`local_tier`], [`remote_tier`] | conformance to the trait, against a model |
//!
//! kvloft-core compiles this crate a second time as a module of its unit tests, so code here names
//! that crate `kvloft_core` and this one `super`.

pub mod faults;
pub mod local_tier;
pub mod memory_tier;
pub mod one_prefix;
pub mod remote_tier;

pub use kvloft_core::testing::PageBuffer;
