//! See `kvloft_core::tier::disk::fuzzing::parse_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvloft_core::tier::disk::fuzzing::parse_record(data));
