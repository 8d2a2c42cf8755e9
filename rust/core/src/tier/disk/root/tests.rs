//! A namespace that is being deleted.

use super::super::namespaces::dir_name;
use super::*;

#[test]
fn a_namespace_is_not_opened_while_it_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let config = DiskConfig {
        dir: dir.path().to_owned(),
        cap_bytes: 1 << 20,
        frame_bytes: 4096,
        namespace: [1; 32],
        description: String::new(),
    };
    let root = DiskRoot::shared();
    root.books().leaving.insert(dir_name(&config.namespace));
    assert_eq!(root.enter(&config).unwrap_err().kind(), ErrorKind::Busy);
    root.books().leaving.clear();
    assert!(root.enter(&config).is_ok());
}
