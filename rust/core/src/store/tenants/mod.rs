//! Tenants: how much of each tier a `cache_salt` can use and for how long, and its current use.
//!
//! | file | contents |
//! |---|---|
//! | `limits` | configured limits, and the same as numbers of frames and seconds |
//! | `table` | what each tenant uses now |
//! | `quota` | where the frame or slot for a tenant's chunk may come from |
//! | `expiry` | when a chunk expires |
//! | `sweeper` | a thread that removes expired chunks and evicts what exceeds a lowered quota |

pub(crate) mod expiry;
pub(crate) mod limits;
pub(crate) mod quota;
pub(crate) mod sweeper;
pub(crate) mod table;
