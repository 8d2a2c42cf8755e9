//! See `kvloft_core::testing::fuzz::parse_superblock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvloft_core::testing::fuzz::parse_superblock(data));
