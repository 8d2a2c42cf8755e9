//! Python bindings for `kvloft_core::session`.
//!
//! Short calls stay attached to the interpreter, which is safe because no holder of a session lock
//! ever waits for the interpreter. Long calls detach.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use kvloft_core::chunk_batch;
use kvloft_core::engine::{EngineSession, Group, SaveRow};
use kvloft_core::evict::Eviction;
use kvloft_core::io::{FrameSizes, available_bytes};
use kvloft_core::key;
use kvloft_core::session::{self, Local};
use kvloft_core::store::{Changes, Lookup, StoreConfig};
use kvloft_wire::{Client, ClientConfig, unix_s};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyTuple};

use crate::batch::ChunkBatch;
use crate::error::raise;
use crate::groups::{PyGroup, append_saved_blocks};
use crate::key::{KeyBytes, KeyChain, digest};
use crate::lease::ReadLease;
use crate::settings::{PySizes, PyTenantLimits, disk_settings, tenant_limits, timeout};
use crate::tokens::{append_token_ids, block_ids, number};

/// An engine's access to a store. Tracks the engine's in-flight loads and saves.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Session {
    inner: Arc<EngineSession>,
    sizes: FrameSizes,
}

impl Session {
    fn over(
        session: Box<dyn session::Session>,
        num_ranks: u32,
        groups: Option<Vec<PyGroup>>,
        sizes: FrameSizes,
    ) -> PyResult<Self> {
        let groups = groups.map_or_else(
            || vec![Group::ONLY],
            |groups| groups.into_iter().map(|group| group.0).collect(),
        );
        let inner = EngineSession::new(session, num_ranks, groups).map_err(raise)?;
        Ok(Self { inner: Arc::new(inner), sizes })
    }
}

/// Initial capacity for each `reserve` row, in tokens. A generating request rarely completes more
/// than one block per step.
const ROW_TOKENS: usize = 32;
/// Initial capacity for each `reserve` row, in blocks.
const ROW_BLOCKS: usize = 8;

/// A row passed to `reserve`.
struct Due<'py> {
    chain: Bound<'py, KeyChain>,
    token_ids: Bound<'py, PyAny>,
    num_tokens: u32,
    units: Range<u32>,
    tables: Bound<'py, PyAny>,
}

impl<'py> FromPyObject<'_, 'py> for Due<'py> {
    type Error = PyErr;
    fn extract(row: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let row = row.cast::<PyTuple>()?;
        let at = |nth| row.get_borrowed_item(nth);
        let [num_tokens, start, stop] = [2, 3, 4].map(|nth| at(nth).and_then(|item| number(item)));
        Ok(Self {
            chain: at(0)?.cast::<KeyChain>()?.to_owned(),
            token_ids: at(1)?.to_owned(),
            num_tokens: num_tokens?,
            units: start?..stop?,
            tables: at(5)?.to_owned(),
        })
    }
}

/// Returns the batch, or None if it is empty.
fn some(inner: Arc<chunk_batch::ChunkBatch>) -> Option<ChunkBatch> {
    (!inner.is_empty()).then_some(ChunkBatch { inner })
}

