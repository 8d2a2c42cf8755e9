//! Tests the internals of the disk tier: parsers, faults, crashes, and the rules for a directory.

mod bad_sectors;
mod class_room;
mod classes;
mod conforming;
mod crash;
mod directory;
mod fault;
mod hanging;
mod hostile;
mod life;
mod parsers;
mod verifying;

use crate::io::SizeClass;
use std::path::Path;

use super::{DiskConfig, DiskEntry, DiskMeta, DiskTier, SlotId, budget, namespaces};
use crate::ChunkKey;
use crate::testing::PageBuffer;
use crate::tier::LocalTier;

const FRAME: u64 = 8192;
const NAMESPACE: [u8; 32] = [0xa7; 32];

/// Returns the config for a directory with space for exactly `slots` frames of `FRAME` bytes.
fn config(dir: &Path, slots: u32) -> DiskConfig {
    DiskConfig {
        dir: dir.to_owned(),
        cap_bytes: budget::dir_bytes(slots, FRAME, 0),
        frame_sizes: FRAME.into(),
        namespace: NAMESPACE,
        description: "a test".to_owned(),
    }
}

/// Returns a chunk's parent. Chunks form a binary forest: 0 and 1 are roots, and the parent of
/// `i` is `i / 2 - 1`.
fn parent_of(i: u32) -> Option<u32> {
    (i / 2).checked_sub(1)
}

fn depth_of(i: u32) -> u32 {
    parent_of(i).map_or(0, |p| depth_of(p) + 1)
}

fn key_of(i: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&i.to_le_bytes()).as_bytes())
}

fn meta_of(i: u32) -> DiskMeta {
    let parent = parent_of(i).map_or(ChunkKey([0; 32]), key_of);
    DiskMeta { key: key_of(i), parent, depth: depth_of(i), saved_s: 1000 + u64::from(i) }
}

/// Returns a chunk's bytes, which depend on `version`.
fn frame_of(i: u32, version: u32) -> PageBuffer {
    let mut frame = PageBuffer::new(usize::try_from(FRAME).expect("small"));
    fill(&mut frame, i, version);
    frame
}

fn fill(frame: &mut [u8], i: u32, version: u32) {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&i.to_le_bytes()).update(&version.to_le_bytes());
    hasher.finalize_xof().fill(frame);
}

fn put(tier: &DiskTier, i: u32) -> SlotId {
    let slot = tier.reserve(SizeClass(0)).expect("a slot");
    tier.write(slot, &meta_of(i), &frame_of(i, 0)).expect("written");
    slot
}

fn get(tier: &DiskTier, slot: SlotId, i: u32) -> crate::Result<Vec<u8>> {
    let mut into = PageBuffer::new(usize::try_from(FRAME).expect("small"));
    tier.read(slot, &key_of(i), &mut into)?;
    Ok(into.to_vec())
}

/// Returns the chunk numbers of recovered entries, in order.
fn numbers(entries: &[DiskEntry]) -> Vec<u32> {
    entries
        .iter()
        .map(|e| (0..1000).find(|&i| key_of(i) == e.meta.key).expect("a known key"))
        .collect()
}

/// Returns `superblock` with the given format version and a valid checksum.
fn of_format(format: u32, superblock: &str) -> String {
    let mut block: serde_json::Value = serde_json::from_str(superblock).expect("JSON");
    block["format"] = format.into();
    let fields =
        ["format", "frame_sizes", "namespace", "description"].map(|name| block[name].to_string());
    let summed = fields.join("|").replace(['"', '[', ']'], "");
    block["checksum"] =
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(summed.as_bytes())).into();
    block.to_string()
}

/// Returns the path of the index or frames file for frames of `FRAME` bytes.
fn slot_file(config: &DiskConfig, kind: &str) -> std::path::PathBuf {
    namespaces::dir_of(config).join(format!("{kind}-{FRAME}.dat"))
}

fn open(config: &DiskConfig) -> (DiskTier, Vec<DiskEntry>) {
    DiskTier::open(config.clone()).expect("opens")
}
