//! NUMA policies of mapped pages: the system calls that set and read them.
#![expect(unsafe_code, reason = "libc has no safe wrapper for these system calls")]

use std::ptr;

use super::placement::{MAX_NODES, Place, bit};

/// Asks `get_mempolicy` for the policy of an address; not in libc.
pub(super) const MPOL_F_ADDR: u64 = 2;

/// Sets the policy of whole pages at `address` in this process.
pub(super) fn bind(address: usize, num_bytes: usize, place: &Place) -> std::io::Result<()> {
    let num_bits = u64::from(MAX_NODES) + 1;
    // SAFETY: the call changes no byte and the system refuses addresses that are not mapped; the
    // mask is one word, and the system reads one bit less than `num_bits`.
    match unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            num_bytes,
            place.mode(),
            &raw const place.nodes,
            num_bits,
            0,
        )
    } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Returns the policy of the page at `address`, which is 0 if none was set; None if the system does
/// not report it.
fn policy_at(address: usize) -> Option<i32> {
    let mut mode = -1_i32;
    let no_mask: *const u64 = ptr::null();
    // SAFETY: the mode is ours, no mask is returned, and the address is only looked up.
    let done = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, no_mask, 0_u64, address, MPOL_F_ADDR)
    };
    (done == 0).then_some(mode)
}

/// Places whole pages at `address` that are not in memory yet on one NUMA node, for every process
/// that maps them.
///
/// Returns false, and changes nothing, if they were placed before: by the server, or by the first
/// of its engines. Also false if the system refuses, in which case it chooses the node.
pub fn prefer_numa_node(address: usize, num_bytes: usize, node: u32) -> bool {
    let place = Place { start: 0, end: num_bytes as u64, nodes: bit(node) };
    place.nodes != 0
        && policy_at(address) == Some(libc::MPOL_DEFAULT)
        && bind(address, num_bytes, &place).is_ok()
}
