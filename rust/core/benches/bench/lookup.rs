//! Measures lookups and leases of prompts with 131,072 tokens in a store of a million chunks.
//!
//! Lookups cycle through many prompts, so that the index entries are not in the CPU caches.

use std::hint::black_box;
use std::time::Instant;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{Store, StoreConfig};
use kvloft_testing::one_prefix::StoreExt;

use crate::table::{Times, title, verdict};

pub(crate) const NUM_CHUNKS: u32 = 1_000_000;
const PROMPT_TOKENS: u32 = 131_072;
const FRAME_BYTES: u64 = 4096;
/// Number of prompts that lookups cycle through.
const NUM_PROBES: u32 = 61;

/// Returns a prompt of `num_blocks` blocks that shares its first `num_shared` blocks with prompt
/// `seed`.
///
/// Each block holds one token. The block size does not affect lookups, because a key is always 32
/// bytes long.
pub(crate) fn prompt(seed: u32, num_blocks: u32, num_shared: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
    let other = |at: u32| if at < num_shared { seed } else { u32::MAX };
    let ids: Vec<u32> =
        (0..num_blocks).map(|at| if at == 0 { other(at) } else { at ^ other(at) << 16 }).collect();
    chain.append_tokens(&ids).expect("fewer than 2^32 tokens");
    chain
}

/// Returns a store filled with prompts of `num_blocks` chunks each.
///
/// Frames are never written, so the store uses memory only for its index.
pub(crate) fn full_store(num_blocks: u32, eviction: Eviction) -> Store {
    let config = StoreConfig {
        frame_sizes: FRAME_BYTES.into(),
        host_bytes: u64::from(NUM_CHUNKS) * FRAME_BYTES,
        eviction,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    let store = Store::open(&config).expect("4 GB of address space");
    for seed in 0..NUM_CHUNKS / num_blocks {
        let range = 0..num_blocks;
        let reserved = store
            .reserve(&prompt(seed, num_blocks, num_blocks), range)
            .expect("the chain has the range");
        store.commit(reserved.chunks);
    }
    store
}

struct Case {
    name: &'static str,
    found: u32,
    probes: Vec<KeyChain>,
}

fn cases(num_blocks: u32) -> Vec<Case> {
    let stored = NUM_CHUNKS / num_blocks;
    let case = |name, found| {
        let seed = |nth: u32| nth * (stored / NUM_PROBES).max(1) % stored;
        Case {
            name,
            found,
            probes: (0..NUM_PROBES).map(|nth| prompt(seed(nth), num_blocks, found)).collect(),
        }
    };
    vec![case("all", num_blocks), case("two thirds", num_blocks * 2 / 3), case("none", 0)]
}

/// Returns the mean time per call in each of 200 rounds over all probes.
fn times(probes: &[KeyChain], mut call: impl FnMut(&KeyChain)) -> Times {
    let round = |_| {
        let start = Instant::now();
        probes.iter().for_each(&mut call);
        start.elapsed() / NUM_PROBES
    };
    Times::new((0..200).map(round).collect())
}

pub(crate) fn run() {
    title(&format!("Lookup of a prompt of {PROMPT_TOKENS} tokens among {NUM_CHUNKS} chunks"));
    println!(
        "{:>6} {:>12} {:>14} {:>8} {:>8} {:>16} {:>8} {:>10} {:>7}",
        "keys",
        "found",
        "lookup min us",
        "median",
        "max",
        "lease median us",
        "max",
        "target us",
        ""
    );
    for (tokens, target_us) in [(256, 50.0), (16, 100.0)] {
        let num_blocks = PROMPT_TOKENS / tokens;
        let store = full_store(num_blocks, Eviction::default());
        for Case { name, found, probes } in cases(num_blocks) {
            for probe in &probes {
                assert_eq!(store.lookup(probe).host_units, found);
            }
            let lookup = times(&probes, |probe| _ = black_box(store.lookup(probe)));
            let lease = times(&probes, |probe| drop(black_box(store.acquire(probe))));
            let us = |times: &Times, share| times.quantile(share) * 1e6;
            println!(
                "{num_blocks:>6} {name:>12} {:>14.2} {:>8.2} {:>8.2} {:>16.2} {:>8.2} {target_us:>10} {:>7}",
                us(&lookup, 0.0),
                us(&lookup, 0.5),
                us(&lookup, 1.0),
                us(&lease, 0.5),
                us(&lease, 1.0),
                verdict(us(&lookup, 0.5) <= target_us),
            );
        }
    }
}
