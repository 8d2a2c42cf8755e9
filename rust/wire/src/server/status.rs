//! Builds a server's status.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::protocol::admin::{EngineStatus, NamespaceStatus, Status};
use crate::server::namespace::Namespace;
use crate::server::shared_state::{DiskSpace, Peer, ServerState};
use crate::threads::locked;

/// Maximum number of tenants reported per namespace.
const MAX_TENANTS: usize = 16;

impl ServerState {
    pub(crate) fn status(&self) -> Status {
        let quarantined = self.quarantine.num_open();
        let (host_bytes, slab_bytes) = self.namespaces.memory().unwrap_or_default();
        let stats = [
            ("server_accepted", self.num_accepted.load(Ordering::Relaxed)),
            ("server_joined", self.num_joined.load(Ordering::Relaxed)),
            ("server_refused", self.num_refused.load(Ordering::Relaxed)),
            ("quarantined_reservations", quarantined.0 as u64),
            ("quarantined_leases", quarantined.1 as u64),
            ("server_host_bytes", self.config.host_bytes),
            ("server_disk_bytes", self.config.disk.as_ref().map_or(0, |disk| disk.cap_bytes)),
            ("server_disk_unused", self.disk_trouble().is_some().into()),
        ];
        let space = locked(&self.disk_space).clone().map(|DiskSpace { free_bytes, closed }| {
            let closed_bytes = self.namespaces.disk.bytes_closed(&closed);
            [("server_disk_free_bytes", free_bytes), ("server_disk_closed_bytes", closed_bytes)]
        });
        let stats = stats.into_iter().chain(space.into_iter().flatten());
        let stats = stats.map(|(name, value)| (name.to_owned(), value)).collect();
        let namespaces = self
            .namespaces
            .all()
            .iter()
            .map(|namespace| self.namespace_status(namespace))
            .collect();
        let settings = self.config.settings.iter().cloned().collect();
        let refusals = locked(&self.refusals).status(Instant::now());
        let disk_trouble = self.disk_trouble();
        Status { host_bytes, slab_bytes, stats, settings, namespaces, refusals, disk_trouble }
    }

    fn namespace_status(&self, namespace: &Arc<Namespace>) -> NamespaceStatus {
        let stats = namespace.store().map(|store| {
            let own = store.stats().into_iter().map(|(name, value)| (name.to_owned(), value));
            let percent = namespace
                .percent(&self.config)
                .map(|percent| ("share_percent".to_owned(), percent.into()));
            own.chain(namespace.counters.stats()).chain(percent).collect()
        });
        let peers = self.peers();
        let mut engines: Vec<_> =
            peers.values().filter_map(|peer| peer.status(namespace)).collect();
        drop(peers);
        engines.sort_by_key(|engine| (u64::MAX - engine.connected_ms, engine.pid));
        let tenants =
            namespace.store().map(|store| store.tenants(MAX_TENANTS).0).unwrap_or_default();
        NamespaceStatus {
            namespace: namespace.hello.namespace,
            description: namespace.hello.description.clone(),
            frame_sizes: namespace.hello.frame_sizes.all().to_vec(),
            num_slabs: namespace.store().map_or(0, |store| store.num_slabs().0),
            stats: stats.unwrap_or_default(),
            tenants,
            engines,
        }
    }
}

impl Peer {
    fn status(&self, of: &Arc<Namespace>) -> Option<EngineStatus> {
        let membership =
            self.membership.as_ref().filter(|membership| Arc::ptr_eq(&membership.namespace, of))?;
        let (num_reserved, num_leases) = membership.local.num_open();
        Some(EngineStatus {
            pid: self.pid,
            connected_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            num_reserved: num_reserved as u64,
            num_leases: num_leases as u64,
            counters: self.counters.stats(),
        })
    }
}
