//! Tests evictions through the admin interface while engines are idle and while they load and save.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    FRAME, LONG, found, remote_config, save, server_config, socket, stat, until, with_disk,
};
use kvloft_core::key::{KeyChain, SaltTag, root_key};
use kvloft_core::session::Session;
use kvloft_core::store::{DiskSettings, Evicted, Prefix};
use kvloft_core::{ErrorKind, Result};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, ClientConfig, EvictReport, Server, ServerConfig, evict, status};

/// Starts a server that allows many connections: each admin request opens a connection, and the
/// server might not close it immediately.
fn serve(dir: &Path) -> Server {
    Server::open(ServerConfig { max_connections: 100, ..server_config(dir) }).expect("a server")
}

fn engine(dir: &Path, nth: u8) -> Client {
    Client::open(ClientConfig { namespace: [nth; 32], ..remote_config(dir) }).expect("a client")
}

/// Returns a tenant's prompt of six blocks, with or without an adapter.
fn chain(namespace: u8, salt: Option<&str>, has_adapter: bool, seed: u32) -> KeyChain {
    let adapter = has_adapter.then_some(("lora", "/there"));
    let root = root_key(&[namespace; 32], adapter, salt).expect("short");
    let mut chain = KeyChain::new(root, 1).expect("a chain");
    chain.append_tokens(&(0..6).map(|at| seed * 10 + at).collect::<Vec<_>>()).expect("tokens");
    chain
}

fn evict_tenant(
    socket: &Path,
    namespace: &str,
    salt: &str,
    host_only: bool,
) -> Result<EvictReport> {
    evict(socket, namespace, Some(SaltTag::of(salt)), host_only, LONG)
}

#[test]
fn evict_removes_one_tenant_from_every_namespace() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = DiskSettings { cap_bytes: 4 << 20, ..with_disk(dir.path()).disk.expect("a disk") };
    let config = || ServerConfig { disk: Some(disk.clone()), ..server_config(dir.path()) };
    let server = Server::open(config()).expect("a server");
    let socket = socket(dir.path());
    for nth in [1, 2] {
        let engine = engine(dir.path(), nth);
        for (salt, has_adapter) in
            [(None, false), (Some("a"), false), (Some("a"), true), (Some("b"), false)]
        {
            assert_eq!(save(&engine, &chain(nth, salt, has_adapter, 0)), 6);
        }
        assert!(engine.flush(LONG));
    }
    server.close(LONG);
    drop(server);
    // Namespace 1 is open now; namespace 2 is only on disk.
    let server = Server::open(config()).expect("a server");
    let one = engine(dir.path(), 1);
    let error = evict_tenant(&socket, "03", "a", false).expect_err("no such namespace exists");
    assert!(
        error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("starts with 03;"),
        "{error}"
    );
    let said = evict_tenant(&socket, "", "a", false).expect("done");
    let evicted = Evicted { num_chunks: 24, disk_bytes: 24 * FRAME, ..Evicted::default() };
    let wanted = EvictReport { num_namespaces: 2, evicted };
    assert_eq!(said, wanted);
    let again = evict_tenant(&socket, "", "a", false).expect("done");
    assert_eq!(again, EvictReport { num_namespaces: 2, ..EvictReport::default() });
    let events = server.take_events().join("; ");
    assert!(events.contains(" in namespace 0101010101010101 and one closed namespace"), "{events}");
    let other = engine(dir.path(), 2);
    for (engine, nth) in [(&one, 1), (&other, 2)] {
        let of = |salt, has_adapter| found(engine, &chain(nth, salt, has_adapter, 0));
        assert_eq!(
            [of(None, false), of(Some("a"), false), of(Some("a"), true), of(Some("b"), false)],
            [6, 0, 0, 6]
        );
    }
}

#[test]
fn evict_host_only_keeps_the_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let one = engine(dir.path(), 1);
    save(&one, &chain(1, Some("a"), false, 0));
    save(&one, &chain(1, None, false, 1));
    assert!(one.flush(LONG));
    let lease = one.acquire(Prefix::from(&chain(1, None, false, 1)));
    let said = evict(&socket(dir.path()), "01", None, true, LONG).expect("done");
    let evicted =
        Evicted { num_chunks: 6, host_bytes: 6 * FRAME, num_in_use: 6, ..Evicted::default() };
    let wanted = EvictReport { num_namespaces: 1, evicted };
    assert_eq!((said, one.frames(lease).len()), (wanted, 6), "chunks in use by a load must stay");
    assert_eq!(stat(&server.status().namespaces[0].stats, "evicted"), 6);
    assert_eq!(found(&one, &chain(1, Some("a"), false, 0)), 6, "the prompt must be found on disk");
}

