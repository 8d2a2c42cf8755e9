//! NUMA policies of mapped pages: the system calls that set and read them.
#![expect(unsafe_code, reason = "libc has no safe wrapper for these system calls")]

use std::io::{Error, Result};
use std::os::fd::AsFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use super::placement::{MAX_NODES, Place, bit};

/// Ranges that are mapped together to be placed: each splits that mapping, and a process may have
/// 65,530.
pub(super) const PLACED_AT_ONCE: usize = 1024;

/// Asks `get_mempolicy` for the policy of an address; not in libc.
pub(super) const MPOL_F_ADDR: u64 = 2;

fn bind(address: usize, num_bytes: usize, place: &Place) -> Result<()> {
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
        _ => Err(Error::last_os_error()),
    }
}

/// Sets the policies of ranges of a file of `size_bytes`, which are in order, for every mapping of
/// the file.
pub(super) fn place(fd: impl AsFd, size_bytes: u64, places: &[Place]) -> Result<()> {
    places.chunks(PLACED_AT_ONCE).try_for_each(|some| place_some(&fd, size_bytes, some))
}

/// Policies are the file's, and hold for all mappings: the one here only says which bytes are
/// meant.
fn place_some(fd: impl AsFd, file_bytes: u64, places: &[Place]) -> Result<()> {
    let (Some(first), Some(last)) = (places.first(), places.last()) else { return Ok(()) };
    let size_bytes =
        usize::try_from(last.end.min(file_bytes).saturating_sub(first.start)).unwrap_or(0);
    let (access, flags) = (ProtFlags::empty(), MapFlags::SHARED);
    // SAFETY: no address is asked for, and nothing reads or writes this mapping.
    let start =
        unsafe { rustix::mm::mmap(ptr::null_mut(), size_bytes, access, flags, fd, first.start) }?;
    let within = |byte: u64| {
        usize::try_from(byte.saturating_sub(first.start)).unwrap_or(size_bytes).min(size_bytes)
    };
    let bound = places.iter().try_for_each(|place| {
        let (from, to) = (within(place.start), within(place.end));
        bind(start.addr() + from, to - from, place)
    });
    // SAFETY: start and size are those of the mapping above, into which nothing points.
    let _unmapped = unsafe { rustix::mm::munmap(start, size_bytes) };
    bound
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
