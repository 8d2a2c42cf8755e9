//! Tests a client whose server is missing, stopped or restarted: lookups miss, and hit again later.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use common::{
    FRAME, LONG, chain, connect, found, remote_config, save, serve, socket, until, with_disk,
};
use kvloft_core::key::KeyChain;
use kvloft_core::session::Session;
use kvloft_core::store::{Changes, Lookup, Prefix, Progress, Tiers};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, ClientConfig, Server, ServerConfig, status};

#[test]
fn lookups_are_misses_until_a_server_starts() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = connect(dir.path());
    let events = engine.take_events();
    assert!(
        events.len() == 1 && events[0].contains("cannot connect to a kvloft server"),
        "{events:?}"
    );
    let chain = chain(1, 3);
    assert!(engine.arena().is_none() && !engine.renew());
    let lease = engine.acquire(Prefix::from(&chain));
    assert_eq!((engine.poll(lease), engine.frames(lease).len()), (Progress::default(), 0));
    assert_eq!(engine.reserve(Prefix::from(&chain), 0..3).expect("in range"), (Vec::new(), 3));
    assert!(engine.reserve(Prefix::from(&chain), 0..4).is_err());
    assert_eq!(
        (engine.commit(&[1]), engine.discard(chain.keys()), found(&engine, &chain)),
        (0, 0, 0)
    );
    engine.abort(&[1]);
    engine.release(lease);
    assert!(!engine.flush(Duration::ZERO));
    let _server = serve(dir.path());
    until("found", || engine.renew());
    assert_eq!(save(&engine, &chain), 3);
}

#[test]
fn restarted_server_has_a_new_arena_used_after_renew() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let engine = connect(dir.path());
    let chain = chain(1, 4);
    assert_eq!(save(&engine, &chain), 4);
    assert!(engine.flush(LONG));
    let lease = engine.acquire(Prefix::from(&chain));
    let (_, before) = (
        engine.reserve(Prefix::from(&common::chain(2, 2)), 0..2).expect("in range"),
        engine.arena(),
    );
    drop(server);
    until("gone", || found(&engine, &chain) == 0);
    assert_eq!((engine.poll(lease), engine.frames(lease).len()), (Progress::default(), 0));
    let config = ServerConfig { host_bytes: 32 * FRAME, ..with_disk(dir.path()) };
    let _server = Server::open(config).expect("a server");
    until("found", || {
        engine.take_events().iter().any(|event| event.starts_with("connected to the kvloft server"))
    });
    assert_eq!(
        (engine.arena(), found(&engine, &chain)),
        (before.clone(), 0),
        "nothing may be found before renew"
    );
    assert!(engine.renew() && !engine.renew());
    let after = engine.arena().expect("an arena");
    assert_ne!(after.id, before.expect("an arena").id);
    assert_eq!(after.size_bytes, 32 * FRAME);
    assert_eq!(
        (engine.poll(lease), engine.frames(lease).len()),
        (Progress::default(), 0),
        "leases of the old store must be invalid"
    );
    assert_eq!(found(&engine, &chain), 4, "the prompt must be found on disk");
    let lease = engine.acquire(Prefix::from(&chain));
    until("read", || engine.poll(lease) == Progress { ready_units: 4, pending_units: 0 });
    assert_eq!(engine.frames(lease).len(), 4);
}

/// Returns an engine that called `clear` while no server was running and `chain` was on disk.
fn cleared_without_server(dir: &Path, chain: &KeyChain) -> Client {
    let server = Server::open(with_disk(dir)).expect("a server");
    let engine = connect(dir);
    save(&engine, chain);
    assert!(engine.flush(LONG));
    drop(server);
    until("gone", || found(&engine, chain) == 0);
    engine.clear();
    engine
}

#[test]
fn pending_clear_is_sent_first_to_the_next_server() {
    let dir = tempfile::tempdir().expect("a directory");
    let chain = chain(1, 4);
    let engine = cleared_without_server(dir.path(), &chain);
    let _server = Server::open(with_disk(dir.path())).expect("a server");
    assert_eq!(found(&connect(dir.path()), &chain), 4, "the chunks are on disk");
    until("found", || engine.renew());
    until("cleared", || save(&engine, &common::chain(2, 1)) == 1);
    assert_eq!(found(&connect(dir.path()), &chain), 0);
}

