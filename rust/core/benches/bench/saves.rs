//! Measures saves of single chunks in a full store of a million chunks.
//!
//! Each save reserves and commits one chunk, and evicts another. Every fourth prompt has been saved
//! before, and old prompts are looked up. Victims therefore include reused chunks, and evicted
//! chunks are saved again. Frames are never written, because writing them is not part of the
//! store's work. All rounds do the same work, so the minimum over all rounds is the store's cost.
//! Any additional time is caused by other processes.

use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_testing::one_prefix::StoreExt;

use crate::lookup::{NUM_CHUNKS, full_store, prompt};
use crate::table::{Times, title, verdict};

/// Number of chunks per prompt. The store's capacity is a multiple of this number, so that prompts
/// fill the store completely.
const PROMPT_CHUNKS: u32 = 16;
const NUM_PROMPTS: u32 = 40_000;
const ROUNDS: u32 = 3;
const MEDIAN_TARGET_US: f64 = 5.0;
const WORST_TARGET_US: f64 = 1000.0;

/// Returns how long each save took, in order.
fn round(eviction: Eviction) -> Vec<Duration> {
    let store = full_store(PROMPT_CHUNKS, eviction);
    // Preallocate the vector, so that reallocations are not measured.
    let mut times = Vec::with_capacity((NUM_PROMPTS * PROMPT_CHUNKS) as usize);
    let num_stored = NUM_CHUNKS / PROMPT_CHUNKS;
    for nth in 0..NUM_PROMPTS {
        // One in four prompts is old and may have been evicted. All other prompts are new.
        let seed =
            if nth % 4 == 0 { nth.wrapping_mul(7919) % num_stored } else { num_stored + nth };
        let chain = prompt(seed, PROMPT_CHUNKS, PROMPT_CHUNKS);
        drop(store.acquire(&prompt(
            nth.wrapping_mul(104_729) % num_stored,
            PROMPT_CHUNKS,
            PROMPT_CHUNKS,
        )));
        let lease = store.acquire(&chain);
        for start in lease.poll().ready_units..PROMPT_CHUNKS {
            let range = start..start + 1;
            let began = Instant::now();
            let reserved = store.reserve(&chain, range).expect("the chain has the range");
            store.commit(reserved.chunks);
            times.push(began.elapsed());
        }
    }
    let evictions = store
        .stats()
        .into_iter()
        .find(|(name, _)| *name == "host_evictions")
        .map_or(0, |(_, num)| num);
    assert_eq!(evictions, times.len() as u64, "each save evicts");
    times
}

pub(crate) fn run() {
    title(&format!("Saves of one chunk, each with an eviction, in a store of {NUM_CHUNKS} chunks"));
    println!(
        "{:>6} {:>9} {:>8} {:>7} {:>7} {:>9} {:>7} {:>7} {:>12}",
        "", "median us", "99.9 %", "target", "", "max us", "target", "", "any round us"
    );
    for (name, eviction) in [("lru", Eviction::Lru), ("adaptive", Eviction::Adaptive)] {
        let rounds: Vec<_> = (0..ROUNDS).map(|_| round(eviction)).collect();
        let any = Times::new(rounds.concat());
        let own = (0..rounds[0].len())
            .filter_map(|nth| rounds.iter().map(|times| times[nth]).min())
            .collect();
        let own = Times::new(own);
        let us = |times: &Times, share| times.quantile(share) * 1e6;
        let (median, worst) = (us(&any, 0.5), us(&own, 1.0));
        println!(
            "{name:>6} {median:>9.2} {:>8.2} {MEDIAN_TARGET_US:>7} {:>7} {worst:>9.1} {WORST_TARGET_US:>7} {:>7} {:>12.1}",
            us(&any, 0.999),
            verdict(median <= MEDIAN_TARGET_US),
            verdict(worst <= WORST_TARGET_US),
            us(&any, 1.0),
        );
    }
}
