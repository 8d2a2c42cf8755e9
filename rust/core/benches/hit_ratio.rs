//! Hit ratio of each eviction policy on a trace, against the optimum: `cargo bench --features bench --bench hit_ratio [-- --trace FILE]`.
//!
//! A trace is JSON lines with `hash_ids`, one id per prefix block (equal ids mean equal prefixes). Each request is looked up,
//! leased and saved in a real store. The optimum knows the future: it keeps what is used soonest, which no policy can beat.
//! Without a trace, a synthetic one stands in: chats of several turns over few system prompts, popular ones more often.
#![expect(clippy::print_stdout, reason = "a bench prints")]

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::time::Instant;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{SaveRange, Store, StoreConfig};

const DEFAULT_TRACE: &str = "../shared/data/conversation_trace.first6000.jsonl";
const PERCENTS: [u32; 5] = [1, 5, 10, 20, 50];
const FRAME_BYTES: u64 = 4096;

/// Block ids of each request, in order of arrival.
type Trace = Vec<Vec<u32>>;

fn main() {
    let Some((name, trace)) = load() else { return println!("no such trace") };
    let unique = trace.iter().flatten().collect::<BTreeSet<_>>().len();
    let total: usize = trace.iter().map(Vec::len).sum();
    println!("{name}: {} requests, {total} blocks, {unique} unique", trace.len());
    println!(
        "{:>5} {:>8} {:>9} | {:>9} {:>9} | {:>9} {:>9}",
        "size", "blocks", "optimum", "lru", "of opt.", "lrfu", "of opt."
    );
    for percent in PERCENTS {
        let capacity = (unique * percent as usize).div_ceil(100).max(1);
        let best = ratio(optimum(&trace, capacity), total);
        let start = Instant::now();
        let [lru, lrfu] = [Eviction::Lru, Eviction::Lrfu].map(|policy| ratio(replay(&trace, capacity, policy), total));
        println!(
            "{percent:>4}% {capacity:>8} {best:>9.4} | {lru:>9.4} {:>8.1}% | {lrfu:>9.4} {:>8.1}%   ({:.1} s)",
            100.0 * lru / best,
            100.0 * lrfu / best,
            start.elapsed().as_secs_f64()
        );
    }
    println!("unlimited: {:.4}", ratio(optimum(&trace, unique), total));
}

fn ratio(hits: usize, total: usize) -> f64 {
    let exact = |count: usize| f64::from(u32::try_from(count).expect("traces are shorter than 2^32 blocks"));
    exact(hits) / exact(total)
}

/// Hits of a store of `capacity` frames.
fn replay(trace: &Trace, capacity: usize, eviction: Eviction) -> usize {
    let config = StoreConfig {
        frame_bytes: FRAME_BYTES,
        host_bytes: capacity as u64 * FRAME_BYTES,
        blocks_per_chunk: 1,
        eviction,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
    };
    let store = Store::open(&config).expect("address space for the frames");
    let mut hits = 0;
    for ids in trace {
        let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
        chain.append_tokens(ids).expect("room for all ids");
        let lease = store.acquire(&chain);
        let start = lease.poll().ready_blocks;
        hits += start as usize;
        let range = SaveRange { start, stop: chain.num_blocks(), tail_blocks: 0 };
        let reserved = store.reserve(&chain, range).expect("the chain has the range");
        store.commit(reserved.leases);
    }
    store.check().expect("the invariants hold");
    hits
}

/// Hits of whoever knows the future. A block's parent is used whenever it is, so of two the deeper is never needed sooner,
/// and presence stays monotone by itself.
fn optimum(trace: &Trace, capacity: usize) -> usize {
    let mut next_uses: HashMap<u32, Vec<usize>> = HashMap::new();
    for (turn, ids) in trace.iter().enumerate().rev() {
        for &id in ids {
            next_uses.entry(id).or_default().push(turn);
        }
    }
    let mut cached: HashMap<u32, (usize, usize)> = HashMap::new();
    let mut order: BTreeSet<((usize, usize), u32)> = BTreeSet::new();
    let mut hits = 0;
    for ids in trace {
        hits += ids.iter().take_while(|id| cached.contains_key(id)).count();
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
            let (_, id) = order.pop_last().expect("as many as are cached");
            cached.remove(&id);
        }
    }
    hits
}

fn load() -> Option<(String, Trace)> {
    let asked = std::env::args().skip_while(|arg| arg != "--trace").nth(1).or_else(|| std::env::var("TRACE").ok());
    // Benches run in the package's folder, traces are named from the repository's.
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let Some(text) = std::fs::read_to_string(root.join(asked.as_deref().unwrap_or(DEFAULT_TRACE))).ok() else {
        return asked.is_none().then(|| ("a synthetic chat trace".into(), synthetic()));
    };
    let ids = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        line["hash_ids"].as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    let trace = text.lines().map(ids).collect::<Option<Trace>>()?;
    Some((asked.unwrap_or_else(|| DEFAULT_TRACE.into()), trace))
}

/// Chats of up to 8 turns, a few hundred open at a time; each turn repeats the chat so far and adds some blocks.
fn synthetic() -> Trace {
    let mut seed = 1u64;
    let mut below = |limit: u32| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((seed >> 33) % u64::from(limit)).expect("below a u32")
    };
    let mut next_id = 1000;
    let mut chats: Vec<Vec<u32>> = Vec::new();
    let mut trace = Trace::new();
    for _ in 0..6000 {
        if chats.len() < 300 || below(4) == 0 {
            // Small numbers are much likelier: a product of two uniform ones.
            let system = below(40) * below(40) / 40;
            chats.push((0..4).map(|at| system * 4 + at).collect());
        }
        // Young chats go on more often than old ones.
        let age = below(30) * below(30) % u32::try_from(chats.len()).expect("few chats");
        let at = chats.len() - 1 - age as usize;
        for _ in 0..=below(8) {
            next_id += 1;
            chats[at].push(next_id);
        }
        trace.push(chats[at].clone());
        if below(8) == 0 {
            chats.remove(at);
        }
    }
    trace
}
