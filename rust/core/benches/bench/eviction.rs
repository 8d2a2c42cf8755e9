//! Compares the hit ratios of the eviction policies with the optimum on a trace.
//!
//! Each request is looked up, leased and saved in a real store. The optimum is an upper bound: it
//! looks ahead in the trace and keeps the chunks that are needed soonest.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{Store, StoreConfig};
use kvloft_testing::one_prefix::StoreExt;

use crate::states;
use crate::table::{title, verdict};
use crate::trace::{Trace, load, synthetic, two_sets};

/// Store sizes as percentages of the number of unique blocks, each with the target ratio of the
/// default policy's hits to LRU's.
const SIZES: [(u32, f64); 5] = [(1, 0.98), (5, 1.4), (10, 0.98), (20, 0.98), (50, 0.98)];
const SYNTHETIC_TARGET: f64 = 0.98;
/// The store size as a percentage of one working set, and the target ratio, for two successive
/// working sets.
const TWO_SETS: (u32, f64) = (120, 0.97);
const FRAME_BYTES: u64 = 4096;

pub(crate) fn run(asked: Option<&Path>) {
    if let Some((name, trace)) = load(asked) {
        table(&name, &trace, 0, &SIZES);
        states::table(&name, &trace);
    }
    states::table("synthetic chats", &synthetic());
    table(
        "synthetic chats",
        &synthetic(),
        0,
        &SIZES.map(|(percent, _)| (percent, SYNTHETIC_TARGET)),
    );
    let [first, second] = two_sets();
    let (percent, target) = TWO_SETS;
    table(
        "the second of two successive sets of chats",
        &[&first[..], &second].concat(),
        first.len(),
        &[(percent / 2, target)],
    );
}

/// Prints the hit ratios of the policies. Hits of requests before index `counted` are not included.
fn table(name: &str, trace: &Trace, counted: usize, sizes: &[(u32, f64)]) {
    let unique = trace.iter().flatten().collect::<BTreeSet<_>>().len();
    let total: usize = trace[counted..].iter().map(Vec::len).sum();
    title(&format!(
        "Eviction: hit ratio on {name}: {} requests, {total} blocks, {unique} unique",
        trace.len() - counted
    ));
    println!(
        "{:>5} {:>8} {:>9} {:>9} {:>9} {:>10} {:>8} {:>7}",
        "size", "blocks", "optimum", "lru", "adaptive", "adaptive/lru", "target", ""
    );
    for &(percent, target) in sizes {
        let capacity = (unique * percent as usize).div_ceil(100).max(1);
        let ratio = |hits: Vec<usize>| hits[counted..].iter().sum::<usize>() as f64 / total as f64;
        let best = ratio(optimum(trace, capacity));
        let [lru, ours] = [Eviction::Lru, Eviction::default()]
            .map(|policy| ratio(replay(trace, capacity, policy)));
        let more = ours / lru;
        println!(
            "{percent:>4}% {capacity:>8} {best:>9.4} {lru:>9.4} {ours:>9.4} {more:>10.3} {target:>8} {:>7}",
            verdict(more >= target)
        );
    }
}

/// Returns the number of hits for each request in a store of `capacity` frames.
fn replay(trace: &Trace, capacity: usize, eviction: Eviction) -> Vec<usize> {
    let config = StoreConfig {
        frame_sizes: FRAME_BYTES.into(),
        host_bytes: capacity as u64 * FRAME_BYTES,
        eviction,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    let store = Store::open(&config).expect("address space for the frames");
    let mut hits = Vec::new();
    for ids in trace {
        let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
        chain.append_tokens(ids).expect("fewer than 2^32 tokens");
        let lease = store.acquire(&chain);
        let start = lease.poll().ready_units;
        hits.push(start as usize);
        let range = start..chain.num_blocks();
        let reserved = store.reserve(&chain, range).expect("the chain has the range");
        store.commit(reserved.chunks);
    }
    store.check().expect("the invariants hold");
    hits
}

/// Returns the number of hits for each request if evictions are based on future requests.
///
/// Each use of a block also counts as a use of its parent. A block is therefore never needed sooner
/// than its parent, and the cached blocks of a prompt always form a prefix.
fn optimum(trace: &Trace, capacity: usize) -> Vec<usize> {
    let mut next_uses: HashMap<u32, Vec<usize>> = HashMap::new();
    for (turn, ids) in trace.iter().enumerate().rev() {
        for &id in ids {
            next_uses.entry(id).or_default().push(turn);
        }
    }
    let mut cached: HashMap<u32, (usize, usize)> = HashMap::new();
    let mut order: BTreeSet<((usize, usize), u32)> = BTreeSet::new();
    let mut hits = Vec::new();
    for ids in trace {
        hits.push(ids.iter().take_while(|id| cached.contains_key(id)).count());
        for (depth, id) in ids.iter().enumerate() {
            let uses = next_uses.get_mut(id).expect("every id was seen");
            uses.pop();
            let rank = (uses.last().copied().unwrap_or(usize::MAX), depth);
            if let Some(before) = cached.insert(*id, rank) {
                order.remove(&(before, *id));
            }
            order.insert((rank, *id));
        }
        while cached.len() > capacity {
            let (_, id) = order.pop_last().expect("as many entries as `cached`");
            cached.remove(&id);
        }
    }
    hits
}
