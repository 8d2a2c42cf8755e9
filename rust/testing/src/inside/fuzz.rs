//! Fuzz entry points for the disk tier. Each entry point takes arbitrary bytes and panics if the
//! tier accepts invalid data.
//!
//! Checksums reject random bytes early, so parts of the input are turned into forged records and
//! superblocks with valid checksums.

use crate::io::SizeClass;
use std::fs;
use std::path::Path;

use twox_hash::XxHash3_64;

use super::PageBuffer;
use crate::key::namespace_id;
use crate::tier::LocalTier;
use crate::tier::disk::record::recover;
use crate::tier::disk::record::{
    self, EMPTY, Parsed, RECORD_BYTES, Record, RecordBytes, record_seed,
};
use crate::tier::disk::superblock::{self, Superblock};
use crate::tier::disk::{
    DiskConfig, DiskEntry, DiskMeta, DiskTier, SlotId, Verifier, budget, inspect, namespaces,
};
use crate::{ChunkKey, ErrorKind};

const SIZES: [u64; 2] = [4096, 12288];
const NAMESPACE: [u8; 32] = [0x5a; 32];

/// Reads numbers from the input, and returns zeros once the input is used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(len.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }

    fn small(&mut self, below: u32) -> u32 {
        u32::from(self.byte()) % below
    }

    /// Returns one of a few keys with a common prefix, so that records have parents and duplicates.
    fn key(&mut self) -> ChunkKey {
        let mut key = ChunkKey([3; 32]);
        key.0[31] = self.byte() % 24;
        key
    }

    fn record(&mut self) -> Record {
        let (key, parent) = (self.key(), self.key());
        let depth = if self.byte() == 255 { u32::MAX } else { self.small(5) };
        let meta = DiskMeta { key, parent, depth, saved_s: self.word() };
        let sequence = if self.byte() == 255 { u64::MAX } else { self.small(64).into() };
        Record { meta, payload: self.small(2).into(), sequence }
    }

    /// Returns an index of empty, forged, torn and random records for frames of this size.
    fn index(&mut self, frame_bytes: u64) -> Vec<u8> {
        let seed = record_seed(&NAMESPACE, frame_bytes);
        let mut index = Vec::new();
        while !self.0.is_empty() && index.len() < 64 * RECORD_BYTES {
            let slot = u32::try_from(index.len() / RECORD_BYTES).unwrap_or(0);
            let mut bytes = EMPTY;
            match self.byte() % 8 {
                0 => {}
                1 => {
                    let taken = self.take(RECORD_BYTES);
                    bytes[..taken.len()].copy_from_slice(taken);
                }
                2 => {
                    bytes = self.record().encode(slot, seed);
                    bytes[self.small(128) as usize] ^= 1 << (self.byte() % 8);
                }
                _ => bytes = self.record().encode(slot, seed),
            }
            index.extend(bytes);
        }
        index.extend(self.take(RECORD_BYTES - 1));
        index
    }
}

/// Adds the magic number and the checksum of a valid record to arbitrary bytes.
fn forge_record(bytes: &mut RecordBytes, seed: u64) {
    bytes[..8].copy_from_slice(b"KVLREC01");
    let checksum = XxHash3_64::oneshot_with_seed(seed, &bytes[..120]);
    bytes[120..].copy_from_slice(&checksum.to_le_bytes());
}

/// Adds the format version and checksum of a valid superblock to JSON with the right structure.
fn forge_superblock(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut forged: Superblock = serde_json::from_slice(bytes).ok()?;
    forged.format = superblock::FORMAT;
    forged.checksum = forged.compute_checksum();
    serde_json::to_vec(&forged).ok()
}

/// Checks that a record that parses successfully encodes to the same bytes.
pub fn parse_record(data: &[u8]) {
    let mut input = Input(data);
    let (slot, seed) = (input.small(3), input.word());
    let mut bytes = EMPTY;
    let taken = input.take(RECORD_BYTES);
    bytes[..taken.len()].copy_from_slice(taken);
    for forged in [false, true] {
        if forged {
            forge_record(&mut bytes, seed);
        }
        match record::parse(&bytes, slot, seed) {
            Parsed::Empty => assert_eq!(bytes, EMPTY),
            Parsed::Valid(found) => {
                assert_eq!(
                    found.encode(slot, seed),
                    bytes,
                    "a valid record differs from its encoding"
                );
            }
            Parsed::Bad => {}
        }
    }
}

/// Checks that a superblock that parses successfully is written back unchanged.
pub fn parse_superblock(data: &[u8]) {
    let forged = forge_superblock(data);
    for found in [Some(data), forged.as_deref()]
        .into_iter()
        .flatten()
        .filter_map(|data| Superblock::parse(data).ok())
    {
        let namespace = found.namespace().expect("a parsed superblock has a namespace");
        assert!(found.frame_sizes.iter().all(|size| superblock::is_frame_size(*size)));
        let made = Superblock::new(&namespace, &found.frame_sizes, &found.description);
        assert!(made.description != found.description || made == found);
    }
}

