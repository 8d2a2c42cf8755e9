//! A store that many engines share: the messages, the server that owns it, and the client that is a `Session`.
//!
//! No byte of KV crosses the socket: workers map the arena, whose descriptor comes with the first answer. Everything here is
//! numbers and keys. It must not know Python, vLLM or what pages hold.

mod client;
pub mod protocol;
mod server;
mod socket;
mod threads;

pub use client::Client;
pub use client::admin::{clear, evict, status};
pub use client::config::ClientConfig;
pub use protocol::admin::{EvictReport, NamespaceStatus, Status};
pub use server::Server;
pub use server::config::{GPU_SETTLE, ServerConfig};
pub use server::namespaces::MAX_NAMESPACES;
