//! See `kvloft_core::testing::fuzz::recover_index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvloft_core::testing::fuzz::recover_index(data));