/// A chunk's key and tier bit mask.
type TierRow<'py> = (Bound<'py, PyBytes>, u8);

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (
        *, frame_bytes, host_bytes, namespace, num_ranks=1, groups=None, eviction="adaptive", disk_path=None, disk_bytes=0,
        disk_threads=2, description="", limits=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        frame_bytes: PySizes,
        host_bytes: u64,
        namespace: &[u8],
        num_ranks: u32,
        groups: Option<Vec<PyGroup>>,
        eviction: &str,
        disk_path: Option<PathBuf>,
        disk_bytes: u64,
        disk_threads: u32,
        description: &str,
        limits: Option<PyTenantLimits>,
    ) -> PyResult<Self> {
        let sizes = FrameSizes::from(frame_bytes);
        let disk = disk_settings(disk_path, disk_bytes, disk_threads, description);
        let config = StoreConfig {
            frame_sizes: sizes.clone(),
            host_bytes,
            eviction: Eviction::parse(eviction).map_err(raise)?,
            available_bytes: available_bytes(),
            namespace: digest(namespace, "namespace")?,
            disk,
            now_s: unix_s(),
            limits: tenant_limits(limits).map_err(raise)?,
        };
        let local = py.detach(|| Local::open(&config)).map_err(raise)?;
        Self::over(Box::new(local), num_ranks, groups, sizes)
    }

    /// Connect to the store on the server at `socket`. Each call waits at most `timeout_s` seconds.
    #[staticmethod]
    #[pyo3(signature = (socket, *, frame_bytes, namespace, timeout_s, num_ranks=1, groups=None, description=""))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        frame_bytes: PySizes,
        namespace: &[u8],
        timeout_s: f64,
        num_ranks: u32,
        groups: Option<Vec<PyGroup>>,
        description: &str,
    ) -> PyResult<Self> {
        let sizes = FrameSizes::from(frame_bytes);
        let config = ClientConfig {
            socket,
            deadline: timeout(timeout_s),
            namespace: digest(namespace, "namespace")?,
            frame_sizes: sizes.clone(),
            description: description.to_owned(),
        };
        let remote = py.detach(|| Client::open(config)).map_err(raise)?;
        Self::over(Box::new(remote), num_ranks, groups, sizes)
    }

    /// Path at which this user's other processes can open the arena. Empty if there is no store.
    #[getter]
    fn arena_path(&self) -> String {
        self.inner.session().arena().map(|arena| arena.path).unwrap_or_default()
    }

    /// Number that identifies the arena's memory, or 0 if there is no store.
    #[getter]
    fn arena_id(&self) -> u64 {
        self.inner.session().arena().map_or(0, |arena| arena.id)
    }

    /// Path at which workers open the lifeline, and the lifeline's inode. None if the store is
    /// embedded or there is no store.
    #[getter]
    fn lifeline(&self) -> Option<(String, u64)> {
        self.inner.session().arena()?.lifeline.map(|lifeline| (lifeline.path, lifeline.id))
    }

    /// Frame size of each size class, in bytes.
    #[getter]
    fn frame_sizes(&self) -> Vec<u64> {
        self.sizes.all().to_vec()
    }

    /// Arena size and slab size, in bytes. Both are 0 if there is no store.
    #[getter]
    fn arena_sizes(&self) -> (u64, u64) {
        let arena = self.inner.session().arena();
        arena.map_or((0, 0), |arena| (arena.size_bytes, arena.slab_bytes))
    }

    /// Switch to a new store if the old store is gone and a new store is available. Return True if
    /// the session switched. The old store's leases and reservations become invalid.
    fn renew(&self) -> bool {
        self.inner.session().renew()
    }

    /// True if the last reservation got no response in time.
    #[getter]
    fn is_save_late(&self) -> bool {
        self.inner.session().is_save_late()
    }

    /// Number of saves that at least one rank has not reported yet.
    #[getter]
    fn num_in_flight(&self) -> usize {
        self.inner.num_in_flight()
    }

    /// Return (number of leading units in host memory, number of leading units in any tier),
    /// counting only units that are stored in every full-attention group.
    fn lookup(&self, chain: &KeyChain) -> PyResult<(u32, u32)> {
        let found = self.inner.lookup(&mut *chain.lock()?);
        Ok((found.host_units, found.stored_units))
    }

    /// Return the lengths of the deepest hit in host memory and of the deepest hit in any tier, in
    /// units, capped at `host_units` and `stored_units`.
    fn deepest_hit(
        &self,
        chain: &KeyChain,
        host_units: u32,
        stored_units: u32,
    ) -> PyResult<(u32, u32)> {
        let most = Lookup { host_units, stored_units };
        let found = self.inner.deepest_hit(&*chain.lock()?, most).map_err(raise)?;
        Ok((found.host_units, found.stored_units))
    }

    /// Pin the chunks that a prefix of `num_units` units needs, and start disk reads for the chunks
    /// that are not in host memory.
    #[pyo3(signature = (chain, num_units=u32::MAX))]
    fn acquire(&self, chain: &KeyChain, num_units: u32) -> PyResult<ReadLease> {
        let lease = self.inner.acquire(&mut *chain.lock()?, num_units).map_err(raise)?;
        Ok(ReadLease { session: Arc::clone(&self.inner), lease })
    }

    /// Extend the chains of many requests and reserve frames for their units. Return two lists with
    /// one item per request: the chunks or None, and the number of units that got no frame. On
    /// error, reserve nothing.
    fn reserve(&self, rows: Vec<Due<'_>>) -> PyResult<(Vec<Option<ChunkBatch>>, Vec<u32>)> {
        // Anything that can run Python code must happen before any chain is locked.
        let mut ids = Vec::with_capacity(rows.len() * ROW_TOKENS);
        let mut blocks = Vec::with_capacity(rows.len() * ROW_BLOCKS);
        let mut parts = Vec::with_capacity(rows.len());
        for Due { chain, token_ids, num_tokens, units, tables } in &rows {
            let known = chain.get().extend_if_long(token_ids, *num_tokens)?;
            let (ids_from, from) = (ids.len(), blocks.len());
            if known < *num_tokens {
                append_token_ids(token_ids, known, *num_tokens, &mut ids)?;
            }
            append_saved_blocks(&self.inner, tables, units, &mut blocks)?;
            parts.push((known, ids_from..ids.len(), from..blocks.len()));
        }
        let mut chains = Vec::with_capacity(rows.len());
        for (due, (known, ..)) in rows.iter().zip(&parts) {
            chains.push(due.chain.get().try_lock_at(*known)?);
        }
        let mut pairs: Vec<_> = chains
            .iter_mut()
            .zip(&parts)
            .map(|(chain, part)| (&mut **chain, &ids[part.1.clone()]))
            .collect();
        key::append_to_each(&mut pairs).map_err(raise)?;
        let mut asked = Vec::with_capacity(rows.len());
        for ((chain, (_, _, own)), due) in chains.iter_mut().zip(&parts).zip(&rows) {
            asked.push(SaveRow { chain, units: due.units.clone(), blocks: &blocks[own.clone()] });
        }
        let reserved = self.inner.reserve(&mut asked).map_err(raise)?;
        Ok(reserved.into_iter().map(|(chunks, num_dropped)| (some(chunks), num_dropped)).unzip())
    }

    /// Reserve frames for Mamba or gated delta net states. Each row is (chain, group, last unit
    /// that the state covers, block that holds the state). On error, reserve nothing.
    fn reserve_states(
        &self,
        rows: Vec<(Bound<'_, KeyChain>, usize, u32, i32)>,
    ) -> PyResult<Vec<Option<ChunkBatch>>> {
        let mut states = Vec::with_capacity(rows.len());
        for (chain, group, unit, block) in &rows {
            states.push(
                self.inner
                    .state_row(&*chain.get().lock()?, *group, *unit, *block)
                    .map_err(raise)?,
            );
        }
        Ok(self.inner.reserve_states(states).map_err(raise)?.into_iter().map(some).collect())
    }

    /// Process one rank's report. Return the number of chunks that became visible, and the number
    /// that failed on a rank.
    #[pyo3(signature = (saved, failed=Vec::new(), misfits=Vec::new()))]
    fn settle(&self, saved: Vec<u64>, failed: Vec<u64>, misfits: Vec<u64>) -> (u32, usize) {
        self.inner.settle(&saved, &failed, &misfits)
    }

    /// Release the frames of reservations that no rank will report, or all reserved frames if
    /// `tickets` is None.
    #[pyo3(signature = (tickets=None))]
    fn abort(&self, tickets: Option<Vec<u64>>) {
        tickets.map_or_else(|| self.inner.abort_all(), |tickets| self.inner.abort(&tickets));
    }

    /// Return the blocks that in-flight saves may still read, restricted to `blocks` if given.
    #[pyo3(signature = (blocks=None))]
    fn being_read(&self, blocks: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<i32>> {
        let blocks = blocks.map(|blocks| block_ids(blocks, 0, None)).transpose()?;
        Ok(self.inner.being_read(blocks.as_deref()))
    }

    /// Remove chunks and their descendants from every tier. Return the number of chunks removed so
    /// far.
    fn discard(&self, keys: Vec<KeyBytes>) -> u64 {
        let keys: Vec<_> = keys.into_iter().map(|key| key.0).collect();
        self.inner.session().discard(&keys)
    }

    /// Remove all chunks from every tier.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.inner.clear());
    }

    /// Return counters and gauges by name. `rust/core/src/store/stats.rs` defines the names.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.session().stats().into_py_dict(py)?;
        stats.set_item("save_misfit_chunks", self.inner.num_misfits())?;
        Ok(stats)
    }

    /// Restrict new saves to frames in the first `limit_bytes` bytes of the arena. Called while
    /// workers cannot yet copy to the rest of the arena.
    fn limit_memory(&self, limit_bytes: u64) {
        self.inner.session().limit_memory(limit_bytes);
    }

    /// Return each new log line as (line, True if the line reports a problem).
    fn take_events(&self) -> Vec<(String, bool)> {
        let events = self.inner.session().take_events().into_iter();
        events.map(|event| (event.to_string(), event.is_problem())).collect()
    }

    /// Start recording added and removed chunks. At least the last `capacity` changes are kept
    /// until `changes` returns them.
    fn watch(&self, capacity: usize) {
        self.inner.session().watch(capacity);
    }

    /// Return (key, tiers) for the `asked` chunks and up to `limit` changed chunks, and True if
    /// earlier reports may be outdated. The bits of `tiers` are 1 for host memory, 2 for disk and 4
    /// for a chunk being saved or read.
    fn changes<'py>(
        &self,
        py: Python<'py>,
        asked: Vec<KeyBytes>,
        limit: usize,
    ) -> (Vec<TierRow<'py>>, bool) {
        let asked: Vec<_> = asked.into_iter().map(|key| key.0).collect();
        let Changes { rows, lost } = self.inner.session().changes(&asked, limit);
        (
            rows.into_iter().map(|(key, tiers)| (PyBytes::new(py, &key.0), tiers.bits())).collect(),
            lost,
        )
    }

    /// Wait until all visible chunks are written to disk or dropped. Return False after a timeout.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> bool {
        py.detach(|| self.inner.session().flush(timeout(timeout_s)))
    }

    /// Stop the store, write pending chunks to disk until the timeout, and release the disk
    /// directory.
    #[pyo3(signature = (timeout_s=30.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) {
        py.detach(|| self.inner.session().close(timeout(timeout_s)));
    }

    fn __repr__(&self) -> String {
        format!("Session(frame_sizes={:?})", self.sizes.all())
    }
}
