//! Python bindings for `kvloft_core::key`: `KeyChain`, `namespace_digest` and `root_key`.

use std::sync::{Mutex, MutexGuard};

use kvloft_core::key::{self, ChunkKey};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{ConfigError, StoreError, raise};
use crate::tokens::{RowBytes, token_ids};

/// Calls that hash at least this many token ids (which takes about 10 us) detach from the
/// interpreter.
const DETACH_TOKENS: usize = 4096;
/// Calls that hash at least this many row bytes (which takes about 20 us) detach from the
/// interpreter.
const DETACH_BYTES: usize = 64 << 10;

/// The keys of a request's prefix, one per block, extended as tokens arrive.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct KeyChain {
    // Lock holders never wait for the interpreter, so waiting for the lock while attached is safe.
    inner: Mutex<key::KeyChain>,
}

impl KeyChain {
    /// Locks the chain. Returns an error if a panic interrupted an earlier change.
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, key::KeyChain>> {
        self.inner.lock().map_err(|_| {
            StoreError::new_err(
                "this KeyChain is unusable after an internal error; create a new KeyChain",
            )
        })
    }

    /// Like `lock`, but never blocks. Also returns an error if the chain is already locked, for
    /// example by another row of the same call, or no longer has `num_tokens` tokens.
    pub(crate) fn try_lock_at(&self, num_tokens: u32) -> PyResult<MutexGuard<'_, key::KeyChain>> {
        let chain = self.inner.try_lock();
        let chain = chain.map_err(|_| {
            StoreError::new_err("this KeyChain is in use, or unusable after an internal error")
        })?;
        let is_same = chain.num_tokens() == num_tokens;
        is_same
            .then_some(chain)
            .ok_or_else(|| StoreError::new_err("this KeyChain is in use by another thread"))
    }

    /// Appends the tokens in `token_ids[:stop]` that the chain lacks, if there are at least
    /// `DETACH_TOKENS` of them. Returns the chain's token count.
    pub(crate) fn extend_if_long(&self, token_ids: &Bound<'_, PyAny>, stop: u32) -> PyResult<u32> {
        let start = self.num_tokens()?;
        if (stop.saturating_sub(start) as usize) < DETACH_TOKENS {
            return Ok(start);
        }
        self.append_tokens(token_ids, start.into(), Some(stop.into()))?;
        self.num_tokens()
    }
}

#[pymethods]
impl KeyChain {
    #[new]
    #[pyo3(signature = (root, *, block_tokens, lookahead = 0))]
    fn new(root: &[u8], block_tokens: u32, lookahead: u32) -> PyResult<Self> {
        let root = ChunkKey(digest(root, "root")?);
        let chain = key::KeyChain::with_lookahead(root, block_tokens, lookahead).map_err(raise)?;
        Ok(Self { inner: Mutex::new(chain) })
    }

    #[getter]
    fn num_tokens(&self) -> PyResult<u32> {
        Ok(self.lock()?.num_tokens())
    }

    #[getter]
    fn num_blocks(&self) -> PyResult<u32> {
        Ok(self.lock()?.num_blocks())
    }

    /// Declare a multimodal item at positions `[start, start + num_tokens)`. Call this before
    /// appending anything at these positions.
    fn add_item(&self, identifier: &str, start: u32, num_tokens: u32) -> PyResult<()> {
        self.lock()?.add_item(identifier, start, num_tokens).map_err(raise)
    }

    /// Append `token_ids[start:stop]`.
    #[pyo3(signature = (token_ids, start=0, stop=None, /))]
    fn append_tokens(
        &self,
        token_ids: &Bound<'_, PyAny>,
        start: i64,
        stop: Option<i64>,
    ) -> PyResult<()> {
        let ids = self::token_ids(token_ids, start, stop)?;
        let append = || self.lock()?.append_tokens(&ids).map_err(raise);
        if ids.len() < DETACH_TOKENS { append() } else { token_ids.py().detach(append) }
    }

    /// Append embedding rows from a C-contiguous buffer of n x `width` elements of `dtype`. No
    /// other thread may write to the buffer during the call.
    #[pyo3(signature = (rows, *, dtype, width))]
    fn append_embeds(&self, rows: &Bound<'_, PyAny>, dtype: &str, width: u32) -> PyResult<()> {
        let rows_py = rows.py();
        let rows = RowBytes::new(rows, key::row_bytes(dtype, width).map_err(raise)?)?;
        let append = || self.lock()?.append_embeds(dtype, width, rows.bytes()).map_err(raise);
        if rows.bytes().len() < DETACH_BYTES { append() } else { rows_py.detach(append) }
    }

    /// Return the key of the prefix that ends with block `block`. If `group` is given, return the
    /// key of that group's chunk that ends with the same block.
    #[pyo3(signature = (block, group = None))]
    fn key<'py>(
        &self,
        py: Python<'py>,
        block: u32,
        group: Option<u32>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let key = self.lock()?.key_of(block, group).map_err(raise)?;
        Ok(PyBytes::new(py, &key.0))
    }

    fn __repr__(&self) -> PyResult<String> {
        let chain = self.lock()?;
        let last = chain.keys().last().map_or_else(|| chain.root(), |key| *key).to_string();
        let (block_tokens, num_tokens, num_blocks) =
            (chain.block_tokens(), chain.num_tokens(), chain.num_blocks());
        let sizes = format!(
            "block_tokens={block_tokens}, num_tokens={num_tokens}, num_blocks={num_blocks}"
        );
        Ok(format!("KeyChain({sizes}, last={}...)", &last[..16]))
    }
}

/// Return an order-independent 32-byte digest of (name, value) pairs. Names must be unique.
#[pyfunction]
pub(crate) fn namespace_digest(
    py: Python<'_>,
    fields: Vec<(String, String)>,
) -> PyResult<Bound<'_, PyBytes>> {
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Ok(PyBytes::new(py, &key::namespace_digest(&fields).map_err(raise)?))
}

/// Return the 32-byte key of the empty prefix. `adapter` identifies a `LoRA` adapter by a (name,
/// path or id) pair.
#[pyfunction]
#[pyo3(signature = (namespace, adapter, cache_salt))]
pub(crate) fn root_key<'py>(
    py: Python<'py>,
    namespace: &[u8],
    adapter: Option<(String, String)>,
    cache_salt: Option<&str>,
) -> PyResult<Bound<'py, PyBytes>> {
    let adapter = adapter.as_ref().map(|(name, place)| (name.as_str(), place.as_str()));
    let root =
        key::root_key(&digest(namespace, "namespace")?, adapter, cache_salt).map_err(raise)?;
    Ok(PyBytes::new(py, &root.0))
}

/// Converts `bytes` to a 32-byte digest. `name` is the argument's name in the error message.
pub(crate) fn digest(bytes: &[u8], name: &str) -> PyResult<[u8; 32]> {
    let len = bytes.len();
    bytes
        .try_into()
        .map_err(|_| ConfigError::new_err(format!("{name} must be 32 bytes, not {len}")))
}

/// A chunk key or another 32-byte digest, converted from Python bytes.
#[derive(Clone, Copy)]
pub(crate) struct KeyBytes(pub(crate) ChunkKey);

impl<'py> FromPyObject<'_, 'py> for KeyBytes {
    type Error = PyErr;
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        digest(object.extract::<&[u8]>()?, "key").map(|key| Self(ChunkKey(key)))
    }
}
