//! Measures the socket's overhead: `cargo bench -p kvloft-wire`.
//!
//! Compares a lookup and a lease of a stored 131,072-token prompt over the socket with the same
//! calls to an in-process store. Calls alternate between prompts, so that the connection's prefix
//! cache never helps.
#![expect(clippy::print_stdout, reason = "benchmarks print their results")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::{Local, Session};
use kvloft_core::store::{Prefix, StoreConfig};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig};

const PROMPT_TOKENS: u32 = 131_072;
const NUM_PROMPTS: u32 = 16;
const NUM_ROUNDS: u32 = 100;
const FRAME_BYTES: u64 = 4096;
/// Target times for a lookup plus a lease, in microseconds: the median and the 99th percentile.
const TARGETS_US: (u128, u128) = (150, 400);

/// Returns a prompt with one token per block. A key's size does not depend on the block size.
fn prompt(seed: u32, num_blocks: u32) -> KeyChain {
    branch(seed, num_blocks, num_blocks)
}

/// Returns a prompt that shares its first `num_same` blocks with prompt `seed`.
fn branch(seed: u32, num_same: u32, num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([7; 32]), 1).expect("a valid chain");
    let token = |at: u32| at << 4 | seed | u32::from(at >= num_same) << 30;
    chain
        .append_tokens(&(0..num_blocks).map(token).collect::<Vec<_>>())
        .expect("fewer than 2^32 tokens");
    chain
}

fn fill(session: &dyn Session, prompts: &[KeyChain]) {
    for chain in prompts {
        let stop = u32::try_from(chain.keys().len()).expect("few blocks");
        let range = 0..stop;
        let (rows, _) =
            session.reserve(Prefix::from(chain), range).expect("the chain has the range");
        assert_eq!(session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), stop);
    }
}

/// Returns the median and 99th-percentile call times, in microseconds.
fn measure(prompts: &[KeyChain], mut call: impl FnMut(&KeyChain)) -> (u128, u128) {
    let mut times: Vec<_> = (0..NUM_ROUNDS)
        .flat_map(|_| prompts)
        .map(|chain| {
            let start = Instant::now();
            call(chain);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    (times[times.len() / 2].as_micros(), times[times.len() * 99 / 100].as_micros())
}

fn main() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("kvloft.sock");
    println!(
        "{:>6} {:>9} {:>24} {:>10} {:>8} {:>7}",
        "keys", "store", "call", "median us", "p99 us", ""
    );
    for tokens in [256, 16] {
        let num_blocks = PROMPT_TOKENS / tokens;
        let prompts: Vec<_> = (0..NUM_PROMPTS).map(|seed| prompt(seed, num_blocks)).collect();
        let host_bytes = u64::from(num_blocks * NUM_PROMPTS) * FRAME_BYTES;
        let namespace = [num_blocks.to_le_bytes()[1]; 32];
        let _server =
            Server::open(ServerConfig::new(socket.clone(), host_bytes)).expect("a server");
        let (frame_bytes, description) = (FRAME_BYTES, String::new());
        let deadline = Duration::from_secs(1);
        let remote = ClientConfig {
            socket: socket.clone(),
            deadline,
            namespace,
            frame_sizes: frame_bytes.into(),
            description,
        };
        let remote = Client::open(remote).expect("a client");
        let local = StoreConfig {
            frame_sizes: frame_bytes.into(),
            host_bytes,
            eviction: Eviction::default(),
            available_bytes: None,
            namespace,
            disk: None,
            now_s: 0,
            limits: kvloft_core::store::TenantLimits::default(),
        };
        let local = Local::open(&local).expect("address space");
        for (name, session) in [("embedded", &local as &dyn Session), ("server", &remote)] {
            report(name, session, &prompts, num_blocks);
        }
    }
}

/// Measures one session and prints its rows.
fn report(name: &str, session: &dyn Session, prompts: &[KeyChain], num_blocks: u32) {
    fill(session, prompts);
    let lease = |chain: &KeyChain| {
        let id = session.acquire(Prefix::from(chain));
        assert_eq!(session.poll(id).ready_units, num_blocks);
        id
    };
    let look_up = |chain: &KeyChain| {
        assert_eq!(session.lookup(Prefix::from(chain)).host_units, num_blocks);
    };
    let both = measure(prompts, |chain| {
        look_up(chain);
        session.release(lease(chain));
    });
    let frames = measure(prompts, |chain| {
        let id = lease(chain);
        assert_eq!(black_box(session.frames(id)).len(), num_blocks as usize);
        session.release(id);
    });
    let halves: Vec<_> =
        (0..NUM_PROMPTS).map(|seed| branch(seed, num_blocks / 2, num_blocks)).collect();
    let half = measure(&halves, |chain| {
        assert_eq!(session.lookup(Prefix::from(chain)).host_units, num_blocks / 2);
        session.release(session.acquire(Prefix::from(chain)));
    });
    for (call, (median, p99), has_target) in [
        ("lookup, lease, release", both, true),
        ("same, half stored", half, true),
        ("lease, frames, release", frames, false),
    ] {
        let met = if median <= TARGETS_US.0 && p99 <= TARGETS_US.1 { "met" } else { "NOT met" };
        let met = if has_target { met } else { "" };
        println!("{num_blocks:>6} {name:>9} {call:>24} {median:>10} {p99:>8} {met:>7}");
    }
}
