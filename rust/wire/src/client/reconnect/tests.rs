//! Tests which requests a client repeats on a new connection, and which servers it rejects.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::Session;
use kvloft_core::store::Prefix;
use kvloft_core::{Error, ErrorKind};
use kvloft_testing::one_prefix::SessionExt;

use super::{ConnectFailures, MAX_RETRY_INTERVAL, RETRY_INTERVAL};
use crate::client::ClientInner;
use crate::{Client, ClientConfig, Server, ServerConfig};

const FRAME: u64 = 4096;
const LONG: Duration = Duration::from_secs(60);

fn config(socket: std::path::PathBuf) -> ClientConfig {
    let (namespace, description) = ([7; 32], String::new());
    ClientConfig { socket, deadline: LONG, namespace, frame_sizes: FRAME.into(), description }
}

#[test]
fn interval_is_short_again_after_a_rejecting_server_is_gone() {
    let mut failures = ConnectFailures::default();
    let rejected = Error::new(ErrorKind::Busy, "too many engines");
    let intervals: Vec<_> = (0..12).map(|_| failures.retry_interval(&rejected)).collect();
    assert!(intervals.is_sorted());
    assert_eq!(intervals[11], MAX_RETRY_INTERVAL);
    let late = Error::io("no response", std::io::ErrorKind::TimedOut.into());
    assert_eq!(failures.retry_interval(&late), MAX_RETRY_INTERVAL);
    let gone = Error::io("no server", std::io::ErrorKind::ConnectionRefused.into());
    assert_eq!(failures.retry_interval(&gone), RETRY_INTERVAL);
}

#[test]
fn closed_client_keeps_no_new_connection() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("kvloft.sock");
    let engine = Client::open(config(socket.clone())).expect("a client");
    let server = Server::open(ServerConfig::new(socket, 64 * FRAME)).expect("a server");
    engine.close(LONG);
    engine.inner.maintain_connection(&mut ConnectFailures::default());
    assert!(!engine.renew());
    let start = Instant::now();
    while server.status().engines().count() > 0 {
        assert!(start.elapsed() < LONG, "the server still counts the engine");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn new_connection_keeps_the_frame_limit() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("kvloft.sock");
    let server = ServerConfig::new(socket.clone(), 64 * FRAME);
    let _server = Server::open(server).expect("a server");
    let engine = Client::open(config(socket)).expect("a client");
    engine.limit_memory(2 * FRAME);
    engine.state().connection.as_mut().expect("connected").close();
    let start = Instant::now();
    while !engine.renew() {
        assert!(start.elapsed() < LONG, "the client did not reconnect");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
    chain.append_tokens(&[1, 2, 3, 4, 5]).expect("tokens");
    let range = 0..5;
    let (rows, num_dropped) = engine.reserve(Prefix::from(&chain), range).expect("in range");
    assert_eq!((rows.len(), num_dropped), (2, 3), "workers can only copy to two frames");
}

/// An idle engine does not call `renew`, so its unused connections must be dropped in the
/// background. Otherwise, their descriptors would keep the memory of exited servers allocated.
#[test]
fn connection_lost_before_its_first_use_is_dropped() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("kvloft.sock");
    let open = || Server::open(ServerConfig::new(socket.clone(), 64 * FRAME)).expect("a server");
    let until_next = |engine: &Client, is_there: bool| {
        let start = Instant::now();
        while engine.state().next.is_some() != is_there {
            assert!(start.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let server = open();
    let engine = Client::open(config(socket.clone())).expect("a client");
    drop(server);
    let server = open();
    until_next(&engine, true);
    drop(server);
    until_next(&engine, false);
    let _server = open();
    until_next(&engine, true);
    assert!(engine.renew());
}

#[test]
fn saves_wait_longer_than_lookups() {
    let deadline = Duration::from_millis(1);
    let inner = ClientInner::new(ClientConfig { deadline, ..config("socket".into()) });
    let lookups = inner.deadline();
    assert!(inner.save_deadline() > lookups + Duration::from_millis(50));
}

/// A child process that is killed when the test ends or fails.
struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
fn server_of_another_user_is_an_invalid_config() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process as another user");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(dir.path(), open).expect("this process owns the directory");
    let socket = dir.path().join("kvloft.sock");
    let listen = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(600)";
    let _server = Child(
        Command::new("python3")
            .args(["-c", listen])
            .arg(&socket)
            .uid(65534)
            .spawn()
            .expect("python3"),
    );
    let start = Instant::now();
    let error = loop {
        match Client::open(config(socket.clone())) {
            Err(error) => break error,
            Ok(_) => assert!(start.elapsed() < LONG, "the server is not listening"),
        }
    };
    assert!(
        error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("belongs to user "),
        "{error}"
    );
}
