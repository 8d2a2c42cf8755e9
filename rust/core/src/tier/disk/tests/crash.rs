//! Tests that a process can die at any system call (I3). After a restart, every chunk found is
//! complete, and every chunk reported as written is found.

use crate::io::SizeClass;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::test_support::faults::{EIO, ENOSPC, Fault, FaultFiles, Rule};

const SLOTS: u32 = 6;
const CHUNKS: u32 = 14;

#[derive(Debug, Clone, Copy)]
enum Op {
    Write(u32),
    Free(u32),
    Clear,
    Reopen,
}

/// The expected disk contents, and the uncertain results of interrupted operations.
#[derive(Debug, Default)]
struct Recorder {
    /// Maps each chunk to the (slot, version) of its last successful write.
    written: BTreeMap<u32, (SlotId, u32)>,
    /// (chunk, version) pairs that may be on disk because an operation was interrupted or failed.
    doubtful: BTreeSet<(u32, u32)>,
    next_version: u32,
    files: FaultFiles,
    num_sizes: u32,
}

/// Frame sizes. A chunk and its parent can have different sizes.
const SIZES: [u64; 3] = [FRAME, 4096, 20480];

impl Recorder {
    fn run(&mut self, tier: &DiskTier, op: Op) {
        match op {
            Op::Write(i) => self.write(tier, i % CHUNKS),
            Op::Free(i) => {
                let picked =
                    self.written.keys().nth(i as usize % self.written.len().max(1)).copied();
                if let Some(chunk) = picked {
                    self.free(tier, chunk);
                }
            }
            Op::Clear => {
                self.doubtful.extend(self.written.iter().map(|(&i, &(_, version))| (i, version)));
                self.written.clear();
                // If this fails, some chunks may remain on disk, but all of them are already in
                // `doubtful`.
                let _ = tier.clear();
            }
            Op::Reopen => {}
        }
    }

    fn write(&mut self, tier: &DiskTier, chunk: u32) {
        let has_parent = parent_of(chunk).is_none_or(|p| self.written.contains_key(&p));
        if !has_parent || self.written.contains_key(&chunk) {
            return;
        }
        let class = SizeClass(u8::try_from(chunk % self.num_sizes).expect("few"));
        let Ok(slot) = tier.reserve(class) else { return };
        let version = self.next_version;
        self.next_version += 1;
        self.doubtful.insert((chunk, version));
        if tier.write(slot, &meta_of(chunk), &bytes_of(slot, chunk, version)).is_ok() {
            self.doubtful.remove(&(chunk, version));
            self.written.insert(chunk, (slot, version));
        } else {
            // Even if freeing fails, this process cannot read any of the new bytes.
            let _ = tier.free(slot);
        }
    }

    /// Frees a chunk after its descendants, as the store does.
    fn free(&mut self, tier: &DiskTier, chunk: u32) {
        let children = [2 * chunk + 2, 2 * chunk + 3];
        for child in children {
            if self.written.contains_key(&child) {
                self.free(tier, child);
            }
        }
        if children.iter().any(|child| self.written.contains_key(child)) {
            // A child could not be freed, so its parent is kept too.
            return;
        }
        let Some(&(slot, version)) = self.written.get(&chunk) else { return };
        match tier.free(slot) {
            Err(_) if !self.files.has_crashed() => {
                let bytes = read(tier, slot, chunk).unwrap();
                assert_eq!(bytes, bytes_of(slot, chunk, version).to_vec());
            }
            result => {
                self.written.remove(&chunk);
                self.doubtful.extend(result.err().map(|_| (chunk, version)));
            }
        }
    }

    /// Compares the chunks found with the expected contents. The chunks found become the expected
    /// contents for later checks.
    fn check(&mut self, tier: &DiskTier, found: &[DiskEntry]) -> Result<(), TestCaseError> {
        let mut seen = BTreeMap::new();
        let mut uncertain = BTreeSet::new();
        for (entry, chunk) in found.iter().zip(numbers(found)) {
            prop_assert_eq!(entry.meta, meta_of(chunk));
            let fits = parent_of(chunk).is_none_or(|p| seen.contains_key(&p));
            let bytes = read(tier, entry.slot, chunk).expect("a visible chunk must be readable");
            let reported = self.written.get(&chunk).map(|&(_, version)| version);
            let versions =
                self.doubtful.iter().filter(|(i, _)| *i == chunk).map(|&(_, v)| v).chain(reported);
            let version =
                versions.into_iter().find(|&v| bytes == bytes_of(entry.slot, chunk, v).to_vec());
            prop_assert!(version.is_some(), "chunk {} holds bytes that were never written", chunk);
            let version = version.unwrap_or_default();
            if !fits || seen.contains_key(&chunk) {
                // This chunk's record could not be cleared, so it is listed last for the caller to
                // free.
                prop_assert!(
                    self.files.num_faults() > 0,
                    "parents must come first, and each chunk must occur once"
                );
                uncertain.extend(tier.free(entry.slot).err().map(|_| (chunk, version)));
                continue;
            }
            seen.insert(chunk, (entry.slot, version));
        }
        for (chunk, place) in &self.written {
            prop_assert_eq!(
                seen.get(chunk),
                Some(place),
                "chunk {} was reported as written but was lost",
                chunk
            );
        }
        prop_assert_eq!(
            seen.values().map(|(slot, _)| slot).collect::<BTreeSet<_>>().len(),
            seen.len()
        );
        self.written = seen;
        self.doubtful = uncertain;
        Ok(())
    }
}

