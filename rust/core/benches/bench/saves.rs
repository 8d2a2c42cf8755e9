//! A save of one chunk into a full store of a million, each of which evicts one: reserve and commit, one call each.
//!
//! Every fourth prompt was saved before and comes back; half of those in the store are looked up again. So victims are found among chunks
//! of different worth, and ghosts are called back. Frames are never written: they would cost memory and time, and neither
//! is the store's.

use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::store::SaveRange;
use rustix::time::{ClockId, clock_gettime};

use crate::lookup::{NUM_CHUNKS, full_store, prompt};
use crate::table::{Times, title, verdict};

/// A divisor of the store's chunks, so that it begins full.
const PROMPT_CHUNKS: u32 = 16;
const NUM_PROMPTS: u32 = 40_000;
const MEDIAN_TARGET_US: f64 = 5.0;
const WORST_TARGET_US: f64 = 1000.0;

/// Time this thread has run, which a busy machine does not stretch.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("no thread has run since before it began")
}

/// Wall and CPU times of each save.
fn measure(eviction: Eviction) -> [Times; 2] {
    let store = full_store(PROMPT_CHUNKS, eviction);
    let most = (NUM_PROMPTS * PROMPT_CHUNKS) as usize;
    let (mut walls, mut cpus) = (Vec::with_capacity(most), Vec::with_capacity(most)); // growing would be measured too
    let num_stored = NUM_CHUNKS / PROMPT_CHUNKS;
    for nth in 0..NUM_PROMPTS {
        // Old prompts, of which some are gone by now, and new ones.
        let seed = if nth % 4 == 0 { nth.wrapping_mul(7919) % num_stored } else { num_stored + nth };
        let chain = prompt(seed, PROMPT_CHUNKS, PROMPT_CHUNKS);
        drop(store.acquire(&prompt(nth.wrapping_mul(104_729) % num_stored, PROMPT_CHUNKS, PROMPT_CHUNKS)));
        let lease = store.acquire(&chain);
        for start in lease.poll().ready_blocks..PROMPT_CHUNKS {
            let range = SaveRange { start, stop: start + 1, tail_blocks: 0 };
            let (cpu, wall) = (cpu_time(), Instant::now());
            let reserved = store.reserve(&chain, range).expect("the chain has the range");
            store.commit(reserved.leases);
            let (wall, cpu) = (wall.elapsed(), cpu_time().saturating_sub(cpu));
            walls.push(wall);
            cpus.push(cpu);
        }
    }
    let evictions = store.stats().into_iter().find(|(name, _)| *name == "host_evictions").map_or(0, |(_, num)| num);
    assert_eq!(evictions, walls.len() as u64, "each save evicts");
    [Times::new(walls), Times::new(cpus)]
}

pub(crate) fn run() {
    title(&format!("Saves of one chunk, each with an eviction, in a store of {NUM_CHUNKS} chunks"));
    println!(
        "{:>6} {:>11} {:>9} {:>11} {:>10} {:>7} {:>15} {:>10} {:>7}",
        "", "median us", "99.9 %", "worst wall", "target", "", "worst on CPU us", "target", ""
    );
    for (name, eviction) in [("lru", Eviction::Lru), ("lrfu", Eviction::Lrfu)] {
        let [wall, cpu] = measure(eviction);
        let us = |times: &Times, share| times.quantile(share) * 1e6;
        let (median, worst) = (us(&wall, 0.5), us(&cpu, 1.0));
        println!(
            "{name:>6} {median:>11.2} {:>9.2} {:>11.1} {MEDIAN_TARGET_US:>10} {:>7} {worst:>15.1} {WORST_TARGET_US:>10} {:>7}",
            us(&wall, 0.999),
            us(&wall, 1.0),
            verdict(median <= MEDIAN_TARGET_US),
            verdict(worst <= WORST_TARGET_US),
        );
    }
}
