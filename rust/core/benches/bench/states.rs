//! Compares eviction policies for Mamba and gated delta net models.
//!
//! Each prompt saves states at the end of its last whole block. A hit requires all states and all
//! blocks before them. Adaptive eviction is compared with LRU, and with adaptive eviction that does
//! not link states to their prefixes.

use kvloft_core::io::SizeClass;
use std::collections::BTreeSet;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{Prefix, SaveRequest, Store, StoreConfig, TenantLimits};
use kvloft_testing::one_prefix::StoreExt;

use crate::table::{title, verdict};
use crate::trace::Trace;

/// Number of KV cache groups with states, as in Qwen3-Next. Like a block, a state takes up one
/// frame.
const NUM_GROUPS: u32 = 3;
/// Store sizes as percentages of the number of unique blocks.
const SIZES: [u32; 4] = [3, 10, 20, 30];
/// Target ratio of adaptive eviction's hits to LRU's.
const TARGET: f64 = 0.98;

pub(crate) fn table(name: &str, trace: &Trace) {
    let unique = trace.iter().flatten().collect::<BTreeSet<_>>().len();
    let total: usize = trace.iter().map(|ids| ids.len().saturating_sub(1)).sum();
    title(&format!("Eviction with {NUM_GROUPS} states per prompt: hit ratio on {name}"));
    println!(
        "{:>5} {:>8} {:>9} {:>9} {:>9} {:>12} {:>8}",
        "size", "frames", "lru", "no prefix", "adaptive", "adaptive/lru", "target"
    );
    for percent in SIZES {
        let frames = (unique * percent as usize).div_ceil(100);
        let ratio =
            |policy, has_prefix| replay(trace, frames, policy, has_prefix) as f64 / total as f64;
        let (lru, without) = (ratio(Eviction::Lru, true), ratio(Eviction::default(), false));
        let ours = ratio(Eviction::default(), true);
        let (more, met) = (ours / lru, verdict(ours >= TARGET * lru && ours >= without));
        println!(
            "{percent:>4}% {frames:>8} {lru:>9.4} {without:>9.4} {ours:>9.4} {more:>12.3} {TARGET:>8} {met:>7}"
        );
    }
}

/// Replays the trace in a store of `frames` frames. Returns the total number of blocks in all hits.
fn replay(trace: &Trace, frames: usize, eviction: Eviction, has_prefix: bool) -> usize {
    let config = StoreConfig {
        frame_sizes: 4096_u64.into(),
        host_bytes: frames as u64 * 4096,
        eviction,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
        now_s: 0,
        limits: TenantLimits::default(),
    };
    let store = Store::open(&config).expect("address space for the frames");
    let mut num_found = 0;
    for ids in trace.iter().filter(|ids| ids.len() > 1) {
        let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
        chain.append_tokens(&ids[..ids.len() - 1]).expect("fewer than 2^32 tokens");
        let groups: Vec<_> = (2..2 + NUM_GROUPS)
            .map(|group| chain.independent_keys(group, 0..chain.num_blocks()).expect("its blocks"))
            .collect();
        let state = |(root, keys): &(ChunkKey, Vec<ChunkKey>), block: usize| {
            let end = chain.keys()[block];
            (*root, [keys[block], end])
        };
        let is_there = |block: usize| {
            groups
                .iter()
                .map(|group| state(group, block))
                .all(|(root, keys)| store.lookup(Prefix::new(root, &keys[..1])).host_units > 0)
        };
        let has = store.lookup(&chain).host_units as usize;
        let found = (0..has).rev().find(|&block| is_there(block)).map_or(0, |block| block + 1);
        num_found += found;
        if found > 0 {
            drop(store.acquire(Prefix { keys: &chain.keys()[..found], ..Prefix::from(&chain) }));
            for (root, keys) in groups.iter().map(|group| state(group, found - 1)) {
                drop(store.acquire(Prefix::new(root, &keys[..1])));
            }
        }
        let whole = |stop| 0..stop;
        store.commit(
            store
                .reserve(&chain, whole(chain.num_blocks()))
                .expect("the chain has the range")
                .chunks,
        );
        for (root, keys) in groups.iter().map(|group| state(group, chain.keys().len() - 1)) {
            let prefix = Prefix::new(root, &keys[..=usize::from(has_prefix)]);
            let asked =
                SaveRequest { prefix, units: whole(1), class: SizeClass(0), is_independent: true };
            store.commit(store.reserve_many(None, &[asked]).expect("one chunk").remove(0).chunks);
        }
    }
    store.check().expect("the invariants hold");
    num_found
}
