//! Listens on a private socket. A lock file distinguishes a stale socket from a running server's
//! socket.

use std::fs::{DirBuilder, File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvloft_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long a killed process's socket can outlive its lock.
const STALE_TIMEOUT: Duration = Duration::from_millis(200);

/// A listening socket that only this user can access. Dropping the listener removes the socket
/// file.
#[derive(Debug)]
pub(crate) struct SocketListener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    /// Device and inode numbers of the socket file. If the lock file is deleted, another server may
    /// replace the socket file.
    file: (u64, u64),
    /// Locked while this server owns the socket.
    lock: File,
}

impl SocketListener {
    /// Listens at `path`. Returns `Busy` if another process is listening there, and `InvalidConfig`
    /// if the directory is not private or the path exists and is not a socket.
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

/// Returns true if another process is still listening at `path` after [`STALE_TIMEOUT`]. When a
/// server dies, its lock may be released before its socket is closed.
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

/// Returns true if a process owns the socket. A connection is refused only if the socket is stale;
/// other errors mean that the socket is busy, inaccessible or of a different type.
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

/// Listens at `path`, replacing a stale socket. Returns the socket, and the device and inode
/// numbers of the socket file.
fn listen(path: &Path) -> Result<(UnixListener, (u64, u64))> {
    let fail =
        |what: &str, error: io::Error| Error::io(format!("{what} {}", path.display()), error);
    if let Ok(found) = path.symlink_metadata() {
        if !found.file_type().is_socket() {
            let message = format!(
                "{} exists but is not a socket; set --socket to a different path",
                path.display()
            );
            return Err(Error::invalid(message));
        }
        if keeps_listening(path) {
            let message = format!(
                "another program is listening on {}; set --socket to a different path",
                path.display()
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(fail("cannot remove the stale socket", error));
            }
            _ => {} // another server may have just removed the file
        }
    }
    let socket = UnixListener::bind(path).map_err(|error| fail("cannot listen on", error))?;
    let private = Permissions::from_mode(0o600);
    std::fs::set_permissions(path, private)
        .map_err(|error| fail("cannot make the socket private:", error))?;
    let file = file_at(path).map_err(|error| fail("cannot read the metadata of", error))?;
    Ok((socket, file))
}

/// Returns the device and inode numbers of the file at `path`. Does not follow links.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|found| (found.dev(), found.ino()))
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Removes the lock file while holding its lock, unless the file has been replaced. A process that
/// opened the file before its removal but locks it afterwards detects that the path no longer
/// refers to that file.
fn remove_lock(lock: &File, socket: &Path) {
    if is_same_file(lock, &lock_path(socket)).unwrap_or(false) {
        let _gone = std::fs::remove_file(lock_path(socket));
    }
}

/// Returns true if `file` is the file at `path`. Follows links.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let (own, found) = (file.metadata()?, path.metadata()?);
    Ok((own.dev(), own.ino()) == (found.dev(), found.ino()))
}

/// Locks a socket's lock file. Returns `Busy` if another server holds the lock.
fn lock(socket: &Path) -> Result<File> {
    let fail =
        |what: &str, error: io::Error| Error::io(format!("{what} {}", socket.display()), error);
    let path = lock_path(socket);
    loop {
        // Other users must not be able to lock the file.
        let mut options = File::options();
        let lock = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = lock.map_err(|error| fail("cannot create the lock file for", error))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                let message = format!(
                    "another kvloft server is listening on {}; set --socket to a different path",
                    socket.display()
                );
                Error::new(ErrorKind::Busy, message)
            }
            TryLockError::Error(error) => fail("cannot lock the lock file for", error),
        })?;
        // Another server may have removed the file after it was opened and before it was locked.
        if is_same_file(&lock, &path).unwrap_or(false) {
            return Ok(lock);
        }
    }
}

/// Creates the socket's directory. An existing directory must belong to this user and must not be
/// writable by others.
fn create_directory(path: &Path) -> Result<()> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| {
        Error::io(format!("cannot create the socket directory {}", folder.display()), error)
    })?;
    let found = folder.metadata();
    let found = found.map_err(|error| {
        Error::io(format!("cannot read the metadata of {}", folder.display()), error)
    })?;
    let (me, rights) = (rustix::process::geteuid().as_raw(), found.mode() & 0o7777);
    let is_ours = found.uid() == me;
    let shown = folder.display();
    let problem = if rights & 0o002 != 0 || (is_ours && rights & 0o022 != 0) {
        let name = path.file_name().unwrap_or_default();
        format!(
            "is writable by other users (mode {rights:o}); use --socket {}, and kvloft will create a private directory for it",
            folder.join("kvloft").join(name).display()
        )
    } else if !is_ours {
        format!(
            "belongs to user {}, but this process runs as user {me}; set --socket to a path in a \
             directory that only user {me} can write to",
            found.uid()
        )
    } else {
        return Ok(());
    };
    let message = format!("the socket directory {shown} {problem}");
    Err(Error::invalid(message))
}

#[cfg(test)]
mod tests;
