//! Tiers: where frames live.

pub mod disk;
