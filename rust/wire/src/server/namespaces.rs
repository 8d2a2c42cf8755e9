//! The namespaces of a server: which are open, and what they share.
//!
//! Their memory is one arena, made for the first of them, and their disk one directory. A namespace without engines stays, for
//! engines come back, until others have all of its memory. It must not know sockets.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvloft_core::pool::Pool;
use kvloft_core::session::Local;
use kvloft_core::store::Way;
use kvloft_core::tier::disk::DiskRoot;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::Hello;
use crate::server::namespace::{Seat, Space, hex, id, store_config};
use crate::settings::ServerConfig;

/// Most namespaces that are open at one time.
pub const MAX_NAMESPACES: usize = 64;
/// Longest wait for the disk of a namespace that makes room.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(3);
/// What sets the size of host memory, as its engines' logs call it.
const OF_SERVER: &str = "--host-size of this engine's kvloft server";

#[derive(Debug, Default)]
struct Books {
    /// What they share, once there is one.
    pool: Option<Arc<Pool>>,
    spaces: BTreeMap<[u8; 32], Arc<Space>>,
}

/// All of a server.
#[derive(Debug)]
pub(crate) struct Namespaces {
    books: Mutex<Books>,
    /// Their disk directory.
    pub(crate) disk: Arc<DiskRoot>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self { books: Mutex::default(), disk: DiskRoot::shared() }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks shares by namespace: `InvalidConfig` for none of 1 to 100 percent, more than 100 together, or two of one namespace.
pub(crate) fn check_shares(shares: &[(String, u32)]) -> Result<()> {
    let mut names: Vec<_> = shares.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some([name, longer]) = names.windows(2).find(|pair| pair[1].starts_with(pair[0])) {
        let message = format!("--share: two are of one namespace: {name} covers {longer}; give more of their digits");
        return Err(Error::new(ErrorKind::InvalidConfig, message));
    }
    let sum: u64 = shares.iter().map(|(_, percent)| u64::from(*percent)).sum();
    if sum <= 100 && shares.iter().all(|(_, percent)| *percent > 0) {
        return Ok(());
    }
    let message = format!("--share: shares must be from 1 to 100 percent, and 100 together at most, not {sum}");
    Err(Error::new(ErrorKind::InvalidConfig, message))
}

impl Books {
    /// Those that may be closed, the one that is idle longest first.
    fn idle(&self) -> Vec<Arc<Space>> {
        let since = |space: &Arc<Space>| space.idle_since().map(|since| (since, Arc::clone(space)));
        let mut idle: Vec<_> = self.spaces.values().filter_map(since).collect();
        idle.sort_by_key(|(since, _)| *since);
        idle.into_iter().map(|(_, space)| space).collect()
    }

    /// The namespace of an engine, and those that have to be closed for it; `Busy` where they have engines.
    fn space(&mut self, hello: &Hello) -> Result<(Arc<Space>, Vec<Arc<Space>>)> {
        let mut gone = Vec::new();
        if let Some(space) = self.spaces.get(&hello.namespace) {
            if space.is_for(hello) {
                return Ok((Arc::clone(space), gone));
            }
            if space.has_seats() {
                return Err(other_shape(space, hello));
            }
            gone.extend(self.spaces.remove(&hello.namespace));
        }
        let fits = self.pool.as_ref().map_or(Ok(()), |pool| pool.check(hello.frame_bytes));
        if let Err(error) = fits {
            if self.spaces.values().any(|space| space.idle_since().is_none()) {
                return Err(error);
            }
            gone.extend(std::mem::take(&mut self.spaces).into_values());
            self.pool = None;
        }
        if self.spaces.len() >= MAX_NAMESPACES {
            let Some(idle) = self.idle().first().map(|space| space.hello.namespace) else {
                let message = format!(
                    "this kvloft server serves {MAX_NAMESPACES} namespaces, and takes no more; start another server for this one"
                );
                return Err(Error::new(ErrorKind::Busy, message));
            };
            gone.extend(self.spaces.remove(&idle));
        }
        let space = Arc::new(Space::new(hello));
        self.spaces.insert(hello.namespace, Arc::clone(&space));
        Ok((space, gone))
    }
}

impl Namespaces {
    /// A seat for the engine; `Busy` or `InvalidConfig` where there is none for its shape. `wake` is the pool's, `tell` for people.
    pub(crate) fn seat(
        &self,
        hello: &Hello,
        config: &ServerConfig,
        wake: impl Fn() + Send + Sync + 'static,
        tell: impl Fn(String),
    ) -> Result<Seat> {
        store_config(hello, config).check(OF_SERVER)?;
        let (space, gone, pool) = {
            let mut books = locked(&self.books);
            let (space, gone) = books.space(hello)?;
            let pool = if let Some(pool) = &books.pool {
                Arc::clone(pool)
            } else {
                let pool = Pool::create_over(Arc::clone(&self.disk), config.host_bytes, hello.frame_bytes, wake)?;
                if !config.numa.is_empty() {
                    tell(placed(&pool, hello.frame_bytes, &config.numa)); // before an engine touches it
                }
                Arc::clone(books.pool.insert(pool))
            };
            space.sit(); // keeps it from being closed meanwhile
            (space, gone, pool)
        };
        for space in gone {
            space.close(REPLACE_TIMEOUT);
        }
        match space.open(&pool, config) {
            Ok(store) => Ok(Seat { local: Local::of(store), space }),
            Err(error) => {
                let mut books = locked(&self.books);
                space.leave();
                if space.store().is_none() && !space.has_seats() {
                    books.spaces.remove(&hello.namespace);
                }
                Err(error)
            }
        }
    }

