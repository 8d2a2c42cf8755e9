//! See `kvloft_core::tier::disk::fuzzing::recover_index`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvloft_core::tier::disk::fuzzing::recover_index(data));
