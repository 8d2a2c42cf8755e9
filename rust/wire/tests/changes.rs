//! Tests that replaying a server's changes gives the same results as lookups, for multiple engines
//! and across reconnects and restarts.

mod common;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use common::{FRAME, LONG, chain, connect, until, with_disk};
use kvloft_core::ChunkKey;
use kvloft_core::key::KeyChain;
use kvloft_core::session::Session;
use kvloft_core::store::{Lookup, Prefix, Tiers};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::{Client, Server, ServerConfig, clear};
use proptest::prelude::*;
use proptest::sample::Index;

const NUM_PROMPTS: u32 = 6;
const NUM_BLOCKS: u32 = 4;

/// An engine with a change feed, and the tiers of each chunk according to the changes applied so
/// far.
struct Engine {
    remote: Client,
    known: HashMap<ChunkKey, Tiers>,
    must_ask_all: bool,
    num_lost: u32,
}

impl Engine {
    fn new(remote: Client, capacity: usize) -> Self {
        remote.watch(capacity);
        Self { remote, known: HashMap::new(), must_ask_all: true, num_lost: 0 }
    }

    /// Applies the next changes, and returns true if there may be more.
    fn take(&mut self, universe: &[ChunkKey], limit: usize) -> bool {
        self.remote.renew();
        let asked = if std::mem::take(&mut self.must_ask_all) { universe } else { &[] };
        let changes = self.remote.changes(asked, limit);
        let is_full = changes.rows.len() == asked.len() + limit;
        self.known.extend(changes.rows);
        self.must_ask_all = changes.lost;
        self.num_lost += u32::from(changes.lost);
        is_full || changes.lost
    }

    fn replayed(&self, chain: &KeyChain) -> Lookup {
        let count = |is_there: &dyn Fn(&Tiers) -> bool| {
            let keys = chain.keys().iter().zip(1..);
            keys.take_while(|(key, _)| self.known.get(*key).is_some_and(is_there))
                .last()
                .map_or(0, |(_, num)| num)
        };
        Lookup {
            host_units: count(&|tiers| tiers.host),
            stored_units: count(&|tiers| tiers.host || tiers.disk),
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save { prompt: u32, num_blocks: u32 },
    Discard { prompt: u32, block: Index },
    Clear,
    AdminClear,
    Take { limit: usize },
    Reconnect { is_orderly: bool },
    Restart,
    Rest,
}

fn step() -> impl Strategy<Value = (Index, Step)> {
    let prompt = || 0..NUM_PROMPTS;
    let step = prop_oneof![
        12 => (prompt(), 1..=NUM_BLOCKS).prop_map(|(prompt, num_blocks)| Step::Save { prompt, num_blocks }),
        3 => (prompt(), any::<Index>()).prop_map(|(prompt, block)| Step::Discard { prompt, block }),
        1 => Just(Step::Clear),
        1 => Just(Step::AdminClear),
        8 => (1..6_usize).prop_map(|limit| Step::Take { limit }),
        2 => any::<bool>().prop_map(|is_orderly| Step::Reconnect { is_orderly }),
        1 => Just(Step::Restart),
        2 => Just(Step::Rest),
    ];
    (any::<Index>(), step)
}

struct World {
    dir: PathBuf,
    server: Option<Server>,
    engines: Vec<Engine>,
    prompts: Vec<KeyChain>,
    universe: Vec<ChunkKey>,
}

impl World {
    fn new(dir: &Path, capacities: &[usize]) -> Self {
        let server = Server::open(Self::config(dir)).expect("a server");
        let engines =
            capacities.iter().map(|capacity| Engine::new(connect(dir), *capacity)).collect();
        let prompts: Vec<_> = (0..NUM_PROMPTS).map(|seed| chain(seed, NUM_BLOCKS)).collect();
        let universe = prompts.iter().flat_map(|chain| chain.keys().to_vec()).collect();
        Self { dir: dir.to_owned(), server: Some(server), engines, prompts, universe }
    }

    /// Returns a config with less host memory and disk space than the prompts need.
    fn config(dir: &Path) -> ServerConfig {
        let mut config =
            ServerConfig { host_bytes: 8 * FRAME, max_connections: 64, ..with_disk(dir) };
        config.disk.as_mut().expect("the config has a disk").cap_bytes = 28 * FRAME;
        config
    }

    fn step(&mut self, who: Index, step: &Step) {
        let at = who.index(self.engines.len());
        let engine = &mut self.engines[at];
        match step {
            Step::Save { prompt, num_blocks } => {
                let chain = &self.prompts[*prompt as usize];
                let (rows, _) =
                    engine.remote.reserve(Prefix::from(chain), 0..(*num_blocks)).expect("in range");
                engine.remote.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
            }
            Step::Discard { prompt, block } => {
                engine.remote.discard(&[*block.get(self.prompts[*prompt as usize].keys())]);
            }
            Step::Clear => engine.remote.clear(),
            Step::AdminClear => assert!(clear(&common::socket(&self.dir), "", LONG).is_ok()),
            Step::Take { limit } => _ = engine.take(&self.universe, *limit),
            Step::Reconnect { is_orderly } => {
                if *is_orderly {
                    engine.remote.close(LONG);
                }
                *engine = Engine::new(connect(&self.dir), 4);
            }
            Step::Restart => self.restart(),
            Step::Rest => self.rest(),
        }
    }

    fn restart(&mut self) {
        let server = self.server.take().expect("one");
        server.close(LONG);
        drop(server);
        let is_lost = |engine: &Engine| {
            engine.remote.take_events().iter().any(|event| event.contains("lost the connection"))
        };
        self.engines.iter().for_each(|engine| until("gone", || is_lost(engine)));
        self.server = Some(Server::open(Self::config(&self.dir)).expect("a server"));
        self.engines.iter().for_each(|engine| until("found", || engine.remote.renew()));
    }

    /// Waits until the store is idle, applies all changes, and compares the result with lookups.
    fn rest(&mut self) {
        assert!(self.engines[0].remote.flush(LONG));
        for engine in &mut self.engines {
            assert!((0..1000).any(|_| !engine.take(&self.universe, 3)), "there is always more");
            for chain in &self.prompts {
                assert_eq!(engine.replayed(chain), engine.remote.lookup(Prefix::from(chain)));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn replayed_changes_equal_lookups(
        steps in prop::collection::vec(step(), 1..60), capacities in prop::collection::vec(prop_oneof![1..8_usize, Just(4096)], 1..4),
    ) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut world = World::new(dir.path(), &capacities);
        for (who, step) in &steps {
            world.step(*who, step);
        }
        world.rest();
    }
}