fn bytes_of(slot: SlotId, chunk: u32, version: u32) -> PageBuffer {
    let mut frame = PageBuffer::new(usize::try_from(SIZES[slot.class().index()]).expect("small"));
    fill(&mut frame, chunk, version);
    frame
}

fn read(tier: &DiskTier, slot: SlotId, chunk: u32) -> crate::Result<Vec<u8>> {
    let mut into = PageBuffer::new(usize::try_from(SIZES[slot.class().index()]).expect("small"));
    tier.read(slot, &key_of(chunk), &mut into)?;
    Ok(into.to_vec())
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => any::<u32>().prop_map(Op::Write),
        6 => any::<u32>().prop_map(Op::Free),
        1 => Just(Op::Clear),
        1 => Just(Op::Reopen),
    ]
}

/// Runs the operations with one fault, then opens the directory on a healthy disk, checks it, and
/// runs a few more operations.
fn live(num_sizes: usize, ops: &[Op], fault: Rule) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().expect("a directory");
    let frame_sizes = SIZES[..num_sizes].to_vec().into();
    let config = DiskConfig { frame_sizes, ..config(dir.path(), SLOTS) };
    let files = FaultFiles::default();
    let num_sizes = u32::try_from(num_sizes).expect("few");
    let mut recorder = Recorder { files: files.clone(), num_sizes, ..Recorder::default() };
    let mut tier =
        DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files).expect("opens").0;
    files.inject(fault);
    for &op in ops {
        if matches!(op, Op::Reopen) {
            drop(tier);
            let opened = DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files);
            let Some((again, found)) = opened.ok().filter(|_| !files.has_crashed()) else {
                // After a crash or a failed open, it is not yet known which chunks are on disk.
                files.heal();
                return reopen(&config, &mut recorder, &[]);
            };
            tier = again;
            recorder.check(&tier, &found)?;
        }
        recorder.run(&tier, op);
        if files.has_crashed() {
            break;
        }
    }
    drop(tier);
    reopen(&config, &mut recorder, ops)
}

fn reopen(config: &DiskConfig, recorder: &mut Recorder, ops: &[Op]) -> Result<(), TestCaseError> {
    recorder.files = FaultFiles::default();
    let (tier, found) = open(config);
    recorder.check(&tier, &found)?;
    let stats = tier.stats();
    prop_assert_eq!((stats.slots_used, stats.slots_reserved), (found.len() as u64, 0));
    for &op in ops.iter().take(12) {
        recorder.run(&tier, op);
    }
    prop_assert!(recorder.num_sizes > 1 || tier.stats().slots <= u64::from(SLOTS));
    prop_assert!(tier.stats().bytes <= config.cap_bytes);
    drop(tier);
    recorder.doubtful.clear();
    let (tier, found) = open(config);
    recorder.check(&tier, &found)?;
    prop_assert_eq!(
        numbers(&found).into_iter().collect::<BTreeSet<_>>(),
        recorder.written.keys().copied().collect()
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn test_a_crash_at_any_call_leaves_whole_chunks_and_loses_none(
        ops in prop::collection::vec(any_op(), 1..30), at in 0..70_u64, part: u8, sizes in 1..=3_usize
    ) {
        live(sizes, &ops, Rule::new(Fault::Crash(part)).after(at))?;
    }

    #[test]
    fn test_refused_calls_lose_nothing_that_was_reported(
        ops in prop::collection::vec(any_op(), 1..30), at in 0..70_u64, full: bool, times in 1..6_u64, sizes in 1..=3_usize
    ) {
        live(sizes, &ops, Rule::new(Fault::Refuse(if full { ENOSPC } else { EIO })).after(at).times(times))?;
    }
}

/// Opening can succeed even if its last system call fails.
#[test]
fn test_a_crash_at_each_call_of_an_opening_and_before() {
    let ops = [
        Op::Write(489_604_795),
        Op::Free(0),
        Op::Write(3_043_321_247),
        Op::Write(1_795_582_170),
        Op::Free(883_800_109),
        Op::Reopen,
    ];
    for at in 0..40 {
        live(2, &ops, Rule::new(Fault::Crash(0)).after(at)).unwrap();
    }
}

#[test]
fn test_a_crash_at_each_call_of_one_history() {
    let mut ops: Vec<_> = (0..CHUNKS).map(Op::Write).collect();
    ops.extend([
        Op::Free(0),
        Op::Write(0),
        Op::Reopen,
        Op::Write(2),
        Op::Free(3),
        Op::Write(4),
        Op::Clear,
        Op::Write(1),
    ]);
    for at in 0..80 {
        for (part, sizes) in [(0, 1), (100, 1), (200, 1), (255, 1), (0, 3), (255, 3)] {
            live(sizes, &ops, Rule::new(Fault::Crash(part)).after(at)).unwrap();
        }
    }
}
