//! Key -> entry: where a chunk is, who its parent is.
