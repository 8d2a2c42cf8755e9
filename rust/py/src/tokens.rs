//! Reads token ids, block ids and embedding rows from Python objects without copying them in
//! Python.
//!
//! Reading a list of 100,000 ids is the slowest part of a scheduler hook, so exact lists of exact
//! ints are read through borrowed references. All other objects take the slower path through owned
//! references. An invalid element always raises an error; no value is ever truncated. No other file
//! in the extension contains unsafe code.
#![expect(
    unsafe_code,
    reason = "the stable ABI has no safe way to read borrowed list items and buffer memory"
)]

use std::ops::Range;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PySequence};

use crate::error::ConfigError;

/// Returns `sequence[start:stop]` as token ids. Raises `ConfigError`, naming the first bad element,
/// if an element is not an int in 0..2^32.
///
/// Unlike slicing, raises an error if a bound is outside the sequence, because fewer ids would
/// identify a different prefix.
pub(crate) fn token_ids(
    sequence: &Bound<'_, PyAny>,
    start: i64,
    stop: Option<i64>,
) -> PyResult<Vec<u32>> {
    let mut ids = Vec::new();
    append_ids("token_ids", sequence, start, stop, &mut ids)?;
    Ok(ids)
}

/// Like [`token_ids`], but appends to `ids`.
pub(crate) fn append_token_ids(
    sequence: &Bound<'_, PyAny>,
    start: u32,
    stop: u32,
    ids: &mut Vec<u32>,
) -> PyResult<()> {
    append_ids("token_ids", sequence, start.into(), Some(stop.into()), ids)
}

/// Returns `sequence[start:stop]` as block ids. Raises `ConfigError` if a bound is outside the
/// sequence or an element is not an int in 0..2^31.
pub(crate) fn block_ids(
    sequence: &Bound<'_, PyAny>,
    start: u32,
    stop: Option<u32>,
) -> PyResult<Vec<i32>> {
    let mut ids = Vec::new();
    append_block_ids(sequence, start, stop, &mut ids)?;
    Ok(ids)
}

/// Like [`block_ids`], but appends to `ids`.
pub(crate) fn append_block_ids(
    sequence: &Bound<'_, PyAny>,
    start: u32,
    stop: Option<u32>,
    ids: &mut Vec<i32>,
) -> PyResult<()> {
    append_ids("block_ids", sequence, start.into(), stop.map(i64::from), ids)
}

fn append_ids<T: TryFrom<u32>>(
    name: &str,
    sequence: &Bound<'_, PyAny>,
    start: i64,
    stop: Option<i64>,
    ids: &mut Vec<T>,
) -> PyResult<()> {
    if let Ok(list) = sequence.cast_exact::<PyList>() {
        let range = bounds(name, list.len(), start, stop)?;
        return append_list(name, list, range, ids);
    }
    if sequence.is_instance_of::<PyBytes>() || sequence.is_instance_of::<PyByteArray>() {
        return Err(PyTypeError::new_err(format!(
            "{name} is a bytes object; pass a sequence of ints"
        )));
    }
    let sequence = sequence.cast::<PySequence>()?;
    for index in bounds(name, sequence.len()?, start, stop)? {
        ids.push(fitting(slow_id(name, &sequence.get_item(index)?, index)?)?);
    }
    Ok(())
}

/// Converts an id to the element type: u32 for token ids, i32 for block ids.
fn fitting<T: TryFrom<u32>>(id: u32) -> PyResult<T> {
    T::try_from(id)
        .map_err(|_| ConfigError::new_err(format!("block id {id} is not an int in 0..2**31")))
}

/// Converts a Python int in 0..2^32. Faster than `extract` if the object is an exact int.
pub(crate) fn number(item: Borrowed<'_, '_, PyAny>) -> PyResult<u32> {
    // SAFETY: `item` is alive while it is borrowed, and this thread is attached.
    let value = unsafe {
        if ffi::PyLong_CheckExact(item.as_ptr()) == 1 {
            ffi::PyLong_AsLong(item.as_ptr())
        } else {
            -1
        }
    };
    u32::try_from(value).or_else(|_| {
        drop(PyErr::take(item.py())); // clear PyLong_AsLong's OverflowError, if any
        item.extract()
    })
}

fn bounds(name: &str, len: usize, start: i64, stop: Option<i64>) -> PyResult<Range<usize>> {
    let stop_at = stop.map_or(Ok(len), usize::try_from);
    match (usize::try_from(start), stop_at) {
        (Ok(start), Ok(stop)) if start <= stop && stop <= len => Ok(start..stop),
        _ => Err(ConfigError::new_err(format!(
            "[{start}:{}] is out of range for {len} {name}",
            stop.unwrap_or(-1)
        ))),
    }
}

