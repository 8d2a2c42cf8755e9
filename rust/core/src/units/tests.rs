//! Tests size formatting.

use super::size_text;

#[test]
fn test_sizes_read_as_people_write_them() {
    let texts = [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (40 << 30, "40 GiB"),
    ];
    for (bytes, text) in texts {
        assert_eq!(size_text(bytes), text);
    }
    assert_eq!(size_text(u64::MAX), "16777215.99 TiB");
}
