//! Random steps for `jobs`, with prompts that share prefixes.

use proptest::prelude::*;

use crate::key::{KeyChain, root_key};

pub(super) const NUM_PROMPTS: usize = 6;
pub(super) const PROMPT_BLOCKS: u32 = 6;

#[derive(Debug, Clone)]
pub(super) enum Step {
    Reserve {
        prompt: usize,
        start: u32,
        stop: u32,
    },
    /// Reserves chunks and commits them.
    Save {
        prompt: usize,
        stop: u32,
    },
    Settle {
        nth: usize,
        commit: bool,
    },
    Acquire {
        prompt: usize,
        num_blocks: usize,
    },
    Release {
        nth: usize,
    },
    Discard {
        prompt: usize,
        block: usize,
    },
    Clear,
    /// Removes a slice of the trees pending removal.
    Remove {
        budget: usize,
    },
    /// Advances the clock.
    Wait {
        millis: u64,
    },
    /// Simulates a check that finds the disk directory removed.
    RemoveDirectory,
    /// Makes a disk thread take a job.
    Take,
    /// Does an in-flight job's next I/O, or applies the job's result.
    Go {
        nth: usize,
        io: Io,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Io {
    Works,
    Fails,
    Corrupts,
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let io = prop_oneof![6 => Just(Io::Works), 1 => Just(Io::Fails), 1 => Just(Io::Corrupts)];
    prop_oneof![
        3 => (0..NUM_PROMPTS, 0..3u32, 1..=PROMPT_BLOCKS)
            .prop_map(|(prompt, start, stop)| Step::Reserve { prompt, start, stop }),
        4 => (0..64usize, prop::bool::weighted(0.85)).prop_map(|(nth, commit)| Step::Settle { nth, commit }),
        4 => (0..NUM_PROMPTS, 1..=PROMPT_BLOCKS).prop_map(|(prompt, stop)| Step::Save { prompt, stop }),
        5 => (0..NUM_PROMPTS, prop_oneof![4 => Just(PROMPT_BLOCKS as usize), 1 => 0..4usize])
            .prop_map(|(prompt, num_blocks)| Step::Acquire { prompt, num_blocks }),
        3 => (0..4usize).prop_map(|budget| Step::Remove { budget }),
        2 => prop_oneof![3 => 0..3_000u64, 1 => 0..70_000u64].prop_map(|millis| Step::Wait { millis }),
        4 => (0..64usize).prop_map(|nth| Step::Release { nth }),
        2 => (0..NUM_PROMPTS, 0..PROMPT_BLOCKS as usize).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => prop::bool::weighted(0.2).prop_map(|clear| if clear { Step::Clear } else { Step::Take }),
        10 => Just(Step::Take),
        1 => prop::bool::weighted(0.3).prop_map(|remove| if remove { Step::RemoveDirectory } else { Step::Take }),
        16 => (0..64usize, io).prop_map(|(nth, io)| Step::Go { nth, io }),
    ]
}

/// Returns a prompt's chain. Bit d of `prompt` is block d's token, so prompts share prefixes.
pub(super) fn prompt_chain(prompt: usize) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, None).unwrap(), 1).unwrap();
    let tokens: Vec<u32> = (0..PROMPT_BLOCKS).map(|at| u32::from(prompt >> at & 1 == 1)).collect();
    chain.append_tokens(&tokens).unwrap();
    chain
}
