//! `Store` and `ReadLease`: conversions only; the meaning is in `kvloft_core::store`.
//!
//! Python holds write leases by their ticket, so that plans and reports can carry numbers. Short calls keep the
//! interpreter: whoever holds the store's lock never waits for it. Long ones let it go.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::io::available_bytes;
use kvloft_core::key::ChunkKey;
use kvloft_core::store::{self, DiskSettings, SaveRange, StoreConfig, WriteLease};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::raise;
use crate::key::{KeyChain, digest};

/// (ticket, frame, key, `first_block`, `num_blocks`)
type ReservedRow<'py> = (u64, u32, Bound<'py, PyBytes>, u32, u32);
/// (frame, key, `first_block`, `num_blocks`, tier)
type LeasedRow<'py> = (u32, Bound<'py, PyBytes>, u32, u32, &'static str);

/// Host arena + optional disk tier + index, in this process.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Store {
    // Before the store, so that what is left aborts first.
    tickets: Mutex<HashMap<u64, WriteLease>>,
    inner: store::Store,
}

impl Store {
    fn tickets(&self) -> MutexGuard<'_, HashMap<u64, WriteLease>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leases of `tickets` that are still open.
    fn take(&self, tickets: &[u64]) -> Vec<WriteLease> {
        let mut open = self.tickets();
        tickets.iter().filter_map(|ticket| open.remove(ticket)).collect()
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        *, frame_bytes, host_bytes, namespace, blocks_per_chunk=1, eviction="lrfu", disk_path=None, disk_bytes=0,
        disk_threads=2, description="",
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        frame_bytes: u64,
        host_bytes: u64,
        namespace: &[u8],
        blocks_per_chunk: u32,
        eviction: &str,
        disk_path: Option<PathBuf>,
        disk_bytes: u64,
        disk_threads: u32,
        description: &str,
    ) -> PyResult<Self> {
        let disk = disk_path.map(|dir| DiskSettings {
            dir,
            cap_bytes: disk_bytes,
            num_threads: disk_threads,
            description: description.to_owned(),
        });
        let config = StoreConfig {
            frame_bytes,
            host_bytes,
            blocks_per_chunk,
            eviction: Eviction::parse(eviction).map_err(raise)?,
            available_bytes: available_bytes(),
            namespace: digest(namespace, "namespace")?,
            disk,
        };
        let inner = py.detach(|| store::Store::open(&config)).map_err(raise)?;
        Ok(Self { tickets: Mutex::default(), inner })
    }

    /// Path another process of this user may open.
    #[getter]
    fn arena_path(&self) -> &str {
        self.inner.arena_path()
    }

    #[getter]
    fn frame_bytes(&self) -> u64 {
        self.inner.frame_bytes()
    }

    #[getter]
    fn num_frames(&self) -> u32 {
        self.inner.num_frames()
    }

    /// (blocks in host, blocks in host or disk), each a count from position 0.
    fn lookup(&self, chain: &KeyChain) -> PyResult<(u32, u32)> {
        let found = self.inner.lookup(&*chain.lock()?);
        Ok((found.host_blocks, found.stored_blocks))
    }

    /// Pin the host part, start reading the disk part into host frames as far as they can be had.
    fn acquire(&self, chain: &KeyChain) -> PyResult<ReadLease> {
        Ok(ReadLease { inner: self.inner.acquire(&*chain.lock()?) })
    }

    /// Reserve frames for full chunks `[start, stop)` and a tail of `tail_blocks` behind them.
    #[pyo3(signature = (chain, start, stop, tail_blocks=0))]
    fn reserve<'py>(
        &self,
        py: Python<'py>,
        chain: &KeyChain,
        start: u32,
        stop: u32,
        tail_blocks: u32,
    ) -> PyResult<(Vec<ReservedRow<'py>>, u32)> {
        let range = SaveRange { start, stop, tail_blocks };
        let reserved = self.inner.reserve(&*chain.lock()?, range).map_err(raise)?;
        let rows = reserved.leases.iter().map(WriteLease::reservation);
        let rows =
            rows.map(|r| (r.ticket, r.frame.0, PyBytes::new(py, &r.key.0), r.first_block, r.num_blocks)).collect();
        self.tickets().extend(reserved.leases.into_iter().map(|lease| (lease.reservation().ticket, lease)));
        Ok((rows, reserved.num_dropped))
    }

    /// Make reserved chunks visible; returns how many did.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn commit(&self, tickets: Vec<u64>) -> u32 {
        self.inner.commit(self.take(&tickets))
    }

    /// Give reserved frames back.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn abort(&self, tickets: Vec<u64>) {
        drop(self.take(&tickets));
    }

    /// Forget chunks (and what hangs on them) in every tier; returns how many were dropped.
    fn discard(&self, keys: Vec<PyBackedKey>) -> u64 {
        let keys: Vec<_> = keys.into_iter().map(|key| key.0).collect();
        self.inner.discard(&keys)
    }

    /// Forget everything in every tier.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.inner.clear());
    }

    /// Counters and gauges; names as in `rust/core/src/store/stats.rs`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.inner.stats() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    /// What a person should see of the disk tier, once each.
    fn take_events(&self) -> Vec<String> {
        self.inner.take_events()
    }

    /// Wait until every visible host chunk that will go to disk is there; False at the deadline.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> bool {
        py.detach(|| self.inner.flush(timeout(timeout_s)))
    }

    /// Stop serving, write to disk what should be there until the timeout, give the disk directory up.
    #[pyo3(signature = (timeout_s=30.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) {
        py.detach(|| {
            let open = std::mem::take(&mut *self.tickets());
            drop(open);
            self.inner.close(timeout(timeout_s));
        });
    }

    fn __repr__(&self) -> String {
        format!("Store(num_frames={}, frame_bytes={})", self.inner.num_frames(), self.inner.frame_bytes())
    }
}

/// Seconds of any kind: negative ones and NaN are none, too many are for ever.
fn timeout(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// A chunk key out of 32 bytes.
struct PyBackedKey(ChunkKey);

impl<'py> FromPyObject<'_, 'py> for PyBackedKey {
    type Error = PyErr;
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        digest(object.extract::<&[u8]>()?, "key").map(|key| Self(ChunkKey(key)))
    }
}

/// Pins on the host part of a prefix; disk chunks behind it are being read in. Dropping it unpins.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct ReadLease {
    inner: store::ReadLease,
}

#[pymethods]
impl ReadLease {
    /// (blocks ready and pinned from position 0, blocks still being read).
    fn poll(&self) -> (u32, u32) {
        let progress = self.inner.poll();
        (progress.ready_blocks, progress.pending_blocks)
    }

    /// (frame, key, `first_block`, `num_blocks`, tier) of each ready chunk in order.
    fn frames<'py>(&self, py: Python<'py>) -> Vec<LeasedRow<'py>> {
        let frames = self.inner.frames().into_iter();
        frames.map(|f| (f.frame.0, PyBytes::new(py, &f.key.0), f.first_block, f.num_blocks, f.tier.as_str())).collect()
    }

    /// Unpin now.
    fn release(&self) {
        self.inner.release();
    }

    fn __repr__(&self) -> String {
        let progress = self.inner.poll();
        format!("ReadLease(ready_blocks={}, pending_blocks={})", progress.ready_blocks, progress.pending_blocks)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Store>()?;
    module.add_class::<ReadLease>()
}
