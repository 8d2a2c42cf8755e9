//! Tests multiple namespaces that share the memory and disk of one server.

mod common;

use kvloft_core::io::FrameId;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{
    FRAME, LONG, accepted, chain, connect, found, refusal, remote_config, save, serve,
    server_config, socket, stat, until, with_disk,
};
use kvloft_core::ErrorKind;
use kvloft_core::session::Session;
use kvloft_core::store::{Prefix, Store, StoreConfig};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{
    Client, ClientConfig, MAX_NAMESPACES, NamespaceStatus, Server, ServerConfig, clear, status,
};

/// Returns a client in namespace `nth` whose frames have `pages` pages.
fn engine(dir: &std::path::Path, nth: u8, pages: u64) -> Client {
    let config = ClientConfig {
        namespace: [nth; 32],
        frame_sizes: (pages * FRAME).into(),
        ..remote_config(dir)
    };
    Client::open(config).expect("a client")
}

fn space(server: &Server, nth: u8) -> NamespaceStatus {
    server
        .status()
        .namespaces
        .into_iter()
        .find(|space| space.namespace == [nth; 32])
        .expect("the namespace is open")
}

fn start_of(session: &Client, pages: u64, frame: FrameId) -> u64 {
    let arena = session.arena().expect("an arena");
    arena.grid(pages * FRAME).expect("it fits").start(frame.number())
}

/// Saves chunks filled with their own keys, and returns the number of committed chunks.
fn mark(session: &Client, pages: u64, seed: u32, num_blocks: u32) -> u32 {
    let chain = chain(seed, num_blocks);
    let (rows, _) = session.reserve(Prefix::from(&chain), 0..num_blocks).expect("in range");
    let arena = session.arena().expect("an arena");
    let memory = File::options().write(true).open(&arena.path).expect("the arena");
    for row in &rows {
        memory
            .write_all_at(
                &row.key.0.repeat(usize::try_from(pages * FRAME / 32).expect("small")),
                start_of(session, pages, row.frame),
            )
            .expect("room");
    }
    session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>())
}

/// Checks every byte of the chunks found, and returns the number of chunks found.
fn compare(session: &Client, pages: u64, seed: u32, num_blocks: u32) -> usize {
    let lease = session.acquire(Prefix::from(&chain(seed, num_blocks)));
    let frames = session.frames(lease);
    let memory = File::open(session.arena().expect("an arena").path).expect("the arena");
    for row in &frames {
        let mut bytes = vec![0; usize::try_from(pages * FRAME).expect("small")];
        memory.read_exact_at(&mut bytes, start_of(session, pages, row.frame)).expect("room");
        assert!(
            bytes == row.key.0.repeat(bytes.len() / 32),
            "wrong bytes in frame {}",
            row.frame.0
        );
    }
    session.release(lease);
    frames.len()
}

#[test]
fn namespaces_share_memory_but_no_chunks() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (one, other) = (engine(dir.path(), 1, 1), engine(dir.path(), 2, 2));
    assert_eq!(
        one.arena().expect("an arena").id,
        other.arena().expect("an arena").id,
        "both engines must share one arena"
    );
    for seed in 0..12 {
        assert_eq!(mark(&one, 1, seed, 5), 5);
    }
    assert_eq!(found(&other, &chain(0, 5)), 0, "another model's prompt must not be found");
    assert_eq!((space(&server, 1).num_slabs, space(&server, 2).num_slabs), (15, 0));
    // The other namespace saves chunks until it owns half of the memory. Chunks dropped in the
    // meantime are misses.
    until("an equal share", || {
        (0..40).for_each(|seed| {
            mark(&other, 2, seed, 3);
        });
        space(&server, 2).num_slabs == 8
    });
    let counts = |engine: &Client, pages, len| {
        (0..40).map(|seed| compare(engine, pages, seed, len)).sum::<usize>()
    };
    assert!(counts(&other, 2, 3) > 8 && counts(&one, 1, 5) > 8);
    other.clear();
    assert_eq!(counts(&other, 2, 3), 0);
    assert!(counts(&one, 1, 5) > 8, "a clear must only empty its own namespace");
}

