use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Limits, Prefix, Store, StoreConfig, TenantLimits};
use kvloft_core::tier::disk::RemovedChunks;
use kvloft_testing::one_prefix::{SessionExt, StoreExt};

use super::EvictRequest;
use crate::protocol::Hello;
use crate::{Client, ClientConfig, Server, ServerConfig};

const FRAME: u64 = 4096;
const LONG: Duration = Duration::from_secs(60);

fn config(dir: &Path) -> (ServerConfig, DiskSettings) {
    let disk = DiskSettings {
        dir: dir.join("disk"),
        cap_bytes: 1 << 20,
        num_threads: 1,
        description: String::new(),
    };
    let socket = dir.join("run").join("kvloft.sock");
    let config = ServerConfig {
        eviction: Eviction::Lru,
        disk: Some(disk.clone()),
        ..ServerConfig::new(socket, 64 * FRAME)
    };
    (config, disk)
}

fn engine(socket: PathBuf) -> Client {
    engine_of(socket, 7)
}

fn engine_of(socket: PathBuf, namespace: u8) -> Client {
    let config = ClientConfig {
        socket,
        deadline: LONG,
        namespace: [namespace; 32],
        frame_sizes: FRAME.into(),
        description: String::new(),
    };
    Client::open(config).expect("a client")
}

fn request(namespace: &str, salt: &str) -> EvictRequest {
    EvictRequest {
        namespace: namespace.to_owned(),
        tenant: Some(SaltTag::of(salt)),
        host_only: false,
    }
}

fn chain_of(namespace: u8, salt: &str, num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[namespace; 32], None, Some(salt)).expect("short"), 1)
        .expect("a chain");
    chain.append_tokens(&(0..num_blocks).collect::<Vec<_>>()).expect("tokens");
    chain
}

/// While a namespace is being closed, its disk files are still in use, but the server no longer
/// lists the namespace.
#[test]
fn eviction_during_close_of_a_namespace_is_cut_short() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, settings) = config(dir.path());
    let server = Server::open(config.clone()).expect("a server");
    let _engine = engine(config.socket);
    let of_store = StoreConfig {
        frame_sizes: FRAME.into(),
        host_bytes: 0,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [9; 32],
        disk: Some(settings),
        now_s: 0,
        limits: TenantLimits::default(),
    };
    let pool = server.state.namespaces.pool().expect("an engine is connected");
    let closing = Store::open_in(&of_store, &pool, None).expect("a store");
    let chain = chain_of(9, "a", 2);
    let reserved = closing.reserve(Prefix::from(&chain), 0..2);
    assert_eq!(closing.commit(reserved.expect("in range").chunks), 2);
    assert!(closing.flush(LONG));
    let evict = |namespace: &str| server.state.evict(&request(namespace, "a")).expect("done");
    let said = evict("");
    assert!(said.evicted.is_cut_short && said.evicted.num_chunks == 0, "{said:?}");
    assert!(!evict("07").evicted.is_cut_short, "the request names a different namespace");
    drop(closing);
    let said = evict("");
    assert!(!said.evicted.is_cut_short && said.evicted.num_chunks == 2, "{said:?}");
}

#[test]
fn hung_disk_of_a_closed_namespace_does_not_block_admin_requests() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(config(dir.path()).0).expect("a server");
    let (heal, hung) = mpsc::channel::<()>();
    let soon = || Instant::now() + Duration::from_millis(50);
    let hangs = move || {
        Ok(hung.recv().map_or_else(|_| RemovedChunks::default(), |()| RemovedChunks::default()))
    };
    let removed = |num_chunks| move || Ok(RemovedChunks { num_chunks, ..RemovedChunks::default() });
    assert!(server.state.remove_within(soon(), hangs).expect("started").is_cut_short);
    let said = server.state.remove_within(soon(), removed(1)).expect("the removal must not fail");
    assert!(
        said.is_cut_short && said.num_chunks == 0,
        "only one thread must wait for the disk, not one per request"
    );
    assert!(server.state.closed("", soon()).is_none(), "the disk hangs");
    drop(heal);
    assert_eq!(server.state.closed("", Instant::now() + LONG), Some(Vec::new()));
    let said = server.state.remove_within(Instant::now() + LONG, removed(1)).expect("done");
    assert!(!said.is_cut_short && said.num_chunks == 1);
}

/// The expiry thread might never finish if the disk hangs.
#[test]
fn close_detaches_a_thread_that_a_disk_blocks() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(config(dir.path()).0).expect("a server");
    let (heal, hung) = mpsc::channel::<()>();
    server.spawn("hangs", move || hung.recv().unwrap_or_default()).expect("started");
    let (send, ended) = mpsc::channel();
    thread::spawn(move || {
        server.close(Duration::ZERO);
        let _none_waits = send.send(());
    });
    let has_ended = ended.recv_timeout(LONG).is_ok();
    drop(heal);
    assert!(has_ended);
}