#[test]
fn close_waits_until_a_clear_is_confirmed() {
    let dir = tempfile::tempdir().expect("a directory");
    let chain = chain(1, 4);
    let engine = cleared_without_server(dir.path(), &chain);
    let start = Instant::now();
    engine.close(Duration::from_millis(100));
    assert!(start.elapsed() < LONG, "no server received the request");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let engine = connect(dir.path());
    assert_eq!(found(&engine, &chain), 4, "chunks were lost with the engine");
    drop(server);
    until("gone", || found(&engine, &chain) == 0);
    engine.clear();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| engine.close(LONG));
        std::thread::sleep(Duration::from_millis(50));
        let _server = Server::open(with_disk(dir.path())).expect("a server");
        closing.join().expect("the client closed");
        assert_eq!(found(&connect(dir.path()), &chain), 0);
    });
}

fn stat(engine: &Client, wanted: &str) -> Option<u64> {
    engine.stats().into_iter().find(|(name, _)| name == wanted).map(|(_, num)| num)
}

fn num_late(engine: &Client) -> Option<u64> {
    stat(engine, "server_late")
}

#[test]
fn stats_report_whether_the_server_is_connected() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = connect(dir.path());
    let state = || (stat(&engine, "server_connected"), stat(&engine, "server_lost"));
    assert_eq!(state(), (Some(0), Some(0)));
    let server = serve(dir.path());
    until("connected", || engine.renew());
    assert_eq!(state(), (Some(1), Some(0)));
    drop(server);
    until("lost", || state() == (Some(0), Some(1)));
    let _server = serve(dir.path());
    until("connected again", || engine.renew());
    assert_eq!(state(), (Some(1), Some(1)));
}

/// Returns a client that has saved `chain` and has received every response in time.
fn client_on_time(dir: &Path, chain: &KeyChain) -> Client {
    let mut on_time = None;
    until("a client whose server was never late", || {
        let config = ClientConfig { deadline: Duration::from_millis(200), ..remote_config(dir) };
        let engine = Client::open(config).expect("a client");
        until("connected", || engine.renew() || engine.arena().is_some());
        until("saved", || save(&engine, chain) == 4 || found(&engine, chain) == 4);
        if num_late(&engine) == Some(0) {
            on_time = Some(engine);
        } else {
            engine.close(Duration::ZERO);
        }
        on_time.is_some()
    });
    on_time.expect("a client is on time within a minute")
}

#[test]
fn stopped_server_costs_one_deadline() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = served_by_a_child(dir.path());
    let chain = chain(1, 4);
    let engine = client_on_time(dir.path(), &chain);
    let num_late_before = num_late(&engine).expect("the client counts late calls");
    signal(&child, "STOP");
    until("it is stopped", || all_stopped(child.id()));
    let start = Instant::now();
    assert_eq!(engine.lookup(Prefix::from(&chain)), Lookup::default());
    let first = start.elapsed();
    for seed in 0..1000 {
        assert_eq!(found(&engine, &chain), 0);
        let lease = engine.acquire(Prefix::from(&chain));
        assert_eq!(engine.frames(lease).len(), 0);
        engine.release(lease);
        let other = common::chain(seed, 4);
        assert_eq!(engine.reserve(Prefix::from(&other), 0..4).expect("in range").1, 4);
        engine.abort(&[u64::from(seed)]);
        assert_eq!(engine.commit(&[u64::from(seed)]), 0);
    }
    // Only one lookup and one save out of 6,000 calls waited. If every call waited, the test would
    // take 20 minutes.
    let all = start.elapsed();
    assert!(first >= Duration::from_millis(200) && all < LONG, "{first:?}, then {all:?}");
    assert_eq!(num_late(&engine), Some(num_late_before + 2));
    let is_late = |event: &str| {
        event.contains(" to the kvloft server at")
            && event.contains(" timed out (server_timeout = 200ms)")
    };
    let num_logged = engine.take_events().iter().filter(|event| is_late(event)).count();
    assert_eq!(num_logged, 1, "the first missed call must be logged immediately");
    signal(&child, "CONT");
    until("it continues", || found(&engine, &chain) == 4);
    until("late answers leave no reservation", || {
        let (rows, num_dropped) =
            engine.reserve(Prefix::from(&common::chain(7, 4)), 0..4).expect("in range");
        engine.abort(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
        (rows.len(), num_dropped) == (4, 0)
    });
    until("missed calls are reported, even if counted while it was stopped", || {
        let num_late = num_late(&engine);
        let status = status(&socket(dir.path()), LONG).expect("the server responds");
        Some(status.namespaces[0].stats["late_calls"]) == num_late
    });
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
}

