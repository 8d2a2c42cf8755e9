//! See `kvloft_core::tier::disk::fuzzing::open_directory`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let dir = tempfile::tempdir().expect("a directory");
    kvloft_core::tier::disk::fuzzing::open_directory(dir.path(), data);
});
