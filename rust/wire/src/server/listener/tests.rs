//! Tests that only one server listens at a time and that stale sockets are replaced.

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use super::*;

#[test]
fn concurrent_starts_and_stops_leave_one_listener_at_a_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvloft.sock");
    let (num_listening, num_bound) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        for _ in 0..500 {
            let Ok(listener) = SocketListener::bind(&path) else { continue };
            assert_eq!(
                num_listening.fetch_add(1, Ordering::SeqCst),
                0,
                "two servers listen at the same time"
            );
            assert!(
                is_same_file(&listener.lock, &lock_path(&path)).unwrap_or(false),
                "the lock belongs to another server"
            );
            assert!(UnixStream::connect(&path).is_ok(), "the server's socket is missing");
            num_bound.fetch_add(1, Ordering::SeqCst);
            num_listening.fetch_sub(1, Ordering::SeqCst);
        }
    };
    thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    assert!(num_bound.into_inner() > 0);
    assert_eq!(
        dir.path().read_dir().expect("the path exists").count(),
        0,
        "a file was left behind"
    );
}

#[test]
fn server_with_a_deleted_lock_keeps_its_successors_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvloft.sock");
    let first = SocketListener::bind(&path).expect("the path is free");
    std::fs::remove_file(lock_path(&path)).expect("the path exists");
    assert_eq!(
        SocketListener::bind(&path).expect_err("the server is listening").kind(),
        ErrorKind::Busy
    );
    first.shut();
    let second = SocketListener::bind(&path).expect("no process listens, and there is no lock");
    drop(first);
    assert!(
        UnixStream::connect(&path).is_ok() && lock_path(&path).exists(),
        "the socket belongs to the second server"
    );
    drop(second);
    assert_eq!(
        dir.path().read_dir().expect("the path exists").count(),
        0,
        "a file was left behind"
    );
}

#[test]
fn socket_of_another_program_is_not_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("others.sock");
    let is_left = || {
        SocketListener::bind(&path).is_err_and(|e| e.kind() == ErrorKind::Busy)
            && !lock_path(&path).exists()
    };
    let listens = UnixListener::bind(&path).expect("the path is free");
    rustix::net::listen(&listens, 0).expect("the socket is already listening");
    assert!(
        (0..4).all(|_| is_listening(&path)),
        "a listener must be detected even if its backlog is full"
    );
    assert!(
        is_left() && listens.accept().is_ok() && path.exists(),
        "the server lost its socket, or a lock was left behind"
    );
    drop(listens);
    drop(SocketListener::bind(&path).expect("the socket is stale"));
    let is_no_stream = UnixDatagram::bind(&path).expect("a listener removes its socket");
    let send = || UnixDatagram::unbound().and_then(|own| own.send_to(b"a line", &path));
    assert!(is_left() && send().is_ok(), "the server lost its socket, or a lock was left behind");
    drop(is_no_stream);
    assert!(SocketListener::bind(&path).is_ok(), "the socket is stale");
}

#[test]
fn bind_waits_for_a_socket_that_outlives_its_server() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvloft.sock");
    let is_had = |is_tidy: bool| {
        let killed = UnixListener::bind(&path).expect("the path is free");
        let own = path.clone();
        // The socket closes after the first connection. A server that exits normally also removes
        // its socket file.
        let end = thread::spawn(move || {
            killed.accept().is_ok() && (!is_tidy || std::fs::remove_file(own).is_ok())
        });
        let found = SocketListener::bind(&path);
        let is_had = end.join().unwrap_or(false) && found.is_ok();
        drop(found);
        let _gone = std::fs::remove_file(&path);
        is_had
    };
    for is_tidy in [false, true] {
        assert!((0..20).any(|_| is_had(is_tidy)), "on a busy machine, this can exceed the timeout");
    }
}

#[test]
fn other_users_cannot_lock_the_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvloft.sock");
    let _listener = SocketListener::bind(&path).expect("the path is free");
    let mode = lock_path(&path).metadata().expect("the path exists").permissions().mode();
    assert_eq!(mode & 0o077, 0);
}

#[test]
fn lock_file_may_be_a_link() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvloft.sock");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), lock_path(&path))
        .expect("the path is free");
    let (send, bound) = mpsc::channel();
    let own = path.clone();
    thread::spawn(move || send.send(SocketListener::bind(&own)));
    let listener = bound
        .recv_timeout(Duration::from_secs(60))
        .expect("the thread is still running")
        .expect("the path is free");
    assert!(SocketListener::bind(&path).is_err(), "the path is in use");
    drop(listener);
    assert!(!path.exists() && lock_path(&path).symlink_metadata().is_err());
}
