//! A store that many engines share: the messages, the server that owns it, and the client that is a `Session`.
//!
//! No byte of KV crosses the socket: workers map the arena, whose descriptor comes with the first answer. Everything here is
//! numbers and keys. It must not know Python, vLLM or what pages hold.

mod batches;
mod bytes;
mod client;
mod connection;
mod known;
mod link;
mod listening;
pub mod message;
mod namespaces;
mod orders;
mod prefixes;
mod quarantine;
mod server;
mod socket;
mod tally;
mod tenants;
mod turns;

pub use client::{Remote, RemoteConfig};
pub use link::{forget, status};
pub use message::{EngineStatus, NamespaceStatus, Status};
pub use namespaces::MAX_NAMESPACES;
pub use orders::{GivenUp, Pinned, Whose, evict, pin};
pub use quarantine::Patience;
pub use server::{Server, ServerConfig};
pub use tally::Counts;
