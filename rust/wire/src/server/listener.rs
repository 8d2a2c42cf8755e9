//! A private place for a server's socket, and the lock that tells a stale one from another server's. It must not know who connects.

use std::fs::{DirBuilder, File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvloft_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// For how long the socket of a process that is killed may outlive its lock.
const DYING: Duration = Duration::from_millis(200);

/// A listening socket that only this user can reach. It is gone from its place when this goes.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    /// Device and number of the socket's file, which may be another's by the end: who deletes a lock that is held lets one in.
    file: (u64, u64),
    /// Locked while the socket is ours, so that a stale one can be told from another server's.
    lock: File,
}

impl Listener {
    /// `Busy` if another server or program listens there; `InvalidConfig` for a place that is not private, or is no socket's.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        check_place(path)?;
        let lock = lock(path)?;
        match listen(path) {
            Ok((socket, file)) => Ok(Self { socket, path: path.to_owned(), file, lock }),
            Err(error) => {
                remove_lock(&lock, path);
                Err(error)
            }
        }
    }

    /// Ends `accept`.
    pub(crate) fn shut(&self) {
        let _ended = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if file_at(&self.path).is_ok_and(|file| file == self.file) {
            let _gone = std::fs::remove_file(&self.path);
        }
        remove_lock(&self.lock, &self.path);
    }
}

/// Whether somebody listens there who has no lock of ours. A server that is just being killed may lose its lock before its socket.
fn keeps_answering(path: &Path) -> bool {
    let deadline = Instant::now() + DYING;
    while answers(path) {
        if Instant::now() > deadline {
            return true;
        }
        sleep(DYING / 20);
    }
    false
}

/// Whether somebody has the socket: only a stale one refuses like this. Others are busy, no streams, or not ours to ask.
fn answers(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let ask =
        || connect(&socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, &SocketAddrUnix::new(path)?);
    !matches!(ask(), Err(Errno::CONNREFUSED | Errno::NOENT))
}

/// Listens in the place of a stale socket: the socket, and its file.
fn listen(path: &Path) -> Result<(UnixListener, (u64, u64))> {
    let fail = |what: &str, error: io::Error| Error::io(format!("{what} {}", path.display()), error);
    if let Ok(found) = path.symlink_metadata() {
        if !found.file_type().is_socket() {
            let message = format!("{} exists and is no socket; give --socket another path", path.display());
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        if keeps_answering(path) {
            let message = format!("another program listens at {}; give --socket another path", path.display());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(fail("a stale socket cannot be removed:", error));
            }
            _ => {} // who listened may have taken it along
        }
    }
    let socket = UnixListener::bind(path).map_err(|error| fail("the server cannot listen at", error))?;
    let private = Permissions::from_mode(0o600);
    std::fs::set_permissions(path, private).map_err(|error| fail("the socket cannot be made private:", error))?;
    let file = file_at(path).map_err(|error| fail("the socket is not to be seen:", error))?;
    Ok((socket, file))
}

/// Device and number of what is at the path itself, not of what a link there leads to.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|found| (found.dev(), found.ino()))
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// While it is locked: who has it open, and gets the lock then, sees that it is not there any more. Another's is left alone.
fn remove_lock(lock: &File, socket: &Path) {
    if is_there(lock, &lock_path(socket)).unwrap_or(false) {
        let _gone = std::fs::remove_file(lock_path(socket));
    }
}

/// Whether the file is the one at that path, or that a link there leads to.
fn is_there(file: &File, path: &Path) -> io::Result<bool> {
    let (own, found) = (file.metadata()?, path.metadata()?);
    Ok((own.dev(), own.ino()) == (found.dev(), found.ino()))
}

/// Takes the lock of a socket; `Busy` if another server has it.
fn lock(socket: &Path) -> Result<File> {
    let fail = |what: &str, error: io::Error| Error::io(format!("{what} {}", socket.display()), error);
    let path = lock_path(socket);
    loop {
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(|error| fail("no lock can be made for the socket", error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                let message =
                    format!("another kvloft server listens at {}; give --socket another path", socket.display());
                Error::new(ErrorKind::Busy, message)
            }
            TryLockError::Error(error) => fail("the lock cannot be taken of the socket", error),
        })?;
        // A server that ended meanwhile took the file with it.
        if is_there(&lock, &path).unwrap_or(false) {
            return Ok(lock);
        }
    }
}

