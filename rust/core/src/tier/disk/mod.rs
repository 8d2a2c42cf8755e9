//! The disk tier.
