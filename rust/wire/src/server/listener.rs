//! Listens on a private socket, with a lock file that distinguishes a stale socket from another
//! server's.

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

/// Time for which the socket of a killed process may outlive its lock.
const STALE_TIMEOUT: Duration = Duration::from_millis(200);

/// A listening socket that only this user can reach. Dropping it removes the socket's file.
#[derive(Debug)]
pub(crate) struct SocketListener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket's file. Another server may replace the file if a user deletes
    /// the lock file.
    file: (u64, u64),
    /// Locked while this server has the socket.
    lock: File,
}

impl SocketListener {
    /// Listens at `path`. `Busy` if another process listens there; `InvalidConfig` if the directory
    /// is not private or the path is another kind of file.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        create_directory(path)?;
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

impl Drop for SocketListener {
    fn drop(&mut self) {
        if file_at(&self.path).is_ok_and(|file| file == self.file) {
            let _gone = std::fs::remove_file(&self.path);
        }
        remove_lock(&self.lock, &self.path);
    }
}

/// Returns whether another process listens at `path`. Waits for [`STALE_TIMEOUT`], since a server
/// that is being killed may lose its lock before its socket.
fn keeps_listening(path: &Path) -> bool {
    let deadline = Instant::now() + STALE_TIMEOUT;
    while is_listening(path) {
        if Instant::now() > deadline {
            return true;
        }
        sleep(STALE_TIMEOUT / 20);
    }
    false
}

/// Returns whether a process has the socket. Only a stale socket refuses a connection; other errors
/// mean that it is busy, of another type, or not accessible.
fn is_listening(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let try_connect = || {
        connect(
            &socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?,
            &SocketAddrUnix::new(path)?,
        )
    };
    !matches!(try_connect(), Err(Errno::CONNREFUSED | Errno::NOENT))
}

/// Listens at `path`, replacing a stale socket. Returns the socket, and the device and inode of its
/// file.
fn listen(path: &Path) -> Result<(UnixListener, (u64, u64))> {
    let fail =
        |what: &str, error: io::Error| Error::io(format!("{what} {}", path.display()), error);
    if let Ok(found) = path.symlink_metadata() {
        if !found.file_type().is_socket() {
            let message = format!(
                "{} exists and is not a socket; give --socket another path",
                path.display()
            );
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        if keeps_listening(path) {
            let message = format!(
                "another program listens at {}; give --socket another path",
                path.display()
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(fail("cannot remove the stale socket", error));
            }
            _ => {} // its server may have removed it meanwhile
        }
    }
    let socket = UnixListener::bind(path).map_err(|error| fail("cannot listen at", error))?;
    let private = Permissions::from_mode(0o600);
    std::fs::set_permissions(path, private)
        .map_err(|error| fail("cannot make the socket private:", error))?;
    let file = file_at(path).map_err(|error| fail("cannot read the metadata of", error))?;
    Ok((socket, file))
}

/// Returns the device and inode of the file at `path`; does not follow a link.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|found| (found.dev(), found.ino()))
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Removes the lock file while it is locked, unless it was replaced. A process that has it open and
/// locks it later finds that its path has changed.
fn remove_lock(lock: &File, socket: &Path) {
    if is_same_file(lock, &lock_path(socket)).unwrap_or(false) {
        let _gone = std::fs::remove_file(lock_path(socket));
    }
}

/// Returns whether `file` is the file at `path`; follows a link.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let (own, found) = (file.metadata()?, path.metadata()?);
    Ok((own.dev(), own.ino()) == (found.dev(), found.ino()))
}

/// Locks a socket's lock file; `Busy` if another server has it.
fn lock(socket: &Path) -> Result<File> {
    let fail =
        |what: &str, error: io::Error| Error::io(format!("{what} {}", socket.display()), error);
    let path = lock_path(socket);
    loop {
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(|error| fail("cannot create the lock file of", error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                let message = format!(
                    "another kvloft server listens at {}; give --socket another path",
                    socket.display()
                );
                Error::new(ErrorKind::Busy, message)
            }
            TryLockError::Error(error) => fail("cannot lock the lock file of", error),
        })?;
        // Another server may have removed the file meanwhile.
        if is_same_file(&lock, &path).unwrap_or(false) {
            return Ok(lock);
        }
    }
}

/// Creates the socket's directory. An existing one must belong to this user and must not be
/// writable by others.
fn create_directory(path: &Path) -> Result<()> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| {
        Error::io(format!("cannot create the socket's directory {}", folder.display()), error)
    })?;
    let found = folder.metadata();
    let found = found.map_err(|error| {
        Error::io(format!("cannot read the metadata of {}", folder.display()), error)
    })?;
    let (me, rights) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let problem = if found.uid() != me {
        format!("belongs to user {}, and this process is user {me}", found.uid())
    } else if rights & 0o022 != 0 {
        format!("is writable by other users (mode {rights:o})")
    } else {
        return Ok(());
    };
    let folder = folder.display();
    let message = format!(
        "the socket's directory {folder} {problem}; give --socket a path in a directory that only this user can write to"
    );
    Err(Error::new(ErrorKind::InvalidConfig, message))
}

#[cfg(test)]
mod tests {
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
                assert_eq!(num_listening.fetch_add(1, Ordering::SeqCst), 0, "two listen at once");
                assert!(
                    is_same_file(&listener.lock, &lock_path(&path)).unwrap_or(false),
                    "the lock is another server's"
                );
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
    fn server_with_a_deleted_lock_keeps_its_successors_socket() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let first = SocketListener::bind(&path).expect("it is free");
        std::fs::remove_file(lock_path(&path)).expect("it is there");
        assert_eq!(SocketListener::bind(&path).expect_err("it listens").kind(), ErrorKind::Busy);
        first.shut();
        let second = SocketListener::bind(&path).expect("no process listens or holds the lock");
        drop(first);
        assert!(
            UnixStream::connect(&path).is_ok() && lock_path(&path).exists(),
            "it is the second one's"
        );
        drop(second);
        assert_eq!(dir.path().read_dir().expect("it is there").count(), 0, "something is left");
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
        rustix::net::listen(&listens, 0).expect("it listens already");
        assert!((0..4).all(|_| is_listening(&path)), "also with more that wait than it lets");
        assert!(
            is_left() && listens.accept().is_ok() && path.exists(),
            "it lost its socket, or a lock is left"
        );
        drop(listens);
        drop(SocketListener::bind(&path).expect("it is stale"));
        let is_no_stream = UnixDatagram::bind(&path).expect("a listener takes its socket along");
        let send = || UnixDatagram::unbound().and_then(|own| own.send_to(b"a line", &path));
        assert!(is_left() && send().is_ok(), "it lost its socket, or a lock is left");
        drop(is_no_stream);
        assert!(SocketListener::bind(&path).is_ok(), "it is stale");
    }

    #[test]
    fn bind_waits_for_a_socket_that_outlives_its_server() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvloft.sock");
        let is_had = |is_tidy: bool| {
            let killed = UnixListener::bind(&path).expect("the path is free");
            let own = path.clone();
            // It exits once it is asked to; one that ends by itself may remove its file.
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
            assert!(
                (0..20).any(|_| is_had(is_tidy)),
                "on a busy machine it may take longer than is waited for"
            );
        }
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
            .expect("it is still at it")
            .expect("it is free");
        assert!(SocketListener::bind(&path).is_err(), "it is taken");
        drop(listener);
        assert!(!path.exists() && lock_path(&path).symlink_metadata().is_err());
    }
}
