//! Which NUMA node each range of an arena's pages should lie on, where frames are made of one part
//! per shard.
//!
//! Advice only: the system may place memory elsewhere. Must not depend on system calls.

use super::frame::FRAME_ALIGN;

/// The nodes of the system's first word of a mask.
pub const MAX_NODES: u32 = 64;
/// Most ranges, each some 0.4 KiB of the kernel's memory and some microseconds when the arena is
/// made.
const MAX_PLACES: u64 = 1 << 18;

/// Bytes `start..end` of an arena, and a bit for each node that they may lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first byte: on a page.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// One bit: all of it on that node. More: pages in turn.
    pub nodes: u64,
}

impl Place {
    /// A policy of the system: what it prefers (1), or pages in turn (3).
    pub(super) fn mode(&self) -> u32 {
        if self.nodes.is_power_of_two() { 1 } else { 3 }
    }
}

/// Returns the mask of one node; 0 if the mask has no bit for it.
pub(super) fn bit(node: u32) -> u64 {
    1_u64.checked_shl(node).unwrap_or(0)
}

/// Ranges of `num_frames` frames of `frame_bytes`, in order and none touching another of the same
/// node: part i of each frame on `nodes[i]`, below `MAX_NODES`. One range of all frames where all
/// nodes are one, or pages in turn where parts are not whole pages or ranges too many.
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
