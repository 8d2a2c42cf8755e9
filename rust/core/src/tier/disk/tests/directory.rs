//! Tests the rules for a directory: a single owner, the size limit, other namespaces, and
//! unexpected files.

use crate::io::SizeClass;
use crate::key::namespace_id;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::super::{namespaces, owner};
use super::*;
use crate::ErrorKind;
use crate::test_support::faults::{FaultFiles, du};

fn namespace_dir(config: &DiskConfig) -> PathBuf {
    config.dir.join(namespace_id(&config.namespace))
}

fn with_namespace(config: &DiskConfig, byte: u8) -> DiskConfig {
    DiskConfig { namespace: [byte; 32], ..config.clone() }
}

fn fill(config: &DiskConfig) -> u32 {
    fill_with(config, &FaultFiles::default())
}

fn fill_with(config: &DiskConfig, files: &FaultFiles) -> u32 {
    let (tier, found) =
        DiskTier::open_with_files(config, &std::sync::Arc::default(), files).unwrap();
    let mut i = u32::try_from(found.len()).unwrap();
    while let Ok(slot) = tier.reserve(SizeClass(0)) {
        tier.write(slot, &DiskMeta { depth: 0, ..meta_of(i) }, &frame_of(i, 0)).unwrap();
        i += 1;
    }
    i
}

#[test]
fn test_a_second_opener_is_told_who_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, _) = open(&config);
    for other in [config.clone(), with_namespace(&config, 1)] {
        let error = DiskTier::open(other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        let text = error.to_string();
        for part in [
            dir.path().to_str().unwrap(),
            &format!("process {}", std::process::id()),
            "a different disk_path",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
    drop(tier);
    open(&config);
}

#[test]
fn test_only_this_user_may_look() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("a"), 2);
    let (tier, _) = open(&config);
    put(&tier, 0);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(&config.dir), mode(&namespace_dir(&config))], [0o700; 2]);
    assert_eq!(mode(&config.dir.join("lock")), 0o600);
    for file in fs::read_dir(namespace_dir(&config)).unwrap() {
        assert_eq!(mode(&file.unwrap().path()), 0o600);
    }
}

#[test]
fn test_a_missing_parent_is_not_created() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("mnt/kv"), 2);
    let error = DiskTier::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "the file system may be mounted later");
    let parent = dir.path().join("mnt");
    let said = format!(
        "disk_path {} is not used: {} does not exist; mount its file system, or run `mkdir -p {}`",
        config.dir.display(),
        parent.display(),
        parent.display()
    );
    assert_eq!((error.to_string(), parent.exists()), (said, false));
    let engine = DiskConfig { dir: config.dir.join("dp1"), ..config.clone() };
    assert_eq!(DiskTier::open(engine.clone()).unwrap_err().kind(), ErrorKind::Io);
    fs::create_dir(&parent).unwrap();
    open(&engine);
    open(&config);
}

#[test]
fn test_a_link_to_a_missing_directory_is_not_used_until_it_exists() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("kv"), 2);
    std::os::unix::fs::symlink("mnt", &config.dir).unwrap();
    let error = DiskTier::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "the file system may be mounted later");
    assert!(error.to_string().contains("/mnt does not exist; mount its file system"), "{error}");
    fs::create_dir(dir.path().join("mnt")).unwrap();
    open(&config);
}

#[test]
fn test_a_directory_that_this_user_cannot_create_is_reported_with_commands() {
    let error = owner::dir_error(owner::MAKE, Path::new("/a/b"), rustix::io::Errno::ACCESS.into());
    let said = error.to_string();
    assert!(
        said.starts_with(
            "disk_path /a/b cannot be created, because /a is not writable by this user: run `mkdir /a/b && chown "
        ),
        "{said}"
    );
    assert_eq!(error.kind(), ErrorKind::Io);
}

#[test]
fn test_a_disk_path_that_cannot_work_is_named_with_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below"), PathBuf::from("/proc/kvloft")] {
        let error = DiskTier::open(config(&path, 2)).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{text}");
        assert!(text.starts_with(&format!("disk_path {} ", path.display())), "{text}");
        assert!(text.contains(": set disk_path to a writable local directory"), "{text}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"x");
}

