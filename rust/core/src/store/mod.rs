//! The store: lookup, lease, reserve, commit.
//!
//! One index over the tiers behind one lock. No call waits for a disk but those that say so. A store that failed inside
//! (a panic under the lock) answers with misses from then on. It must not know Python, tokens' meaning or what pages hold.
//!
//! From the ground up, each using only what is before it: `state` is all that the lock guards (with `books`, `owners`, `stats`,
//! `waiters`, `watch`); `quota` and `ages` say what an owner may have; `host`, `disk` and `entries` are the small moves;
//! `filling`, `frames`, `slots`, `forget`, `recover` and `removal` are made of them; then `lookup`, `load`, `save` and `jobs`; `opening` waits
//! for a disk; `inner` is the lock, `lease`, `tend` and `threads` take it; `open` is a [`Store`], and `calls`, `changes`, `evict`,
//! `share` and `tenants` are what it is asked.

mod ages;
mod books;
mod breaker;
mod calls;
mod changes;
mod config;
mod disk;
mod entries;
mod evict;
mod filling;
mod forget;
mod frames;
mod host;
mod inner;
mod jobs;
mod lease;
mod limits;
mod load;
mod lookup;
mod open;
mod opening;
mod owners;
mod quota;
mod recover;
mod removal;
mod save;
mod share;
mod shares;
mod slots;
mod state;
mod stats;
mod tenants;
mod tend;
#[cfg(any(test, feature = "faults"))]
mod tests;
mod threads;
mod waiters;
mod watch;

pub use ages::erase_expired;
pub use calls::{Lookup, Reserved};
pub use changes::Listener;
pub use config::{ArenaInfo, DiskSettings, LifelineInfo, StoreConfig};
pub use evict::{Evict, erase_closed};
pub use inner::Clock;
pub use lease::{ReadLease, WriteLease};
pub use limits::{Limits, Quota, TenantLimits};
pub use load::{LeasedFrame, Progress, TierName};
pub use lookup::{Anchors, Prefix};
pub use open::Store;
pub use opening::Opener;
pub use save::{Got, Reservation, ToSave};
pub use share::Way;
pub use stats::Evicted;
pub use tenants::Tenant;
pub use watch::{Changes, Tiers};
