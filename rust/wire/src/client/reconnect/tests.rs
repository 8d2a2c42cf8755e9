//! What a client repeats on another connection to the same server, and which servers it does not use.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use kvloft_core::ErrorKind;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::Session;
use kvloft_core::store::{Prefix, SaveRange};

use crate::{Remote, RemoteConfig, Server, ServerConfig};

const FRAME: u64 = 4096;
const LONG: Duration = Duration::from_secs(60);

fn config(socket: std::path::PathBuf) -> RemoteConfig {
    let (namespace, description) = ([7; 32], String::new());
    RemoteConfig { socket, deadline: LONG, namespace, frame_bytes: FRAME, blocks_per_chunk: 1, description }
}

#[test]
fn another_connection_has_the_limit_of_frames_that_the_first_one_had() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("run").join("kvloft.sock");
    let server = ServerConfig::new(socket.clone(), 64 * FRAME);
    let _server = Server::open(server).expect("a server");
    let engine = Remote::open(config(socket)).expect("a client");
    engine.limit_frames(2);
    engine.state().link.as_mut().expect("connected").die();
    let start = Instant::now();
    while !engine.renew() {
        assert!(start.elapsed() < LONG, "it does not connect again");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
    chain.append_tokens(&[1, 2, 3, 4, 5]).expect("tokens");
    let range = SaveRange { start: 0, stop: 5, tail_blocks: 0 };
    let (rows, num_dropped) = engine.reserve(Prefix::from(&chain), range).expect("in range");
    assert_eq!((rows.len(), num_dropped), (2, 3), "workers can copy to two frames only");
}

/// Ends with the test, also with one that fails.
struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Only root can make a process of another user.
#[test]
fn a_server_of_another_user_is_a_wrong_setting() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(dir.path(), open).expect("it is ours");
    let socket = dir.path().join("kvloft.sock");
    let listen =
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(600)";
    let _server = Child(Command::new("python3").args(["-c", listen]).arg(&socket).uid(65534).spawn().expect("python3"));
    let start = Instant::now();
    let error = loop {
        match Remote::open(config(socket.clone())) {
            Err(error) => break error,
            Ok(_) => assert!(start.elapsed() < LONG, "it does not listen"),
        }
    };
    assert!(error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("is another user's"), "{error}");
}
