//! Compares the time to compute keys for token ids and embedding rows with plain BLAKE3 over the
//! same number of bytes, and the time to compute a chunk's tag with the time to copy the chunk.

use std::time::Instant;

use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::tag::chunk_tag;

use crate::table::{Times, in_turns, title, verdict};

const NUM_IDS: u32 = 131_072;
const ROOT: ChunkKey = ChunkKey([7; 32]);
/// Number of bfloat16 values in an embedding row.
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
    chain.append_tokens(ids).expect("fewer than 2^32 tokens");
    chain
}

fn embeds(rows: &[u8], block_tokens: u32) -> KeyChain {
    let mut chain = KeyChain::new(ROOT, block_tokens).expect("a valid chain");
    chain.append_embeds("bfloat16", WIDTH, rows).expect("whole rows");
    chain
}

/// Prints milliseconds, gigabytes per second, and the ratio to the reference.
fn row(
    what: &str,
    num_bytes: usize,
    [ours, reference]: &[Times; 2],
    name: &str,
    target: (&str, bool),
) {
    let ms = |share| ours.quantile(share) * 1e3;
    let speed = |times: &Times| num_bytes as f64 / times.min() / 1e9;
    println!(
        "{what:<50} {:>8.3} {:>8.3} {:>8.3} {:>6.1} {:>10} {:>7}   {name} {:.1} GB/s, ratio {:.2}",
        ms(0.0),
        ms(0.5),
        ms(1.0),
        speed(ours),
        target.0,
        verdict(target.1),
        speed(reference),
        speed(ours) / speed(reference),
    );
}

fn token_rows() {
    let (ids, bytes) = (ids(), noise(NUM_IDS as usize * 4));
    for (block_tokens, target_ms) in [(256, 0.25), (16, 1.0)] {
        let turns =
            in_turns(300, || tokens(&ids, block_tokens), || blake3::keyed_hash(&[7; 32], &bytes));
        let what = format!("{NUM_IDS} token ids, blocks of {block_tokens}, 1 thread");
        let target = (&*format!("{target_ms} ms"), turns[0].min() * 1e3 <= target_ms);
        row(&what, bytes.len(), &turns, "plain BLAKE3", target);
    }
}

fn embed_rows() {
    let rows = noise(NUM_ROWS * WIDTH as usize * 2);
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        for block_tokens in [16, 256] {
            let plain = || blake3::Hasher::new_keyed(&[7; 32]).update_rayon(&rows).finalize();
            let turns = pool.install(|| in_turns(400, || embeds(&rows, block_tokens), plain));
            let what = format!(
                "{NUM_ROWS} bf16 rows of {WIDTH}, blocks of {block_tokens}, {threads} threads"
            );
            let met = turns[1].min() / turns[0].min() >= 0.9;
            row(&what, rows.len(), &turns, "plain BLAKE3", ("ratio 0.90", met));
        }
    }
}

fn tag_rows() {
    for (page_bytes, num_blocks) in [(2048u32, 16u32), (2048, 128), (16 << 10, 32)] {
        let pages = vec![page_bytes; 64];
        let payload = noise(page_bytes as usize * 64 * num_blocks as usize);
        let tag = || chunk_tag(&payload, &pages, num_blocks).expect("a whole payload");
        let turns = in_turns(25, tag, || payload.clone());
        let what = format!("tag of {} MiB in pages of {page_bytes}", payload.len() >> 20);
        let met = payload.len() as f64 / turns[0].min() >= 5e9;
        row(&what, payload.len(), &turns, "a copy", ("5 GB/s", met));
    }
}

fn decode_row() {
    let prompt = ids();
    let mut chain = tokens(&prompt, 16);
    let start = Instant::now();
    for &id in &prompt {
        chain.append_tokens(&[id]).expect("fewer than 2^32 tokens");
    }
    let nanos = start.elapsed().as_secs_f64() * 1e9 / f64::from(NUM_IDS);
    println!("{:<50} {nanos:>5.0} ns on average", "one more token, blocks of 16");
}

pub(crate) fn run() {
    title("Hashing");
    println!(
        "{:<50} {:>8} {:>8} {:>8} {:>6} {:>10} {:>7}   reference",
        "", "min ms", "median", "max", "GB/s", "target", ""
    );
    token_rows();
    embed_rows();
    tag_rows();
    decode_row();
}