/// After a temporary error, the engine runs without its disk tier and retries. Only a permanent
/// error prevents startup.
#[test]
fn test_only_what_can_never_work_is_the_settings_fault() {
    use rustix::io::Errno;
    let never = [Errno::NOTDIR, Errno::EXIST, Errno::NOENT, Errno::NAMETOOLONG, Errno::OPNOTSUPP];
    let passes = [
        Errno::ACCESS,
        Errno::PERM,
        Errno::ROFS,
        Errno::IO,
        Errno::NOSPC,
        Errno::MFILE,
        Errno::STALE,
        Errno::LOOP,
    ];
    for (errnos, kind) in [(&never[..], ErrorKind::InvalidConfig), (&passes[..], ErrorKind::Io)] {
        for &errno in errnos {
            let error = owner::dir_error("open", Path::new("/a/b"), errno.into());
            assert_eq!(error.kind(), kind, "{errno:?}: {error}");
            assert!(
                error.to_string().contains("disk_path /a/b") && !error.to_string().contains('['),
                "{error}"
            );
        }
    }
    for errno in [Errno::ACCESS, Errno::ROFS] {
        let error = owner::dir_error("open", Path::new("/a/b"), errno.into()).to_string();
        assert!(!error.contains("os error"), "the reason must be reported once: {error}");
    }
}

#[test]
fn test_a_cap_below_one_chunk_is_named_with_the_least_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 1);
    assert_eq!(fill(&config), 1);
    config.cap_bytes -= 1;
    let error = DiskTier::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(
        error.to_string().contains("disk_size")
            && error.to_string().contains(&(config.cap_bytes + 1).to_string())
    );
    for frame_bytes in [0, 4095, 6144] {
        let error =
            DiskTier::open(DiskConfig { frame_sizes: frame_bytes.into(), ..config.clone() })
                .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    }
}

#[test]
fn test_the_cap_holds_at_every_instant() {
    let dir = tempfile::tempdir().unwrap();
    let base = config(dir.path(), 1);
    for (round, cap_mib) in [3, 3, 3, 2, 3, 1].into_iter().enumerate() {
        let byte = u8::try_from(round).unwrap() % 3;
        let config = DiskConfig { cap_bytes: cap_mib << 20, ..with_namespace(&base, byte) };
        let files = FaultFiles::default();
        files.watch(dir.path());
        fill_with(&config, &files);
        let most = files.most_bytes();
        assert!(most <= config.cap_bytes, "{most} of {} in round {round}", config.cap_bytes);
        assert!(
            most > config.cap_bytes * 9 / 10,
            "only {most} of {} bytes were used",
            config.cap_bytes
        );
        let (tier, _) = open(&config);
        assert!(tier.stats().bytes <= config.cap_bytes && tier.stats().bytes >= du(dir.path()));
    }
}

#[test]
fn test_the_least_recently_used_namespace_makes_room_and_no_more_than_needed() {
    let dir = tempfile::tempdir().unwrap();
    let path_of = |byte: u8| dir.path().join(namespace_id(&[byte; 32]));
    // Each namespace is created in a separate directory, so that none is deleted to make room.
    // Namespace 2 is the least recently used, followed by 3 and 1.
    for (byte, age_s) in [(1_u8, 100), (2, 300), (3, 200)] {
        let elsewhere = tempfile::tempdir().unwrap();
        let other = with_namespace(&config(elsewhere.path(), 4), byte);
        fill(&other);
        fs::rename(namespace_dir(&other), path_of(byte)).unwrap();
        for file in fs::read_dir(path_of(byte)).unwrap() {
            let file = fs::File::options().write(true).open(file.unwrap().path()).unwrap();
            let time = file.metadata().unwrap().modified().unwrap()
                - std::time::Duration::from_secs(age_s);
            file.set_modified(time).unwrap();
        }
    }
    let foreign: u64 =
        namespaces::scan(dir.path(), &BTreeSet::new()).unwrap().iter().map(|f| f.bytes).sum();
    let mut config = config(dir.path(), 1);
    config.cap_bytes += foreign;
    let (tier, _) = open(&config);
    let mut history = Vec::new();
    loop {
        let slot = tier.reserve(SizeClass(0)).ok();
        history.push([1, 2, 3].map(|byte| path_of(byte).exists()));
        if slot.is_none() {
            break;
        }
    }
    assert_eq!(history[0], [true; 3], "a third namespace must fit");
    history.dedup();
    assert_eq!(history, [[true; 3], [true, false, true], [true, false, false], [false; 3]]);
    assert_eq!(tier.take_events().len(), 3, "each removal must be logged");
    assert!(tier.stats().bytes <= config.cap_bytes, "removed namespaces must not be included");
}

#[test]
fn test_opening_a_new_namespace_brings_a_directory_below_a_smaller_cap() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    fill(&with_namespace(&config, 1));
    let small = DiskConfig { cap_bytes: budget::dir_bytes(1, FRAME, 0), ..config };
    let (tier, _) = open(&small);
    assert_eq!(tier.take_events().len(), 1);
    assert!(tier.stats().bytes <= small.cap_bytes && du(dir.path()) <= small.cap_bytes);
}

