//! Python bindings for `Server` and the admin functions of `kvloft_wire`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvloft_core::evict::Eviction;
use kvloft_core::io::available_bytes;
use kvloft_core::key::SaltTag;
use kvloft_core::store::Evicted;
use kvloft_wire::{EvictReport, ServerConfig, Status, clear, evict, status};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use crate::error::raise;
use crate::settings::{PyTenantLimits, disk_settings, tenant_limits, timeout};

/// A store shared by this user's engines. The server listens until it is closed.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Server {
    inner: kvloft_wire::Server,
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (
        socket, *, host_bytes, eviction="adaptive", disk_path=None, disk_bytes=0, disk_threads=2, max_connections=64,
        shares=None, numa=None, limits=None, settings=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        host_bytes: u64,
        eviction: &str,
        disk_path: Option<PathBuf>,
        disk_bytes: u64,
        disk_threads: u32,
        max_connections: usize,
        shares: Option<Vec<(String, u32)>>,
        numa: Option<Vec<u32>>,
        limits: Option<PyTenantLimits>,
        settings: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let config = ServerConfig {
            eviction: Eviction::parse(eviction).map_err(raise)?,
            available_bytes,
            disk: disk_settings(disk_path, disk_bytes, disk_threads, ""),
            shares: shares.unwrap_or_default(),
            numa: numa.unwrap_or_default(),
            limits: tenant_limits(limits).map_err(raise)?,
            settings: settings.unwrap_or_default().into_iter().collect(),
            max_connections,
            ..ServerConfig::new(socket, host_bytes)
        };
        Ok(Self { inner: py.detach(|| kvloft_wire::Server::open(config)).map_err(raise)? })
    }

    /// Return the server's status. See `server_status`.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        status_dict(py, &self.inner.status())
    }

    /// Return the reason the server cannot use its disk directory. Return None if the directory is
    /// usable or the server has no disk tier.
    fn disk_trouble(&self) -> Option<String> {
        self.inner.disk_trouble()
    }

    /// Return the log lines added since the last call.
    fn take_events(&self) -> Vec<String> {
        self.inner.take_events()
    }

    /// Close all connections, write pending chunks to disk until the timeout, and release the disk.
    #[pyo3(signature = (timeout_s=30.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) {
        py.detach(|| self.inner.close(timeout(timeout_s)));
    }

    fn __repr__(&self) -> String {
        format!("Server({} engines)", self.inner.status().engines().count())
    }
}

/// Return the available memory of this machine or container in bytes, or None if it is unknown.
#[pyfunction(name = "available_bytes")]
pub(crate) fn available_memory() -> Option<u64> {
    available_bytes()
}

/// Return the status of the server at `socket`.
#[pyfunction]
#[pyo3(signature = (socket, *, timeout_s=5.0))]
pub(crate) fn server_status(
    py: Python<'_>,
    socket: PathBuf,
    timeout_s: f64,
) -> PyResult<Bound<'_, PyAny>> {
    let found = py.detach(|| status(&socket, timeout(timeout_s))).map_err(raise)?;
    status_dict(py, &found)
}

/// Remove all chunks of a namespace from the server at `socket`. Return the number of chunks
/// removed.
#[pyfunction]
#[pyo3(signature = (socket, *, namespace="", timeout_s=30.0))]
pub(crate) fn server_clear(
    py: Python<'_>,
    socket: PathBuf,
    namespace: &str,
    timeout_s: f64,
) -> PyResult<u64> {
    py.detach(|| clear(&socket, namespace, timeout(timeout_s))).map_err(raise)
}

/// Evict one salt's chunks or all chunks, either from every tier or only from host memory.
#[pyfunction]
#[pyo3(signature = (socket, *, namespace="", salt=None, host_only=false, timeout_s=60.0))]
pub(crate) fn server_evict<'py>(
    py: Python<'py>,
    socket: PathBuf,
    namespace: &str,
    salt: Option<&str>,
    host_only: bool,
    timeout_s: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let tenant = salt.map(SaltTag::of);
    let done = py
        .detach(|| evict(&socket, namespace, tenant, host_only, timeout(timeout_s)))
        .map_err(raise)?;
    let EvictReport { num_namespaces, evicted } = done;
    let Evicted { num_chunks, host_bytes, disk_bytes, num_in_use, is_cut_short } = evicted;
    let numbers = [
        ("namespaces", num_namespaces),
        ("chunks", num_chunks),
        ("host_bytes", host_bytes),
        ("disk_bytes", disk_bytes),
        ("in_use", num_in_use),
    ];
    let dict = numbers.into_py_dict(py)?;
    dict.set_item("complete", !is_cut_short)?;
    Ok(dict)
}

/// Converts a status to a Python dict via JSON, with namespace digests as `bytes`.
fn status_dict<'py>(py: Python<'py>, status: &Status) -> PyResult<Bound<'py, PyAny>> {
    let dict = py.import("json")?.call_method1("loads", (status.to_json().map_err(raise)?,))?;
    for (namespace, of) in dict.get_item("namespaces")?.try_iter()?.zip(&status.namespaces) {
        namespace?.set_item("namespace", PyBytes::new(py, &of.namespace))?;
    }
    Ok(dict)
}
