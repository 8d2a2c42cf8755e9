//! The store finds, pins, saves and evicts chunks in host memory and on disk, behind one lock.
//!
//! No method blocks on disk I/O unless its documentation says so. If a thread panics while holding
//! the lock, all later lookups miss.
//!
//! Files, roughly in dependency order:
//!
//! | file | contents |
//! |---|---|
//! | `config`, `stats` | settings; counters and gauges |
//! | `change_log` | keys of chunks added to or removed from a tier |
//! | `tenants/` | limits, quotas, expiry and usage per `cache_salt` |
//! | `state` | `State`: all data guarded by the lock |
//! | `host/`, `disk/` | chunk states in host memory and on disk |
//! | `entries` | add, detach and free index entries; remove chunk trees |
//! | `lookup`, `load`, `save` | find a prefix; pin and read it; reserve, commit and abort frames |
//! | `locked` | the lock, its condition variables and the clock; leases, which are guards |
//! | `open` | [`Store`]: open, flush and close |
//! | `api`, `evict`, `listener` | the other [`Store`] methods |

mod api;
mod change_log;
mod config;
mod disk;
mod entries;
mod evict;
mod host;
mod listener;
mod load;
mod locked;
mod lookup;
mod open;
mod save;
mod state;
mod stats;
mod tenants;
#[cfg(any(test, feature = "testing"))]
mod tests;

pub use api::Tenant;
pub use change_log::{Changes, Tiers};
pub use config::{ArenaInfo, DiskSettings, LifelineInfo, StoreConfig};
pub use evict::{Evict, remove_closed};
pub use host::emptying::SlabRelease;
pub use listener::Listener;
pub use load::{LeasedFrame, Progress, TierName};
pub use locked::{Clock, Opener, ReadLease, WriteLease};
pub use lookup::{Anchors, Lookup, Prefix};
pub use open::Store;
pub use save::{Reservation, Reserved, SaveRequest};
pub use stats::Evicted;
pub use tenants::expiry::remove_expired;
pub use tenants::limits::{Limits, Quota, TenantLimits};
