//! The store: lookup, lease, reserve, commit.
