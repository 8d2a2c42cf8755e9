//! Tests directories created or changed by another user: the tier follows no links, trusts no
//! contents, and uses bounded time and memory.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::super::record::recover;
use super::super::record::{Record, payload_checksum, record_seed};
use super::super::superblock::Superblock;
use super::super::{Verifier, inspect, namespaces};
use super::*;
use crate::ErrorKind;
use crate::key::namespace_id;
use crate::test_support::faults::{Call, EIO, Fault, FaultFiles, Rule};

fn filled(dir: &Path) -> DiskConfig {
    let config = config(dir, 8);
    let (tier, _) = open(&config);
    for i in 0..4 {
        put(&tier, i);
    }
    config
}

fn places(config: &DiskConfig) -> Vec<PathBuf> {
    let own = config.dir.join(namespace_id(&config.namespace));
    let files = ["index-8192.dat", "frames-8192.dat", "superblock.json"].map(|name| own.join(name));
    [config.dir.clone(), config.dir.join("lock"), own].into_iter().chain(files).collect()
}

fn refusal(config: &DiskConfig) -> String {
    let error = DiskTier::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "an operator can fix this error: {error}");
    error.to_string()
}

#[test]
fn test_what_others_may_write_is_refused_with_the_fix() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    for path in places(&config) {
        let good = fs::metadata(&path).unwrap().permissions();
        for mode in [0o777, 0o720, 0o602] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let text = refusal(&config);
            assert!(text.contains(&format!("disk_path {}", config.dir.display())), "{text}");
            let fix = if path == config.dir {
                format!("set disk_path = {}/kvloft, which kvloft creates", path.display())
            } else {
                format!("chmod go-w {}`", path.display())
            };
            assert!(text.contains(&fix), "{text}");
        }
        fs::set_permissions(&path, good).unwrap();
        assert_eq!(open(&config).1.len(), 4, "the directory must not be changed");
    }
}

#[test]
fn test_what_belongs_to_another_user_is_refused_with_the_fix() {
    if !rustix::process::geteuid().is_root() {
        // Only root can change the owner of files.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    for path in places(&config) {
        chown(&path, Some(12345), None).unwrap();
        let text = refusal(&config);
        assert!(text.contains("belongs to user 12345") && text.contains("chown -R 0 "), "{text}");
        chown(&path, Some(0), None).unwrap();
        assert_eq!(open(&config).1.len(), 4, "the directory must not be changed");
    }
}

#[test]
fn test_a_public_directory_of_another_user_gets_a_directory_of_this_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    chown(&config.dir, Some(12345), None).unwrap();
    fs::set_permissions(&config.dir, Permissions::from_mode(0o1777)).unwrap();
    let text = refusal(&config);
    assert!(text.contains("(mode 1777); set disk_path = ") && !text.contains("chown"), "{text}");
    let below = DiskConfig { dir: config.dir.join("kvloft"), ..config };
    open(&below);
}

#[test]
fn test_no_link_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4);
    let own = config.dir.join(namespace_id(&config.namespace));
    let target = dir.path().join("mine");
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
    for name in ["superblock.json.tmp", "superblock.json", "index-8192.dat", "frames-8192.dat"] {
        fs::write(&target, "precious").unwrap();
        let _ = fs::remove_file(own.join(name));
        symlink(&target, own.join(name)).unwrap();
        let (tier, _) = open(&config);
        let slot = put(&tier, 0);
        assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
        assert_eq!(fs::read(&target).unwrap(), b"precious", "{name}");
        assert!(
            !fs::symlink_metadata(own.join(name)).is_ok_and(|meta| meta.is_symlink()),
            "{name}"
        );
    }
    fs::remove_file(dir.path().join("lock")).unwrap();
    symlink(&target, dir.path().join("lock")).unwrap();
    assert_eq!(DiskTier::open(config).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(fs::read(&target).unwrap(), b"precious");
}

