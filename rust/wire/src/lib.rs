//! A store that many engines share: the messages, the server that owns it, and the client that is a `Session`.
//!
//! No byte of KV crosses the socket: workers map the arena, whose descriptor comes with the first answer. Everything here is
//! numbers and keys. It must not know Python, vLLM or what pages hold.

mod client;
pub mod protocol;
mod server;
mod settings;
mod socket;
mod threads;

pub use client::Remote;
pub use client::admin::{evict, forget, status};
pub use protocol::admin::{GivenUp, Whose};
pub use protocol::{EngineStatus, NamespaceStatus, Status};
pub use server::Server;
pub use server::counters::Counts;
pub use server::namespaces::MAX_NAMESPACES;
pub use settings::{GPU_SETTLE, RemoteConfig, ServerConfig};
