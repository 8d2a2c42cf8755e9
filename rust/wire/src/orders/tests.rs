use std::path::Path;
use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Limits, Prefix, SaveRange, Store, StoreConfig, TenantLimits};

use super::Whose;
use crate::{Patience, Remote, RemoteConfig, Server, ServerConfig};

const FRAME: u64 = 4096;
const LONG: Duration = Duration::from_secs(60);

fn config(dir: &Path, disk: DiskSettings) -> ServerConfig {
    ServerConfig {
        socket: dir.join("run").join("kvloft.sock"),
        host_bytes: 64 * FRAME,
        eviction: Eviction::Lru,
        available_bytes: None,
        disk: Some(disk),
        shares: Vec::new(),
        limits: TenantLimits::default(),
        settings: Vec::new(),
        max_connections: 8,
        patience: Patience::default(),
    }
}

fn engine(config: &ServerConfig, nth: u8) -> Remote {
    let remote = RemoteConfig {
        socket: config.socket.clone(),
        deadline: LONG,
        namespace: [nth; 32],
        frame_bytes: FRAME,
        blocks_per_chunk: 1,
        description: String::new(),
    };
    Remote::open(remote).expect("a client")
}

/// As while it is closed: its disk is still in use, and it is none of the server's any more.
#[test]
fn a_namespace_that_is_being_closed_may_keep_something() {
    let dir = tempfile::tempdir().expect("a directory");
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 1 << 20, num_threads: 1, description: String::new() };
    let config = config(dir.path(), settings.clone());
    let server = Server::open(config.clone()).expect("a server");
    let _engine = engine(&config, 7);
    let of_store = StoreConfig {
        frame_bytes: FRAME,
        host_bytes: 0,
        blocks_per_chunk: 1,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [9; 32],
        disk: Some(settings),
        now_s: 0,
        limits: TenantLimits::default(),
    };
    let pool = server.shared.namespaces.pool().expect("an engine is there");
    let closing = Store::open_in(&of_store, &pool, None).expect("a store");
    let mut chain = KeyChain::new(root_key(&[9; 32], None, Some("a")).expect("short"), 1).expect("a chain");
    chain.append_tokens(&[1, 2]).expect("tokens");
    let reserved = closing.reserve(Prefix::from(&chain), SaveRange { start: 0, stop: 2, tail_blocks: 0 });
    assert_eq!(closing.commit(reserved.expect("in range").leases), 2);
    assert!(closing.flush(LONG));
    let evict = |namespace: &str| {
        let whose = Whose { namespace: namespace.to_owned(), salt: Some(SaltTag::of("a")) };
        server.shared.evict(&whose, false).expect("done")
    };
    let said = evict("");
    assert!(said.is_cut_short && said.num_chunks == 0, "{said:?}");
    assert!(!evict("07").is_cut_short, "another is meant");
    drop(closing);
    let said = evict("");
    assert!(!said.is_cut_short && said.num_chunks == 2, "{said:?}");
}

/// A namespace that no engine asks for has no store that would look.
#[test]
fn what_is_too_old_goes_from_namespaces_without_engines_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 1 << 20, num_threads: 1, description: String::new() };
    let limits = |ttl_s| TenantLimits { salted: Limits { ttl_s, ..Limits::default() }, ..TenantLimits::default() };
    let open = |ttl_s| {
        let config = ServerConfig { limits: limits(ttl_s), ..config(dir.path(), settings.clone()) };
        (Server::open(config.clone()).expect("a server"), config)
    };
    let chain = |nth: u8, salt: Option<&str>| {
        let mut chain = KeyChain::new(root_key(&[nth; 32], None, salt).expect("short"), 1).expect("a chain");
        chain.append_tokens(&[1, 2, 3]).expect("tokens");
        chain
    };
    let each = [(1, Some("a")), (1, None), (2, Some("b")), (2, None)];
    let (server, config) = open(None);
    for (nth, salt) in each {
        let engine = engine(&config, nth);
        let all = SaveRange { start: 0, stop: 3, tail_blocks: 0 };
        let (rows, _) = engine.reserve(Prefix::from(&chain(nth, salt)), all).expect("in range");
        assert_eq!(engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 3);
        assert!(engine.flush(LONG));
    }
    server.close(LONG);
    drop(server);
    std::thread::sleep(Duration::from_millis(2100)); // two whole seconds at least
    let (server, _) = open(Some(1));
    server.shared.erase_expired();
    let told = server.take_events();
    assert_eq!(told, ["6 chunks of namespaces without engines are erased from disk: they are too old"]);
    server.shared.erase_expired();
    assert!(server.take_events().is_empty());
    server.close(LONG);
    drop(server);
    let (_server, config) = open(None); // nothing is too old for this one
    for (nth, salt) in each {
        let found = engine(&config, nth).lookup(Prefix::from(&chain(nth, salt))).stored_blocks;
        assert_eq!(found, if salt.is_some() { 0 } else { 3 }, "{nth} {salt:?}");
    }
}
