//! A 64-bit position-dependent tag over a chunk's pages.
