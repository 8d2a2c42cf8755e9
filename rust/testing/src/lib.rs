//! Test support for kvloft's tiers and store, never shipped in a wheel.
//!
//! | module | contents |
//! |---|---|
//! | [`faults`] | files that fail, hang or corrupt bytes on demand |
//! | [`one_prefix`] | calls for a single prefix; engines pass many prefixes per call |
//! | [`memory_tier`] | a `LocalTier` in memory that fails, hangs and panics on demand |
//! | [`local_tier`], [`remote_tier`] | conformance suites that compare tiers with a model |
//!
//! kvloft-core compiles this crate a second time as a module of its unit tests, so code in this
//! crate uses the names `kvloft_core` and `super`.

pub mod faults;
pub mod local_tier;
pub mod memory_tier;
pub mod one_prefix;
pub mod remote_tier;

pub use kvloft_core::testing::PageBuffer;