    /// All of them, in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<Space>> {
        locked(&self.books).spaces.values().cloned().collect()
    }

    /// Those whose names begin so, maybe none.
    pub(crate) fn all_of(&self, prefix: &str) -> Vec<Arc<Space>> {
        self.all().into_iter().filter(|space| hex(&space.hello.namespace).starts_with(prefix)).collect()
    }

    /// What they share; None before the first engine.
    #[cfg(test)]
    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        locked(&self.books).pool.clone()
    }

    /// Bytes of the arena and of a slab; None before the first engine.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        locked(&self.books).pool.as_ref().map(|pool| (pool.size_bytes(), pool.slab_bytes()))
    }

    /// Why a name does not do, with those that do.
    pub(crate) fn none_of(&self, what: &str) -> Error {
        let ids: Vec<_> = self.all().iter().map(|space| id(&space.hello.namespace)).collect();
        let message = if ids.is_empty() {
            format!("this kvloft server has {what}: engines bring them, so try again once one is connected")
        } else {
            format!("this kvloft server has {what}; say --namespace with one of its own: {}", ids.join(", "))
        };
        Error::new(ErrorKind::InvalidConfig, message)
    }

    /// Has stores give way to others, those first that are most above their share. Whether more is to be done at once.
    pub(crate) fn give_way(&self) -> bool {
        let mut stores: Vec<_> = self.all().iter().filter_map(|space| space.store().cloned()).collect();
        stores.sort_by_cached_key(|store| Reverse(store.num_slabs().1));
        stores.iter().any(|store| matches!(store.give_way(), Way::Gave | Way::Working))
    }

    /// Takes out those without engines that have no memory left; and one more where another has no room on disk, for what a closed
    /// one has there may be deleted.
    pub(crate) fn take_idle(&self) -> Vec<Arc<Space>> {
        let mut books = locked(&self.books);
        let mut is_short = books.pool.as_ref().is_some_and(|pool| pool.take_short_of_disk());
        let mut idle = books.idle();
        let num_slabs = |space: &Arc<Space>| space.store().map(|store| store.num_slabs().0);
        idle.retain(|space| num_slabs(space).is_some_and(|num| num == 0 || std::mem::take(&mut is_short)));
        for space in &idle {
            books.spaces.remove(&space.hello.namespace);
        }
        idle
    }

    /// Closes all until the timeout.
    pub(crate) fn close(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        for space in self.all() {
            space.close(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Has memory lie near the shards' GPUs; what a person should see of it.
fn placed(pool: &Pool, frame_bytes: u64, nodes: &[u32]) -> String {
    let names = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    match pool.place(frame_bytes, nodes) {
        Ok(1) => format!("host memory lies on NUMA node{} {names}", if nodes.len() == 1 { "" } else { "s" }),
        Ok(num) => format!("host memory lies on NUMA nodes {names} by shard, in {num} ranges"),
        Err(error) => format!("{error}; it lies where the system puts it"),
    }
}

fn other_shape(other: &Space, hello: &Hello) -> Error {
    let name = id(&hello.namespace);
    let message = format!(
        "engines of namespace {name} on this kvloft server have chunks of {} bytes in {} blocks, and this engine's have \
         {} in {}; give them the same settings, or start another server for it",
        other.hello.frame_bytes, other.hello.blocks_per_chunk, hello.frame_bytes, hello.blocks_per_chunk
    );
    Error::new(ErrorKind::Busy, message)
}
