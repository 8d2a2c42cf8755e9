//! The store's disk side: decides which chunks to read, write and free, and handles disk failures.
//!
//! All decisions are made under the store's lock. Only `threads` does I/O, and only after releasing
//! the lock. Each file imports only from files above it in this table:
//!
//! | file | contents |
//! |---|---|
//! | `breaker` | circuit breaker; pure state |
//! | `time_shares` | shares of disk time for reads and writes; pure state |
//! | `work` | disk tier state, guarded by the lock: queues, jobs in flight, breakers |
//! | `transitions` | change a chunk's state and everything that depends on it |
//! | `slots` | pick the chunk to evict when another chunk needs a slot |
//! | `reopen` | index an opened tier's chunks; drop them if the tier's directory is removed |
//! | `jobs` | pick the next read, write or free, and apply its result |
//! | `threads` | open the tier and run the jobs |

pub(crate) mod breaker;
pub(crate) mod jobs;
pub(crate) mod reopen;
pub(crate) mod slots;
pub(crate) mod threads;
pub(crate) mod time_shares;
pub(crate) mod transitions;
pub(crate) mod work;
