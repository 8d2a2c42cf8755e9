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
use crate::server::config::ServerConfig;
use crate::server::namespace::{Membership, Namespace, namespace_hex, namespace_id, store_config};

/// Most namespaces that are open at one time.
pub const MAX_NAMESPACES: usize = 64;
/// Longest wait for the disk of a namespace that makes room.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(3);
/// What sets the size of host memory, as its engines' logs call it.
const OF_SERVER: &str = "--host-size of this engine's kvloft server";

#[derive(Debug, Default)]
struct OpenNamespaces {
    /// What they share, once there is one.
    pool: Option<Arc<Pool>>,
    namespaces: BTreeMap<[u8; 32], Arc<Namespace>>,
}

/// All of a server.
#[derive(Debug)]
pub(crate) struct Namespaces {
    open: Mutex<OpenNamespaces>,
    /// Their disk directory.
    pub(crate) disk: Arc<DiskRoot>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self { open: Mutex::default(), disk: DiskRoot::shared() }
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

impl OpenNamespaces {
    /// Those that may be closed, the one that is idle longest first.
    fn idle(&self) -> Vec<Arc<Namespace>> {
        let since = |namespace: &Arc<Namespace>| namespace.idle_since().map(|since| (since, Arc::clone(namespace)));
        let mut idle: Vec<_> = self.namespaces.values().filter_map(since).collect();
        idle.sort_by_key(|(since, _)| *since);
        idle.into_iter().map(|(_, namespace)| namespace).collect()
    }

    /// The namespace of an engine, and those that have to be closed for it; `Busy` where they have engines.
    fn namespace(&mut self, hello: &Hello) -> Result<(Arc<Namespace>, Vec<Arc<Namespace>>)> {
        let mut gone = Vec::new();
        if let Some(namespace) = self.namespaces.get(&hello.namespace) {
            if namespace.is_for(hello) {
                return Ok((Arc::clone(namespace), gone));
            }
            if namespace.has_engines() {
                return Err(shape_conflict(namespace, hello));
            }
            gone.extend(self.namespaces.remove(&hello.namespace));
        }
        let fits = self.pool.as_ref().map_or(Ok(()), |pool| pool.check(hello.frame_bytes));
        if let Err(error) = fits {
            if self.namespaces.values().any(|namespace| namespace.idle_since().is_none()) {
                return Err(error);
            }
            gone.extend(std::mem::take(&mut self.namespaces).into_values());
            self.pool = None;
        }
        if self.namespaces.len() >= MAX_NAMESPACES {
            let Some(idle) = self.idle().first().map(|namespace| namespace.hello.namespace) else {
                let message = format!(
                    "this kvloft server serves {MAX_NAMESPACES} namespaces, and takes no more; start another server for this one"
                );
                return Err(Error::new(ErrorKind::Busy, message));
            };
            gone.extend(self.namespaces.remove(&idle));
        }
        let namespace = Arc::new(Namespace::new(hello));
        self.namespaces.insert(hello.namespace, Arc::clone(&namespace));
        Ok((namespace, gone))
    }
}

impl Namespaces {
    /// A membership for the engine; `Busy` or `InvalidConfig` where there is none for its shape. `wake` is the pool's, `tell` for people.
    pub(crate) fn join(
        &self,
        hello: &Hello,
        config: &ServerConfig,
        wake: impl Fn() + Send + Sync + 'static,
        tell: impl Fn(String),
    ) -> Result<Membership> {
        store_config(hello, config).check(OF_SERVER)?;
        let (namespace, gone, pool) = {
            let mut open = locked(&self.open);
            let (namespace, gone) = open.namespace(hello)?;
            let pool = if let Some(pool) = &open.pool {
                Arc::clone(pool)
            } else {
                let pool = Pool::create_over(Arc::clone(&self.disk), config.host_bytes, hello.frame_bytes, wake)?;
                if !config.numa.is_empty() {
                    tell(place_memory(&pool, hello.frame_bytes, &config.numa)); // before an engine touches it
                }
                Arc::clone(open.pool.insert(pool))
            };
            namespace.add_engine(); // keeps it from being closed meanwhile
            (namespace, gone, pool)
        };
        for namespace in gone {
            namespace.close(REPLACE_TIMEOUT);
        }
        match namespace.open(&pool, config) {
            Ok(store) => Ok(Membership { local: Local::of(store), namespace }),
            Err(error) => {
                let mut open = locked(&self.open);
                namespace.leave();
                if namespace.store().is_none() && !namespace.has_engines() {
                    open.namespaces.remove(&hello.namespace);
                }
                Err(error)
            }
        }
    }

