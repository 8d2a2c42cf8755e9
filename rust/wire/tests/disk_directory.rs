//! Tests a server's disk directory before the first engine connects, and when a second server uses
//! the same directory.

mod common;

use common::{FRAME, LONG, chain, connect, found, save, stat, until, with_disk};
use kvloft_core::session::Session;
use kvloft_core::{ErrorKind, Result};
use kvloft_wire::{Server, ServerConfig};

/// Returns the settings of two servers with the same disk directory and different sockets.
fn servers(dir: &std::path::Path) -> [ServerConfig; 2] {
    let config = with_disk(dir);
    let second = dir.join("second").join("kvloft.sock");
    [config.clone(), ServerConfig { socket: second, ..config }]
}

fn is_unused(server: &Server) -> bool {
    stat(&server.status().stats, "server_disk_unused") == 1
}

#[test]
fn second_server_reports_a_used_disk_and_claims_it_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let [of_second, of_first] = servers(dir.path());
    let first = Server::open(of_first).expect("a server");
    assert_eq!((first.disk_trouble(), is_unused(&first)), (None, false));
    let second = Server::open(of_second).expect("the server starts");
    let trouble =
        second.disk_trouble().expect("the error is reported before the first engine connects");
    let whose = format!(
        "disk_path {} is in use by process {}",
        dir.path().join("disk").display(),
        std::process::id()
    );
    assert!(trouble.starts_with(&whose) && is_unused(&second), "{trouble}");
    assert!(second.take_events().is_empty(), "the error was already reported at startup");
    let engine = connect(dir.path());
    assert_eq!(save(&engine, &chain(1, 3)), 3, "host memory must work");
    assert_eq!(found(&engine, &chain(1, 3)), 3);
    first.close(LONG);
    let mut told = Vec::new();
    until("the disk is used", || {
        told.extend(second.take_events());
        second.disk_trouble().is_none()
    });
    assert!(!is_unused(&second));
    told.extend(second.take_events());
    let used = format!("disk tier: now using {}", dir.path().join("disk").display());
    assert_eq!(told.iter().filter(|event| **event == used).count(), 1, "{told:?}");
    until("its chunks are on disk", || {
        engine.flush(LONG);
        let status = second.status();
        status.namespaces.iter().any(|space| stat(&space.stats, "disk_used") == 3)
    });
    second.close(LONG);
}

/// Returns one of the server's counters, or None if the counter is missing.
fn room(server: &Server, name: &str) -> Option<u64> {
    server.status().stats.get(name).copied()
}

#[test]
fn status_has_the_free_space_of_a_claimed_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let [of_second, of_first] = servers(dir.path());
    std::fs::create_dir_all(dir.path().join("disk").join("0123456789abcdef"))
        .expect("the disk has space");
    std::fs::write(
        dir.path().join("disk").join("0123456789abcdef").join("frames.dat"),
        [1; 12_000],
    )
    .expect("the disk has space");
    let first = Server::open(of_first).expect("a server");
    let free = room(&first, "server_disk_free_bytes").expect("the space was measured at startup");
    let found = rustix::fs::statvfs(dir.path()).expect("a file system");
    let (now, all) = (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize);
    assert!(
        free <= all && free.abs_diff(now) < 1 << 33,
        "{free} of {all}, and {now} now: other processes write there, too"
    );
    let closed = room(&first, "server_disk_closed_bytes").expect("the directory was measured");
    assert!((12_000..100_000).contains(&closed), "{closed}");
    let second = Server::open(of_second).expect("the server starts");
    assert_eq!(room(&second, "server_disk_free_bytes"), None, "another server has the directory");
    let none = ServerConfig {
        disk: None,
        socket: dir.path().join("third").join("kvloft.sock"),
        ..with_disk(dir.path())
    };
    assert_eq!(room(&Server::open(none).expect("a server"), "server_disk_closed_bytes"), None);
}

#[test]
fn reopened_namespace_is_not_counted_twice() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::open(with_disk(dir.path())).expect("a server");
    let engine = connect(dir.path());
    assert_eq!(save(&engine, &chain(1, 3)), 3);
    assert!(engine.flush(LONG));
    server.close(LONG);
    drop((engine, server));
    let server = Server::open(with_disk(dir.path())).expect("a server");
    assert!(
        room(&server, "server_disk_closed_bytes").expect("the directory was measured") >= 3 * FRAME
    );
    let engine = connect(dir.path());
    assert_eq!(found(&engine, &chain(1, 3)), 3);
    assert_eq!(
        room(&server, "server_disk_closed_bytes"),
        Some(0),
        "the directory must not be measured again for seconds"
    );
}

#[test]
fn closed_server_releases_its_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let [of_first, of_second] = servers(dir.path());
    let first = Server::open(of_first).expect("a server");
    first.close(LONG);
    let second = Server::open(of_second).expect("a server");
    assert_eq!(second.disk_trouble(), None);
}

#[test]
fn unusable_disk_path_fails_the_start() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("disk"), "a file").expect("the disk has space");
    let opened: Result<Server> = Server::open(with_disk(dir.path()));
    assert_eq!(opened.expect_err("the path is not a directory").kind(), ErrorKind::InvalidConfig);
    let config = ServerConfig { disk: None, host_bytes: 8 * FRAME, ..with_disk(dir.path()) };
    assert_eq!(Server::open(config).expect("the first server has exited").disk_trouble(), None);
}