/// Core tests cover the binding itself. If binding fails, for example because a node is missing,
/// the server still works.
#[test]
fn memory_is_bound_to_numa_nodes_or_the_failure_is_logged() {
    let default = "leaving NUMA placement to the kernel";
    for (numa, said) in
        [(vec![0, 63], default), (vec![0, 0], "on NUMA nodes 0, 0"), (vec![0], "on NUMA node 0")]
    {
        let dir = tempfile::tempdir().expect("a directory");
        let server =
            Server::open(ServerConfig { numa, ..server_config(dir.path()) }).expect("a server");
        let one = engine(dir.path(), 1, 2);
        let events = server.take_events().join("; ");
        assert!(events.contains(said) || events.contains(default), "{events}");
        assert_eq!((mark(&one, 2, 1, 4), compare(&one, 2, 1, 4)), (4, 4));
    }
}

#[test]
fn clear_removes_one_namespace() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let socket = socket(dir.path());
    assert_eq!(clear(&socket, "", LONG).expect("there is no namespace"), 0);
    let one = engine(dir.path(), 0x11, 1);
    save(&one, &chain(1, 3));
    assert_eq!(clear(&socket, "", LONG).expect("there is a namespace"), 3);
    let other = engine(dir.path(), 0x12, 2);
    save(&one, &chain(1, 3));
    save(&other, &chain(1, 4));
    for name in ["", "1", "13"] {
        let error = clear(&socket, name, LONG).expect_err("which");
        assert!(error.kind() == ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains("1111111111111111, 1212121212121212"), "{error}");
    }
    assert_eq!(clear(&socket, "1212", LONG).expect("one"), 4);
    assert_eq!((found(&one, &chain(1, 3)), found(&other, &chain(1, 4))), (3, 0));
}

#[test]
fn shares_are_applied_and_invalid_ones_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let shares = |percent| vec![("01".to_owned(), percent), ("02".to_owned(), 20)];
    for percent in [0, 81] {
        let error =
            Server::open(ServerConfig { shares: shares(percent), ..server_config(dir.path()) })
                .expect_err("wrong");
        assert!(
            error.kind() == ErrorKind::InvalidConfig
                && error.to_string().contains("add up to at most 100"),
            "{error}"
        );
    }
    let server = Server::open(ServerConfig { shares: shares(50), ..server_config(dir.path()) })
        .expect("a server");
    let (one, other) = (engine(dir.path(), 1, 1), engine(dir.path(), 2, 1));
    for seed in 0..12 {
        save(&one, &chain(seed, 6));
    }
    until("a fifth of 16 slabs", || {
        for seed in 0..40 {
            save(&other, &chain(seed, 3));
        }
        space(&server, 2).num_slabs == 3
    });
    std::thread::sleep(Duration::from_millis(300));
    for seed in 0..40 {
        save(&other, &chain(seed, 3));
    }
    assert_eq!((space(&server, 1).num_slabs, space(&server, 2).num_slabs), (13, 3));
    let _third = engine(dir.path(), 3, 1);
    let percents = server
        .status()
        .namespaces
        .into_iter()
        .map(|space| space.stats.get("share_percent").copied());
    assert_eq!(percents.collect::<Vec<_>>(), [Some(50), Some(20), None]);
}

#[test]
fn chunks_outlive_their_engine_until_memory_is_needed() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (one, other) = (engine(dir.path(), 1, 1), engine(dir.path(), 2, 2));
    for seed in 0..8 {
        save(&one, &chain(seed, 6));
    }
    one.close(Duration::ZERO);
    until("gone", || space(&server, 1).engines.is_empty());
    std::thread::sleep(Duration::from_millis(300));
    let back = engine(dir.path(), 1, 1);
    assert_eq!(found(&back, &chain(3, 6)), 6, "the engine must find a warm cache");
    back.close(Duration::ZERO);
    drop((one, back));
    until("the other has it all", || {
        for seed in 0..40 {
            save(&other, &chain(seed, 3));
        }
        server.status().namespaces.len() == 1
    });
    assert_eq!(space(&server, 2).num_slabs, 16);
    assert_eq!(found(&engine(dir.path(), 1, 1), &chain(3, 6)), 0);
}

