//! Tenants: how much of each tier a `cache_salt` uses and may use, and for how long.
//!
//! | file | contents |
//! |---|---|
//! | `limits` | configured limits, and their values in pages and seconds |
//! | `table` | current usage of each tenant |
//! | `quota` | where a frame for a tenant's chunk may come from |
//! | `expiry` | expiry times of chunks |
//! | `sweeper` | thread that removes expired chunks and evicts chunks above a quota |

pub(crate) mod expiry;
pub(crate) mod limits;
pub(crate) mod quota;
pub(crate) mod sweeper;
pub(crate) mod table;