    /// All of them, in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<Namespace>> {
        locked(&self.open).namespaces.values().cloned().collect()
    }

    /// Those whose names begin so, maybe none.
    pub(crate) fn matching(&self, prefix: &str) -> Vec<Arc<Namespace>> {
        self.all()
            .into_iter()
            .filter(|namespace| namespace_hex(&namespace.hello.namespace).starts_with(prefix))
            .collect()
    }

    /// What they share; None before the first engine.
    #[cfg(test)]
    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        locked(&self.open).pool.clone()
    }

    /// Bytes of the arena and of a slab; None before the first engine.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        locked(&self.open).pool.as_ref().map(|pool| (pool.size_bytes(), pool.slab_bytes()))
    }

    /// Why a name does not do, with those that do.
    pub(crate) fn no_namespace(&self, what: &str) -> Error {
        let ids: Vec<_> = self.all().iter().map(|namespace| namespace_id(&namespace.hello.namespace)).collect();
        let message = if ids.is_empty() {
            format!("this kvloft server has {what}: engines bring them, so try again once one is connected")
        } else {
            format!("this kvloft server has {what}; say --namespace with one of its own: {}", ids.join(", "))
        };
        Error::new(ErrorKind::InvalidConfig, message)
    }

    /// Has stores give way to others, those first that are most above their share. Whether more is to be done at once.
    pub(crate) fn release_slabs(&self) -> bool {
        let mut stores: Vec<_> = self.all().iter().filter_map(|namespace| namespace.store().cloned()).collect();
        stores.sort_by_cached_key(|store| Reverse(store.num_slabs().1));
        stores.iter().any(|store| matches!(store.give_way(), Way::Gave | Way::Working))
    }

    /// Takes out those without engines that have no memory left; and one more where another has no room on disk, for what a closed
    /// one has there may be deleted.
    pub(crate) fn remove_idle(&self) -> Vec<Arc<Namespace>> {
        let mut open = locked(&self.open);
        let mut is_short = open.pool.as_ref().is_some_and(|pool| pool.take_short_of_disk());
        let mut idle = open.idle();
        let num_slabs = |namespace: &Arc<Namespace>| namespace.store().map(|store| store.num_slabs().0);
        idle.retain(|namespace| num_slabs(namespace).is_some_and(|num| num == 0 || std::mem::take(&mut is_short)));
        for namespace in &idle {
            open.namespaces.remove(&namespace.hello.namespace);
        }
        idle
    }

    /// Closes all until the timeout.
    pub(crate) fn close(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        for namespace in self.all() {
            namespace.close(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Has memory lie near the shards' GPUs; what a person should see of it.
fn place_memory(pool: &Pool, frame_bytes: u64, nodes: &[u32]) -> String {
    let names = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    match pool.place(frame_bytes, nodes) {
        Ok(1) => format!("host memory lies on NUMA node{} {names}", if nodes.len() == 1 { "" } else { "s" }),
        Ok(num) => format!("host memory lies on NUMA nodes {names} by shard, in {num} ranges"),
        Err(error) => format!("{error}; it lies where the system puts it"),
    }
}

fn shape_conflict(other: &Namespace, hello: &Hello) -> Error {
    let name = namespace_id(&hello.namespace);
    let message = format!(
        "engines of namespace {name} on this kvloft server have chunks of {} bytes in {} blocks, and this engine's have \
         {} in {}; give them the same settings, or start another server for it",
        other.hello.frame_bytes, other.hello.blocks_per_chunk, hello.frame_bytes, hello.blocks_per_chunk
    );
    Error::new(ErrorKind::Busy, message)
}