#[test]
fn killed_engine_does_not_affect_other_namespaces() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let other = engine(dir.path(), 2, 2);
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "child_that_is_killed_with_all_its_memory_reserved",
            "--ignored",
            "--nocapture",
        ])
        .env("KV_SERVE_DIR", dir.path())
        .spawn()
        .expect("a child");
    let reserved = || stat(&space(&server, 1).stats, "frames_reserved");
    until("it saves", || server.status().namespaces.len() == 2 && reserved() == 60);
    mark(&other, 2, 1, 2);
    until("it is wanted", || mark(&other, 2, 7, 9) == 0);
    assert_eq!(reserved(), 60, "the frames being filled must stay reserved");
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
    until("memory of closed namespaces goes to others that need it", || {
        (0..40).for_each(|seed| {
            mark(&other, 2, seed, 3);
            compare(&other, 2, seed, 3);
        });
        space(&server, 2).num_slabs == 8
    });
}

#[test]
#[ignore = "run by the test above, in a process that it kills"]
fn child_that_is_killed_with_all_its_memory_reserved() {
    let dir = std::env::var("KV_SERVE_DIR").expect("called by the test");
    let one = engine(dir.as_ref(), 1, 1);
    one.reserve(Prefix::from(&chain(1, 60)), 0..60).expect("in range");
    common::outlive_no_test();
}

#[test]
fn restart_finds_every_namespace_on_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    for (nth, pages) in [(1, 1), (2, 2)] {
        let engine = engine(dir.path(), nth, pages);
        assert_eq!(mark(&engine, pages, 5, 4), 4);
        assert!(engine.flush(LONG));
    }
    server.close(LONG);
    drop(server);
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let engines = [(1, 1), (2, 2)].map(|(nth, pages)| (engine(dir.path(), nth, pages), pages));
    for (engine, pages) in &engines {
        assert_eq!(found(engine, &chain(5, 4)), 4);
        let lease = engine.acquire(Prefix::from(&chain(5, 4)));
        until("read", || engine.poll(lease).ready_units == 4);
        assert_eq!(compare(engine, *pages, 5, 4), 4);
    }
    engines[0].0.clear();
    until("cleared", || found(&engines[0].0, &chain(5, 4)) == 0);
    assert_eq!(found(&engines[1].0, &chain(5, 4)), 4);
    assert!(server.take_events().iter().all(|event| !event.contains("failed to open")));
}

/// The engine logs the error, which must not name the engine's own `host_size`.
#[test]
fn error_for_too_large_chunks_has_the_servers_option() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig { available_bytes: || Some(1 << 30), ..server_config(dir.path()) };
    let server = Server::open(config.clone()).expect("a server");
    let large = || ClientConfig { frame_sizes: (128 * FRAME).into(), ..remote_config(dir.path()) };
    let said = refusal(large());
    assert_eq!(
        said,
        "--host-size of this engine's kvloft server = 256 KiB is too small for a chunk of 524288 bytes; set it to at least \
         that size; running without the cache and retrying in the background"
    );
    drop(server);
    let _server =
        Server::open(ServerConfig { available_bytes: || Some(FRAME), ..config }).expect("a server");
    let said = refusal(remote_config(dir.path()));
    assert!(
        said.starts_with(
            "--host-size of this engine's kvloft server = 256 KiB is more than the 4 KiB"
        ),
        "{said}"
    );
}

static AVAILABLE: AtomicU64 = AtomicU64::new(FRAME);

