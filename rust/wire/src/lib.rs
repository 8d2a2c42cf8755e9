//! Shares a store between engines over a Unix socket: the protocol, the server that owns the store,
//! and the client, which implements `Session`.
//!
//! Only keys and numbers cross the socket, never KV bytes: workers map the arena, and the arena's
//! descriptor arrives with the first response. This crate is independent of Python, vLLM and the
//! KV layout.

mod client;
pub mod protocol;
mod server;
mod socket;
mod threads;

pub use client::Client;
pub use client::admin::{clear, evict, status};
pub use client::handshake::ClientConfig;
pub use protocol::admin::{EvictReport, NamespaceStatus, Status};
pub use server::Server;
pub use server::config::ServerConfig;
pub use server::namespace::unix_s;
pub use server::namespaces::MAX_NAMESPACES;
