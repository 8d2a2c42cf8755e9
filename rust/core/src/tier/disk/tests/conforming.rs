//! Runs the conformance suite for local tiers on the memory tier and on the disk tier. The disk
//! tier is tested with healthy and with failing files.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;
use crate::io::FrameSizes;
use crate::test_support::faults::{
    Call, EIO, ENOSPC, EOPNOTSUPP, EROFS, Fault, FaultFiles, Rule, du,
};
use crate::test_support::local_tier::{Op, Opened, Place, check};
use crate::test_support::memory_tier::MemoryTier;

const SLOTS: u32 = 6;
const SIZES: [u64; 3] = [4096, 12288, 40960];

#[derive(Debug, Default)]
struct OnFiles {
    sizes: Vec<u64>,
    dir: Option<tempfile::TempDir>,
    files: FaultFiles,
    /// True if silent faults and corruption can also occur.
    is_liar: bool,
    may_lose: AtomicBool,
}

impl OnFiles {
    fn new(sizes: &[u64], is_liar: bool) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let files = FaultFiles::new(1);
        files.watch(dir.path());
        Self { sizes: sizes.to_vec(), dir: Some(dir), files, is_liar, ..Self::default() }
    }

    /// Returns a config with space for six frames if there is one size, or for two of the largest
    /// frames if there are more sizes.
    fn config(&self) -> DiskConfig {
        let slots = if self.sizes.len() == 1 { SLOTS } else { 2 };
        let frame_sizes = FrameSizes::from(self.sizes.clone());
        let maps = budget::map_bytes(self.sizes.len());
        let cap_bytes = budget::dir_bytes(slots, frame_sizes.largest(), maps);
        let config = config(self.dir.as_ref().expect("made").path(), SLOTS);
        DiskConfig { cap_bytes, frame_sizes, ..config }
    }
}

impl Place for OnFiles {
    fn frame_sizes(&self) -> Vec<usize> {
        self.sizes.iter().map(|size| usize::try_from(*size).expect("small")).collect()
    }

    fn capacity(&self) -> usize {
        usize::try_from(self.config().cap_bytes - budget::FIXED_BYTES).expect("small")
    }

    fn open(&self) -> Opened {
        let (tier, found) =
            DiskTier::open_with_files(&self.config(), &std::sync::Arc::default(), &self.files)
                .expect("opens");
        (Arc::new(tier), found)
    }

    fn fault(&self, which: Option<u32>) {
        const READS: &[Call] = &[Call::Read];
        const WRITES: &[Call] = &[Call::Write];
        const BOTH: &[Call] = &[Call::Read, Call::Write];
        self.files.heal();
        let Some(which) = which else { return };
        let at = which as usize / 16;
        let rule = match which % 16 {
            0 => Rule::new(Fault::Refuse(EIO)).on(WRITES),
            1 => Rule::new(Fault::Refuse(ENOSPC)).chance(100),
            2 => Rule::new(Fault::Refuse(EROFS)),
            3 => Rule::new(Fault::Refuse(EIO)).on(READS),
            4 => Rule::new(Fault::Refuse(EIO)).on(BOTH).chance(80),
            5 => Rule::new(Fault::Short(1 + at % 5000)).on(BOTH),
            6 => Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").chance(128),
            7 => Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("frames").chance(128),
            8 => Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Punch]),
            _ if !self.is_liar => return,
            9 => Rule::new(Fault::Torn(at % 9000, Some(EIO))).chance(128),
            10 | 11 => Rule::new(Fault::Torn(at % 9000, None)).chance(128),
            12 | 13 => Rule::new(Fault::Lost).on(WRITES).chance(128),
            14 => Rule::new(Fault::Flip(at)).on(READS).chance(128),
            _ => Rule::new(Fault::Flip(at)).on(WRITES).chance(128),
        };
        self.may_lose.fetch_or(which % 16 > 8, Ordering::SeqCst);
        self.files.inject(rule);
    }

    fn may_lose(&self) -> bool {
        self.may_lose.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
struct InMemory(Arc<MemoryTier>);

impl Place for InMemory {
    fn frame_sizes(&self) -> Vec<usize> {
        self.0.frame_sizes.iter().map(|size| usize::try_from(*size).expect("small")).collect()
    }

    fn capacity(&self) -> usize {
        self.0.capacity as usize
    }

    fn open(&self) -> Opened {
        self.0.open_again();
        (Arc::clone(&self.0) as Arc<dyn LocalTier>, self.0.entries())
    }

    fn fault(&self, which: Option<u32>) {
        for (bit, flag) in
            [&self.0.fail_writes, &self.0.fail_reads, &self.0.fail_frees].into_iter().enumerate()
        {
            flag.store(which.is_some_and(|which| which >> bit & 1 == 1), Ordering::SeqCst);
        }
    }
}

fn any_ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(
        (any::<u8>(), any::<u32>()).prop_map(|(what, which)| Op::from_numbers(what, which)),
        1..120,
    )
}

fn conforms(place: &dyn Place, ops: &[Op]) -> Result<(), TestCaseError> {
    check(place, ops).map_err(TestCaseError::fail)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn test_the_tier_in_memory_conforms(ops in any_ops()) {
        conforms(&InMemory(MemoryTier::with_sizes(&[64], 64 * SLOTS)), &ops)?;
        conforms(&InMemory(MemoryTier::with_sizes(&[64, 128, 320], 640)), &ops)?;
    }

    #[test]
    fn test_a_refusing_disk_conforms(ops in any_ops()) {
        let place = OnFiles::new(&[FRAME], false);
        conforms(&place, &ops)?;
        prop_assert!(place.files.most_bytes() <= place.config().cap_bytes);
        prop_assert!(du(&place.config().dir) <= place.config().cap_bytes);
    }

    #[test]
    fn test_a_refusing_disk_with_several_sizes_conforms(ops in any_ops(), num in 2..=3_usize) {
        let place = OnFiles::new(&SIZES[..num], false);
        conforms(&place, &ops)?;
        prop_assert!(place.files.most_blocks() <= place.config().cap_bytes);
    }

    #[test]
    fn test_a_lying_disk_gives_no_wrong_bytes(ops in any_ops()) {
        conforms(&OnFiles::new(&[FRAME], true), &ops)?;
        conforms(&OnFiles::new(&SIZES, true), &ops)?;
    }

    #[test]
    fn test_a_sound_disk_conforms(ops in any_ops()) {
        let ops: Vec<_> = ops.into_iter().filter(|op| !matches!(op, Op::Fault(_))).collect();
        conforms(&OnFiles::new(&[FRAME], false), &ops)?;
        conforms(&OnFiles::new(&SIZES, false), &ops)?;
    }
}