#[test]
fn engine_is_accepted_once_memory_is_available_and_listed_until_then() {
    let dir = tempfile::tempdir().expect("a directory");
    let available_bytes = || Some(AVAILABLE.load(Ordering::Relaxed));
    let server = Server::open(ServerConfig { available_bytes, ..server_config(dir.path()) });
    let server = server.expect("a server");
    let waits = Client::open(remote_config(dir.path())).expect("it retries");
    until("it retried", || server.status().refusals.first().is_some_and(|each| each.count > 1));
    let (listed, events) = (server.status().refusals, server.take_events());
    assert_eq!((listed.len(), &*listed[0].namespace), (1, "0707070707070707"));
    assert!(listed[0].reason.contains("is more than the 4 KiB of memory"), "{listed:?}");
    assert_eq!(events.len(), 1, "the same reason is logged once: {events:?}");
    AVAILABLE.store(1 << 30, Ordering::Relaxed);
    until("memory is compared again", || waits.renew());
    // The server sends its welcome before it updates the list of rejected engines.
    until("it is no longer listed", || server.status().refusals.is_empty());
    AVAILABLE.store(FRAME, Ordering::Relaxed);
    let other = ClientConfig { namespace: [8; 32], ..remote_config(dir.path()) };
    assert!(accepted(other).is_some(), "the arena is allocated already");
}

#[test]
fn memory_of_a_lost_server_is_released_by_its_client() {
    let arenas = || {
        let links = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
        links.filter_map(|fd| Some(std::fs::metadata(fd.path()).ok()?.ino())).collect::<Vec<_>>()
    };
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let engine = connect(dir.path());
    let id = engine.arena().expect("connected").id;
    assert!(arenas().contains(&id));
    drop(server);
    until("its descriptors are closed", || !arenas().contains(&id));
    assert_eq!(engine.arena().map(|arena| arena.id), Some(id), "until the next plan");
}

#[test]
fn number_of_namespaces_and_size_of_frames_are_bounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig {
        max_connections: 100,
        gpu_settle: Duration::ZERO,
        ..server_config(dir.path())
    };
    let _server = Server::open(config).expect("a server");
    let num = u8::try_from(MAX_NAMESPACES).expect("few");
    let mut engines: Vec<_> = (0..num).map(|nth| engine(dir.path(), nth, 1)).collect();
    let another = |pages: u64| ClientConfig {
        namespace: [200; 32],
        frame_sizes: (pages * FRAME).into(),
        ..remote_config(dir.path())
    };
    let said = refusal(another(5));
    assert!(said.contains("too large for this server's slabs"), "{said}");
    let said = refusal(another(1));
    assert!(said.contains("its limit of 64 namespaces"), "{said}");
    let waits = Client::open(another(1)).expect("the client starts in any case");
    drop(engines.pop());
    until("the refused engine now has its place", || waits.renew());
    drop(waits);
    drop(engines);
    let mut large = None; // stays connected, because an idle namespace without memory is closed
    until("the memory is allocated again", || {
        large = accepted(another(5));
        large.is_some()
    });
    assert_eq!(
        large
            .as_ref()
            .and_then(Session::arena)
            .expect("an arena")
            .grid(5 * FRAME)
            .expect("it fits")
            .num_frames(),
        12
    );
    assert_eq!(status(&socket(dir.path()), LONG).expect("the server responds").namespaces.len(), 1);
}

#[test]
fn namespace_idle_longest_is_closed_at_the_limit() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig { max_connections: 100, ..server_config(dir.path()) };
    let server = Server::open(config).expect("a server");
    let num = u8::try_from(MAX_NAMESPACES).expect("few");
    let mut engines: Vec<_> = (0..num).map(|nth| Some(engine(dir.path(), nth, 1))).collect();
    for nth in [40, 3, 50] {
        let one = engines[usize::from(nth)].take().expect("connected");
        assert_eq!(save(&one, &chain(1, 1)), 1, "otherwise the empty namespace would be closed");
        one.close(Duration::ZERO);
        until("gone", || space(&server, nth).engines.is_empty());
    }
    let _another = engine(dir.path(), 200, 1);
    let ids: Vec<_> = server.status().namespaces.iter().map(|space| space.namespace[0]).collect();
    assert!(ids.contains(&3) && ids.contains(&50) && !ids.contains(&40), "{ids:?}");
    let events = server.take_events();
    let left = events.iter().filter(|event| event.contains("disconnected")).collect::<Vec<_>>();
    assert!(
        left.len() == 3 && left[0].contains("disconnected from namespace 2828282828282828 after "),
        "{left:?}"
    );
    assert!(left[0].ends_with(" s; saved 1 chunk (4 KiB)"), "{left:?}");
}

