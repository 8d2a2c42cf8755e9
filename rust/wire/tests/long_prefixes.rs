//! Tests long prefixes: only a few keys are sent, and every stored chunk is found.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{FRAME, LONG, chain, connect, found, save, server_config, stat, until, with_disk};
use kvloft_core::KeyChain;
use kvloft_core::session::Session;
use kvloft_core::store::{Lookup, Prefix, Progress};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Server, ServerConfig};
use proptest::prelude::*;

const NUM_BLOCKS: u32 = 900;

fn serve(dir: &std::path::Path, num_frames: u64) -> Server {
    Server::open(ServerConfig { host_bytes: num_frames * FRAME, ..server_config(dir) })
        .expect("a server")
}

fn lookup(session: &dyn Session, chain: &KeyChain) -> u32 {
    let Lookup { host_units, stored_units } = session.lookup(Prefix::from(chain));
    assert_eq!(host_units, stored_units);
    host_units
}

/// Leases every chunk found, and returns the keys of the leased frames.
fn leased(session: &dyn Session, chain: &KeyChain) -> Vec<kvloft_core::ChunkKey> {
    let lease = session.acquire(Prefix::from(chain));
    let frames = session.frames(lease);
    assert_eq!(session.poll(lease).ready_units as usize, frames.len());
    session.release(lease);
    frames.iter().map(|frame| frame.key).collect()
}

/// Returns a chain whose first `num_same` blocks are the same for every `seed`.
fn branch(seed: u32, num_same: u32, num_blocks: u32) -> KeyChain {
    let num_same = num_same.min(num_blocks);
    let mut tokens: Vec<_> = (0..num_same).map(|at| at * 1000).collect();
    tokens.extend((num_same..num_blocks).map(|at| at * 1000 + seed));
    let mut chain = KeyChain::new(chain(0, 0).root(), 1).expect("a chain");
    chain.append_tokens(&tokens).expect("tokens");
    chain
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn long_prefix_is_found_up_to_where_it_diverges(
        asked in prop::collection::vec((0..NUM_BLOCKS, 0..=NUM_BLOCKS, any::<bool>()), 1..20),
        num_stored in 0..=NUM_BLOCKS,
    ) {
        let dir = tempfile::tempdir().expect("a directory");
        let _server = serve(dir.path(), u64::from(NUM_BLOCKS));
        let engine = connect(dir.path());
        let stored = branch(0, 0, num_stored);
        prop_assert_eq!(save(&engine, &stored), num_stored);
        for (num_same, num_blocks, is_leased) in asked {
            let prompt = branch(7, num_same, num_blocks);
            let expected = num_same.min(num_blocks).min(num_stored);
            if is_leased {
                prop_assert_eq!(leased(&engine, &prompt), &stored.keys()[..expected as usize]);
            } else {
                prop_assert_eq!(lookup(&engine, &prompt), expected);
            }
        }
    }
}

/// All bytes of a key must be compared.
#[test]
fn keys_that_differ_in_the_last_byte_are_misses() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path(), 400);
    let engine = connect(dir.path());
    let stored = chain(1, 400);
    save(&engine, &stored);
    for num_same in [0, 1, 63, 64, 65, 128, 399, 400] {
        let mut keys = stored.keys().to_vec();
        keys[num_same..].iter_mut().for_each(|key| key.0[31] ^= 1);
        let forged = Prefix::new(stored.root(), &keys);
        assert_eq!(engine.lookup(forged).host_units as usize, num_same);
        let lease = engine.acquire(forged);
        let frames = engine.frames(lease);
        assert!(
            frames.iter().map(|frame| frame.key).eq(stored.keys()[..num_same].iter().copied()),
            "{num_same}"
        );
        engine.release(lease);
    }
}