#[test]
fn test_a_link_in_the_namespaces_place_is_replaced_and_what_it_points_to_stays() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = config(dir.path(), 4);
    let own = config.dir.join(namespace_id(&config.namespace));
    fs::write(elsewhere.path().join("index.dat"), "precious").unwrap();
    symlink(elsewhere.path(), &own).unwrap();
    let (tier, _) = open(&config);
    put(&tier, 0);
    assert!(fs::symlink_metadata(&own).unwrap().is_dir() && tier.stats().fresh_starts == 1);
    assert_eq!(fs::read(elsewhere.path().join("index.dat")).unwrap(), b"precious");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 1);
}

/// The link is removed, a new superblock is written, and the chunks are kept.
#[test]
fn test_a_link_in_the_place_of_the_next_superblock_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let config = DiskConfig { description: "renamed".to_owned(), ..filled(dir.path()) };
    let own = config.dir.join(namespace_id(&config.namespace));
    let target = dir.path().join("mine");
    fs::write(&target, "precious").unwrap();
    symlink(&target, own.join("superblock.json.tmp")).unwrap();
    assert_eq!(open(&config).1.len(), 4);
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    assert_eq!(inspect(dir.path()).unwrap()[0].description, "renamed");
}

#[test]
fn test_a_lock_that_is_deleted_under_its_owner_makes_no_second_owner() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 4);
    let (tier, _) = open(&config);
    fs::remove_file(dir.path().join("lock")).unwrap();
    assert_eq!(DiskTier::open(config.clone()).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(Verifier::open(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
    drop(tier);
    open(&config);
}

/// Earlier kvloft versions lock only the lock file.
#[test]
fn test_the_lock_file_alone_keeps_others_out_too() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    let file = fs::File::open(dir.path().join("lock")).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_eq!(DiskTier::open(config.clone()).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(Verifier::open(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn test_an_open_that_fails_anywhere_leaves_nothing_in_the_way_of_the_next() {
    for call in [Call::Open, Call::Read, Call::SetLen] {
        for at in 0..4 {
            let dir = tempfile::tempdir().unwrap();
            let config = filled(dir.path());
            if call == Call::SetLen {
                // Simulate a crash between growing the first file and the second. Opening makes
                // their lengths consistent.
                let frames = places(&config).remove(4);
                OpenOptions::new()
                    .write(true)
                    .open(frames)
                    .unwrap()
                    .set_len(8 * FRAME + 1)
                    .unwrap();
            }
            let files = FaultFiles::default();
            let rule = Rule::new(Fault::Refuse(EIO)).after(at).times(1);
            files.inject(match call {
                Call::Open => rule.on(&[Call::Open]),
                Call::Read => rule.on(&[Call::Read]),
                _ => rule.on(&[Call::SetLen]),
            });
            if let Err(error) =
                DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files)
            {
                assert_eq!(error.kind(), ErrorKind::Io, "the error may be temporary: {error}");
            }
            let (tier, found) = DiskTier::open_with_files(
                &config,
                &std::sync::Arc::default(),
                &FaultFiles::default(),
            )
            .unwrap();
            assert_eq!((numbers(&found), tier.stats().fresh_starts), (vec![0, 1, 2, 3], 0));
        }
    }
}

#[test]
fn test_keys_that_begin_alike_do_not_make_recovery_slow() {
    // Recovering 200,000 such keys took minutes when a key's first bytes served as its hash.
    let entry = |i: u32| {
        let mut key = ChunkKey([7; 32]);
        key.0[28..].copy_from_slice(&i.to_le_bytes());
        let parent = ChunkKey([9; 32]);
        let meta = DiskMeta { key, parent, depth: i % 2, saved_s: 0 };
        DiskEntry { slot: SlotId(i), meta, sequence: u64::from(i) }
    };
    let found: Vec<_> = (0..200_000).map(entry).collect();
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(recover(&found)));
    let recovered = receive.recv_timeout(Duration::from_secs(60)).expect("recovery must finish");
    assert_eq!((recovered.entries.len(), recovered.orphans.len()), (100_000, 100_000));
}

/// Creates a namespace by hand, with frames of `frame_bytes`, one valid record, and a frames file
/// that is a hole followed by `frame_end`.
fn forge(dir: &Path, frame_bytes: u64, frame_end: &[u8], payload: u128) -> DiskConfig {
    let config = config(dir, 1);
    drop(open(&config));
    let own = config.dir.join(namespace_id(&config.namespace));
    let superblock = Superblock::new(&config.namespace, &[frame_bytes], "forged");
    fs::write(own.join("superblock.json"), serde_json::to_vec(&superblock).unwrap()).unwrap();
    let record = Record { meta: meta_of(0), payload, sequence: 0 };
    let seed = record_seed(&config.namespace, frame_bytes);
    fs::write(own.join(namespaces::index_name(frame_bytes)), record.encode(0, seed)).unwrap();
    let frames = own.join(namespaces::frames_name(frame_bytes));
    let frames = OpenOptions::new().write(true).create(true).truncate(true).open(frames).unwrap();
    frames.set_len(frame_bytes).unwrap();
    frames.write_all_at(frame_end, frame_bytes - frame_end.len() as u64).unwrap();
    config
}

#[test]
fn test_a_forged_frame_size_allocates_nothing() {
    for frame_bytes in [8_u64 << 40, 1 << 62, 16 << 30 | 4096] {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), 1);
        drop(open(&config));
        let path = config.dir.join(namespace_id(&config.namespace)).join("superblock.json");
        let forged = Superblock::new(&config.namespace, &[frame_bytes], "forged");
        fs::write(&path, serde_json::to_vec(&forged).unwrap()).unwrap();
        let damage = Verifier::open(dir.path()).unwrap().step(1);
        assert_eq!(damage[0].problem, "superblock.json is damaged (a value is out of range)");
        assert!(inspect(dir.path()).unwrap()[0].problem.is_some());
        assert_eq!(open(&config).0.stats().fresh_starts, 1);
        let error = DiskTier::open(DiskConfig {
            frame_sizes: frame_bytes.into(),
            cap_bytes: u64::MAX,
            ..config
        })
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    }
}

#[test]
fn test_frames_are_verified_in_pieces_of_any_number() {
    for frame_bytes in [4096, 1 << 20, (1 << 20) + 4096, (5 << 20) + 8192] {
        let mut frame = vec![0; usize::try_from(frame_bytes).unwrap()];
        let tail = frame.len() - 8192.min(frame.len());
        blake3::Hasher::new().finalize_xof().fill(&mut frame[tail..]);
        for spoil in [None, Some(0), Some(frame.len() / 2), Some(frame.len() - 1)] {
            let dir = tempfile::tempdir().unwrap();
            let mut claimed = frame.clone();
            if let Some(at) = spoil {
                claimed[at] ^= 1;
            }
            forge(dir.path(), frame_bytes, &frame[tail..], payload_checksum(&claimed));
            let damage = Verifier::open(dir.path()).unwrap().step(1);
            assert_eq!(damage.is_empty(), spoil.is_none(), "{frame_bytes} {spoil:?} {damage:?}");
        }
    }
}

#[test]
fn test_a_flood_of_damaged_records_is_told_in_few_lines() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    fs::write(slot_file(&config, "index"), vec![1; 128 * 5000]).unwrap();
    let damage = Verifier::open(dir.path()).unwrap().step(1);
    assert_eq!(damage.len(), 1001);
    assert_eq!(damage[1000].problem, "4000 more records are damaged or have no frame");
}

#[test]
fn test_files_of_holes_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = filled(dir.path());
    let own = config.dir.join(namespace_id(&config.namespace));
    // There are more records than the maximum number of slots, and the frames file has the largest
    // size that ext4 supports.
    for (name, len) in [("index-8192.dat", 128_u64 << 32), ("frames-8192.dat", (1 << 44) - 4096)] {
        OpenOptions::new().write(true).open(own.join(name)).unwrap().set_len(len).unwrap();
    }
    assert!(Verifier::open(dir.path()).unwrap().step(10).is_empty());
    assert_eq!(inspect(dir.path()).unwrap()[0].chunks, 4);
    assert_eq!(open(&config).1.len(), 4);
}
