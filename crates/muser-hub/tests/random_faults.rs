//! Whatever sequence of faults a server shows, a pull that ends well has the right bytes.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::ops::ControlFlow;
use std::time::Duration;

use muser_hub::{Hub, ModelStore, PullOptions, Source, pull};
use proptest::prelude::*;
use support::{Reply, Server, content};

#[derive(Clone, Debug)]
enum Fault {
    Cut(usize),
    CutFull(usize),
    ShiftedRange(usize),
    Unavailable,
    NotSatisfiable,
    Silence,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        6 => (0_usize..80_000).prop_map(Fault::Cut),
        2 => (0_usize..80_000).prop_map(Fault::CutFull),
        1 => (1_usize..100).prop_map(Fault::ShiftedRange),
        1 => Just(Fault::Unavailable),
        1 => Just(Fault::NotSatisfiable),
        1 => Just(Fault::Silence),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_faults_then_the_right_bytes(
        len in 24_usize..120_000,
        seed in any::<u64>(),
        faults in prop::collection::vec(fault(), 0..10),
        restarts in prop::collection::vec(0_usize..10, 0..3),
        etag in prop::option::of(Just("\"strong\"")),
    ) {
        let data = content(len, seed);
        let server = Server::start({
            let (data, faults) = (data.clone(), faults.clone());
            move |request, n| {
                let mut good = Reply::good(request, &data);
                if let Some(etag) = etag {
                    good = good.header("ETag", etag);
                }
                match (faults.get(n), request.from()) {
                    (None, _) => good,
                    (Some(Fault::Cut(at)), _) => good.cut(*at),
                    (Some(Fault::CutFull(at)), _) => Reply::full(&data).cut(*at),
                    (Some(Fault::ShiftedRange(by)), Some(from)) if from > *by => Reply::range(&data, from - by),
                    (Some(Fault::ShiftedRange(_)), _) => good.cut(10),
                    (Some(Fault::Unavailable), _) => Reply::status("503 Service Unavailable"),
                    (Some(Fault::NotSatisfiable), _) => Reply::status("416 Range Not Satisfiable"),
                    (Some(Fault::Silence), _) => Reply { status: "", headers: vec![], body: vec![], end: support::End::Close },
                }
            }
        });
        let home = tempfile::tempdir().unwrap();
        let store = ModelStore::open(Some(home.path())).unwrap();
        let hub = Hub::new("http://127.0.0.1:9").unwrap();
        let source = Source::parse(&server.url("/m.gguf"), &hub).unwrap().remove(0);
        let options = PullOptions { backoff: Duration::from_millis(1), max_failures: 12, max_wait: Duration::from_millis(2), ..PullOptions::default() };
        // Some pulls are stopped after a few progress reports; the next one goes on.
        for reports in restarts {
            let mut seen = 0;
            let _ = pull(&store, &hub, &source, &options, &mut |_| {
                seen += 1;
                if seen > reports { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
        }
        let pulled = pull(&store, &hub, &source, &options, &mut |_| ControlFlow::Continue(()));
        prop_assert!(pulled.is_ok(), "{pulled:?}");
        prop_assert!(std::fs::read(store.dir().join("m.gguf")).unwrap() == data, "other bytes");
    }
}