/// Recovers arbitrary records. Checks that every recovered chunk has its parent and that no chunk
/// is recovered more than once.
pub fn recover_index(data: &[u8]) {
    let index = Input(data).index(SIZES[0]);
    let seed = record_seed(&NAMESPACE, SIZES[0]);
    let records = index.as_chunks::<RECORD_BYTES>().0.iter();
    let found =
        (0..).zip(records).filter_map(|(number, bytes)| match record::parse(bytes, number, seed) {
            Parsed::Valid(record) => Some(DiskEntry {
                slot: SlotId::new(SizeClass(0), number),
                meta: record.meta,
                sequence: record.sequence,
            }),
            Parsed::Empty | Parsed::Bad => None,
        });
    let found: Vec<_> = found.collect();
    let recovered = recover(&found);
    let kept = &recovered.entries;
    assert_eq!(kept.len() + recovered.duplicates.len() + recovered.orphans.len(), found.len());
    for (at, entry) in kept.iter().enumerate() {
        assert!(kept[..at].iter().all(|other| other.meta.key != entry.meta.key), "recovered twice");
        let has_parent = kept[..at]
            .iter()
            .any(|p| p.meta.key == entry.meta.parent && p.meta.depth + 1 == entry.meta.depth);
        assert!(entry.meta.depth == 0 || has_parent, "recovered without its parent");
    }
}

/// Checks that a directory of arbitrary files can be inspected and verified, and that opening it
/// returns a working tier.
pub fn open_directory(dir: &Path, data: &[u8]) {
    let mut input = Input(data);
    let num_sizes = 1 + input.small(2) as usize;
    let cap_bytes = budget::dir_bytes(1 + input.small(20), SIZES[num_sizes - 1], 16384);
    let config = DiskConfig {
        dir: dir.to_owned(),
        cap_bytes,
        frame_sizes: SIZES[..num_sizes].to_vec().into(),
        namespace: NAMESPACE,
        description: "fuzzed".to_owned(),
    };
    write_files(&mut input, &config).expect("files can be written here");
    let infos = inspect(dir).expect("inspecting must not fail for any contents");
    assert!(infos.iter().all(|info| info.chunks <= info.slots));
    let mut verifier = Verifier::open(dir).expect("verifying must not fail for any contents");
    let _ = verifier.step(u64::MAX);
    assert_eq!(verifier.num_checked(), verifier.num_chunks());
    drop(verifier);
    let (tier, found) =
        DiskTier::open(config).expect("damage loses chunks, but opening never fails");
    let stats = tier.stats();
    assert!(stats.bytes <= stats.cap_bytes, "{stats:?}");
    for entry in found {
        let mut frame = buffer(entry.slot.class());
        match tier.read(entry.slot, &entry.meta.key, &mut frame) {
            Ok(()) => assert!(frame.iter().all(|&b| b == 0)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
        tier.free(entry.slot).expect("every chunk can be freed");
    }
    let meta = DiskMeta { key: ChunkKey([1; 32]), parent: ChunkKey([0; 32]), depth: 0, saved_s: 0 };
    for class in (0..2).map(SizeClass).take(num_sizes) {
        let slot = tier.reserve(class).expect("all slots are free");
        let mut frame = buffer(class);
        frame.fill(0xa5);
        tier.write(slot, &meta, &frame).expect("written");
        frame.fill(0);
        tier.read(slot, &meta.key, &mut frame).expect("read");
        assert!(frame.iter().all(|&b| b == 0xa5));
        tier.free(slot).expect("every chunk can be freed");
    }
}

fn buffer(class: SizeClass) -> PageBuffer {
    PageBuffer::new(usize::try_from(SIZES[class.index()]).expect("small"))
}

fn write_files(input: &mut Input, config: &DiskConfig) -> std::io::Result<()> {
    let own = config.dir.join(namespace_id(&config.namespace));
    namespaces::make_dir(&own)?;
    let ours = config.frame_sizes.all();
    let sizes =
        [ours, ours, &SIZES, &[8192], &[16 << 30, 4096], &[u64::MAX - 4095], &[0], &[], &[4096; 2]];
    let made = Superblock::new(&NAMESPACE, sizes[input.small(9) as usize], "fuzzed");
    let mut superblock = serde_json::to_vec(&made)?;
    let flips = input.small(3);
    for _ in 0..flips.saturating_sub(1) {
        let at = input.small(200) as usize % superblock.len();
        superblock[at] = input.byte();
    }
    write(&own.join(superblock::FILE_NAME), &superblock)?;
    for size in ours {
        let frames = input.small(24);
        write(&own.join(namespaces::frames_name(*size)), &vec![0; frames as usize * 2048])?;
        write(&own.join(namespaces::index_name(*size)), &input.index(*size))?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    fs::write(path, bytes)?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
}
