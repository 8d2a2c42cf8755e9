//! Tests that a lock survives when a forked child drops its copy.

use super::*;

/// Simulates a fork: `parents` holds the parent's files, and the dropped lock is the child's copy.
#[test]
fn a_forked_child_leaves_the_directory_locked() {
    let dir = tempfile::tempdir().unwrap();
    let mut lock = DirLock::acquire(dir.path()).unwrap();
    let parents: Vec<_> = lock.files.iter().map(|file| file.try_clone().unwrap()).collect();
    lock.owner_pid += 1;
    drop(lock);
    assert_eq!(DirLock::acquire(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
    drop(parents);
    assert!(DirLock::acquire(dir.path()).is_ok());
}
