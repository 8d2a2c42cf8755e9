//! Tests that engines on one server share chunks, but not leases or reservations.

mod common;

use kvloft_core::io::SizeClass;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use common::{
    FRAME, LONG, accepted, chain, connect, found, numbers, refusal, remote_config, save, serve,
    server_config, socket, stat, until,
};
use kvloft_core::io::Arena;
use kvloft_core::session::Session;
use kvloft_core::store::{Prefix, Progress};
use kvloft_core::{ChunkKey, ErrorKind};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::protocol::admin::Stats;
use kvloft_wire::protocol::{
    Hello, Keys, LENGTH_BYTES, MAX_HELLO, MAX_PREFIXES, Request, SentAnchors, SentPrefixes,
    SentRange, VERSION,
};
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig, status};

#[test]
fn engine_finds_chunks_of_another_engine() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    let chain = chain(1, 5);
    let (rows, num_dropped) = one.reserve(Prefix::from(&chain), 0..5).expect("in range");
    assert_eq!((rows.len(), num_dropped, found(&other, &chain)), (5, 0, 0));
    let (own, others) = (one.arena().expect("an arena"), other.arena().expect("an arena"));
    assert_eq!((own.id, own.size_bytes), (others.id, 64 * FRAME));
    let file = File::options().write(true).open(&own.path).expect("the arena");
    file.write_all_at(b"hello", u64::from(rows[3].frame.0) * FRAME).expect("room");
    assert_eq!(one.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 5);

    let lease = other.acquire(Prefix::from(&chain));
    assert_eq!(other.poll(lease), Progress { ready_units: 5, pending_units: 0 });
    let frames = other.frames(lease);
    assert_eq!(frames.iter().map(|frame| frame.key).collect::<Vec<_>>(), chain.keys());
    let mut bytes = [0; 5];
    let at = u64::from(frames[3].frame.0) * FRAME;
    File::open(&others.path)
        .expect("the arena")
        .read_exact_at(&mut bytes, at)
        .expect("the frame can be read");
    assert_eq!(&bytes, b"hello");
    assert_eq!(Arena::open(&others.path, 64 * FRAME).expect("the file is an arena").id(), own.id);
    other.release(lease);
    until("unpinned", || stat(&pairs(&one), "pins") == 0);
}

fn pairs(session: &dyn Session) -> Stats {
    session.stats().into_iter().map(|(name, value)| (name.into_owned(), value)).collect()
}

#[test]
fn prefix_is_found_up_to_the_first_difference() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let engine = connect(dir.path());
    let (long, other) = (chain(1, 9), chain(2, 9));
    assert_eq!(save(&engine, &long), 9);
    for _ in 0..2 {
        assert_eq!(found(&engine, &long), 9);
        assert_eq!(found(&engine, &chain(1, 4)), 4, "shorter");
        assert_eq!(found(&engine, &other), 0);
        assert_eq!(found(&engine, &chain(1, 20)), 9, "longer");
        assert_eq!(found(&engine, &chain(1, 0)), 0);
    }
    // Only the keys of the new blocks and their parent are sent.
    let grown = chain(1, 12);
    let range = 9..12;
    let (rows, num_dropped) = engine.reserve(Prefix::from(&grown), range).expect("in range");
    assert_eq!((rows.len(), num_dropped, rows[0].key), (3, 0, grown.keys()[9]));
    assert_eq!(engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 3);
    assert_eq!(found(&engine, &grown), 12);
    assert!(
        engine.reserve(Prefix::from(&grown), 0..13).is_err(),
        "the chain does not have this unit"
    );
}

#[test]
fn engine_cannot_use_leases_or_tickets_of_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    let chain = chain(1, 3);
    let (rows, _) = one.reserve(Prefix::from(&chain), 0..3).expect("in range");
    let tickets: Vec<_> = rows.iter().map(|row| row.ticket).collect();
    assert_eq!(other.commit(&tickets), 0);
    other.abort(&tickets);
    assert_eq!(one.commit(&tickets), 3);
    assert_eq!(one.commit(&tickets), 0, "once");
    let lease = one.acquire(Prefix::from(&chain));
    assert_eq!(other.frames(lease), []);
    other.release(lease);
    assert_eq!(one.frames(lease).len(), 3);
    assert_eq!(other.discard(&chain.keys()[1..2]), 2);
    assert_eq!(found(&one, &chain), 1);
    other.clear();
    assert_eq!(found(&one, &chain), 0);
}

