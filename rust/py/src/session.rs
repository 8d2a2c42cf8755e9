//! `Session`: conversions only; the meaning is in `kvloft_core::session`.
//!
//! Short calls keep the interpreter: the holder of a session's lock never waits for it. Long ones let it go.

use std::path::PathBuf;
use std::sync::Arc;

use kvloft_core::batch;
use kvloft_core::engine::{EngineSession, SaveRow};
use kvloft_core::evict::Eviction;
use kvloft_core::io::available_bytes;
use kvloft_core::key;
use kvloft_core::session::{self, Local};
use kvloft_core::store::{Changes, DiskSettings, Lookup, Prefix, SaveRange, StoreConfig, ToSave};
use kvloft_wire::{Client, ClientConfig};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyTuple};

use crate::batch::ChunkBatch;
use crate::error::raise;
use crate::groups::{Blocks, GroupsDue, Kept, Reserved, Saved, SavedGroup, attached, beside, each, kept_by};
use crate::key::{KeyBytes, KeyChain, digest};
use crate::lease::ReadLease;
use crate::limits::{PyTenantLimits, tenant_limits};
use crate::time::{timeout, unix_s};
use crate::tokens::{append_block_ids, append_token_ids, block_ids, number};

/// A store, and what one engine has in flight in it.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Session {
    inner: Arc<EngineSession>,
    blocks_per_chunk: u32,
    #[pyo3(get)]
    frame_bytes: u64,
}

impl Session {
    fn over(session: Box<dyn session::Session>, num_ranks: u32, blocks_per_chunk: u32, frame_bytes: u64) -> Self {
        Self { inner: Arc::new(EngineSession::new(session, num_ranks)), blocks_per_chunk, frame_bytes }
    }

    /// The block of a prefix with which a range begins.
    fn first_of(&self, range: SaveRange) -> u32 {
        range.start.saturating_mul(self.blocks_per_chunk)
    }

    /// Appends the blocks that hold a range.
    fn part_of(&self, table: &Bound<'_, PyAny>, range: SaveRange, blocks: &mut Vec<i32>) -> PyResult<()> {
        let first = self.first_of(range);
        let end = range.stop.saturating_mul(self.blocks_per_chunk).saturating_add(range.tail_blocks);
        append_block_ids(table, first, Some(end.max(first)), blocks)
    }
}

/// Room for what one request completes in a step as it generates: a block of usual size, and the blocks of a chunk.
const ROW_TOKENS: usize = 32;
const ROW_BLOCKS: usize = 8;

/// A row of `reserve_all`.
struct Due<'py> {
    chain: Bound<'py, KeyChain>,
    token_ids: Bound<'py, PyAny>,
    num_tokens: u32,
    range: SaveRange,
    table: Bound<'py, PyAny>,
    /// The chunk that ends with so many blocks is not needed any more; 0: none.
    replaced: u32,
}

impl<'py> FromPyObject<'_, 'py> for Due<'py> {
    type Error = PyErr;
    fn extract(row: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let row = row.cast::<PyTuple>()?;
        let at = |nth| row.get_borrowed_item(nth);
        let [num_tokens, start, stop, tail_blocks, replaced] =
            [2, 3, 4, 5, 7].map(|nth| at(nth).and_then(|item| number(item)));
        Ok(Self {
            chain: at(0)?.cast::<KeyChain>()?.to_owned(),
            token_ids: at(1)?.to_owned(),
            num_tokens: num_tokens?,
            range: SaveRange { start: start?, stop: stop?, tail_blocks: tail_blocks? },
            table: at(6)?.to_owned(),
            replaced: replaced?,
        })
    }
}

