//! See `kvloft_core::testing::fuzz::open_directory`. Files in memory are several times faster if
//! available.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    kvloft_core::testing::fuzz::open_directory(dir.path(), data);
});
