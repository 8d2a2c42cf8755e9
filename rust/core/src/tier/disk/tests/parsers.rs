//! Tests that parsers and pure functions never panic and accept no invalid data.

use proptest::prelude::*;

use super::super::budget::SlotCount;
use super::super::record::recover;
use super::super::record::{self, EMPTY, Parsed, RECORD_BYTES, Record, RecordBytes};
use super::super::superblock::Superblock;
use super::*;
use crate::testing::fuzz;

fn any_record() -> impl Strategy<Value = Record> {
    let meta = (any::<[u8; 32]>(), any::<[u8; 32]>(), any::<u32>(), any::<u64>()).prop_map(
        |(key, parent, depth, saved_s)| {
            let (key, parent) = (ChunkKey(key), ChunkKey(parent));
            DiskMeta { key, parent, depth, saved_s }
        },
    );
    (meta, any::<u128>(), any::<u64>()).prop_map(|(meta, payload, sequence)| Record {
        meta,
        payload,
        sequence,
    })
}

fn any_bytes() -> impl Strategy<Value = RecordBytes> {
    prop::collection::vec(any::<u8>(), RECORD_BYTES).prop_map(|v| v.try_into().expect("128 bytes"))
}

proptest! {
    #[test]
    fn test_record_round_trips_only_at_its_slot_and_namespace(r in any_record(), slot: u32, seed: u64, other: u32) {
        let bytes = r.encode(slot, seed);
        prop_assert_eq!(record::parse(&bytes, slot, seed), Parsed::Valid(r));
        if other != slot {
            prop_assert_eq!(record::parse(&bytes, other, seed), Parsed::Bad);
        }
        prop_assert_eq!(record::parse(&bytes, slot, seed ^ 1), Parsed::Bad);
    }

    #[test]
    fn test_any_bytes_are_no_record(bytes in any_bytes(), magic: bool, slot: u32, seed: u64) {
        let mut bytes = bytes;
        if magic {
            bytes[..8].copy_from_slice(b"KVLREC01");
        }
        prop_assert_eq!(record::parse(&bytes, slot, seed), Parsed::Bad);
    }

    #[test]
    fn test_a_torn_or_flipped_record_is_bad(
        old in any_record(), new in any_record(), cut in 1..RECORD_BYTES, bit in 0..RECORD_BYTES * 8
    ) {
        let (old, new) = (old.encode(3, 9), new.encode(3, 9));
        for base in [EMPTY, old] {
            let mut torn = base;
            torn[..cut].copy_from_slice(&new[..cut]);
            if torn != new && torn != base {
                prop_assert_eq!(record::parse(&torn, 3, 9), Parsed::Bad);
            }
        }
        let mut flipped = new;
        flipped[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(record::parse(&flipped, 3, 9), Parsed::Bad);
    }

    #[test]
    fn test_superblock_round_trips(namespace: [u8; 32], pages in 1..=1_u64 << 22, text: String) {
        let sizes = [pages * 4096, 1 << 34];
        let sizes = &sizes[..=usize::from(pages % 2 == 1)];
        let block = Superblock::new(&namespace, sizes, &text);
        let json = serde_json::to_vec(&block).unwrap();
        let parsed = Superblock::parse(&json).unwrap();
        prop_assert_eq!(parsed.namespace(), Some(namespace));
        prop_assert_eq!(&parsed.frame_sizes[..], sizes);
        prop_assert!(text.starts_with(&parsed.description));
        prop_assert_eq!(parsed, block);
    }

    #[test]
    fn test_any_bytes_are_no_superblock(bytes: Vec<u8>) {
        prop_assert!(Superblock::parse(&bytes).is_err());
    }

    #[test]
    fn test_a_changed_superblock_is_no_superblock(at in 0_usize..300, to: u8) {
        let block = Superblock::new(&NAMESPACE, &[4096, 8192], "qwen, 16 blocks");
        let mut json = serde_json::to_vec_pretty(&block).unwrap();
        let at = at % json.len();
        json[at] = to;
        // The checksum covers everything except whitespace between tokens.
        prop_assert!(Superblock::parse(&json).map_or(true, |parsed| parsed == block));
    }

    #[test]
    fn test_the_largest_fit_is_the_most_that_fit(bytes in 0..1_u64 << 44, pages in 1..2000_u64, most: u32) {
        let fits = |slots| budget::dir_bytes(slots, pages * 4096, 0) <= bytes;
        let slots = budget::largest_fit(most, fits);
        prop_assert!(slots == 0 || fits(slots));
        prop_assert!(slots == most || !fits(slots + 1));
    }

    #[test]
    fn test_more_slots_fill_punched_ones_first(slots in 0..1_u32 << 28, punched: u32, more in 0..1_u32 << 27) {
        let punched = punched % (slots + 1);
        let count = SlotCount { frame_bytes: 4096, slots, filled: slots - punched };
        let after = count.with(more);
        prop_assert_eq!(after.filled, count.filled + more);
        prop_assert_eq!(after.slots, slots.max(after.filled));
        prop_assert!(after.bytes() >= count.bytes());
    }

    #[test]
    fn test_recovery_keeps_what_hangs_together(
        picks in prop::collection::vec((0..40_u32, 0..1000_u64, 0..20_u32), 0..60)
    ) {
        // Each pick is a (chunk, sequence, forge) tuple. The depth is wrong if `forge` is 0.
        // Duplicates and orphans also occur.
        let found: Vec<_> = (0..).map(SlotId).zip(picks).map(|(slot, (i, sequence, forge))| {
            let meta = meta_of(i);
            DiskEntry { slot, meta: DiskMeta { depth: meta.depth + u32::from(forge == 0), ..meta }, sequence }
        }).collect();
        let recovered = recover(&found);
        let is_under = |e: &DiskEntry, all: &[DiskEntry]| {
            let is_parent = |p: &DiskMeta| p.key == e.meta.parent && p.depth + 1 == e.meta.depth;
            e.meta.depth == 0 || all.iter().any(|p| is_parent(&p.meta))
        };
        // Oracle: keep the newest copy of each key, then repeatedly drop chunks whose parent is
        // missing.
        let mut live: Vec<_> = found.iter().filter(|e| {
            !found.iter().any(|o| o.meta.key == e.meta.key && (o.sequence, o.slot) > (e.sequence, e.slot))
        }).copied().collect();
        loop {
            let before = live.clone();
            live.retain(|e| is_under(e, &before));
            if live == before { break }
        }
        let mut sorted = recovered.entries.clone();
        sorted.sort_by_key(|e| e.slot);
        prop_assert_eq!(&sorted, &live);
        prop_assert_eq!(recovered.entries.len() + recovered.duplicates.len() + recovered.orphans.len(), found.len());
        let parent_of = |e: &DiskEntry| live.iter().find(|p| e.meta.depth > 0 && p.meta.key == e.meta.parent);
        let is_below = |e: &DiskEntry, o: &DiskEntry| {
            std::iter::successors(parent_of(e), |p| parent_of(p)).any(|p| p.slot == o.slot)
        };
        for (at, e) in recovered.entries.iter().enumerate() {
            let earlier = &recovered.entries[..at];
            prop_assert!(e.meta.depth == 0 || earlier.iter().any(|p| p.meta.key == e.meta.parent), "parents come first");
            // A younger entry precedes an older entry only if a descendant of the younger entry was
            // written no later than the older entry.
            let is_hoisted = |o: &DiskEntry| {
                live.iter().any(|d| d.sequence <= e.sequence && is_below(d, o))
            };
            prop_assert!(earlier.iter().all(|o| o.sequence <= e.sequence || is_hoisted(o)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Runs the `rust/fuzz` targets on as many inputs as a unit test can afford.
    #[test]
    fn test_no_bytes_make_the_tier_believe_a_lie(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz::parse_record(&data);
        fuzz::parse_superblock(&data);
        fuzz::recover_index(&data);
        fuzz::open_directory(tempfile::tempdir().unwrap().path(), &data);
    }
}

#[test]
fn test_an_empty_record_is_empty() {
    assert_eq!(record::parse(&EMPTY, 0, 0), Parsed::Empty);
}

#[test]
fn test_a_record_with_something_where_zeros_belong_is_of_another_version() {
    let record = Record { meta: meta_of(1), payload: 2, sequence: 3 };
    let mut bytes = record.encode(5, 6);
    assert_eq!(record::parse(&bytes, 5, 6), Parsed::Valid(record));
    bytes[116] = 1;
    let checksum = twox_hash::XxHash3_64::oneshot_with_seed(6, &bytes[..120]);
    bytes[120..].copy_from_slice(&checksum.to_le_bytes());
    assert_eq!(record::parse(&bytes, 5, 6), Parsed::Bad);
}

#[test]
fn test_record_layout_is_the_documented_one() {
    let meta = DiskMeta { key: ChunkKey([1; 32]), parent: ChunkKey([2; 32]), depth: 4, saved_s: 7 };
    let bytes = Record { meta, payload: 5, sequence: 6 }.encode(8, 9);
    let head = [
        &b"KVLREC01"[..],
        &[1; 32],
        &[2; 32],
        &5_u128.to_le_bytes(),
        &6_u64.to_le_bytes(),
        &7_u64.to_le_bytes(),
    ];
    let tail = [1_u32, 4, 8, 0].map(u32::to_le_bytes).concat();
    assert_eq!(bytes[..120], [head.concat(), tail].concat());
}

#[test]
fn test_oldest_comes_first_unless_its_parent_is_younger() {
    let entry = |i: u32, sequence| DiskEntry { slot: SlotId(i), meta: meta_of(i), sequence };
    // The parent of 6 is 2, whose parent is 0.
    let recovered = recover(&[entry(6, 1), entry(1, 2), entry(0, 3), entry(2, 9)]);
    assert_eq!(numbers(&recovered.entries), [0, 2, 6, 1]);
}
