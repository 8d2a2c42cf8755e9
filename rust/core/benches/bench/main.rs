//! What the core costs, beside its targets: `cargo bench` for all of it, in this order: hashing,
//! lookup, eviction, saves, disk.
//!
//! `cargo bench -- [SECTION]... [--trace FILE] [--dir DIR]`: only these sections; replay this
//! trace; measure this disk. What is compared takes turns within the run. `met` says whether a
//! target is: where a table has a minimum, by that, for it is what the work costs when nothing else
//! runs on the machine.
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
