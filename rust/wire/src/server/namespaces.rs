//! The open namespaces of a server, and the memory and disk directory they share.
//!
//! The memory is a single arena, which is allocated when the first namespace is opened. A namespace
//! without engines remains open in case engines reconnect, until other namespaces have taken all of
//! its memory.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvloft_core::key::{namespace_hex, namespace_id};
use kvloft_core::pool::Pool;
use kvloft_core::session::Local;
use kvloft_core::store::{SlabRelease, StoreConfig};
use kvloft_core::tier::disk::DiskRoot;
use kvloft_core::{Error, ErrorKind, Result};

use crate::protocol::Hello;
use crate::server::config::ServerConfig;
use crate::server::namespace::{Membership, Namespace, store_config};
use crate::threads::locked;

/// Maximum number of open namespaces.
pub const MAX_NAMESPACES: usize = 64;
/// Timeout for disk writes when a namespace is closed to make room for another.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(3);
/// Name of the host memory setting in errors sent to engines.
const HOST_SIZE_SETTING: &str = "--host-size of this engine's kvloft server";

#[derive(Debug, Default)]
struct OpenNamespaces {
    /// None until the first engine connects.
    pool: Option<Arc<Pool>>,
    namespaces: BTreeMap<[u8; 32], Arc<Namespace>>,
}

#[derive(Debug)]
pub(crate) struct Namespaces {
    open: Mutex<OpenNamespaces>,
    /// The disk directory shared by all namespaces.
    pub(crate) disk: Arc<DiskRoot>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self { open: Mutex::default(), disk: DiskRoot::shared() }
    }
}

/// Validates the configured shares. Returns `InvalidConfig` if a share is not between 1 and 100
/// percent, the sum exceeds 100 percent, or two shares match the same namespace.
pub(crate) fn check_shares(shares: &[(String, u32)]) -> Result<()> {
    let mut names: Vec<_> = shares.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some([name, longer]) = names.windows(2).find(|pair| pair[1].starts_with(pair[0])) {
        let message =
            format!("--share: two shares overlap: {name} covers {longer}; use more digits");
        return Err(Error::invalid(message));
    }
    let sum: u64 = shares.iter().map(|(_, percent)| u64::from(*percent)).sum();
    if sum <= 100 && shares.iter().all(|(_, percent)| *percent > 0) {
        return Ok(());
    }
    let message = format!(
        "--share: shares must be 1 to 100 percent each and add up to at most 100, not {sum}"
    );
    Err(Error::invalid(message))
}

impl OpenNamespaces {
    /// Returns the namespaces that have been idle for at least `min`, longest idle first.
    fn idle(&self, min: Duration) -> Vec<Arc<Namespace>> {
        let since = |namespace: &Arc<Namespace>| {
            let since = namespace.idle_since().filter(|since| since.elapsed() >= min)?;
            Some((since, Arc::clone(namespace)))
        };
        let mut idle: Vec<_> = self.namespaces.values().filter_map(since).collect();
        idle.sort_by_key(|(since, _)| *since);
        idle.into_iter().map(|(_, namespace)| namespace).collect()
    }

    /// Returns an engine's namespace, and the namespaces to close before opening it. Returns `Busy`
    /// or `InvalidConfig` if a namespace that would have to be closed is not idle.
    fn namespace(&mut self, hello: &Hello) -> Result<(Arc<Namespace>, Vec<Arc<Namespace>>)> {
        if let Some(namespace) = self.namespaces.get(&hello.namespace) {
            if namespace.is_for(hello) {
                return Ok((Arc::clone(namespace), Vec::new()));
            }
            if namespace.idle_since().is_none() {
                return Err(shape_conflict(namespace, hello));
            }
        }
        let mut gone = Vec::new();
        let fits = self.pool.as_ref().map_or(Ok(()), |pool| pool.check(&hello.frame_sizes));
        if let Err(error) = fits {
            if self.namespaces.values().any(|namespace| namespace.idle_since().is_none()) {
                return Err(error);
            }
            gone.extend(std::mem::take(&mut self.namespaces).into_values());
            self.pool = None;
        }
        gone.extend(self.namespaces.remove(&hello.namespace));
        if self.namespaces.len() >= MAX_NAMESPACES {
            let Some(idle) =
                self.idle(Duration::ZERO).first().map(|namespace| namespace.hello.namespace)
            else {
                let message = format!(
                    "this kvloft server has reached its limit of {MAX_NAMESPACES} namespaces; \
                     start another server"
                );
                return Err(Error::new(ErrorKind::Busy, message));
            };
            gone.extend(self.namespaces.remove(&idle));
        }
        let namespace = Arc::new(Namespace::new(hello));
        self.namespaces.insert(hello.namespace, Arc::clone(&namespace));
        Ok((namespace, gone))
    }

    fn pool(&mut self, create: impl FnOnce() -> Result<Arc<Pool>>) -> Result<Arc<Pool>> {
        let pool = self.pool.take().map_or_else(create, Ok)?;
        Ok(Arc::clone(self.pool.insert(pool)))
    }
}

