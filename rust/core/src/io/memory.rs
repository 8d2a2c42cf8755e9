//! Memory available to this process, as limited by the machine and the process's control groups.
//!
//! Callers pass the result when they open a store, so that the store never reads the environment.

use std::fs;
use std::path::Path;

/// Returns the available memory in bytes: the minimum across the machine and all enclosing memory
/// control groups.
///
/// Returns None if no limit can be read, for example because /proc is not mounted.
pub fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let groups =
        fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| groups_available(&text));
    [machine, groups].into_iter().flatten().min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the smallest amount of memory available in any of the process's groups and their
/// ancestors. Groups that have no limit are skipped.
fn groups_available(cgroup: &str) -> Option<u64> {
    let left_of = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (base, names) = match fields.next()? {
            "" => ("/sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
            list if list.split(',').any(|name| name == "memory") => (
                "/sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ),
            _ => return None,
        };
        let groups = Path::new(fields.next()?.trim_start_matches('/')).ancestors();
        groups.filter_map(|group| group_left(&Path::new(base).join(group), names)).min()
    };
    cgroup.lines().filter_map(left_of).min()
}

/// Returns the limit minus the usage. The usage excludes inactive file pages, because the kernel
/// can reclaim them.
fn group_left(group: &Path, (limit, usage, inactive): (&str, &str, &str)) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(inactive)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests;