#[test]
fn evict_without_engines_finds_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    assert_eq!(
        evict_tenant(&socket(dir.path()), "", "a", false).expect("done"),
        EvictReport::default()
    );
}

/// Saves and loads chunks until `is_over` is set, and checks every loaded byte. Returns the number
/// of loaded chunks.
fn work(session: &Client, salt: &str, is_over: &AtomicBool) -> u64 {
    let memory = File::options()
        .read(true)
        .write(true)
        .open(&session.arena().expect("an arena").path)
        .expect("memory");
    let mut num_loaded = 0;
    while !is_over.load(Ordering::Relaxed) {
        for chain in (0..4).map(|seed| chain(1, Some(salt), seed % 2 == 0, seed)) {
            let (rows, _) = session.reserve(Prefix::from(&chain), 0..6).expect("in range");
            for row in &rows {
                let bytes = row.key.0.repeat(usize::try_from(FRAME / 32).expect("small"));
                memory.write_all_at(&bytes, u64::from(row.frame.0) * FRAME).expect("room");
            }
            session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
            let lease = session.acquire(Prefix::from(&chain));
            for row in session.frames(lease) {
                let mut bytes = vec![0; usize::try_from(FRAME).expect("small")];
                memory.read_exact_at(&mut bytes, u64::from(row.frame.0) * FRAME).expect("room");
                assert!(
                    bytes == row.key.0.repeat(bytes.len() / 32),
                    "wrong bytes in frame {}",
                    row.frame.0
                );
                num_loaded += 1;
            }
            session.release(lease);
        }
    }
    num_loaded
}

#[test]
fn engines_load_and_save_during_evictions() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let is_over = AtomicBool::new(false);
    let engines = [engine(dir.path(), 1), engine(dir.path(), 1)];
    let num_loaded: u64 = std::thread::scope(|scope| {
        let workers = engines.each_ref().map(|engine| scope.spawn(|| work(engine, "a", &is_over)));
        let mut num_evicted = [0, 0];
        until("both paths were taken often", || {
            for (num_evicted, is_host_only) in num_evicted.iter_mut().zip([false, true]) {
                let said = evict_tenant(&socket(dir.path()), "", "a", is_host_only).expect("done");
                *num_evicted += u32::from(said.evicted.num_chunks > 0);
            }
            num_evicted.iter().all(|num| *num > 20)
        });
        is_over.store(true, Ordering::Relaxed);
        workers
            .into_iter()
            .map(|worker| worker.join().expect("the worker found no wrong byte"))
            .sum()
    });
    assert!(num_loaded > 0);
    assert!(!evict_tenant(&socket(dir.path()), "", "a", false).expect("done").evicted.is_cut_short);
    assert!((0..4).all(|seed| found(&engines[0], &chain(1, Some("a"), seed % 2 == 0, seed)) == 0));
    drop(engines);
    server.close(LONG);
    assert_eq!(server.take_events().iter().filter(|event| event.contains("fail")).count(), 0);
}

#[test]
fn log_has_the_tag_and_the_namespaces_of_an_eviction() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (socket, one, _other) = (socket(dir.path()), engine(dir.path(), 1), engine(dir.path(), 2));
    save(&one, &chain(1, Some("a"), false, 0));
    let _before = server.take_events();
    let said = || server.take_events().join("; ");
    let tag = format!("{:016x}", u64::from_be_bytes(SaltTag::of("a").0));
    let (first, second) = ("0101010101010101", "0202020202020202");
    evict_tenant(&socket, "", "a", false).expect("done");
    assert_eq!(
        said(),
        format!("kvloft evict: evicted 6 chunks of tenant {tag} in namespaces {first}, {second}")
    );
    evict(&socket, "01", None, true, LONG).expect("done");
    assert_eq!(
        said(),
        format!(
            "kvloft evict: evicted 0 chunks of all tenants from host memory in namespace {first}"
        )
    );
}

#[test]
fn status_requests_are_not_counted_as_connections() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let num = |name: &str| stat(&status(&socket(dir.path()), LONG).expect("a server").stats, name);
    let accepted = || num("server_accepted");
    assert_eq!([accepted(), accepted()], [0, 0]);
    let _one = engine(dir.path(), 1);
    assert_eq!(accepted(), 1);
    evict_tenant(&socket(dir.path()), "", "a", false).expect("done");
    assert_eq!((accepted(), stat(&server.status().stats, "server_accepted")), (2, 2));
    assert_eq!(num("server_joined"), 1, "a command must not be treated as an engine");
}