/// If the disk hangs while a namespace is being opened, the server may close all other namespaces
/// in the meantime.
#[test]
fn namespace_opened_after_close_releases_the_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, _) = config(dir.path());
    let ended = Server::open(config.clone()).expect("a server");
    ended.close(Duration::ZERO);
    let hello = Hello {
        version: 1,
        namespace: [7; 32],
        frame_sizes: FRAME.into(),
        description: String::new(),
    };
    assert!(ended.state.join(&hello).is_err());
    let next = Server::open(ServerConfig {
        socket: dir.path().join("next").join("kvloft.sock"),
        ..config
    });
    assert_eq!(
        next.expect("a server").disk_trouble(),
        None,
        "the first server must keep running without the disk"
    );
}

#[test]
fn concurrent_evictions_count_their_own_chunks() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, _) = config(dir.path());
    let server = Server::open(config.clone()).expect("a server");
    let engine = engine(config.socket);
    for _ in 0..30 {
        for (salt, num) in [("a", 20), ("b", 7)] {
            let chain = chain_of(7, salt, num);
            let (rows, _) = engine.reserve(Prefix::from(&chain), 0..num).expect("in range");
            assert_eq!(engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), num);
        }
        let evict = |salt: &'static str| {
            server.state.evict(&request("", salt)).expect("done").evicted.num_chunks
        };
        let both = thread::scope(|scope| {
            ["a", "b"]
                .map(|salt| scope.spawn(move || evict(salt)))
                .map(|thread| thread.join().expect("no panic"))
        });
        assert_eq!(both, [20, 7]);
    }
}

/// A namespace with no engines has no store that could remove expired chunks.
#[test]
fn chunks_of_namespaces_without_engines_expire() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = |ttl_s| TenantLimits {
        salted: Limits { ttl_s, ..Limits::default() },
        ..TenantLimits::default()
    };
    let open = |ttl_s| {
        let config = ServerConfig { limits: limits(ttl_s), ..config(dir.path()).0 };
        (Server::open(config.clone()).expect("a server"), config)
    };
    let chain = |nth: u8, salt: Option<&str>| {
        let mut chain =
            KeyChain::new(root_key(&[nth; 32], None, salt).expect("short"), 1).expect("a chain");
        chain.append_tokens(&[1, 2, 3]).expect("tokens");
        chain
    };
    let each = [(1, Some("a")), (1, None), (2, Some("b")), (2, None)];
    let (server, config) = open(None);
    for (nth, salt) in each {
        let engine = engine_of(config.socket.clone(), nth);
        let all = 0..3;
        let (rows, _) = engine.reserve(Prefix::from(&chain(nth, salt)), all).expect("in range");
        assert_eq!(engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 3);
        assert!(engine.flush(LONG));
    }
    server.close(LONG);
    drop(server);
    std::thread::sleep(Duration::from_millis(2100)); // at least two whole seconds
    let (server, _) = open(Some(1));
    server.state.remove_expired();
    let logged = server.take_events();
    assert_eq!(logged, ["removed 6 expired chunks from closed namespaces"]);
    server.state.remove_expired();
    assert!(server.take_events().is_empty());
    server.close(LONG);
    drop(server);
    let (_server, config) = open(None); // without a TTL
    for (nth, salt) in each {
        let (engine, chain) = (engine_of(config.socket.clone(), nth), chain(nth, salt));
        let wanted = if salt.is_some() { 0 } else { 3 };
        let (mut found, deadline) = (u32::MAX, Instant::now() + LONG);
        while found != wanted && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10)); // the disk may be opened later
            found = engine.lookup(Prefix::from(&chain)).stored_units;
        }
        assert_eq!(found, wanted, "{nth} {salt:?}");
    }
}

/// A server must not clear or count chunks in a directory that another server uses.
#[test]
fn clear_is_refused_while_another_server_has_the_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, disk) = config(dir.path());
    std::fs::create_dir_all(disk.dir.join("0123456789abcdef")).expect("room");
    let _first = Server::open(config.clone()).expect("a server");
    let second = ServerConfig { socket: dir.path().join("second").join("kvloft.sock"), ..config };
    let socket = second.socket.clone();
    let second = Server::open(second).expect("the server starts");
    for name in ["", "01"] {
        let said = second.state.clear(name).expect_err("the namespace is unknown").to_string();
        assert!(said.contains("the server cannot use its disk"), "{said}");
    }
    let _engine = engine(socket);
    let said = second.state.clear("").expect_err("the directory may contain chunks").to_string();
    assert!(said.contains("a restart could bring them back"), "{said}");
}
