//! Benchmarks for the core: `cargo bench -- [SECTION]... [--trace FILE] [--dir DIR]`.
//!
//! The sections are hashing, lookup, eviction, saves and disk. Without arguments, all sections run
//! in this order. `--trace` names the trace that the eviction section replays, and `--dir` names
//! the directory that the disk section uses. The variants being compared alternate within a run.
//! Rows show whether the target is met. The hashing section compares minimum times, which are least
//! affected by other load on the machine.
#![expect(clippy::print_stdout, reason = "benches print their results")]
#![expect(clippy::cast_precision_loss, reason = "figures are printed with three digits")]

mod disk;
mod eviction;
mod hashing;
mod lookup;
mod saves;
mod states;
mod table;
mod trace;

use std::path::{Path, PathBuf};

/// Returns the command-line argument after `name`.
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