#[test]
fn closed_engine_releases_everything() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    assert_eq!(save(&one, &chain(1, 3)), 3);
    let _lease = one.acquire(Prefix::from(&chain(1, 3)));
    one.reserve(Prefix::from(&chain(2, 3)), 0..3).expect("in range");
    one.close(Duration::ZERO);
    until("freed", || {
        stat(&pairs(&other), "frames_reserved") == 0 && stat(&pairs(&other), "pins") == 0
    });
    assert_eq!(found(&one, &chain(1, 3)), 0, "closed");
    assert_eq!(server.status().engines().count(), 1);
}

/// Opens the lifeline, as a worker does before it maps the arena.
fn open_lifeline(engine: &Client) -> std::fs::File {
    let lifeline =
        engine.arena().and_then(|arena| arena.lifeline).expect("a server's arena has one");
    std::fs::File::options().write(true).open(lifeline.path).expect("the engine is running")
}

#[test]
fn frames_stay_reserved_until_the_last_worker_exits() {
    for says_bye in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let server = serve(dir.path());
        let (one, other) = (connect(dir.path()), connect(dir.path()));
        assert_eq!(save(&other, &chain(1, 3)), 3);
        let workers = [open_lifeline(&one), open_lifeline(&one)];
        one.reserve(Prefix::from(&chain(2, 5)), 0..5).expect("in range");
        let _lease = one.acquire(Prefix::from(&chain(1, 3)));
        if says_bye {
            one.close(Duration::ZERO);
        }
        drop(one);
        for worker in workers {
            until("noticed", || stat(&numbers(&server.status()), "quarantined_reservations") == 5);
            std::thread::sleep(Duration::from_millis(500)); // longer than `gpu_settle`
            let status = server.status();
            assert_eq!(
                (stat(&numbers(&status), "frames_reserved"), stat(&numbers(&status), "pins")),
                (5, 3)
            );
            assert_eq!(status.engines().count(), 1);
            drop(worker);
        }
        until("freed", || stat(&numbers(&server.status()), "frames_reserved") == 0);
        assert_eq!(stat(&numbers(&server.status()), "pins"), 0);
    }
}

#[test]
fn chunks_that_a_disconnected_engine_reserved_are_saved_by_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    let _worker = open_lifeline(&one);
    one.reserve(Prefix::from(&chain(1, 5)), 0..2).expect("in range");
    assert_eq!(save(&other, &chain(1, 5)), 0, "the first two chunks are not saved yet");
    drop(one);
    until("saved", || save(&other, &chain(1, 5)) == 5);
    assert_eq!(found(&other, &chain(1, 5)), 5);
    assert_eq!(stat(&numbers(&server.status()), "quarantined_reservations"), 2);
}

#[test]
fn chunks_that_a_hung_engine_reserved_are_saved_by_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let config =
        ServerConfig { save_grace: Duration::from_millis(100), ..server_config(dir.path()) };
    let _server = Server::open(config).expect("a server");
    let (hung, other) = (connect(dir.path()), connect(dir.path()));
    let (rows, _) = hung.reserve(Prefix::from(&chain(1, 5)), 0..2).expect("in range");
    until("saved", || save(&other, &chain(1, 5)) == 5);
    assert_eq!(hung.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 0);
    assert_eq!((found(&hung, &chain(1, 5)), stat(&pairs(&other), "frames_reserved")), (5, 0));
}

