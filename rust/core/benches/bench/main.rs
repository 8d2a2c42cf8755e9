//! Costs of the core compared with their targets. `cargo bench` runs all sections in this order:
//! hashing, lookup, eviction, saves, disk.
//!
//! `cargo bench -- [SECTION]... [--trace FILE] [--dir DIR]`: runs only these sections; replays this
//! trace; measures this disk. Compared variants alternate within a run. `met` is true if the target
//! is met: by the minimum if a table has one, because it is the cost without other load on the
//! machine.
#![expect(clippy::print_stdout, reason = "a bench prints")]
#![expect(clippy::cast_precision_loss, reason = "figures of three digits")]

mod disk;
mod eviction;
mod hashing;
mod lookup;
mod saves;
mod states;
mod table;
mod trace;

use std::path::{Path, PathBuf};

/// The value behind `--name`.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg != name).nth(1)
}

fn main() {
    let known = ["hashing", "lookup", "eviction", "saves", "disk"];
    let asked: Vec<String> = std::env::args().filter(|arg| known.contains(&arg.as_str())).collect();
    for section in
        known.into_iter().filter(|&name| asked.is_empty() || asked.iter().any(|arg| arg == name))
    {
        match section {
            "hashing" => hashing::run(),
            "lookup" => lookup::run(),
            "eviction" => {
                eviction::run(
                    option("--trace")
                        .or_else(|| std::env::var("TRACE").ok())
                        .as_deref()
                        .map(Path::new),
                );
            }
            "saves" => saves::run(),
            _ => disk::run(option("--dir").map(PathBuf::from)),
        }
    }
}
