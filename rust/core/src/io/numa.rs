//! Assigns page ranges of an arena to NUMA nodes, so that each shard of a frame is on its rank's
//! node. The assignment is only a preference: the kernel may place memory on other nodes.
#![expect(unsafe_code, reason = "libc has no safe wrapper for these system calls")]

use std::io::{Error, Result};
use std::os::fd::AsFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use super::frame::FRAME_ALIGN;

/// Number of nodes that fit in the first word of the kernel's node mask.
pub const MAX_NODES: u32 = 64;
/// Maximum number of ranges. Each range costs 0.4 KiB of kernel memory and a few microseconds when
/// the arena is created.
const MAX_PLACES: u64 = 1 << 18;

/// The bytes `start..end` of an arena and their preferred NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Page-aligned offset of the first byte.
    pub start: u64,
    /// Offset after the last byte.
    pub end: u64,
    /// Mask of nodes. If only one bit is set, all pages prefer that node. If several bits are set,
    /// pages are interleaved across the corresponding nodes.
    pub nodes: u64,
}

impl Place {
    /// Returns the memory policy to request from the kernel: preferred (1) or interleaved (3).
    pub(super) fn mode(&self) -> u32 {
        if self.nodes.is_power_of_two() { 1 } else { 3 }
    }
}

/// Returns a mask with only `node` set, or 0 if the mask has no bit for `node`.
pub(super) fn bit(node: u32) -> u64 {
    1_u64.checked_shl(node).unwrap_or(0)
}

/// Returns the ranges for `num_frames` frames of `frame_bytes` bytes each, in ascending order.
///
/// Shard i of each frame is on `nodes[i]`, which must be less than `MAX_NODES`. Adjacent ranges on
/// the same node are merged, so the result is a single range if all nodes are the same. Returns a
/// single range with interleaved pages if shards are not whole pages or if there would be more than
/// `MAX_PLACES` ranges.
pub fn by_shard(frame_bytes: u64, num_frames: u32, nodes: &[u32]) -> Vec<Place> {
    let all = nodes.iter().fold(0, |all, node| all | bit(*node));
    let (num_parts, end) = (nodes.len() as u64, frame_bytes * u64::from(num_frames));
    if all == 0 || end == 0 {
        return Vec::new();
    }
    let is_whole = frame_bytes.is_multiple_of(num_parts * FRAME_ALIGN);
    let num_runs = nodes.chunk_by(|one, next| one == next).count() as u64;
    if all.is_power_of_two() || !is_whole || num_runs * u64::from(num_frames) > MAX_PLACES {
        return vec![Place { start: 0, end, nodes: all }];
    }
    let part_bytes = frame_bytes / num_parts;
    let parts = (0..u64::from(num_frames) * num_parts)
        .map(|part| part * part_bytes)
        .zip(nodes.iter().cycle());
    let mut places: Vec<Place> = Vec::new();
    for (start, node) in parts {
        match places.last_mut() {
            Some(last) if last.nodes == bit(*node) => last.end += part_bytes,
            _ => places.push(Place { start, end: start + part_bytes, nodes: bit(*node) }),
        }
    }
    places
}

/// Maximum number of ranges placed through one temporary mapping. Each range splits the mapping,
/// and by default Linux allows 65,530 mappings per process.
pub(super) const PLACED_AT_ONCE: usize = 1024;

/// `get_mempolicy` flag that requests the policy for an address. The libc crate does not define it.
pub(super) const MPOL_F_ADDR: u64 = 2;

fn bind(address: usize, num_bytes: usize, place: &Place) -> Result<()> {
    let num_bits = u64::from(MAX_NODES) + 1;
    // SAFETY: the call does not modify any bytes, and the kernel rejects addresses that are not
    // mapped. The mask is one word, and the kernel reads one bit fewer than `num_bits`.
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

/// Sets the memory policies of ranges in a file of `size_bytes` bytes. The ranges must be in
/// ascending order.
pub(super) fn place(fd: impl AsFd, size_bytes: u64, places: &[Place]) -> Result<()> {
    places.chunks(PLACED_AT_ONCE).try_for_each(|some| place_some(&fd, size_bytes, some))
}

/// Sets the memory policies of ranges through a temporary mapping. The policies belong to the file,
/// so they apply to all its mappings.
fn place_some(fd: impl AsFd, file_bytes: u64, places: &[Place]) -> Result<()> {
    let (Some(first), Some(last)) = (places.first(), places.last()) else { return Ok(()) };
    let size_bytes =
        usize::try_from(last.end.min(file_bytes).saturating_sub(first.start)).unwrap_or(0);
    let (access, flags) = (ProtFlags::empty(), MapFlags::SHARED);
    // SAFETY: no address is given, and nothing reads or writes this mapping.
    let start =
        unsafe { rustix::mm::mmap(ptr::null_mut(), size_bytes, access, flags, fd, first.start) }?;
    let within = |byte: u64| {
        usize::try_from(byte.saturating_sub(first.start)).unwrap_or(size_bytes).min(size_bytes)
    };
    let bound = places.iter().try_for_each(|place| {
        let (from, to) = (within(place.start), within(place.end));
        bind(start.addr() + from, to - from, place)
    });
    // SAFETY: start and size belong to the mapping above, and no pointer into it exists.
    let _unmapped = unsafe { rustix::mm::munmap(start, size_bytes) };
    bound
}

/// Returns the policy of the page at `address`, or 0 if no policy was set. Returns None if the
/// kernel does not report policies.
fn policy_at(address: usize) -> Option<i32> {
    let mut mode = -1_i32;
    let no_mask: *const u64 = ptr::null();
    // SAFETY: `mode` is a local variable, no mask is returned, and the kernel does not access the
    // memory at the address.
    let done = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, no_mask, 0_u64, address, MPOL_F_ADDR)
    };
    (done == 0).then_some(mode)
}

/// Places the unallocated pages of a page-aligned range on one NUMA node, for all processes that
/// map the range.
///
/// Returns false and changes nothing if the server or an earlier engine has already placed the
/// pages. Also returns false if the kernel rejects the placement, in which case the kernel chooses
/// the nodes.
pub fn prefer_numa_node(address: usize, num_bytes: usize, node: u32) -> bool {
    let place = Place { start: 0, end: num_bytes as u64, nodes: bit(node) };
    place.nodes != 0
        && policy_at(address) == Some(libc::MPOL_DEFAULT)
        && bind(address, num_bytes, &place).is_ok()
}

#[cfg(test)]
mod tests;
