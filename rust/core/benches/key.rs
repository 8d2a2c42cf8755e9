//! Keys and tags against their targets: `cargo bench --features bench --bench key`.
//!
//! Criterion watches for changes between runs; the table at the end holds measured times against targets and against plain
//! BLAKE3, both the best of many turns in the same run, so that a busy machine does not decide.
#![expect(missing_docs, clippy::print_stdout, reason = "criterion's macros make undocumented items; a bench prints")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::tag::chunk_tag;

const NUM_IDS: u32 = 131_072;
const ROOT: ChunkKey = ChunkKey([7; 32]);
/// Rows of 4096 bfloat16, and how many.
const WIDTH: u32 = 4096;
const NUM_ROWS: usize = 512;

fn ids() -> Vec<u32> {
    (0..NUM_IDS).map(|i| i.wrapping_mul(2_654_435_761) % 151_936).collect()
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

fn tokens(ids: &[u32], block_tokens: u32) -> KeyChain {
    let mut chain = KeyChain::new(ROOT, block_tokens).expect("a valid chain");
    chain.append_tokens(ids).expect("room for all ids");
    chain
}

fn embeds(rows: &[u8], block_tokens: u32) -> KeyChain {
    let mut chain = KeyChain::new(ROOT, block_tokens).expect("a valid chain");
    chain.append_embeds("bfloat16", WIDTH, rows).expect("whole rows");
    chain
}

/// What two things cost, done in turns: their shortest times, which is what they cost when nothing else runs.
struct Turns {
    one: Duration,
    two: Duration,
}

fn in_turns<A, B>(times: usize, mut one: impl FnMut() -> A, mut two: impl FnMut() -> B) -> Turns {
    let mut best = Turns { one: Duration::MAX, two: Duration::MAX };
    for _ in 0..times {
        let start = Instant::now();
        black_box(one());
        let middle = Instant::now();
        black_box(two());
        best = Turns { one: best.one.min(middle - start), two: best.two.min(middle.elapsed()) };
    }
    best
}

fn row(what: &str, measured: &str, target: &str, met: bool, plain: &str) {
    let verdict = if met { "met" } else { "MISSED" };
    println!("{what:<46} {measured:>12} {target:>12} {verdict:>7}   {plain}");
}

fn token_rows() {
    let (ids, bytes) = (ids(), noise(NUM_IDS as usize * 4));
    for (block_tokens, target_ms) in [(256, 0.25), (16, 1.0)] {
        let turns = in_turns(300, || tokens(&ids, block_tokens), || blake3::keyed_hash(&[7; 32], &bytes));
        let ms = turns.one.as_secs_f64() * 1e3;
        row(
            &format!("{NUM_IDS} ids, blocks of {block_tokens}, 1 thread"),
            &format!("{ms:.3} ms"),
            &format!("<= {target_ms:.2} ms"),
            ms <= target_ms,
            &format!("plain BLAKE3 of the ids {:.3} ms", turns.two.as_secs_f64() * 1e3),
        );
    }
}

fn embed_rows() {
    let rows = noise(NUM_ROWS * WIDTH as usize * 2);
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        for block_tokens in [16, 256] {
            let plain = || blake3::Hasher::new_keyed(&[7; 32]).update_rayon(&rows).finalize();
            let turns = pool.install(|| in_turns(400, || embeds(&rows, block_tokens), plain));
            let ratio = turns.two.as_secs_f64() / turns.one.as_secs_f64();
            row(
                &format!("{NUM_ROWS} bf16 rows of {WIDTH}, blocks of {block_tokens}, {threads} threads"),
                &format!("{:.0} %", ratio * 100.0),
                ">= 90 %",
                ratio >= 0.9,
                &format!(
                    "{:.2} ms, plain BLAKE3 {:.2} ms",
                    turns.one.as_secs_f64() * 1e3,
                    turns.two.as_secs_f64() * 1e3
                ),
            );
        }
    }
}

fn tag_rows() {
    for (page_bytes, num_blocks) in [(2048u32, 16u32), (2048, 128), (16 << 10, 32)] {
        let pages = vec![page_bytes; 64];
        let payload = noise(page_bytes as usize * 64 * num_blocks as usize);
        let copy = || payload.clone();
        let turns = in_turns(25, || chunk_tag(&payload, &pages, num_blocks).expect("a whole payload"), copy);
        let giga = f64::from(page_bytes) * 64.0 * f64::from(num_blocks) / 1e9;
        let speed = |time: Duration| giga / time.as_secs_f64();
        row(
            &format!("tag of {} MiB in pages of {page_bytes}", payload.len() >> 20),
            &format!("{:.1} GB/s", speed(turns.one)),
            ">= 5 GB/s",
            speed(turns.one) >= 5.0,
            &format!("a copy {:.1} GB/s", speed(turns.two)),
        );
    }
}

fn decode_row() {
    let prompt = ids();
    let mut chain = tokens(&prompt, 16);
    let start = Instant::now();
    for &id in &prompt {
        chain.append_tokens(&[id]).expect("room");
    }
    let nanos = start.elapsed().as_secs_f64() * 1e9 / f64::from(NUM_IDS);
    println!("{:<46} {nanos:>9.0} ns", "one token more, blocks of 16");
}

fn watch(criterion: &mut Criterion) {
    let ids = ids();
    let mut group = criterion.benchmark_group("append_tokens");
    group.throughput(Throughput::Elements(u64::from(NUM_IDS)));
    for block_tokens in [16, 256] {
        group.bench_with_input(BenchmarkId::from_parameter(block_tokens), &block_tokens, |bench, &block_tokens| {
            bench.iter(|| tokens(&ids, block_tokens));
        });
    }
    group.finish();
}

criterion_group! {
    name = watched;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_secs(1));
    targets = watch
}

fn main() {
    watched();
    println!("\n{:<46} {:>12} {:>12}", "", "measured", "target");
    token_rows();
    embed_rows();
    tag_rows();
    decode_row();
}
