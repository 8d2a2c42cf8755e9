//! Tests the parsing of `/proc/meminfo` and of control group files.

use super::*;

#[test]
fn meminfo_is_read_in_kib() {
    assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12 * 1024));
    assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
    assert_eq!(mem_available("MemAvailable: many kB\n"), None);
}

#[test]
fn a_group_has_left_what_it_does_not_use_but_for_reclaimable_pages() {
    let group = std::env::temp_dir().join(format!("kvloft-group-{}", std::process::id()));
    fs::create_dir_all(&group).unwrap();
    let names = ("memory.max", "memory.current", "inactive_file");
    fs::write(group.join("memory.current"), "700\n").unwrap();
    fs::write(group.join("memory.max"), "max\n").unwrap();
    assert_eq!(group_left(&group, names), None);
    fs::write(group.join("memory.max"), "1000\n").unwrap();
    assert_eq!(group_left(&group, names), Some(300));
    fs::write(group.join("memory.stat"), "inactive_file_x 9\ninactive_file 200\n").unwrap();
    assert_eq!(group_left(&group, names), Some(500));
    fs::write(group.join("memory.current"), "1900\n").unwrap();
    assert_eq!(group_left(&group, names), Some(0));
    fs::remove_dir_all(&group).unwrap();
}

#[test]
fn this_machine_has_some() {
    assert!(available_bytes().is_none_or(|bytes| bytes > 0));
}
