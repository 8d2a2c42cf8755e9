//! Lookups in a store of a million chunks, against their targets: `cargo bench --features bench --bench lookup`.
//!
//! Each prompt has 131,072 tokens. Lookups go round many prompts, so that the caches of the processor do not hold the answer.
#![expect(missing_docs, clippy::print_stdout, reason = "criterion's macros make undocumented items; a bench prints")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group};
use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::{SaveRange, Store, StoreConfig};

const NUM_CHUNKS: u32 = 1_000_000;
const PROMPT_TOKENS: u32 = 131_072;
const FRAME_BYTES: u64 = 4096;
/// Prompts that are looked up in turn.
const NUM_PROBES: u32 = 61;

/// A prompt of `num_blocks` one-token blocks, of which the first `num_shared` are those of prompt `seed`.
///
/// A key is 32 bytes whatever its block holds, so one token a block makes the same lookup as 16 or 256.
fn prompt(seed: u32, num_blocks: u32, num_shared: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
    let other = |at: u32| if at < num_shared { seed } else { u32::MAX };
    let ids: Vec<u32> = (0..num_blocks).map(|at| if at == 0 { other(at) } else { at ^ other(at) << 16 }).collect();
    chain.append_tokens(&ids).expect("room for all ids");
    chain
}

/// A store full of prompts of `num_blocks` chunks. No frame is written, so it takes no memory but for its books.
fn full_store(num_blocks: u32) -> Store {
    let config = StoreConfig {
        frame_bytes: FRAME_BYTES,
        host_bytes: u64::from(NUM_CHUNKS) * FRAME_BYTES,
        blocks_per_chunk: 1,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
    };
    let store = Store::open(&config).expect("4 GB of address space");
    for seed in 0..NUM_CHUNKS / num_blocks {
        let range = SaveRange { start: 0, stop: num_blocks, tail_blocks: 0 };
        let reserved = store.reserve(&prompt(seed, num_blocks, num_blocks), range).expect("the chain has the range");
        store.commit(reserved.leases);
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
        Case { name, found, probes: (0..NUM_PROBES).map(|nth| prompt(seed(nth), num_blocks, found)).collect() }
    };
    vec![case("all", num_blocks), case("two thirds", num_blocks * 2 / 3), case("none", 0)]
}

fn lookups(criterion: &mut Criterion) {
    let mut rows = Vec::new();
    for (tokens, target_us) in [(256, 50.0), (16, 100.0)] {
        let num_blocks = PROMPT_TOKENS / tokens;
        let store = full_store(num_blocks);
        let mut group = criterion.benchmark_group(format!("lookup of {num_blocks} keys in 1M chunks"));
        for case in cases(num_blocks) {
            let mut turn = case.probes.iter().cycle();
            for probe in &case.probes {
                assert_eq!(store.lookup(probe).host_blocks, case.found);
            }
            group.bench_function(BenchmarkId::from_parameter(case.name), |bench| {
                bench.iter(|| store.lookup(black_box(turn.next().expect("there are probes"))));
            });
            let lookup = mean(&case.probes, |probe| _ = black_box(store.lookup(probe)));
            let lease = mean(&case.probes, |probe| drop(black_box(store.acquire(probe))));
            rows.push((num_blocks, case.name, lookup, lease, target_us));
        }
        group.finish();
    }
    println!("\n{:>6} {:>12} {:>12} {:>12} {:>10} {:>7}", "keys", "found", "lookup us", "lease us", "target us", "met");
    for (num_blocks, name, lookup, lease, target_us) in rows {
        let met = if lookup <= target_us { "yes" } else { "NO" };
        println!("{num_blocks:>6} {name:>12} {lookup:>12.2} {lease:>12.2} {target_us:>10.0} {met:>7}");
    }
}

/// Microseconds per call over some rounds of all probes.
fn mean(probes: &[KeyChain], mut call: impl FnMut(&KeyChain)) -> f64 {
    const ROUNDS: u32 = 20;
    let start = Instant::now();
    for _ in 0..ROUNDS {
        probes.iter().for_each(&mut call);
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS * NUM_PROBES)
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = lookups
}

fn main() {
    benches();
    Criterion::default().configure_from_args().final_summary();
}
