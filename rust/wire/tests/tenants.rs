//! Tests tenant quotas and the expiry of chunks on a server: in each namespace, on disk, and across
//! restarts.

mod common;

use kvloft_core::io::SizeClass;
use std::path::Path;
use std::time::Duration;

use common::{
    FRAME, LONG, found, remote_config, save, server_config, socket, stat, until, with_disk,
};
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{Limits, Quota, SaveRequest, Tenant, TenantLimits};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, ClientConfig, NamespaceStatus, Server, ServerConfig, status};

fn engine(dir: &Path, nth: u8) -> Client {
    Client::open(ClientConfig { namespace: [nth; 32], ..remote_config(dir) }).expect("a client")
}

fn chain(namespace: u8, salt: Option<&str>, seed: u32, num_blocks: u32) -> KeyChain {
    let mut chain =
        KeyChain::new(root_key(&[namespace; 32], None, salt).expect("short"), 1).expect("a chain");
    chain
        .append_tokens(&(0..num_blocks).map(|at| seed * 100 + at).collect::<Vec<_>>())
        .expect("tokens");
    chain
}

fn space(dir: &Path, nth: u8) -> NamespaceStatus {
    let status = status(&socket(dir), LONG).expect("an answer");
    status
        .namespaces
        .into_iter()
        .find(|space| space.namespace == [nth; 32])
        .expect("the namespace is open")
}

fn tenant(dir: &Path, nth: u8, salt: Option<&str>) -> Option<Tenant> {
    space(dir, nth).tenants.into_iter().find(|tenant| tenant.tag == salt.map(SaltTag::of))
}

fn salted(limits: Limits) -> TenantLimits {
    TenantLimits { salted: limits, ..TenantLimits::default() }
}

#[test]
fn engines_of_one_tenant_share_its_quota() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits {
        host: Some(Quota::Share(125_000)),
        disk: Some(Quota::Bytes(10 * FRAME)),
        ttl_s: None,
    };
    let _server = Server::open(ServerConfig { limits: salted(limits), ..with_disk(dir.path()) })
        .expect("a server");
    let engines = [engine(dir.path(), 7), engine(dir.path(), 7)];
    assert_eq!(save(&engines[0], &chain(7, Some("b"), 0, 6)), 6);
    assert_eq!(save(&engines[1], &chain(7, None, 0, 6)), 6);
    for seed in 0..10 {
        assert_eq!(save(&engines[seed as usize % 2], &chain(7, Some("a"), seed, 4)), 4);
        assert!(engines[0].flush(LONG));
    }
    let of_a = tenant(dir.path(), 7, Some("a")).expect("the tenant has chunks");
    assert_eq!(
        (of_a.host_bytes / FRAME, of_a.max_host_bytes, of_a.max_disk_bytes, of_a.ttl_s),
        (8, Some(8 * FRAME), Some(10 * FRAME), None)
    );
    assert!((6..=10).contains(&(of_a.disk_bytes / FRAME)), "{of_a:?}");
    assert_eq!(
        tenant(dir.path(), 7, None).map(|tenant| (tenant.host_bytes, tenant.max_host_bytes)),
        Some((6 * FRAME, None))
    );
    for (salt, len) in [(Some("b"), 6), (None, 6), (Some("a"), 4)] {
        let seed = if salt == Some("a") { 9 } else { 0 };
        assert_eq!(
            engines[0].lookup((&chain(7, salt, seed, len)).into()).host_units,
            len,
            "{salt:?}"
        );
    }
    let stats = space(dir.path(), 7).stats;
    assert_eq!(
        [stat(&stats, "quota_evictions"), stat(&stats, "host_evictions"), stat(&stats, "salts")],
        [32, 32, 2]
    );
    assert!(stat(&stats, "quota_disk_evictions") >= 30 && stat(&stats, "quota_dropped") == 0);
}

#[test]
fn leases_of_a_closed_engine_do_not_count_against_the_quota() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { host: Some(Quota::Bytes(4 * FRAME)), ..Limits::default() };
    let _server =
        Server::open(ServerConfig { limits: salted(limits), ..server_config(dir.path()) })
            .expect("a server");
    let (one, other) = (engine(dir.path(), 7), engine(dir.path(), 7));
    assert_eq!(save(&one, &chain(7, Some("a"), 0, 4)), 4);
    let _lease = one.acquire((&chain(7, Some("a"), 0, 4)).into());
    assert_eq!(save(&other, &chain(7, Some("a"), 1, 4)), 0, "the tenant's whole quota is in use");
    assert_eq!(stat(&space(dir.path(), 7).stats, "quota_dropped"), 4);
    one.close(LONG);
    until("the lease has ended", || stat(&space(dir.path(), 7).stats, "pins") == 0);
    assert_eq!(save(&other, &chain(7, Some("a"), 1, 4)), 4);
    assert_eq!(found(&other, &chain(7, Some("a"), 0, 4)), 0);
}

