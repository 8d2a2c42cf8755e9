use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::store::*;
use kvloft_core::tier::LocalTier;
use kvloft_core::tier::disk::*;
use std::sync::Arc;
use std::time::{Duration, Instant};
#[derive(Debug)]
struct Null;
impl LocalTier for Null {
    fn reserve(&self) -> Option<SlotId> {
        None
    }
    fn write(&self, _: SlotId, _: &DiskMeta, _: &[u8]) -> kvloft_core::Result<()> {
        Ok(())
    }
    fn read(&self, _: SlotId, _: &ChunkKey, _: &mut [u8]) -> kvloft_core::Result<()> {
        Ok(())
    }
    fn free(&self, _: SlotId) -> kvloft_core::Result<()> {
        Ok(())
    }
    fn stats(&self) -> DiskStats {
        DiskStats::default()
    }
    fn take_events(&self) -> Vec<String> {
        vec![]
    }
    fn clear(&self) -> kvloft_core::Result<()> {
        Ok(())
    }
    fn close(&self) {}
}
fn chain(ids: &[u32]) -> KeyChain {
    let mut c = KeyChain::new(ChunkKey([7; 32]), 1).unwrap();
    c.append_tokens(ids).unwrap();
    c
}
fn config(frames: u64) -> StoreConfig {
    StoreConfig {
        frame_bytes: 4096,
        host_bytes: frames * 4096,
        blocks_per_chunk: 1,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
    }
}
fn main() {
    const N: u32 = 1_000_000;
    let store = Store::open(&config(u64::from(N) + 1)).unwrap();
    let all = SaveRange { start: 0, stop: 2, tail_blocks: 0 };
    for leaf in 0..N {
        let c = chain(&[1, leaf]);
        let r = store.reserve(&c, all).unwrap();
        store.commit(r.leases);
    }
    let mut times = Vec::new();
    for leaf in 0..200_000 {
        let c = chain(&[1, N + leaf]);
        let t = Instant::now();
        let r = store.reserve(&c, all).unwrap();
        store.commit(r.leases);
        times.push(t.elapsed());
    }
    times.sort();
    println!(
        "save with eviction at 1M: median {:?} p99.9 {:?} worst {:?}",
        times[100_000], times[199_800], times[199_999]
    );
    let hub = chain(&[1]);
    let t = Instant::now();
    store.discard(hub.keys());
    println!("discard hub of 1M: {:?}", t.elapsed());
    let mut worst = Duration::ZERO;
    let mut n = 0;
    while store.stats().iter().any(|s| s.0 == "entries" && s.1 > 0) {
        let t = Instant::now();
        store.acquire(&hub);
        worst = worst.max(t.elapsed());
        n += 1;
    }
    println!("{n} calls after it, worst {worst:?}");
    let root = ChunkKey([7; 32]);
    let mut found =
        vec![DiskEntry { slot: SlotId(0), key: hub.keys()[0], parent: root, num_blocks: 1, sequence: 0, depth: 0 }];
    for leaf in 0..N {
        found.push(DiskEntry {
            slot: SlotId(leaf + 1),
            key: chain(&[1, leaf]).keys()[1],
            parent: hub.keys()[0],
            num_blocks: 1,
            sequence: 1,
            depth: 1,
        });
    }
    let disk =
        DiskSettings { dir: "/x".into(), cap_bytes: 4096 * 1_100_000, num_threads: 2, description: String::new() };
    let t = Instant::now();
    let store = Store::with_disk(&StoreConfig { disk: Some(disk), ..config(1000) }, Arc::new(Null), &found).unwrap();
    println!("recover 1M: {:?}", t.elapsed());
    let c = chain(&[1, 5]);
    let t = Instant::now();
    let l = store.acquire(&c);
    let mut worst = t.elapsed();
    println!("acquire: {worst:?}");
    loop {
        let t = Instant::now();
        let p = l.poll();
        worst = worst.max(t.elapsed());
        if p.pending_blocks == 0 {
            println!("{p:?}");
            break;
        }
    }
    println!("first load of a hub with 1M disk children: worst call {worst:?}");
    drop(l);
    let t = Instant::now();
    store.clear();
    println!("clear 1M, all: {:?}", t.elapsed());
}