/// A chunk's key, and where it is.
type TierRow<'py> = (Bound<'py, PyBytes>, u8);

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (
        *, frame_bytes, host_bytes, namespace, blocks_per_chunk=1, num_ranks=1, eviction="adaptive", disk_path=None, disk_bytes=0,
        disk_threads=2, description="", limits=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        frame_bytes: u64,
        host_bytes: u64,
        namespace: &[u8],
        blocks_per_chunk: u32,
        num_ranks: u32,
        eviction: &str,
        disk_path: Option<PathBuf>,
        disk_bytes: u64,
        disk_threads: u32,
        description: &str,
        limits: Option<PyTenantLimits>,
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
            now_s: unix_s(),
            limits: tenant_limits(limits).map_err(raise)?,
        };
        let local = py.detach(|| Local::open(&config)).map_err(raise)?;
        Ok(Self::over(Box::new(local), num_ranks, blocks_per_chunk, frame_bytes))
    }

    /// The store of the server that listens at `socket`; each call waits `timeout_s` at most.
    #[staticmethod]
    #[pyo3(signature = (socket, *, frame_bytes, namespace, timeout_s, blocks_per_chunk=1, num_ranks=1, description=""))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        frame_bytes: u64,
        namespace: &[u8],
        timeout_s: f64,
        blocks_per_chunk: u32,
        num_ranks: u32,
        description: &str,
    ) -> PyResult<Self> {
        let config = ClientConfig {
            socket,
            deadline: timeout(timeout_s),
            namespace: digest(namespace, "namespace")?,
            frame_bytes,
            blocks_per_chunk,
            description: description.to_owned(),
        };
        let remote = py.detach(|| Client::open(config)).map_err(raise)?;
        Ok(Self::over(Box::new(remote), num_ranks, blocks_per_chunk, frame_bytes))
    }

    /// Path another process of this user may open; empty while there is no store.
    #[getter]
    fn arena_path(&self) -> String {
        self.inner.session().arena().map(|arena| arena.path).unwrap_or_default()
    }

    /// Which memory it is; 0 while there is no store.
    #[getter]
    fn arena_id(&self) -> u64 {
        self.inner.session().arena().map_or(0, |arena| arena.id)
    }

    /// Where a worker opens the lifeline, and its inode; None for an engine's own store, or while there is none.
    #[getter]
    fn lifeline(&self) -> Option<(String, u64)> {
        self.inner.session().arena()?.lifeline.map(|lifeline| (lifeline.path, lifeline.id))
    }

    #[getter]
    fn num_frames(&self) -> u32 {
        self.inner.session().arena().map_or(0, |arena| arena.num_frames)
    }

    /// Use the store that took the place of one that is gone: whether there is one. Nothing of the old one is there then.
    fn renew(&self) -> bool {
        self.inner.session().renew()
    }

    /// Whether the last reservation got no answer in time.
    #[getter]
    fn is_save_late(&self) -> bool {
        self.inner.session().is_save_late()
    }

    /// Saves that some rank has not reported.
    #[getter]
    fn num_in_flight(&self) -> usize {
        self.inner.num_in_flight()
    }

    /// (blocks in host, blocks in host or disk), each a count from position 0, of the chain as `group` keeps it.
    #[pyo3(signature = (chain, group=None))]
    fn lookup(&self, chain: &KeyChain, group: Option<u32>) -> PyResult<(u32, u32)> {
        let mut chain = chain.lock()?;
        let found = self.inner.session().lookup(kept_by(&mut chain, &[group]).remove(0));
        Ok((found.host_blocks, found.stored_blocks))
    }

    /// (in host, in host or on disk) for each (group, start, stop): a byte a block, 1 where what the group keeps of that block is.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn lookup_attached<'py>(
        &self,
        py: Python<'py>,
        chain: &KeyChain,
        rows: Vec<(u32, u32, u32)>,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let kept = attached(&*chain.lock()?, &rows)?;
        let found = self.inner.session().lookup_many(&each(&kept).collect::<Vec<_>>());
        let mut rest = found.as_slice();
        let column = |found: &[Lookup], of: fn(&Lookup) -> u32| {
            PyBytes::new(py, &found.iter().map(|one| u8::from(of(one) > 0)).collect::<Vec<_>>())
        };
        let columns = |(_, keys): &Kept| {
            let (own, behind) = rest.split_at(keys.len());
            rest = behind;
            (column(own, |one| one.host_blocks), column(own, |one| one.stored_blocks))
        };
        Ok(kept.iter().map(columns).collect())
    }

    /// Pin the host part, start reading the disk part into host frames as far as they can be had.
    fn acquire(&self, chain: &KeyChain) -> PyResult<ReadLease> {
        let id = self.inner.session().acquire(Prefix::from(&*chain.lock()?));
        Ok(ReadLease { session: Arc::clone(&self.inner), id })
    }

    /// The same of the first `num_blocks` as each of the groups `full` keeps them, and of each (group, start, stop) of `rows`.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn acquire_groups(
        &self,
        chain: &KeyChain,
        num_blocks: u32,
        full: Vec<Option<u32>>,
        rows: Vec<(u32, u32, u32)>,
    ) -> PyResult<ReadLease> {
        let mut chain = chain.lock()?;
        let kept = attached(&chain, &rows)?;
        let mut prefixes = kept_by(&mut chain, &full);
        for prefix in &mut prefixes {
            prefix.keys = &prefix.keys[..prefix.keys.len().min(num_blocks as usize)];
        }
        prefixes.extend(each(&kept));
        let id = self.inner.session().acquire_all(&prefixes);
        Ok(ReadLease { session: Arc::clone(&self.inner), id })
    }

    /// Reserve frames for full chunks `[start, stop)` and a tail of `tail_blocks` behind them.
    fn reserve(
        &self,
        chain: &KeyChain,
        start: u32,
        stop: u32,
        tail_blocks: u32,
        table: &Bound<'_, PyAny>,
    ) -> PyResult<(ChunkBatch, u32)> {
        let range = SaveRange { start, stop, tail_blocks };
        let (first, mut blocks) = (self.first_of(range), Vec::new());
        self.part_of(table, range, &mut blocks)?;
        let chain = chain.lock()?;
        let what = (Prefix::from(&*chain), range).into();
        let row = SaveRow { what, table: &blocks, first, each: 1, replaced: None };
        let (inner, num_dropped) = self.inner.reserve(&[row]).map_err(raise)?.swap_remove(0);
        Ok((ChunkBatch { inner }, num_dropped))
    }

    /// The same for many requests, each of whose chains is extended first; all or nothing. (chunks, or None where there is nothing
    /// to save; chunks that could not be had) of each.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn reserve_all(&self, rows: Vec<Due<'_>>) -> PyResult<(Vec<Option<ChunkBatch>>, Vec<u32>)> {
        // All that Python has to say first: no chain is held meanwhile.
        let (mut ids, mut tables) =
            (Vec::with_capacity(rows.len() * ROW_TOKENS), Vec::with_capacity(rows.len() * ROW_BLOCKS));
        let mut parts = Vec::with_capacity(rows.len());
        for Due { chain, token_ids, num_tokens, range, table, .. } in &rows {
            let known = chain.get().extend_if_long(token_ids, *num_tokens)?;
            let (ids_from, from) = (ids.len(), tables.len());
            if known < *num_tokens {
                append_token_ids(token_ids, known, *num_tokens, &mut ids)?;
            }
            self.part_of(table, *range, &mut tables)?;
            parts.push((known, ids_from..ids.len(), from..tables.len()));
        }
        let mut chains = Vec::with_capacity(rows.len());
        for (due, (known, ..)) in rows.iter().zip(&parts) {
            chains.push(due.chain.get().try_lock_at(*known)?);
        }
        let mut pairs: Vec<_> =
            chains.iter_mut().zip(&parts).map(|(chain, part)| (&mut **chain, &ids[part.1.clone()])).collect();
        key::append_to_each(&mut pairs).map_err(raise)?;
        let mut asked = Vec::with_capacity(rows.len());
        for ((chain, (_, _, own)), due) in chains.iter().zip(&parts).zip(&rows) {
            let what = (Prefix::from(&**chain), due.range).into();
            let (table, first) = (&tables[own.clone()], self.first_of(due.range));
            let replaced = due.replaced.checked_sub(1).map(|block| chain.key(block)).transpose().map_err(raise)?;
            asked.push(SaveRow { what, table, first, each: 1, replaced });
        }
        let reserved = self.inner.reserve(&asked).map_err(raise)?;
        let some = |inner: Arc<batch::ChunkBatch>| (!inner.is_empty()).then_some(ChunkBatch { inner });
        Ok(reserved.into_iter().map(|(chunks, num_dropped)| (some(chunks), num_dropped)).unzip())
    }

    /// Reserve frames for blocks `[start, stop)` of many requests in each of `groups` (table, number, whether chunks are attached, how
    /// the table is cut); all or nothing. For each request the chunks by table, where there are any, and how many could not be had: of those that are not
    /// attached, if there are such groups.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn reserve_groups(&self, rows: Vec<GroupsDue<'_>>, groups: Vec<SavedGroup>) -> PyResult<Vec<Reserved>> {
        for (chain, token_ids, num_tokens, ..) in &rows {
            chain.get().extend(token_ids, *num_tokens)?; // all of them before any is held
        }
        let mut tables = Vec::with_capacity(rows.len());
        for (_, _, _, start, stop, table) in &rows {
            let blocks = groups.iter().map(|group| Blocks::of(group, table, *start, *stop));
            tables.push(blocks.collect::<PyResult<Vec<_>>>()?);
        }
        let mut parts = Vec::with_capacity(rows.len());
        for ((chain, ..), tables) in rows.iter().zip(tables) {
            let mut chain = chain.get().try_lock()?;
            groups
                .iter()
                .filter(|group| !group.2)
                .filter_map(|group| group.1)
                .for_each(|group| chain.extend_group(group));
            let saved = tables.into_iter().zip(&groups).map(|(blocks, group)| Saved::of(&chain, group, blocks));
            let saved = saved.collect::<PyResult<Vec<_>>>()?;
            parts.push((chain, saved));
        }
        let asked: Vec<_> =
            parts.iter().flat_map(|(chain, saved)| saved.iter().map(|saved| saved.row(chain))).collect();
        let mut reserved = self.inner.reserve(&asked).map_err(raise)?.into_iter();
        let joined = |(_, saved): &(_, Vec<Saved>)| {
            let (mut batches, mut num_dropped, has_full) = (Vec::new(), 0, groups.iter().any(|group| !group.2));
            for ((nth, _, is_attached, _), (inner, dropped)) in groups.iter().zip(reserved.by_ref().take(saved.len())) {
                num_dropped = num_dropped.max(if *is_attached && has_full { 0 } else { dropped });
                batches.extend((!inner.is_empty()).then_some((*nth, ChunkBatch { inner })));
            }
            (batches, num_dropped)
        };
        Ok(parts.iter().map(joined).collect())
    }

    /// Reserve a frame for what a group keeps of one block, beside the prefix that ends with it; (chain, group, block, where it is).
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn reserve_attached(&self, rows: Vec<(Bound<'_, KeyChain>, u32, u32, i32)>) -> PyResult<Vec<Option<ChunkBatch>>> {
        let mut kept = Vec::with_capacity(rows.len());
        for (chain, group, block, _) in &rows {
            kept.push(beside(&*chain.get().lock()?, *group, *block)?);
        }
        let mut asked = Vec::with_capacity(rows.len());
        for ((root, keys), (.., own)) in kept.iter().zip(&rows) {
            let (prefix, table) = (Prefix::new(*root, keys), std::slice::from_ref(own));
            let range = SaveRange { start: 0, stop: 1, tail_blocks: 0 };
            let what = ToSave { prefix, range, is_attached: true };
            asked.push(SaveRow { what, table, first: 0, each: 1, replaced: None });
        }
        let reserved = self.inner.reserve(&asked).map_err(raise)?;
        Ok(reserved.into_iter().map(|(inner, _)| (!inner.is_empty()).then_some(ChunkBatch { inner })).collect())
    }

    /// Take in one rank's report; (chunks that became visible, chunks that some rank failed).
    #[pyo3(signature = (saved, failed=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn settle(&self, saved: Vec<u64>, failed: Vec<u64>) -> (u32, usize) {
        self.inner.settle(&saved, &failed)
    }

    /// Give reserved frames back that no rank will report; all of them for None.
    #[pyo3(signature = (tickets=None))]
    fn abort(&self, tickets: Option<Vec<u64>>) {
        tickets.map_or_else(|| self.inner.abort_all(), |tickets| self.inner.abort(&tickets));
    }

    /// Those of `blocks` that a save in flight reads; every such block for None.
    #[pyo3(signature = (blocks=None))]
    fn being_read(&self, blocks: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<i32>> {
        let blocks = blocks.map(|blocks| block_ids(blocks, 0, None)).transpose()?;
        Ok(self.inner.being_read(blocks.as_deref()))
    }

    /// Forget chunks (and what hangs on them) in every tier; returns how many were dropped.
    fn discard(&self, keys: Vec<KeyBytes>) -> u64 {
        let keys: Vec<_> = keys.into_iter().map(|key| key.0).collect();
        self.inner.session().discard(&keys)
    }

    /// Forget everything in every tier.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.inner.clear());
    }

    /// Counters and gauges; names as in `rust/core/src/store/stats.rs`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.inner.session().stats().into_py_dict(py)
    }

    /// Saves take no frames from this one on from now on: workers cannot copy to them yet.
    fn limit_frames(&self, num_frames: u32) {
        self.inner.session().limit_frames(num_frames);
    }

    /// What a person should see of the disk tier, once each.
    fn take_events(&self) -> Vec<String> {
        self.inner.session().take_events()
    }

    /// Note from now on which chunks come and go: `capacity` of them wait to be taken.
    fn watch(&self, capacity: usize) {
        self.inner.session().watch(capacity);
    }

    /// ([(key, 1 if in host + 2 if on disk + 4 if coming to host)], whether keys were lost): chunks asked for, and up to `limit`
    /// that came or went.
    fn changes<'py>(&self, py: Python<'py>, asked: Vec<KeyBytes>, limit: usize) -> (Vec<TierRow<'py>>, bool) {
        let asked: Vec<_> = asked.into_iter().map(|key| key.0).collect();
        let Changes { rows, lost } = self.inner.session().changes(&asked, limit);
        (rows.into_iter().map(|(key, tiers)| (PyBytes::new(py, &key.0), tiers.bits())).collect(), lost)
    }

    /// Wait until every visible host chunk that will go to disk is there; False at the deadline.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> bool {
        py.detach(|| self.inner.session().flush(timeout(timeout_s)))
    }

    /// Stop serving, write to disk what should be there until the timeout, give the disk directory up.
    #[pyo3(signature = (timeout_s=30.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) {
        py.detach(|| self.inner.session().close(timeout(timeout_s)));
    }

    fn __repr__(&self) -> String {
        format!("Session(num_frames={}, frame_bytes={})", self.num_frames(), self.frame_bytes)
    }
}