#[test]
fn test_what_is_not_ours_is_never_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let base = config(dir.path(), 6);
    fill(&with_namespace(&base, 1));
    let foreign = dir.path().join(namespace_id(&[1; 32]));
    fs::write(foreign.join("notes.txt"), "mine").unwrap();
    fs::create_dir(dir.path().join("photos")).unwrap();
    fs::write(dir.path().join("photos/index.dat"), "mine").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(elsewhere.path().join("index.dat"), "mine").unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("0123456789abcdef")).unwrap();
    assert!(fill(&base) >= 5);
    assert_eq!(fs::read_dir(&foreign).unwrap().count(), 1);
    for path in [
        foreign.join("notes.txt"),
        dir.path().join("photos/index.dat"),
        elsewhere.path().join("index.dat"),
    ] {
        assert_eq!(fs::read(path).unwrap(), b"mine");
    }
}

#[test]
fn test_a_smaller_cap_drops_the_highest_slots_and_their_orphans() {
    let dir = tempfile::tempdir().unwrap();
    let large = config(dir.path(), 8);
    {
        let (tier, _) = open(&large);
        let slots: Vec<_> = (0..8).map(|_| tier.reserve(SizeClass(0)).unwrap()).collect();
        // Chunk 0, the parent of 2 and 3, is in the last slot. Chunk 1, the parent of 4 and 5, is
        // in the first slot.
        for (slot, i) in slots.iter().zip([1, 4, 5, 2, 3, 6, 7, 0]) {
            tier.write(*slot, &meta_of(i), &frame_of(i, 0)).unwrap();
        }
    }
    let small = config(dir.path(), 5);
    let (tier, found) = open(&small);
    assert_eq!(numbers(&found), [1, 4, 5]);
    let stats = tier.stats();
    assert_eq!((stats.slots, stats.dropped_over_cap, stats.dropped_orphans), (5, 3, 2));
    assert!(du(dir.path()) <= small.cap_bytes);
    for entry in found {
        let i = numbers(&[entry])[0];
        assert_eq!(get(&tier, entry.slot, i).unwrap(), frame_of(i, 0).to_vec());
    }
    drop(tier);
    let (tier, found) = open(&large);
    assert_eq!((numbers(&found), tier.stats().dropped_orphans), (vec![1, 4, 5], 0));
}

#[test]
fn test_a_wrong_superblock_starts_afresh_and_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4);
    let superblock = namespace_dir(&config).join("superblock.json");
    let good = {
        open(&config);
        fs::read_to_string(&superblock).unwrap()
    };
    let spoil: [(&str, &dyn Fn()); 7] = [
        ("missing", &|| fs::remove_file(&superblock).unwrap()),
        ("empty", &|| fs::write(&superblock, "").unwrap()),
        ("flipped", &|| fs::write(&superblock, good.replace("8192", "8193")).unwrap()),
        ("older", &|| fs::write(&superblock, of_format(1, &good)).unwrap()),
        ("newer", &|| {
            fs::write(&superblock, good.replace("\"format\": 4", "\"format\": 5")).unwrap();
        }),
        ("huge", &|| fs::write(&superblock, vec![b' '; 1 << 20]).unwrap()),
        ("other frames", &|| {
            drop(DiskTier::open(DiskConfig { frame_sizes: 4096_u64.into(), ..config.clone() }));
        }),
    ];
    for (name, spoil) in spoil {
        let (tier, _) = open(&config);
        tier.clear().unwrap();
        put(&tier, 0);
        drop(tier);
        spoil();
        let (tier, found) = open(&config);
        assert!(found.is_empty(), "{name}");
        let events = tier.take_events();
        assert!(
            tier.stats().fresh_starts == 1 && events[0].starts_with("disk tier: recreating "),
            "{name}: {events:?}"
        );
        let slot = put(&tier, 1);
        assert_eq!(get(&tier, slot, 1).unwrap(), frame_of(1, 0).to_vec());
    }
}

#[test]
fn a_namespace_whose_first_digits_are_anothers_leaves_its_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4);
    let (tier, _) = open(&config);
    let slot = put(&tier, 1);
    drop(tier);
    let mut other = config.clone();
    other.namespace[31] ^= 1;
    let error = DiskTier::open(other).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Io
            && error.to_string().contains("with the same 16-digit prefix"),
        "{error}"
    );
    let (tier, found) = open(&config);
    assert_eq!((numbers(&found), tier.stats().fresh_starts), (vec![1], 0));
    assert_eq!(get(&tier, slot, 1).unwrap(), frame_of(1, 0).to_vec());
}
