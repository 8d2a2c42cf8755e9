//! Memory and files: the only folder with unsafe code.

pub mod direct;