#[test]
fn prefix_with_an_evicted_anchor_is_a_partial_hit() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path(), 400);
    let (engine, other) = (connect(dir.path()), connect(dir.path()));
    let long = chain(1, 400);
    save(&engine, &long);
    assert_eq!(lookup(&engine, &long), 400);
    save(&other, &chain(2, 100)); // takes frames from the end of the long prefix
    assert_eq!(
        lookup(&engine, &long),
        300,
        "chunks no longer on the server must be looked up again"
    );
    assert_eq!(leased(&engine, &long), &long.keys()[..300]);
    other.clear();
    assert_eq!(lookup(&engine, &long), 0);
    assert_eq!(save(&engine, &long), 400);
    assert_eq!(lookup(&engine, &long), 400);
}

#[test]
fn restarted_server_finds_a_long_prefix_on_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig { host_bytes: 300 * FRAME, ..with_disk(dir.path()) };
    let disk = config
        .disk
        .clone()
        .map(|disk| kvloft_core::store::DiskSettings { cap_bytes: 4 << 20, ..disk });
    let config = ServerConfig { disk, ..config };
    let server = Server::open(config.clone()).expect("a server");
    let engine = connect(dir.path());
    let long = chain(1, 300);
    assert_eq!(save(&engine, &long), 300);
    assert!(engine.flush(LONG));
    engine.close(Duration::ZERO);
    server.close(LONG);
    drop(server);
    let _server = Server::open(config).expect("a server");
    let engine = connect(dir.path());
    until("it is found", || found(&engine, &long) == 300);
    let lease = engine.acquire(Prefix::from(&long));
    until("it is read", || engine.poll(lease) == Progress { ready_units: 300, pending_units: 0 });
    assert_eq!(engine.frames(lease).iter().map(|frame| frame.key).collect::<Vec<_>>(), long.keys());
    assert_eq!(found(&connect(dir.path()), &long), 300, "the prefix must be cached now");
}

#[test]
fn lookups_loads_and_saves_are_counted_by_engine_and_in_total() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path(), 400);
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    save(&one, &chain(1, 300));
    assert_eq!(
        lookup(&other, &chain(1, 400)),
        300,
        "300 of 400 must be found although fewer keys are sent"
    );
    assert_eq!(lookup(&other, &chain(2, 50)), 0);
    assert_eq!(leased(&other, &chain(1, 200)).len(), 200);
    assert_eq!(
        lookup(&other, &chain(1, 100)),
        100,
        "anchors of a lease must not apply to the next lookup"
    );
    let asked = [
        "lookups",
        "lookup_chunks",
        "lookup_chunks_found",
        "load_chunks",
        "save_chunks",
        "late_calls",
        "late_chunks",
    ];
    let status = server.status();
    // Compared as a set, because the order of clients that connect at the same time is undefined.
    let counted: BTreeSet<_> =
        status.engines().map(|engine| asked.map(|name| stat(&engine.counters, name))).collect();
    assert_eq!(counted, BTreeSet::from([[0, 0, 0, 0, 300, 0, 0], [3, 550, 400, 200, 0, 0, 0]]));
    other.close(Duration::ZERO);
    until("it is gone", || server.status().engines().count() == 1);
    let status = server.status();
    let totals = &status.namespaces[0].stats;
    assert_eq!(
        asked.map(|name| stat(totals, name)),
        [3, 550, 400, 200, 300, 0, 0],
        "counts of disconnected engines must be included"
    );
    assert_eq!(stat(&status.stats, "server_host_bytes"), 400 * FRAME);
}

/// A single key can belong to an independent chunk, so neither end caches it.
#[test]
fn lookup_of_an_attached_chunk_keeps_the_prefix_cache() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path(), 500);
    let engine = connect(dir.path());
    let long = chain(1, 400);
    save(&engine, &long);
    assert_eq!(lookup(&engine, &long), 400);
    let lookups =
        || server.status().engines().map(|engine| stat(&engine.counters, "lookups")).sum::<u64>();
    assert_eq!(lookups(), 1);
    for root in [chain(2, 1), chain(3, 1)] {
        assert_eq!(lookup(&engine, &root), 0);
    }
    assert_eq!(lookups(), 3, "each lookup must be counted once");
    assert_eq!(engine.lookup_many(&[]), []);
    assert_eq!(lookup(&engine, &long), 400);
}