#[test]
fn namespace_whose_memory_cannot_be_allocated_is_not_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig { host_bytes: 1 << 50, ..server_config(dir.path()) };
    let server = Server::open(config).expect("a server");
    let large = ClientConfig { frame_sizes: (1_u64 << 24).into(), ..remote_config(dir.path()) };
    let line = refusal(large);
    assert!(line.contains("memory"), "{line}");
    assert_eq!(server.status().namespaces.len(), 0);
}

#[test]
fn idle_namespace_stays_open_while_its_engine_restarts() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = ServerConfig { restart_grace: LONG * 100, ..server_config(dir.path()) };
    let server = Server::open(config).expect("a server");
    drop(engine(dir.path(), 1, 1));
    until("gone", || space(&server, 1).engines.is_empty());
    std::thread::sleep(Duration::from_millis(300)); // several rounds of housekeeping
    assert_eq!(space(&server, 1).namespace, [1; 32], "it is closed although it has no memory");
}

#[test]
fn rejected_engine_does_not_close_an_idle_namespace() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let _active = engine(dir.path(), 2, 1);
    let one = engine(dir.path(), 1, 1);
    assert_eq!(save(&one, &chain(1, 1)), 1);
    drop(one);
    until("gone", || space(&server, 1).engines.is_empty());
    let said = refusal(ClientConfig {
        namespace: [1; 32],
        frame_sizes: (5 * FRAME).into(),
        ..remote_config(dir.path())
    });
    assert!(said.contains("too large for this server's slabs"), "{said}");
    assert_eq!(found(&engine(dir.path(), 1, 1), &chain(1, 1)), 1);
}

#[test]
fn idle_namespace_stays_open_until_its_clear_is_on_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let one = engine(dir.path(), 1, 1);
    assert_eq!(mark(&one, 1, 5, 4), 4);
    assert!(one.flush(LONG));
    drop(one);
    server.close(LONG);
    drop(server);
    let config = with_disk(dir.path());
    let other = StoreConfig {
        frame_sizes: FRAME.into(),
        host_bytes: FRAME,
        eviction: config.eviction,
        available_bytes: None,
        namespace: [9; 32],
        disk: config.disk.clone(),
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    let other = Store::open(&other).expect("this store owns the directory now");
    let server = Server::open(config).expect("a server");
    let one = engine(dir.path(), 1, 1);
    one.clear();
    let error = kvloft_wire::clear(&socket(dir.path()), "01", LONG).expect_err("not cleared yet");
    assert!(error.to_string().contains("a restart could bring them back"), "{error}");
    one.close(Duration::ZERO);
    until("gone", || server.status().engines().count() == 0);
    // A namespace without memory stays open while its chunks are being removed from disk.
    std::thread::sleep(Duration::from_millis(300));
    let said = refusal(ClientConfig {
        namespace: [2; 32],
        frame_sizes: (5 * FRAME).into(),
        ..remote_config(dir.path())
    });
    assert!(
        said.contains("too large for this server's slabs"),
        "a different slab size would close the namespace too: {said}"
    );
    drop(other);
    until("cleared, and closed", || server.status().namespaces.is_empty());
    let back = engine(dir.path(), 1, 1);
    until("its disk is open", || stat(&space(&server, 1).stats, "disk_broken") == 0);
    assert_eq!(found(&back, &chain(5, 4)), 0);
}
