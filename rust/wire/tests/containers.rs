//! Tests a server and an engine in different PID namespaces, as in containers that share the socket
//! directory.

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use common::{chain, connect, found, save, serve, socket, until};
use kvloft_wire::status;

const SERVED_DIR: &str = "KV_TEST_SERVED_DIR";
const APART: [&str; 4] = ["--pid", "--fork", "--mount-proc", "--kill-child"];

/// Returns a command that runs in a new PID namespace, or None if the kernel does not permit new
/// namespaces.
fn elsewhere() -> Option<Command> {
    let ways = [&[][..], &["--user", "--map-current-user"][..]];
    let mut ways = ways.into_iter().map(|way| {
        let mut command = Command::new("unshare");
        command.args(APART).args(way).stdin(Stdio::null()).stderr(Stdio::null());
        (command, way)
    });
    let way = ways.find_map(|(mut command, way)| {
        command.arg("true").status().is_ok_and(|s| s.success()).then_some(way)
    })?;
    let mut command = Command::new("unshare");
    command.args(APART).args(way);
    Some(command)
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _gone = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Runs a server in a different PID namespace until stdin is closed.
#[test]
fn server_in_another_pid_namespace() {
    let Some(dir) = std::env::var_os(SERVED_DIR) else { return };
    let _server = serve(dir.as_ref());
    let _ended = std::io::stdin().read(&mut [0]);
}

#[test]
fn engine_in_another_pid_namespace_is_served() {
    let Some(mut command) = elsewhere() else {
        eprintln!("skipped: this user cannot create a PID namespace");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).expect("ours");
    command
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", "server_in_another_pid_namespace"]);
    command.env(SERVED_DIR, dir.path()).stdin(Stdio::piped()).stdout(Stdio::null());
    let _server = Ended(command.spawn().expect("unshare"));
    let path = socket(dir.path());
    until("a server", || status(&path, common::LONG).is_ok());
    let engine = connect(dir.path());
    let chain = chain(1, 3);
    assert_eq!((save(&engine, &chain), found(&engine, &chain)), (3, 3));
    let engines = status(&path, common::LONG).expect("a server").namespaces.remove(0).engines;
    assert_eq!(engines.iter().map(|engine| engine.pid).collect::<Vec<_>>(), [0]);
}
