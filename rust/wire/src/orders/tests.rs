use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::store::{DiskSettings, Prefix, SaveRange, Store, StoreConfig};

use super::Whose;
use crate::{Patience, Remote, RemoteConfig, Server, ServerConfig};

const FRAME: u64 = 4096;
const LONG: Duration = Duration::from_secs(60);

/// As while it is closed: its disk is still in use, and it is none of the server's any more.
#[test]
fn a_namespace_that_is_being_closed_may_keep_something() {
    let dir = tempfile::tempdir().expect("a directory");
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 1 << 20, num_threads: 1, description: String::new() };
    let config = ServerConfig {
        socket: dir.path().join("run").join("kvloft.sock"),
        host_bytes: 64 * FRAME,
        eviction: Eviction::Lru,
        available_bytes: None,
        disk: Some(settings.clone()),
        shares: Vec::new(),
        limits: kvloft_core::store::TenantLimits::default(),
        settings: Vec::new(),
        max_connections: 8,
        patience: Patience::default(),
    };
    let server = Server::open(config.clone()).expect("a server");
    let remote = RemoteConfig {
        socket: config.socket,
        deadline: LONG,
        namespace: [7; 32],
        frame_bytes: FRAME,
        blocks_per_chunk: 1,
        description: String::new(),
    };
    let _engine = Remote::open(remote).expect("a client");
    let of_store = StoreConfig {
        frame_bytes: FRAME,
        host_bytes: 0,
        blocks_per_chunk: 1,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [9; 32],
        disk: Some(settings),
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
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
