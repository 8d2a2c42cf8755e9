//! A store that many engines share: the messages, the server that owns it, and the client that is a `Session`.
//!
//! No byte of KV crosses the socket: workers map the arena, whose descriptor comes with the first answer. Everything here is
//! numbers and keys. It must not know Python, vLLM or what pages hold.

mod answer;
mod asking;
mod batches;
mod bytes;
mod client;
mod connection;
mod engine;
mod found;
mod holding;
mod known;
mod late;
mod lifeline;
mod link;
mod listening;
pub mod message;
mod namespaces;
mod obeying;
mod orders;
mod place;
mod prefixes;
mod quarantine;
mod request;
mod room;
mod server;
mod session;
mod settings;
mod shared;
mod socket;
mod space;
mod status;
mod tally;
mod tenants;
mod threads;
mod turns;
mod upkeep;

pub use asking::{evict, forget, status};
pub use client::Remote;
pub use message::{EngineStatus, NamespaceStatus, Status};
pub use namespaces::MAX_NAMESPACES;
pub use orders::{GivenUp, Whose};
pub use server::Server;
pub use settings::{GPU_SETTLE, RemoteConfig, ServerConfig};
pub use tally::Counts;