/// A stopped server does not accept connections, and its connection queue may be full.
#[test]
fn commands_time_out_if_a_stopped_servers_queue_is_full() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir_all(dir.path().join("run")).expect("room");
    let path = socket(dir.path());
    let listener = UnixListener::bind(&path).expect("the path is free");
    rustix::net::listen(&listener, 0).expect("a shorter queue");
    let _queued = UnixStream::connect(&path).expect("the queue has room for one");
    let (send, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let error = status(&path, Duration::from_millis(200)).map_err(|error| error.to_string());
        let _none_waits = send.send(error.err());
    });
    let error = answer.recv_timeout(LONG).expect("the command must not hang");
    assert!(error.is_some_and(|error| error.contains("cannot connect to a kvloft server")));
}

#[test]
fn late_answers_leave_no_leases_or_reservations() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = served_by_a_child(dir.path());
    let chain = chain(1, 4);
    let engine = client_on_time(dir.path(), &chain);
    let many = common::chain(9, 2500); // sent in multiple messages
    let every: Vec<_> = many.keys().chunks(1).map(|keys| Prefix::new(many.root(), keys)).collect();
    for what in ["a save", "a lease", "many saves", "many lookups", "a lease on many"] {
        let num_late_before = num_late(&engine).expect("the client counts late calls");
        signal(&child, "STOP");
        until("it is stopped", || all_stopped(child.id()));
        match what {
            "a save" => {
                let other = common::chain(8, 4);
                assert_eq!(engine.reserve(Prefix::from(&other), 0..4).expect("in range").1, 4);
            }
            "many saves" => {
                let asked: Vec<_> = every.iter().map(|prefix| (*prefix, 0..1).into()).collect();
                let reserved = engine.reserve_many(&asked).expect("in range");
                assert!(
                    reserved.iter().all(|each| each.chunks.is_empty() && each.num_dropped == 1)
                );
            }
            "many lookups" => {
                assert_eq!(engine.lookup_many(&every), vec![Lookup::default(); every.len()]);
            }
            // These calls grant no leases, so there is nothing to release.
            "a lease" => {
                assert_eq!(engine.poll(engine.acquire(Prefix::from(&chain))), Progress::default());
            }
            _ => assert_eq!(engine.poll(engine.acquire_all(&every)), Progress::default()),
        }
        assert_eq!(num_late(&engine), Some(num_late_before + 1), "{what} must wait only once");
        signal(&child, "CONT");
        until("it continues", || found(&engine, &chain) == 4 || save(&engine, &chain) == 4);
        until("late answers are released", || {
            let held = status(&socket(dir.path()), LONG)
                .expect("the server responds")
                .namespaces
                .remove(0)
                .engines;
            held.len() == 1 && (held[0].num_reserved, held[0].num_leases) == (0, 0)
        });
    }
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
}

#[test]
fn commit_after_an_unanswered_clear_releases_its_frames() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = served_by_a_child(dir.path());
    let config = ClientConfig { deadline: Duration::from_millis(20), ..remote_config(dir.path()) };
    let engine = Client::open(config).expect("a client");
    until("connected", || engine.renew() || engine.arena().is_some());
    let (chain, mut tickets) = (chain(1, 4), Vec::new());
    until("reserved", || {
        let (rows, _) = engine.reserve(Prefix::from(&chain), 0..4).expect("in range");
        tickets = rows.iter().map(|row| row.ticket).collect();
        tickets.len() == 4
    });
    signal(&child, "STOP");
    until("it is stopped", || all_stopped(child.id()));
    engine.clear();
    assert_eq!(engine.commit(&tickets), 0);
    signal(&child, "CONT");
    until("no frame is reserved", || {
        let held = status(&socket(dir.path()), LONG)
            .expect("the server responds")
            .namespaces
            .remove(0)
            .engines;
        held.len() == 1 && held[0].num_reserved == 0
    });
    assert_eq!(found(&connect(dir.path()), &chain), 0, "the clear must be applied first");
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
}

#[test]
fn saves_wait_for_a_server_that_pauses() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = served_by_a_child(dir.path());
    let engine = connect(dir.path());
    until("connected", || engine.renew() || engine.arena().is_some());
    let chains: Vec<_> = (0..256).map(|seed| common::chain(seed, 2048)).collect(); // 16 MiB of keys
    let asked: Vec<_> = chains.iter().map(|chain| (Prefix::from(chain), 0..2048).into()).collect();
    signal(&child, "STOP");
    until("it is stopped", || all_stopped(child.id()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            signal(&child, "CONT");
        });
        let reserved = engine.reserve_many(&asked).expect("in range");
        assert_eq!(
            reserved.iter().map(|each| each.chunks.len()).sum::<usize>(),
            64,
            "expected one reservation per frame"
        );
    });
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
}