#[test]
fn slow_save_of_the_only_engine_is_committed() {
    let dir = tempfile::tempdir().expect("a directory");
    let config =
        ServerConfig { save_grace: Duration::from_millis(10), ..server_config(dir.path()) };
    let _server = Server::open(config).expect("a server");
    let engine = connect(dir.path());
    let (rows, _) = engine.reserve(Prefix::from(&chain(1, 5)), 0..5).expect("in range");
    assert_eq!(save(&engine, &chain(1, 5)), 0, "another request has the same prefix");
    std::thread::sleep(Duration::from_millis(500)); // several rounds of housekeeping
    assert_eq!(engine.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 5);
}

#[test]
fn each_connection_has_its_lifeline() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (one, other) = (
        connect(dir.path()).arena().expect("an arena"),
        connect(dir.path()).arena().expect("an arena"),
    );
    assert_eq!(one.id, other.id);
    assert_ne!(
        one.lifeline.expect("a server's arena has a lifeline").id,
        other.lifeline.expect("a server's arena has a lifeline").id
    );
}

#[test]
fn killed_engine_frees_its_frames_and_commits_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let other = connect(dir.path());
    let test = std::env::current_exe().expect("this test");
    let mut child = Command::new(test)
        .args(["--exact", "child_that_is_killed_during_a_save", "--ignored", "--nocapture"])
        .env("KV_SERVE_DIR", dir.path())
        .spawn()
        .expect("a child");
    until("it saves", || {
        stat(&pairs(&other), "frames_reserved") == 5 && found(&other, &chain(2, 7)) == 2
    });
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
    until("freed", || stat(&pairs(&other), "frames_reserved") == 0);
    let stats = numbers(&server.status());
    assert_eq!((stat(&stats, "pins"), stat(&stats, "quarantined_reservations")), (0, 0));
    assert_eq!(found(&other, &chain(2, 7)), 2);
    assert_eq!(save(&other, &chain(3, 9)), 9);
}

#[test]
#[ignore = "run by the test above, in a process that it kills"]
fn child_that_is_killed_during_a_save() {
    let dir = std::env::var("KV_SERVE_DIR").expect("called by the test");
    let engine = connect(dir.as_ref());
    assert_eq!(save(&engine, &chain(2, 2)), 2);
    engine.reserve(Prefix::from(&chain(2, 7)), 2..7).expect("in range");
    let _lease = engine.acquire(Prefix::from(&chain(2, 2)));
    common::outlive_no_test();
}

#[test]
fn second_shape_of_a_namespace_is_refused_while_the_first_is_used() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let first = connect(dir.path());
    let other = ClientConfig { frame_sizes: (2 * FRAME).into(), ..remote_config(dir.path()) };
    let said = refusal(other.clone());
    assert!(said.contains("use the same settings for all engines"), "{said}");
    save(&first, &chain(1, 3));
    first.close(Duration::ZERO);
    until("room", || {
        accepted(other.clone())
            .is_some_and(|other| other.arena().is_some_and(|arena| arena.size_bytes == 64 * FRAME))
    });
}

#[test]
fn refusal_of_a_shape_is_one_sentence() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let said =
        refusal(ClientConfig { frame_sizes: (1_u64 << 30).into(), ..remote_config(dir.path()) });
    assert!(said.contains("--host-size"), "{said}");
    assert_eq!(save(&connect(dir.path()), &chain(1, 3)), 3);
}

#[test]
fn reservations_respect_the_frame_limit_of_their_engine() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let (one, other) = (connect(dir.path()), connect(dir.path()));
    one.limit_memory(4 * FRAME);
    for (seed, num_dropped) in [(1, 2), (2, 6)] {
        assert_eq!(
            one.reserve(Prefix::from(&chain(seed, 6)), 0..6).expect("in range").1,
            num_dropped
        );
        assert_eq!(other.reserve(Prefix::from(&chain(seed + 9, 6)), 0..6).expect("in range").1, 0);
    }
}

#[test]
fn second_server_on_a_socket_is_refused_and_a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let mode = socket(dir.path()).metadata().expect("the socket exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(Server::open(server_config(dir.path())).expect_err("taken").kind(), ErrorKind::Busy);
    drop(server);
    assert!(!socket(dir.path()).exists());
    // Unlike the server, a dropped `UnixListener` leaves its socket file behind.
    drop(std::os::unix::net::UnixListener::bind(socket(dir.path())).expect("the path is free"));
    assert!(socket(dir.path()).exists());
    let _server = serve(dir.path());
    assert!(connect(dir.path()).arena().is_some());
}