/// After a dropped save, the engine looks up where to continue. The hit rate excludes that lookup.
#[test]
fn lookup_after_a_dropped_save_is_not_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { host: Some(Quota::Bytes(4 * FRAME)), ..Limits::default() };
    let _server =
        Server::open(ServerConfig { limits: salted(limits), ..server_config(dir.path()) })
            .expect("a server");
    let engine = engine(dir.path(), 7);
    let lookups = || {
        let engine = space(dir.path(), 7).engines.remove(0);
        ["lookups", "lookup_chunks", "lookup_chunks_found"].map(|name| stat(&engine.counters, name))
    };
    let (long, other) = (chain(7, Some("a"), 0, 6), chain(7, Some("b"), 1, 3));
    assert_eq!((save(&engine, &long), save(&engine, &other)), (4, 3));
    assert_eq!(
        (found(&engine, &long), lookups()),
        (4, [1, 6, 4]),
        "the last save must use all its frames"
    );
    assert_eq!(save(&engine, &long), 0);
    let after = |prefix: &KeyChain, blocks, counted: [u64; 3]| {
        assert_eq!(found(&engine, prefix), blocks);
        assert_eq!(lookups(), counted);
    };
    after(&other, 3, [2, 9, 7]); // a request's lookup is counted
    after(&long, 4, [2, 9, 7]);
    after(&long, 4, [3, 15, 11]); // counted: the save has already looked up its prefix
    assert_eq!(engine.lookup_many(&[(&long).into(), (&other).into()]).len(), 2);
    assert_eq!(lookups(), [4, 24, 18]);
    let _lease = engine.acquire((&long).into());
    let state = chain(7, Some("a"), 2, 1);
    let attached = SaveRequest {
        prefix: (&state).into(),
        units: 0..1,
        class: SizeClass(0),
        is_independent: true,
    };
    assert_eq!(engine.reserve_many(&[attached]).expect("in range")[0].num_dropped, 1);
    after(&state, 0, [5, 25, 18]); // counted: dropped saves of independent chunks are not continued
}

/// Percentages refer to the namespace's share of memory, which is halved when another namespace
/// is opened.
#[test]
fn quota_follows_the_share_of_the_namespace() {
    let dir = tempfile::tempdir().expect("a directory");
    let limits = Limits { host: Some(Quota::Share(500_000)), ..Limits::default() };
    let _server =
        Server::open(ServerConfig { limits: salted(limits), ..server_config(dir.path()) })
            .expect("a server");
    let one = engine(dir.path(), 1);
    assert_eq!(save(&one, &chain(1, Some("a"), 0, 40)), 32);
    drop(one);
    until("it has left", || space(dir.path(), 1).engines.is_empty());
    std::thread::sleep(Duration::from_millis(1500)); // the store checks once per second
    assert_eq!(tenant(dir.path(), 1, Some("a")).map(|tenant| tenant.host_bytes), Some(32 * FRAME));
    let (one, _other) = (engine(dir.path(), 1), engine(dir.path(), 2));
    until("a quarter is left", || {
        tenant(dir.path(), 1, Some("a")).is_some_and(|tenant| tenant.host_bytes == 16 * FRAME)
    });
    assert_eq!(
        tenant(dir.path(), 1, Some("a")).and_then(|tenant| tenant.max_host_bytes),
        Some(16 * FRAME)
    );
    assert_eq!(
        found(&one, &chain(1, Some("a"), 0, 40)),
        16,
        "the beginning of the prompt must stay"
    );
}

/// A TTL that gives a busy machine enough time to lease or write newly saved chunks.
const TTL_S: u32 = 6;

#[test]
fn expired_chunks_are_removed_for_good() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = || {
        let limits = salted(Limits { ttl_s: Some(TTL_S), ..Limits::default() });
        ServerConfig { limits, ..with_disk(dir.path()) }
    };
    let server = Server::open(config()).expect("a server");
    let one = engine(dir.path(), 7);
    for salt in [Some("a"), Some("b"), None] {
        assert_eq!(save(&one, &chain(7, salt, 0, 6)), 6);
    }
    let lease = one.acquire((&chain(7, Some("a"), 0, 6)).into());
    until("it has expired", || stat(&space(dir.path(), 7).stats, "expired") == 12);
    for (salt, len) in [(Some("a"), 0), (Some("b"), 0), (None, 6)] {
        assert_eq!(found(&one, &chain(7, salt, 0, 6)), len, "{salt:?}");
    }
    assert_eq!(one.frames(lease).len(), 6, "I4: chunks must stay until their load completes");
    one.release(lease);
    until("its memory is free", || stat(&space(dir.path(), 7).stats, "frames_visible") == 6);
    assert!(one.flush(LONG));
    assert_eq!(stat(&space(dir.path(), 7).stats, "disk_used"), 6);
    assert_eq!(save(&one, &chain(7, Some("a"), 0, 6)), 6, "the prompt must be savable again");
    assert!(one.flush(LONG));
    drop(one);
    server.close(LONG);
    drop(server);
    std::thread::sleep(Duration::from_secs(TTL_S.into()) + Duration::from_millis(500));
    let _server = Server::open(config()).expect("a server");
    let one = engine(dir.path(), 7);
    assert_eq!(
        [found(&one, &chain(7, Some("a"), 0, 6)), found(&one, &chain(7, None, 0, 6))],
        [0, 6]
    );
    until("it is forgotten", || stat(&space(dir.path(), 7).stats, "expired") == 6);
    until("it is off the disk", || stat(&space(dir.path(), 7).stats, "disk_used") == 6);
}
