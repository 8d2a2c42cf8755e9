//! See `kvloft_core::testing::fuzz::open_directory`. Uses `/dev/shm` if available, because files in
//! memory are several times faster.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    kvloft_core::testing::fuzz::open_directory(dir.path(), data);
});
