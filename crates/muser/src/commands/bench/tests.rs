//! Benchmarks of a synthetic model, against a program that is a line of shell.

use muser_model::synth::{Mix, Preset, SynthOptions};
use serde_json::Value;

use super::*;
use crate::cli::{ModelArgs, PrefillChoice};

/// A model file of the tiny synthetic preset and the arguments that name it.
fn tiny() -> (tempfile::TempDir, ModelSource, BenchArgs) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let bytes =
        muser_model::synth::to_bytes(&SynthOptions::new(Preset::Tiny, Mix::from_name("q4_k_m").unwrap()))
            .unwrap();
    std::fs::write(&path, bytes).unwrap();
    let args = BenchArgs {
        prompt: vec![20],
        gen_tokens: 3,
        depth: vec![0, 300],
        rows: vec![2],
        draft_rows: vec![4],
        draft: CompanionChoice::Off,
        draft_len: muser_engine::DraftLength::Auto,
        draft_accept: None,
        reps: 2,
        repack: RepackChoice::Auto,
        compare: None,
        reload: false,
        receipt: None,
        json: true,
        model: ModelArgs {
            model: None,
            backend: BackendChoice::Scalar,
            devices: None,
            adapter: None,
            threads: Some(1),
            ctx: None,
            prefill: PrefillChoice::Exact,
            kv: None,
        },
    };
    (folder, ModelSource::File(path), args)
}

fn console() -> Console {
    use clap::Parser as _;
    Console::from_environment(&crate::cli::Cli::parse_from(["muser", "-q", "models"]).global)
}

#[test]
fn lists_become_tests_without_repetitions() {
    let names = |tests: Vec<Test>| tests.iter().map(Test::to_string).collect::<Vec<_>>();
    assert_eq!(
        names(plan::tests(&[512, 512, 0], 1, &[0, 9], &[8], &[4])),
        ["pp512", "tg@0", "rows8@0", "draft4@0", "tg@9", "rows8@9", "draft4@9"]
    );
    assert_eq!(names(plan::tests(&[7], 0, &[0], &[8], &[])), ["pp7"]);
}

#[test]
fn every_kind_of_test_is_measured_in_turn_with_another_program() {
    let (folder, source, mut args) = tiny();
    let log = folder.path().join("calls");
    // The other program notes its arguments, so that the test sees when it ran and what it was asked.
    let script = format!(
        "echo '{{tests}}' >> {}; echo '{{\"tests\": [{{\"test\": \"tg@0\", \"tok_s\": 1e-3}}]}}'",
        log.display()
    );
    args.compare = Some(script);
    args.reload = true;
    let report = measure(&args, &source, &console()).unwrap();
    let names: Vec<_> = report.tests.iter().map(|t| t.test.as_str()).collect();
    assert_eq!(names, ["pp20", "tg@0", "rows2@0", "draft4@0", "tg@300", "rows2@300", "draft4@300"]);
    let calls = std::fs::read_to_string(log).unwrap();
    assert_eq!(calls.lines().collect::<Vec<_>>(), [names.join(",").as_str(); 2]);

    // One probe before each round and one after each measurement.
    assert_eq!(report.bandwidth_probes.len(), 2 * (1 + names.len()));
    for test in &report.tests {
        assert_eq!(test.reps.len(), 2);
        assert!(test.tok_s > 0.0 && test.reps.iter().all(|rep| rep.best_ms <= rep.median_ms));
        assert_eq!(test.gb_s.is_none(), test.test == "pp20");
        let steps = if test.test == "pp20" { 1 } else { 3 };
        assert!(test.reps.iter().all(|rep| rep.steps == steps));
    }
    let compare = report.compare.as_ref().unwrap();
    assert_eq!(compare.ratios.len(), 1);
    assert!(compare.ratios[0].ratio > 1.0 && compare.rounds.len() == 2);
    let table = report.table();
    assert!(table.contains("draft4@300") && table.contains("in turn with"), "{table}");

    let json: Value = serde_json::to_value(&report).unwrap();
    for key in ["device", "bandwidth", "commit", "model"] {
        assert!(!json[key].is_null(), "{key}");
    }
    assert_eq!(json["tests"][1]["test"], "tg@0");
    assert!(json["tests"][1]["tok_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_fast_backend_is_measured_too() {
    let (_folder, source, mut args) = tiny();
    args.model.backend = BackendChoice::Cpu;
    let report = measure(&args, &source, &console()).unwrap();
    assert_eq!((report.backend.as_str(), report.tests.len()), ("cpu", 7));
    assert!(report.tests.iter().all(|test| test.tok_s > 0.0));
}

#[test]
fn a_receipt_carries_the_report_and_is_never_overwritten() {
    let (folder, source, mut args) = tiny();
    (args.depth, args.rows, args.draft_rows, args.reps) = (vec![0], vec![], vec![], 1);
    let report = measure(&args, &source, &console()).unwrap();
    let path = receipt::write(
        "unit-test-of-receipts",
        Some(folder.path()),
        crate::COMMIT,
        muser_text::utc_now(),
        &report,
    )
    .unwrap();
    assert!(path.starts_with(folder.path()), "{}", path.display());
    let read: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(read["report"]["tests"][0]["test"], "pp20");
    assert_eq!(read["report"]["model"]["file"], "tiny.gguf");
    assert!(read["withdrawn"].is_null());
    assert!(
        receipt::write(
            "unit-test-of-receipts",
            Some(folder.path()),
            crate::COMMIT,
            muser_text::utc_now(),
            &report
        )
        .is_err()
    );
}

#[test]
fn depths_beyond_the_context_are_the_users_mistake() {
    let (_folder, source, mut args) = tiny();
    args.depth = vec![4_000_000_000];
    let message = measure(&args, &source, &console()).unwrap_err().to_string();
    assert!(message.contains("the model's context is"), "{message}");
}

#[test]
fn a_stand_in_is_compared_and_called_synthetic() {
    let (folder, source, mut args) = tiny();
    let draft = folder.path().join("draft.gguf");
    let mix = Mix::from_name("q4_k_m").unwrap();
    std::fs::write(&draft, muser_model::synth::draft_to_bytes(&Preset::Tiny.draft(), mix, 1).unwrap())
        .unwrap();
    args.model.backend = BackendChoice::Cpu;
    (args.prompt, args.depth, args.rows, args.draft_rows) = (vec![], vec![0], vec![], vec![]);
    args.draft_accept = Some(0.8);
    // Nobody named a draft, and none lies beside the model.
    let message = measure(&args, &source, &console()).unwrap_err().to_string();
    assert!(message.contains("--draft"), "{message}");
    args.draft = CompanionChoice::File(draft);
    args.draft_len = muser_engine::DraftLength::Fixed(2);
    args.gen_tokens = 60;
    let report = measure(&args, &source, &console()).unwrap();
    let drafting = report.drafting.as_ref().unwrap();
    assert!(drafting.synthetic && drafting.texts.len() == 1);
    assert!((drafting.accepted_by_position[0] - 0.8).abs() < 0.2, "{drafting:?}");
    assert!(drafting.tokens_per_target_pass > 1.8 && drafting.tokens_per_target_pass < 3.0, "{drafting:?}");
    assert!(report.tests.iter().any(|test| test.test == "synthetic-drafted" && test.tok_s > 0.0));
    assert!(report.table().contains("synthetic"));
}
