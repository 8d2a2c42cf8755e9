//! Python's face of `kvloft_core::Error`: one exception class per thing a caller can do about it.

use kvloft_core::{Error, ErrorKind};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(kvloft._core, StoreError, PyRuntimeError, "The store could not do what was asked (I/O, closed).");
create_exception!(kvloft._core, ConfigError, PyValueError, "A setting is out of range; the message names the fix.");
create_exception!(kvloft._core, BusyError, StoreError, "Another process owns the disk directory.");

/// The exception for a core error.
#[expect(clippy::needless_pass_by_value, reason = "map_err hands the error over")]
pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        ErrorKind::InvalidConfig => ConfigError::new_err(message),
        ErrorKind::Busy => BusyError::new_err(message),
        _ => StoreError::new_err(message),
    }
}
