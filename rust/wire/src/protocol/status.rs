//! What a server does, as people and engines are told it, and as it crosses. It must not know who asks.

use kvloft_core::store::Tenant;

use crate::protocol::codec::{Reader, Writer};
use crate::protocol::tenants::{tenant, write_tenant};
use crate::server::counters::Counts;

/// What a server does now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Bytes of the arena; 0 before the first engine.
    pub host_bytes: u64,
    /// Bytes of its slabs; the last one is longer.
    pub slab_bytes: u64,
    /// Of the server, over all namespaces.
    pub stats: Vec<(String, u64)>,
    /// What it was started with, for people.
    pub settings: Vec<(String, String)>,
    /// Open now, in the order of their names.
    pub namespaces: Vec<NamespaceStatus>,
}

impl Status {
    /// All that are connected.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        self.namespaces.iter().flat_map(|space| &space.engines)
    }
}

/// One namespace of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceStatus {
    /// Whose KV it is.
    pub namespace: [u8; 32],
    /// One line about it.
    pub description: String,
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// Slabs of the arena that it has.
    pub num_slabs: u32,
    /// Of its store.
    pub stats: Vec<(String, u64)>,
    /// Salts that have most, what has none among them; their tags do not tell them.
    pub tenants: Vec<Tenant>,
    /// Connected now.
    pub engines: Vec<EngineStatus>,
}

/// One connected engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStatus {
    /// Its process, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// Milliseconds since it said hello.
    pub connected_ms: u64,
    /// Reservations that it holds.
    pub num_reserved: u64,
    /// Read leases that it holds.
    pub num_leases: u64,
    /// What it asked for and got.
    pub counts: Counts,
}

pub(crate) fn write_stats(to: &mut Writer<'_>, stats: &[(String, u64)]) {
    to.count(stats.len());
    for (name, value) in stats {
        to.text(name);
        to.u64(*value);
    }
}

pub(crate) fn stats(from: &mut Reader<'_>) -> Option<Vec<(String, u64)>> {
    from.list(12, |from| Some((from.text()?, from.u64()?)))
}

pub(crate) fn write_status(to: &mut Writer<'_>, status: &Status) {
    to.u64(status.host_bytes);
    to.u64(status.slab_bytes);
    write_stats(to, &status.stats);
    to.count(status.settings.len());
    for (name, value) in &status.settings {
        to.text(name);
        to.text(value);
    }
    to.count(status.namespaces.len());
    for space in &status.namespaces {
        to.key(&space.namespace);
        to.text(&space.description);
        to.u64(space.frame_bytes);
        to.u32(space.num_slabs);
        write_stats(to, &space.stats);
        to.count(space.tenants.len());
        space.tenants.iter().for_each(|tenant| write_tenant(to, tenant));
        to.count(space.engines.len());
        for engine in &space.engines {
            to.u32(engine.pid);
            for number in [engine.connected_ms, engine.num_reserved, engine.num_leases].iter().chain(&engine.counts.0) {
                to.u64(*number);
            }
        }
    }
}

pub(crate) fn status(from: &mut Reader<'_>) -> Option<Status> {
    let (host_bytes, slab_bytes, stats) = (from.u64()?, from.u64()?, stats(from)?);
    let settings = from.list(8, |from| Some((from.text()?, from.text()?)))?;
    Some(Status { host_bytes, slab_bytes, stats, settings, namespaces: from.list(60, namespace_status)? })
}

fn namespace_status(from: &mut Reader<'_>) -> Option<NamespaceStatus> {
    let (namespace, description) = (from.key()?, from.text()?);
    let (frame_bytes, num_slabs, stats) = (from.u64()?, from.u32()?, stats(from)?);
    let tenants = from.list(21, tenant)?;
    let engines = from.list(84, |from| {
        let (pid, connected_ms, num_reserved, num_leases) = (from.u32()?, from.u64()?, from.u64()?, from.u64()?);
        let mut counts = Counts::default();
        for number in &mut counts.0 {
            *number = from.u64()?;
        }
        Some(EngineStatus { pid, connected_ms, num_reserved, num_leases, counts })
    })?;
    Some(NamespaceStatus { namespace, description, frame_bytes, num_slabs, stats, tenants, engines })
}
