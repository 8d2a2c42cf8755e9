//! Stress test: three models with different chunk sizes share a server with tenant quotas. Engines
//! connect, save, load, and disconnect with open leases. No load may return a wrong byte, and no
//! frame may leak.

mod common;

use kvloft_core::io::FrameGrid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{FRAME, LONG, remote_config, server_config, stat, until};
use kvloft_core::key::{KeyChain, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{Limits, Prefix, Quota, TenantLimits};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig};

/// Number of pages in each model's chunks. A slab has four pages.
const PAGES: [u64; 3] = [1, 2, 4];
const NUM_SLABS: u32 = 16;
const SALTS: [Option<&str>; 3] = [None, Some("pepper"), Some("thyme")];

/// A small random number generator, one per thread.
struct Pick(u64);

impl Pick {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn number(&mut self, end: u64) -> u32 {
        u32::try_from(self.below(end)).expect("small")
    }
}

fn engine(dir: &Path, nth: usize) -> Client {
    let namespace = [u8::try_from(nth).expect("few") + 1; 32];
    Client::open(ClientConfig {
        namespace,
        frame_sizes: (PAGES[nth] * FRAME).into(),
        ..remote_config(dir)
    })
    .expect("a client")
}

fn chain(nth: usize, salt: Option<&str>, prompt: u32, num_blocks: u32) -> KeyChain {
    let root = root_key(&[u8::try_from(nth).expect("few"); 32], None, salt).expect("short");
    let mut chain = KeyChain::new(root, 1).expect("a chain");
    let tokens: Vec<_> =
        (0..num_blocks).map(|at| if at < 2 { prompt / 4 } else { prompt * 100 + at }).collect();
    chain.append_tokens(&tokens).expect("tokens");
    chain
}

fn grid(engine: &Client, nth: usize) -> FrameGrid {
    engine.arena().expect("an arena").grid(PAGES[nth] * FRAME).expect("it fits")
}

fn content(nth: usize, key: &[u8; 32]) -> Vec<u8> {
    key.repeat(usize::try_from(PAGES[nth] * FRAME / 32).expect("small"))
}

/// Saves a prompt whose chunks hold their own keys, and returns the number of committed chunks.
fn save(engine: &Client, memory: &File, nth: usize, chain: &KeyChain) -> u32 {
    let num_blocks = u32::try_from(chain.keys().len()).expect("few");
    let (rows, _) = engine.reserve(Prefix::from(chain), 0..num_blocks).expect("in range");
    for row in &rows {
        let at = grid(engine, nth).start(row.frame.number());
        memory.write_all_at(&content(nth, &row.key.0), at).expect("room");
    }
    engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>())
}

/// Runs several steps of one engine. The engine may exit with open leases and reservations.
fn live(dir: &Path, nth: usize, pick: &mut Pick) -> (u32, usize) {
    let engine = engine(dir, nth);
    let memory = File::options()
        .read(true)
        .write(true)
        .open(engine.arena().expect("an arena").path)
        .expect("the arena exists");
    let (mut held, mut num_saved, mut num_compared) = (Vec::new(), 0, 0);
    for _ in 0..10 + pick.below(60) {
        let salt = SALTS[pick.number(3) as usize];
        let chain = chain(nth, salt, pick.number(24), 1 + pick.number(10));
        match pick.below(12) {
            0..5 => num_saved += save(&engine, &memory, nth, &chain),
            5..9 => held.push(engine.acquire(Prefix::from(&chain))),
            // The chunk stays reserved.
            9 => drop(engine.reserve(Prefix::from(&chain), 0..1).expect("in range")),
            10 => engine.clear(),
            _ => held.drain(..).for_each(|lease| engine.release(lease)),
        }
        for lease in &held {
            for row in engine.frames(*lease) {
                let mut found = content(nth, &[0; 32]);
                memory
                    .read_exact_at(&mut found, grid(&engine, nth).start(row.frame.number()))
                    .expect("room");
                assert!(
                    found == content(nth, &row.key.0),
                    "wrong bytes in frame {} of {nth}",
                    row.frame.0
                );
                num_compared += 1;
            }
        }
    }
    if pick.below(2) == 0 {
        engine.close(Duration::ZERO);
    }
    (num_saved, num_compared)
}

#[test]
fn random_engines_of_three_models_corrupt_and_leak_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let salted = Limits { host: Some(Quota::Share(500_000)), ..Limits::default() };
    let limits = TenantLimits { salted, ..TenantLimits::default() };
    // The engines are threads of this process, so there are no GPU copies to wait for.
    let config = ServerConfig {
        limits,
        gpu_settle: Duration::ZERO,
        max_connections: 1000,
        ..server_config(dir.path())
    };
    let server = Server::open(config).expect("a server");
    let first = engine(dir.path(), 0); // its chunks determine the slab size
    let end = Instant::now() + Duration::from_secs(2);
    std::thread::scope(|scope| {
        for thread in 0..6_usize {
            let (nth, dir) = (thread % 3, dir.path());
            scope.spawn(move || {
                let (mut pick, mut sum) = (Pick(thread as u64 + 1), (0, 0));
                // On a busy machine, continues until chunks have been saved and compared.
                while Instant::now() < end
                    || ((sum.0 == 0 || sum.1 == 0) && Instant::now() < end + LONG)
                {
                    let (num_saved, num_compared) = live(dir, nth, &mut pick);
                    sum = (sum.0 + num_saved, sum.1 + num_compared);
                }
                assert!(sum.0 > 0 && sum.1 > 0, "model {nth} had no memory: {sum:?}");
            });
        }
    });
    drop(first);
    until("their leases and reservations are released", || {
        server.status().namespaces.iter().all(|space| {
            let held = ["pins", "frames_reserved"].map(|name| stat(&space.stats, name));
            space.engines.is_empty() && held == [0, 0]
        })
    });
    for nth in [0, 1, 2, 1] {
        has_it_all(&server, dir.path(), nth);
    }
}

/// Checks that a single engine can use every frame of every slab.
fn has_it_all(server: &Server, dir: &Path, nth: usize) {
    let engine = engine(dir, nth);
    let num_frames = grid(&engine, nth).num_frames();
    let memory = File::options()
        .write(true)
        .open(engine.arena().expect("an arena").path)
        .expect("the arena exists");
    until("it has all memory", || {
        for prompt in 0..num_frames {
            save(&engine, &memory, nth, &chain(nth, None, 1000 + 4 * prompt, 1));
        }
        let status = server.status();
        let own = status
            .namespaces
            .iter()
            .find(|space| space.namespace == [u8::try_from(nth).expect("few") + 1; 32]);
        let own = own.expect("the engine is open");
        let used = stat(&own.stats, "frames_visible");
        own.num_slabs == NUM_SLABS && used == u64::from(num_frames)
    });
    assert!(engine.flush(LONG));
    engine.close(LONG);
}
