//! NUMA nodes for ranges of an arena's pages, for frames that consist of one part per shard.
//!
//! This is advice: the system can place memory elsewhere. Must not depend on system calls.

use super::frame::FRAME_ALIGN;

/// The nodes of the system's first word of a mask.
pub const MAX_NODES: u32 = 64;
/// Maximum number of ranges; each takes 0.4 KiB of kernel memory and some microseconds when the
/// arena is created.
const MAX_PLACES: u64 = 1 << 18;

/// Bytes `start..end` of an arena, and a bit for each allowed node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first byte: on a page.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// One bit: all pages are on that node. Several bits: pages alternate.
    pub nodes: u64,
}

impl Place {
    /// Policy of the system call: preferred node (1) or interleaved (3).
    pub(super) fn mode(&self) -> u32 {
        if self.nodes.is_power_of_two() { 1 } else { 3 }
    }
}

/// Returns the mask of one node; 0 if the mask has no bit for it.
pub(super) fn bit(node: u32) -> u64 {
    1_u64.checked_shl(node).unwrap_or(0)
}

/// Ranges of `num_frames` frames of `frame_bytes`, in order and merged per node: part i of each
/// frame is on `nodes[i]`, which is below `MAX_NODES`. A single range if all nodes are equal; also,
/// with alternating pages, if parts are not whole pages or there are too many ranges.
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

#[cfg(test)]
mod tests;
