//! Converts core errors to the exceptions in `kvloft.errors`.

use kvloft_core::{Error, ErrorKind};
use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(kvloft.errors, BusyError);
import_exception!(kvloft.errors, ConfigError);
import_exception!(kvloft.errors, DeniedError);
import_exception!(kvloft.errors, LateError);
import_exception!(kvloft.errors, StoreError);

pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        ErrorKind::InvalidConfig => ConfigError::new_err(message),
        ErrorKind::Busy => BusyError::new_err(message),
        _ if error.is_denied() => DeniedError::new_err(message),
        _ if error.is_late() => LateError::new_err(message),
        _ => StoreError::new_err(message),
    }
}