fn append_list<T: TryFrom<u32>>(
    name: &str,
    list: &Bound<'_, PyList>,
    range: Range<usize>,
    ids: &mut Vec<T>,
) -> PyResult<()> {
    ids.reserve(range.len());
    for index in range {
        // SAFETY: `list` is a live list and this thread is attached. The index fits in an isize
        // because it is below the list's earlier length. If the list has since shrunk (only slow_id
        // runs Python code), the call returns null.
        let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), index.cast_signed()) };
        if item.is_null() {
            return Err(PyErr::fetch(list.py()));
        }
        // SAFETY: `item` is not null, and the list keeps it alive: neither call runs Python code or
        // detaches, and an abi3 extension runs under the interpreter's lock, so no other thread can
        // remove the item from the list between the calls.
        let value = unsafe {
            if ffi::PyLong_CheckExact(item) == 1 { ffi::PyLong_AsLong(item) } else { -1 }
        };
        if let Ok(id) = u32::try_from(value) {
            ids.push(fitting(id)?);
        } else {
            drop(PyErr::take(list.py())); // clear PyLong_AsLong's OverflowError, if any
            ids.push(fitting(slow_id(name, &list.get_item(index)?, index)?)?);
        }
    }
    Ok(())
}

/// Converts any object with `__index__` to an id.
#[cold]
fn slow_id(name: &str, item: &Bound<'_, PyAny>, index: usize) -> PyResult<u32> {
    item.extract().map_err(|cause| {
        let shown = item.repr().map_or_else(|_| "?".into(), |repr| repr.to_string());
        let error = ConfigError::new_err(format!(
            "{name}[{index}] = {shown:.80} is not an int in 0..2**32"
        ));
        error.set_cause(item.py(), Some(cause));
        error
    })
}

/// Return `(key, value[0])` for each value that is neither None nor empty. Both lists must have the
/// same length.
///
/// The scheduler passes lists for hundreds of requests, but only a few requests have a value.
#[pyfunction]
pub(crate) fn first_of_each<'py>(
    keys: &Bound<'py, PyList>,
    values: &Bound<'py, PyList>,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let (len, py) = (values.len(), values.py());
    if keys.len() != len {
        return Err(ConfigError::new_err(format!(
            "{} keys for {len} values; pass lists of the same length",
            keys.len()
        )));
    }
    let mut found = Vec::new();
    for index in 0..len {
        // SAFETY: `values` is a live list and this thread is attached. The index fits in an isize
        // because it is below the list's earlier length. If the list has since shrunk, the call
        // returns null. Only the pointer is compared.
        let item = unsafe { ffi::PyList_GetItem(values.as_ptr(), index.cast_signed()) };
        if item.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: None lives as long as the interpreter.
        if item != unsafe { ffi::Py_None() } {
            let value = values.get_item(index)?;
            if value.is_truthy()? {
                found.push((keys.get_item(index)?, value.get_item(0)?));
            }
        }
    }
    Ok(found)
}

/// A C-contiguous buffer's memory, exported until this value is dropped.
pub(crate) struct RowBytes(PyUntypedBuffer);

impl RowBytes {
    /// Exports `rows`. Raises `ConfigError` if `rows` is not C-contiguous, or if it is
    /// two-dimensional and its row size is not `row_bytes`.
    pub(crate) fn new(rows: &Bound<'_, PyAny>, row_bytes: usize) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(rows)?;
        if !buffer.is_c_contiguous() {
            return Err(ConfigError::new_err("embedding rows must be C-contiguous"));
        }
        if let [_, width] = *buffer.shape()
            && width.checked_mul(buffer.item_size()) != Some(row_bytes)
        {
            return Err(ConfigError::new_err(format!(
                "each row has {width} x {} bytes; rows must have {row_bytes} bytes",
                buffer.item_size()
            )));
        }
        Ok(Self(buffer))
    }

    /// Returns the bytes. The caller must ensure that nothing writes to the buffer during the
    /// slice's lifetime.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the buffer is C-contiguous, so its len_bytes bytes start at buf_ptr, which is not
        // null because the buffer is not empty. The export that self holds keeps the memory
        // allocated and in place. The caller of append_embeds must ensure, as documented there,
        // that no other thread writes to the buffer.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
    }
}