/// Makes the socket's directory; one that is there must be this user's, and no other user may write to it.
fn check_place(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| Error::io(format!("the socket's directory {} cannot be made", folder.display()), error))?;
    let found = folder.metadata();
    let found =
        found.map_err(|error| Error::io(format!("the directory {} cannot be looked at", folder.display()), error))?;
    let (me, rights) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let problem = if found.uid() != me {
        format!("belongs to user {}, and this process is user {me}", found.uid())
    } else if rights & 0o022 != 0 {
        format!("may be written by other users (mode {rights:o})")
    } else {
        return Ok(());
    };
    let folder = folder.display();
    let message =
        format!("the socket's directory {folder} {problem}; give --socket a path in a directory of this user's own");
    Err(Error::new(ErrorKind::InvalidConfig, message))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// The one that listens has the socket and the lock, whoever ends or begins meanwhile.
    #[test]
    fn servers_that_end_and_begin_at_once_never_listen_together() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let (num_listening, num_bound) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            for _ in 0..500 {
                let Ok(listener) = Listener::bind(&path) else { continue };
                assert_eq!(num_listening.fetch_add(1, Ordering::SeqCst), 0, "two listen at once");
                assert!(is_there(&listener.lock, &lock_path(&path)).unwrap_or(false), "its lock is another's");
                assert!(UnixStream::connect(&path).is_ok(), "its socket is gone");
                num_bound.fetch_add(1, Ordering::SeqCst);
                num_listening.fetch_sub(1, Ordering::SeqCst);
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        assert!(num_bound.into_inner() > 0);
        assert_eq!(dir.path().read_dir().expect("it is there").count(), 0, "something is left");
    }

    #[test]
    fn a_server_whose_lock_was_deleted_leaves_the_next_ones_socket_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let first = Listener::bind(&path).expect("it is free");
        std::fs::remove_file(lock_path(&path)).expect("it is there");
        assert_eq!(Listener::bind(&path).expect_err("it listens").kind(), ErrorKind::Busy);
        first.shut();
        let second = Listener::bind(&path).expect("no process listens, and no lock says that it is taken");
        drop(first);
        assert!(UnixStream::connect(&path).is_ok() && lock_path(&path).exists(), "it is the second one's");
        drop(second);
        assert_eq!(dir.path().read_dir().expect("it is there").count(), 0, "something is left");
    }

    #[test]
    fn a_socket_that_another_program_has_is_left_to_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("others.sock");
        let is_left =
            || Listener::bind(&path).is_err_and(|e| e.kind() == ErrorKind::Busy) && !lock_path(&path).exists();
        let listens = UnixListener::bind(&path).expect("the path is free");
        rustix::net::listen(&listens, 0).expect("it listens already");
        assert!((0..4).all(|_| answers(&path)), "also with more that wait than it lets");
        assert!(is_left() && listens.accept().is_ok() && path.exists(), "it lost its socket, or a lock is left");
        drop(listens);
        drop(Listener::bind(&path).expect("it is stale"));
        let is_no_stream = UnixDatagram::bind(&path).expect("a listener takes its socket along");
        let send = || UnixDatagram::unbound().and_then(|own| own.send_to(b"a line", &path));
        assert!(is_left() && send().is_ok(), "it lost its socket, or a lock is left");
        drop(is_no_stream);
        assert!(Listener::bind(&path).is_ok(), "it is stale");
    }

    #[test]
    fn a_socket_that_outlives_its_server_for_a_moment_is_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let is_had = |is_tidy: bool| {
            let killed = UnixListener::bind(&path).expect("the path is free");
            let own = path.clone();
            // It goes once it was asked; one that ends by itself may take its file with it.
            let end = thread::spawn(move || killed.accept().is_ok() && (!is_tidy || std::fs::remove_file(own).is_ok()));
            let found = Listener::bind(&path);
            let is_had = end.join().unwrap_or(false) && found.is_ok();
            drop(found);
            let _gone = std::fs::remove_file(&path);
            is_had
        };
        for is_tidy in [false, true] {
            assert!((0..20).any(|_| is_had(is_tidy)), "on a busy machine it may take longer than is waited for");
        }
    }

    #[test]
    fn a_lock_that_is_a_link_is_a_lock() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), lock_path(&path)).expect("the path is free");
        let (send, bound) = mpsc::channel();
        let own = path.clone();
        thread::spawn(move || send.send(Listener::bind(&own)));
        let listener = bound.recv_timeout(Duration::from_secs(60)).expect("it is still at it").expect("it is free");
        assert!(Listener::bind(&path).is_err(), "it is taken");
        drop(listener);
        assert!(!path.exists() && lock_path(&path).symlink_metadata().is_err());
    }
}
