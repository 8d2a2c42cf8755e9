//! Tests a namespace that is being deleted, a directory with no namespaces, and a hung directory.

use std::fs;
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::key::namespace_id;

#[test]
fn a_namespace_is_not_opened_while_it_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let root = DiskRoot::shared();
    root.state().leaving.insert(namespace_id(&config.namespace));
    assert_eq!(root.enter(&config).unwrap_err().kind(), ErrorKind::Busy);
    root.state().leaving.clear();
    assert!(root.enter(&config).is_ok());
}

fn config(dir: &Path) -> DiskConfig {
    DiskConfig {
        dir: dir.to_owned(),
        cap_bytes: 1 << 20,
        frame_sizes: 4096_u64.into(),
        namespace: [1; 32],
        description: String::new(),
    }
}

#[test]
fn a_directory_that_is_kept_is_no_others_before_and_after_its_namespaces() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("new"));
    let (first, second) = (DiskRoot::shared(), DiskRoot::shared());
    first.hold(&config.dir).unwrap();
    let is_busy = || second.hold(&config.dir).is_err_and(|error| error.kind() == ErrorKind::Busy);
    assert!(is_busy(), "before a namespace is opened");
    drop(first.enter(&config).unwrap());
    first.hold(&config.dir).unwrap();
    assert!(is_busy(), "after the last namespace is closed");
    let owner = first.enter(&config).unwrap();
    first.release();
    assert!(is_busy(), "a namespace is open");
    drop(owner);
    second.hold(&config.dir).unwrap();
    assert_eq!(first.enter(&config).unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn a_directory_that_was_deleted_and_made_again_is_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("disk"));
    let (first, second) = (DiskRoot::shared(), DiskRoot::shared());
    first.hold(&config.dir).unwrap();
    for _ in 0..2 {
        fs::remove_dir_all(&config.dir).unwrap();
        fs::create_dir(&config.dir).unwrap();
        drop(first.enter(&config).unwrap());
        assert_eq!(
            second.hold(&config.dir).unwrap_err().kind(),
            ErrorKind::Busy,
            "the first root still holds the directory"
        );
    }
    fs::remove_dir_all(&config.dir).unwrap();
    second.hold(&config.dir).unwrap();
    assert_eq!(
        first.enter(&config).unwrap_err().kind(),
        ErrorKind::Busy,
        "the second root now holds the directory"
    );
}

/// A server can hang in a system call while it locks its directory. Engines must still be able to
/// start with host memory only.
#[test]
fn a_namespace_is_not_held_up_by_one_that_hangs_as_it_takes_the_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let (root, config) = (DiskRoot::shared(), config(dir.path()));
    let hung = root.opening.lock().expect("no panic");
    let (send, came) = mpsc::channel();
    let (own, its) = (Arc::clone(&root), config.clone());
    let waits = thread::spawn(move || send.send(own.enter(&its).map(drop).map_err(|e| e.kind())));
    let said = came.recv_timeout(Duration::from_secs(60));
    drop(hung);
    assert!(waits.join().is_ok());
    assert_eq!(said, Ok(Err(ErrorKind::Busy)));
    assert!(root.enter(&config).is_ok(), "the directory responds again");
}
