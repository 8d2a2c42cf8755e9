//! The extension module `kvloft._core`, which only converts values between Python and
//! `kvloft_core`.
#![expect(clippy::needless_pass_by_value, reason = "pyo3 and map_err pass arguments by value")]

mod arena;
mod batch;
mod disk;
mod error;
mod groups;
mod key;
mod lease;
mod server;
mod session;
mod settings;
mod tokens;

#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::{
        arena::{Arena, prefer_numa_node},
        batch::ChunkBatch,
        disk::{DiskVerify, disk_inspect},
        key::{KeyChain, namespace_digest, root_key},
        lease::ReadLease,
        server::{Server, available_memory, server_clear, server_evict, server_status},
        session::Session,
        tokens::first_of_each,
    };
    #[pymodule_export]
    const KEY_SCHEMA: u32 = kvloft_core::key::KEY_SCHEMA;
    #[pymodule_export]
    const TRAILER_BYTES: usize = kvloft_core::io::TRAILER_BYTES;
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    const REVISION: &str = env!("KVLOFT_REVISION");
}