/// Reported chunks are treated as lost if the server does not respond for one second.
#[test]
fn change_feed_reports_a_lost_server_once_and_its_return_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = served_by_a_child(dir.path());
    let config = ClientConfig { deadline: Duration::from_millis(200), ..remote_config(dir.path()) };
    let engine = Client::open(config).expect("a client");
    engine.watch(100);
    let chain = chain(1, 2);
    let told = |tiers: Tiers, lost| Changes {
        rows: chain.keys().iter().map(|key| (*key, tiers)).collect(),
        lost,
    };
    let (host, nowhere) = (Tiers { host: true, ..Tiers::default() }, Tiers::default());
    let ask = || engine.changes(chain.keys(), 0);
    // Polls until the chunks are reported in `tiers`. Returns true if `lost` was set in the
    // meantime.
    let hear = |tiers: Tiers| {
        let mut lost = false;
        until("heard", || {
            let changes = ask();
            lost |= changes.lost;
            changes.rows == told(tiers, true).rows
        });
        lost
    };
    let saved = || until("saved", || save(&engine, &chain) == 2 || found(&engine, &chain) == 2);
    assert!(!ask().lost || engine.arena().is_some(), "no report yet");
    until("connected", || engine.renew() || engine.arena().is_some());
    saved();
    hear(host);
    until("all changes are reported", || ask() == told(host, false));
    signal(&child, "STOP");
    until("it is stopped", || all_stopped(child.id()));
    assert_eq!(ask(), Changes::default(), "the server may return in a moment");
    signal(&child, "CONT");
    assert!(hear(host), "the late response was lost");
    until("all changes are reported", || ask() == told(host, false));
    signal(&child, "STOP");
    until("it is stopped", || all_stopped(child.id()));
    assert!(hear(nowhere));
    assert_eq!(ask(), told(nowhere, false));
    signal(&child, "CONT");
    assert!(hear(host));
    until("all changes are reported", || ask() == told(host, false));
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
    assert!(hear(nowhere) && !ask().lost);
    let mut child = served_by_a_child(dir.path());
    until("found", || engine.renew());
    until("the server responds", || ask().lost);
    child.kill().expect("the child is running");
    child.wait().expect("the child has exited");
}

/// Runs `server_in_a_child_process` in a process that the test can stop.
fn served_by_a_child(dir: &std::path::Path) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "server_in_a_child_process", "--ignored", "--nocapture"])
        .env("KV_SERVE_DIR", dir)
        .spawn()
        .expect("a child")
}

/// Returns true if every thread has stopped. A signal takes a moment to reach every thread.
fn all_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the child is running");
    let state = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("stat")).unwrap_or_default()
    };
    tasks
        .flatten()
        .map(state)
        .all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
}

fn signal(child: &std::process::Child, name: &str) {
    let done = std::process::Command::new("kill")
        .args([&format!("-{name}"), &child.id().to_string()])
        .status();
    assert!(done.expect("kill is there").success());
}

#[test]
#[ignore = "run by the test above, in a process that it stops"]
fn server_in_a_child_process() {
    let dir = std::env::var("KV_SERVE_DIR").expect("called by the test");
    let _server = serve(dir.as_ref());
    common::outlive_no_test();
}

#[test]
fn malformed_answer_closes_the_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir_all(dir.path().join("run")).expect("room");
    let listener = UnixListener::bind(socket(dir.path())).expect("the path is free");
    let answers = std::thread::spawn(move || {
        for bytes in
            [&b"\x05\0\0\0\x01\0\0\0\x63"[..], b"\xff\xff\xff\xff", b"HTTP/1.1 400\r\n\r\n", b""]
        {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut some = [0; 64];
            let _read = stream.read(&mut some);
            let _sent = stream.write_all(bytes);
        }
    });
    for _ in 0..4 {
        let config =
            ClientConfig { deadline: Duration::from_millis(20), ..remote_config(dir.path()) };
        let engine = Client::open(config);
        assert!(engine.as_ref().map_or(true, |engine| engine.arena().is_none()));
        if answers.is_finished() {
            break;
        }
    }
}