impl Namespaces {
    /// Adds an engine to its namespace. Returns `Busy` or `InvalidConfig` if the engine's frame
    /// sizes do not fit the arena or the server has too many namespaces. The pool calls `wake` when
    /// a namespace needs slabs.
    pub(crate) fn join(
        &self,
        hello: &Hello,
        config: &ServerConfig,
        wake: impl Fn() + Send + Sync + 'static,
        log: impl Fn(String),
    ) -> Result<Membership> {
        let available_bytes = (config.available_bytes)();
        let (namespace, gone, pool) = {
            let mut open = locked(&self.open);
            // Once allocated, the arena no longer counts as available memory.
            let available_bytes = available_bytes.filter(|_| open.pool.is_none());
            StoreConfig { available_bytes, ..store_config(hello, config) }
                .check(HOST_SIZE_SETTING)?;
            let (namespace, gone) = open.namespace(hello)?;
            let pool = open.pool(|| {
                let (root, sizes) = (Arc::clone(&self.disk), hello.frame_sizes.clone());
                let pool = Pool::create(root, config.host_bytes, sizes, wake)?;
                if !config.numa.is_empty() {
                    // Place the memory before an engine first writes to it.
                    log(place_memory(&pool, hello.frame_sizes.largest(), &config.numa));
                }
                Ok(pool)
            });
            if pool.is_ok() {
                namespace.add_engine(); // keeps the namespace open until its store is open
            } else {
                open.namespaces.remove(&hello.namespace);
            }
            (namespace, gone, pool)
        };
        for namespace in gone {
            namespace.close(REPLACE_TIMEOUT);
        }
        let pool = pool?;
        match namespace.open(&pool, config) {
            Ok(store) => Ok(Membership { local: Local::of(store), namespace }),
            Err(error) => {
                let mut open = locked(&self.open);
                namespace.remove_engine();
                if namespace.store().is_none() && !namespace.has_engines() {
                    open.namespaces.remove(&hello.namespace);
                }
                Err(error)
            }
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Namespace>> {
        locked(&self.open).namespaces.values().cloned().collect()
    }

    /// Returns the open namespaces whose hex digits start with `prefix`.
    pub(crate) fn matching(&self, prefix: &str) -> Vec<Arc<Namespace>> {
        self.all()
            .into_iter()
            .filter(|namespace| namespace_hex(&namespace.hello.namespace).starts_with(prefix))
            .collect()
    }

    /// Returns the shared pool, or None before the first engine connects.
    #[cfg(test)]
    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        locked(&self.open).pool.clone()
    }

    /// Returns the arena size and slab size in bytes, or None before the first engine connects.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        locked(&self.open).pool.as_ref().map(|pool| (pool.size_bytes(), pool.slab_bytes()))
    }

    /// Returns the error for a prefix that matches no namespace.
    pub(crate) fn no_such_namespace(&self, prefix: &str) -> Error {
        let ids: Vec<_> = self.all().iter().map(|namespace| namespace.id()).collect();
        let message = if ids.is_empty() {
            format!("no namespace id starts with {prefix}; retry once an engine has connected")
        } else {
            format!(
                "no namespace id starts with {prefix}; use --namespace with one of: {}",
                ids.join(", ")
            )
        };
        Error::invalid(message)
    }

    /// Releases slabs that other namespaces need, starting with the namespace that exceeds its
    /// share by the most. Returns true if this method should be called again immediately.
    pub(crate) fn release_slabs(&self) -> bool {
        let mut stores: Vec<_> =
            self.all().iter().filter_map(|namespace| namespace.store().cloned()).collect();
        stores.sort_by_cached_key(|store| Reverse(store.num_slabs().1));
        stores.iter().any(|store| {
            matches!(store.release_slab(), SlabRelease::Released | SlabRelease::InProgress)
        })
    }

    /// Removes and returns namespaces that have no memory and have been idle for at least `grace`.
    /// If a namespace needs disk space, also removes an idle namespace that has memory, because the
    /// files of a closed namespace can be deleted.
    pub(crate) fn remove_idle(&self, grace: Duration) -> Vec<Arc<Namespace>> {
        let mut open = locked(&self.open);
        let mut is_short = self.disk.take_short();
        let mut idle = open.idle(grace);
        let num_slabs =
            |namespace: &Arc<Namespace>| namespace.store().map(|store| store.num_slabs().0);
        idle.retain(|namespace| {
            num_slabs(namespace).is_some_and(|num| num == 0 || std::mem::take(&mut is_short))
        });
        for namespace in &idle {
            open.namespaces.remove(&namespace.hello.namespace);
        }
        idle
    }

    pub(crate) fn close(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        for namespace in self.all() {
            namespace.close(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Places memory on the NUMA nodes of the shards' GPUs. Returns the line to log.
fn place_memory(pool: &Pool, frame_bytes: u64, nodes: &[u32]) -> String {
    let names = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    match pool.place(frame_bytes, nodes) {
        Ok(1) => format!(
            "host memory is on NUMA node{} {names}",
            if nodes.len() == 1 { "" } else { "s" }
        ),
        Ok(num) => format!("host memory is on NUMA nodes {names}, one per shard, in {num} ranges"),
        Err(error) => format!("{error}; leaving NUMA placement to the kernel"),
    }
}

fn shape_conflict(other: &Namespace, hello: &Hello) -> Error {
    let name = namespace_id(&hello.namespace);
    let message = format!(
        "engines in namespace {name} on this kvloft server use chunk sizes of {:?} bytes, but this \
         engine uses {:?}; use the same settings for all engines in this namespace, or start \
         another server",
        other.hello.frame_sizes.all(),
        hello.frame_sizes.all()
    );
    Error::new(ErrorKind::Busy, message)
}
