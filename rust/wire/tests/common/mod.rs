//! Servers and clients for the tests, with small frames.
#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses a part of this module")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Prefix};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::protocol::admin::Stats;
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig, Status};

pub(crate) const FRAME: u64 = 4096;
/// Timeout for any wait in these tests.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn server_config(dir: &Path) -> ServerConfig {
    ServerConfig {
        eviction: Eviction::Lru,
        max_connections: 8,
        gpu_settle: Duration::from_millis(200),
        save_grace: LONG * 100,
        restart_grace: Duration::ZERO,
        ..ServerConfig::new(socket(dir), 64 * FRAME)
    }
}

pub(crate) fn with_disk(dir: &Path) -> ServerConfig {
    let disk = DiskSettings {
        dir: dir.join("disk"),
        cap_bytes: 1 << 20,
        num_threads: 1,
        description: String::new(),
    };
    ServerConfig { disk: Some(disk), ..server_config(dir) }
}

pub(crate) fn socket(dir: &Path) -> PathBuf {
    dir.join("run").join("kvloft.sock")
}

pub(crate) fn remote_config(dir: &Path) -> ClientConfig {
    ClientConfig {
        socket: socket(dir),
        deadline: LONG,
        namespace: [7; 32],
        frame_sizes: FRAME.into(),
        description: "a test".to_owned(),
    }
}

pub(crate) fn serve(dir: &Path) -> Server {
    Server::open(server_config(dir)).expect("a server")
}

pub(crate) fn connect(dir: &Path) -> Client {
    Client::open(remote_config(dir)).expect("a client")
}

/// Returns the log line of a rejected engine, which starts without the cache.
pub(crate) fn refusal(config: ClientConfig) -> String {
    let engine = Client::open(config).expect("a rejected client still starts");
    assert!(engine.arena().is_none());
    engine.take_events().concat()
}

/// Returns the engine if the server accepts it immediately.
pub(crate) fn accepted(config: ClientConfig) -> Option<Client> {
    Client::open(config).ok().filter(|engine| engine.arena().is_some())
}

pub(crate) fn chain(seed: u32, num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
    chain
        .append_tokens(&(0..num_blocks).map(|at| at * 1000 + seed).collect::<Vec<_>>())
        .expect("tokens");
    chain
}

/// Saves a whole prefix and returns the number of committed chunks.
pub(crate) fn save(session: &dyn Session, chain: &KeyChain) -> u32 {
    let num_blocks = u32::try_from(chain.keys().len()).expect("few");
    let (rows, _) = session.reserve(Prefix::from(chain), 0..num_blocks).expect("in range");
    session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>())
}

pub(crate) fn found(session: &dyn Session, chain: &KeyChain) -> u32 {
    session.lookup(Prefix::from(chain)).stored_units
}

pub(crate) fn stat(stats: &Stats, name: &str) -> u64 {
    *stats.get(name).expect("a counter of that name")
}

/// Returns the counters of the server and of its only namespace.
pub(crate) fn numbers(status: &Status) -> Stats {
    let of_namespaces = status.namespaces.iter().flat_map(|namespace| &namespace.stats);
    status.stats.iter().chain(of_namespaces).map(|(name, value)| (name.clone(), *value)).collect()
}

/// Returns once the test that started this child process has exited. The test usually kills the
/// child first.
pub(crate) fn outlive_no_test() {
    let test = std::os::unix::process::parent_id();
    while std::os::unix::process::parent_id() == test {
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
