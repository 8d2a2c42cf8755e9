//! What goes when a tier is full.