#[test]
fn directory_writable_by_others_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let folder = dir.path().join("run");
    std::fs::create_dir(&folder).expect("room");
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).expect("ours");
    assert_eq!(
        Server::open(server_config(dir.path())).expect_err("the directory is not private").kind(),
        ErrorKind::InvalidConfig
    );
}

#[test]
fn client_that_reads_no_answers_is_disconnected() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let mut stream = UnixStream::connect(socket(dir.path())).expect("a server");
    let mut bytes = Vec::new();
    let (version, namespace, description) = (VERSION, [7; 32], String::new());
    let hello = Hello { version, namespace, frame_sizes: FRAME.into(), description };
    Request::Hello(hello).encode(1, &mut bytes);
    stream.write_all(&bytes).expect("the server reads");
    until("it has a place", || server.status().engines().count() == 1);
    stream.set_nonblocking(true).expect("a socket");
    bytes.clear();
    (0..1000).for_each(|number| Request::Stats(0, 0).encode(number, &mut bytes));
    until("both buffers are full", || stream.write(&bytes).is_err());
    until("it is disconnected", || server.status().engines().count() == 0);
}

/// Sends raw bytes, and returns everything that the server sends until it closes the connection.
fn say(socket: &std::path::Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).expect("a server");
    let _refused_already = stream.write_all(bytes);
    let _gone = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _reset = std::io::Read::read_to_end(&mut stream, &mut answer);
    answer
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of malformed messages")]
fn malformed_bytes_are_refused_without_effect_on_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let engine = connect(dir.path());
    save(&engine, &chain(1, 3));
    let message =
        |body: &[u8]| [&u32::try_from(body.len()).expect("short").to_le_bytes()[..], body].concat();
    let mut hello = Vec::new();
    let fields = Hello {
        version: VERSION,
        namespace: [7; 32],
        frame_sizes: FRAME.into(),
        description: String::new(),
    };
    Request::Hello(fields.clone()).encode(1, &mut hello);
    let mut other_version = Vec::new();
    Request::Hello(Hello { version: 99, ..fields }).encode(1, &mut other_version);
    let after_hello = |bytes: &[u8]| [&hello, bytes].concat();
    let mut lying = Vec::new();
    let keys = kvloft_wire::protocol::Keys::Bytes(&[]);
    let prefixes = SentPrefixes { num_same: 5, all: vec![(ChunkKey([1; 32]), keys)] };
    Request::Lookup(prefixes).encode(2, &mut lying);
    let mut of_nothing = Vec::new();
    let two = kvloft_wire::protocol::Keys::Bytes(&[[1; 32], [2; 32]]);
    Request::Lookup(SentPrefixes { num_same: 0, all: vec![(ChunkKey([1; 32]), two)] })
        .encode(2, &mut of_nothing);
    Request::Lookup(SentPrefixes { num_same: 2, all: Vec::new() }).encode(3, &mut of_nothing);
    let mut huge = Vec::new();
    let range = u32::MAX..u32::MAX;
    Request::Reserve(vec![SentRange {
        root: ChunkKey([1; 32]),
        first: u32::MAX - 1,
        keys,
        units: range,
        class: SizeClass(0),
        is_independent: false,
    }])
    .encode(2, &mut huge);
    let mut without_keys = Vec::new();
    let range = 2..3;
    Request::Reserve(vec![SentRange {
        root: ChunkKey([1; 32]),
        first: 3,
        keys,
        units: range,
        class: SizeClass(0),
        is_independent: false,
    }])
    .encode(2, &mut without_keys);
    let stored = chain(1, 3);
    let anchored = |stride, last, num_keys: usize, num_same| {
        let keys: Vec<_> =
            stored.keys()[1..].iter().chain(stored.keys()).copied().take(num_keys).collect();
        let mut bytes = Vec::new();
        Request::Anchors(SentAnchors { stride, last, keys: Keys::Own(&keys) })
            .encode(2, &mut bytes);
        let prefixes =
            SentPrefixes { num_same, all: vec![(ChunkKey([1; 32]), Keys::Own(stored.keys()))] };
        Request::Lookup(prefixes).encode(3, &mut bytes);
        after_hello(&bytes)
    };
    let admin = |version, json: &[u8]| {
        let mut bytes = Vec::new();
        Request::Admin(version, json).encode(1, &mut bytes);
        bytes
    };
    let malformed =
        String::from_utf8(say(&socket(dir.path()), &admin(VERSION, b"{"))).expect("text");
    assert!(malformed.ends_with("malformed request"), "{malformed}");
    for (name, bytes) in [
        ("an admin request of another version", admin(VERSION + 1, br#""status""#)),
        ("an admin request that is no JSON", admin(VERSION, &[0xff; 9])),
        ("an unknown admin request", admin(VERSION, br#"{"evict_all":{}}"#)),
        (
            "an admin request that is too long",
            after_hello(&admin(VERSION, &vec![b' '; MAX_HELLO + 1])),
        ),
        ("a prefix from before its anchor", anchored(2, 2, 1, 1)),
        ("a prefix from behind its anchor", anchored(2, 2, 1, 3)),
        ("no anchor", anchored(1, 1, 0, 0)),
        ("anchors at one place", anchored(0, 2, 2, 0)),
        ("anchors out of order", anchored(3, 2, 2, 0)),
        ("anchors beyond every prefix", anchored(1, u32::MAX, 2, 0)),
        ("anchors beyond every number", anchored(u32::MAX, u32::MAX, 3, 0)),
        ("text", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("too long", u32::MAX.to_le_bytes().to_vec()),
        (
            "too long before hello",
            u32::try_from(MAX_HELLO + 1).expect("short").to_le_bytes().to_vec(),
        ),
        ("no kind", message(&[1, 0, 0, 0, 200])),
        ("empty", message(&[])),
        ("before hello", message(&[1, 0, 0, 0, 12])),
        ("another version", other_version),
        ("hello twice", after_hello(&hello)),
        ("a prefix that was not sent", after_hello(&lying)),
        ("known keys of no prefix", after_hello(&of_nothing)),
        ("a range of nothing", after_hello(&huge)),
        ("a range whose keys were left out", after_hello(&without_keys)),
        ("longer than any", after_hello(&u32::MAX.to_le_bytes())),
    ] {
        let before = stat(&numbers(&server.status()), "server_refused");
        let answer = say(&socket(dir.path()), &bytes);
        assert!(answer.len() > LENGTH_BYTES, "{name}: the reason must be reported");
        assert_eq!(stat(&numbers(&server.status()), "server_refused"), before + 1, "{name}");
    }
    assert!(
        say(&socket(dir.path()), &after_hello(&1000_u32.to_le_bytes())).len() > LENGTH_BYTES,
        "truncated"
    );
    assert_eq!(found(&engine, &chain(1, 3)), 3);
    until("gone", || server.status().engines().count() == 1);
}

#[test]
fn connections_are_bounded_and_silent_ones_are_closed() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let engine = connect(dir.path());
    let silent: Vec<_> =
        (0..7).map(|_| UnixStream::connect(socket(dir.path())).expect("room")).collect();
    let error = status(&socket(dir.path()), LONG).expect_err("full");
    assert!(error.to_string().contains("limit of 8 connections"), "{error}");
    until("they said nothing", || status(&socket(dir.path()), LONG).is_ok());
    assert!(silent.iter().all(|stream| stream.as_raw_fd() >= 0));
    assert_eq!(save(&engine, &chain(1, 3)), 3);
    assert!(stat(&numbers(&server.status()), "server_refused") > 0);
}

#[test]
fn status_works_before_and_after_the_first_engine() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let empty = status(&socket(dir.path()), LONG).expect("the server responds");
    assert_eq!((empty.namespaces.len(), empty.host_bytes), (0, 0));
    let engine = connect(dir.path());
    engine.reserve(Prefix::from(&chain(1, 3)), 0..3).expect("in range");
    let _lease = engine.acquire(Prefix::from(&chain(1, 3)));
    let status = status(&socket(dir.path()), LONG).expect("the server responds");
    let space = &status.namespaces[0];
    assert_eq!(
        (space.namespace, space.frame_sizes.as_slice(), space.description.as_str()),
        ([7; 32], [FRAME].as_slice(), "a test")
    );
    assert_eq!((status.host_bytes, status.slab_bytes, space.num_slabs), (64 * FRAME, 4 * FRAME, 1));
    assert_eq!(stat(&numbers(&status), "frames_reserved"), 3);
    assert_eq!((space.engines[0].pid, space.engines[0].num_reserved), (std::process::id(), 3));
    assert_eq!(space.engines[0].num_leases, 1);
    assert!(server.take_events().iter().any(|event| event.contains("connected to namespace")));
}

#[test]
fn batched_reservations_equal_single_ones() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let engine = connect(dir.path());
    let chains: Vec<_> = (0..5).map(|seed| chain(seed, 8)).collect();
    save(&engine, &chains[2]);
    let part = |start, stop| start..stop;
    // Covers stored chunks, more chunks than there are frames (64), and repeated chunks.
    let long = chain(9, 60);
    let ranges =
        [(0, part(0, 8)), (1, part(0, 3)), (2, part(0, 8)), (1, part(3, 8)), (0, part(0, 8))];
    let mut asked: Vec<_> = ranges
        .iter()
        .map(|(nth, range)| (Prefix::from(&chains[*nth]), range.clone()).into())
        .collect();
    asked.push((Prefix::from(&long), part(0, 60)).into());
    let mut wrong = asked.clone();
    wrong.insert(3, (Prefix::from(&chains[3]), part(0, 9)).into());
    assert!(engine.reserve_many(&wrong).is_err(), "the range exceeds one of the chains");
    let reserved = engine.reserve_many(&asked).expect("in range");
    let counts: Vec<_> =
        reserved.iter().map(|each| (each.chunks.len(), each.num_dropped)).collect();
    let rows: Vec<_> = reserved.into_iter().flat_map(|each| each.chunks).collect();
    assert_eq!(
        counts,
        [(8, 0), (3, 0), (0, 0), (5, 0), (0, 0), (48, 12)],
        "48 of 64 frames were free, or could be evicted"
    );
    let tickets: Vec<_> = rows.iter().map(|row| row.ticket).collect();
    assert!(tickets.is_sorted());
    assert_eq!(engine.commit(&tickets), 64);
    assert_eq!(
        (found(&engine, &chains[0]), found(&engine, &chains[1]), found(&engine, &long)),
        (8, 8, 48)
    );
}

#[test]
fn message_with_many_keys_keeps_the_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let engine = connect(dir.path());
    let long = chain(1, 400_000); // 12 MiB of keys
    assert_eq!(found(&engine, &long), 0);
    let (rows, num_dropped) = engine.reserve(Prefix::from(&long), 0..400_000).expect("in range");
    assert_eq!((rows.len(), num_dropped), (64, 400_000 - 64));
    assert!(engine.renew() || engine.take_events().is_empty(), "the connection must stay open");
}

#[test]
fn number_of_leased_prefixes_is_bounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = serve(dir.path());
    let engine = connect(dir.path());
    let nothing = vec![Prefix::new(ChunkKey([1; 32]), &[]); MAX_PREFIXES as usize];
    let num_leases = || {
        assert_eq!(found(&engine, &chain(1, 1)), 0); // the server has handled all earlier messages
        server.status().namespaces[0].engines[0].num_leases
    };
    let leases: Vec<_> = (0..66).map(|_| engine.acquire_all(&nothing)).collect();
    assert_eq!(num_leases(), 64);
    engine.release(leases[0]);
    assert_eq!(num_leases(), 63);
    engine.acquire_all(&nothing);
    engine.acquire_all(&nothing);
    assert_eq!(num_leases(), 64, "one more lease must fit");
}
