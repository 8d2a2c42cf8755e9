//! Request traces to replay.
//!
//! - A file of JSON lines with `hash_ids`, one id per block. Equal ids mean equal prefixes.
//! - Synthetic multi-turn chats that share a few system prompts of different popularity.
//! - Two sets of synthetic chats, one after the other.

use std::path::Path;

const DEFAULT_TRACE: &str = "../shared/data/conversation_trace.first6000.jsonl";

/// The block ids of each request, in order of arrival.
pub(crate) type Trace = Vec<Vec<u32>>;

/// Returns the name and the requests of the given trace. Without an argument, uses the default
/// trace if it exists.
pub(crate) fn load(asked: Option<&Path>) -> Option<(String, Trace)> {
    // Benchmarks run in the package's directory, but trace paths are relative to the repository
    // root.
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let path = root.join(asked.unwrap_or(Path::new(DEFAULT_TRACE)));
    if asked.is_none() && !path.exists() {
        return None;
    }
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let ids = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        line["hash_ids"].as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    let trace = text.lines().map(ids).collect::<Option<Trace>>();
    Some((
        path.display().to_string(),
        trace.unwrap_or_else(|| panic!("{}: not a trace", path.display())),
    ))
}

/// Returns a generator of pseudo-random numbers below a limit, with a fixed seed.
fn numbers() -> impl FnMut(u32) -> u32 {
    let mut seed = 1u64;
    move |limit| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((seed >> 33) % u64::from(limit)).expect("less than the limit")
    }
}

/// Returns the requests of synthetic chats, with a few hundred chats open at a time.
///
/// A request repeats the chat so far and adds up to 8 blocks. A chat has 8 turns on average.
pub(crate) fn synthetic() -> Trace {
    let mut below = numbers();
    let mut next_id = 1000;
    let mut chats: Vec<Vec<u32>> = Vec::new();
    let mut trace = Trace::new();
    for _ in 0..6000 {
        if chats.len() < 300 || below(4) == 0 {
            // Multiplying two uniform random numbers makes small results much more likely.
            let system = below(40) * below(40) / 40;
            chats.push((0..4).map(|at| system * 4 + at).collect());
        }
        // Chats that started recently are more likely to continue.
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

/// Returns two sets of 64 chats with 5 turns each, in random order.
///
/// The first prompt has 4,000 tokens, each later turn adds 400, and each output has 150. A block
/// has 64 tokens. The sets have no chats in common.
pub(crate) fn two_sets() -> [Trace; 2] {
    const CHATS: u32 = 64;
    const TURNS: u32 = 5;
    let mut below = numbers();
    [0, 1].map(|set| {
        let mut chats: Vec<(u32, u32)> =
            (0..CHATS).map(|chat| ((set * CHATS + chat) * 1000, 0)).collect();
        let mut trace = Trace::new();
        while !chats.is_empty() {
            let at = below(u32::try_from(chats.len()).expect("few chats")) as usize;
            let (first, turn) = &mut chats[at];
            trace.push((0..(4150 + 550 * *turn) / 64).map(|block| *first + block).collect());
            *turn += 1;
            if *turn == TURNS {
                chats.swap_remove(at);
            }
        }
        trace
    })
}
