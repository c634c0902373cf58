//! Frames of made-up reports.

use muser_server::dashboard::{DraftPart, ErrorPart, FIGURES, NodePart, SlotPart};

use super::super::past::tests::report as made;
use super::*;

/// A report with every figure that there is: figure number `i` has the value `i`, or none where `i` is a multiple of nine.
fn report() -> Report {
    let mut report = made(5, 1, &[[Some(1.0), Some(0.5)], [Some(8.0), None], [Some(4.0), Some(0.25)]]);
    let figures = FIGURES.iter().enumerate().map(|(at, figure)| FigurePart {
        id: figure.id.into(),
        group: figure.group.into(),
        label: figure.label.into(),
        value: (at % 9 != 8).then_some(at as f64),
        unit: figure.unit.into(),
        mark: figure.mark,
        over: figure.over.into(),
        what: figure.what.into(),
    });
    report.figures = figures.collect();
    let slot = |id: usize, state: &'static str, tokens: usize| SlotPart {
        id,
        state: state.into(),
        prompt_tokens: tokens,
        processed_tokens: tokens,
        cached_tokens: 0,
        generated_tokens: 1,
    };
    report.slots.list = vec![slot(0, "writing", 811), slot(1, "idle", 0)];
    let error = |status, code: &'static str, last_hour| ErrorPart {
        status,
        code: code.into(),
        last_hour,
        total: 12,
        seconds_ago: 3,
    };
    report.errors.list = vec![error(400, "invalid_value", 3), error(503, "unavailable", 0)];
    report.draft.list =
        vec![DraftPart { place: 1, accepted_share: 0.81 }, DraftPart { place: 2, accepted_share: 0.5 }];
    report.nodes.list = vec![NodePart { name: "desk\x1b[2J".into(), ..NodePart::default() }];
    report
}

fn text(lines: &[Line]) -> String {
    lines.iter().map(|line| line.plain() + "\n").collect()
}

fn with<T>(report: Option<&Report>, trouble: Option<&str>, look: impl FnOnce(&Shown<'_>) -> T) -> T {
    let mut past = Past::default();
    if let Some(report) = report {
        past.take(report);
    }
    look(&Shown { place: "http://127.0.0.1:8080/", report, past: &past, trouble })
}

#[test]
fn every_frame_has_the_size_of_its_screen() {
    let report = report();
    for (width, height) in [(80, 24), (120, 40), (200, 60), (40, 12), (20, 5), (1, 1), (0, 0), (80, 3)] {
        for (found, trouble) in [
            (Some(&report), None),
            (Some(&report), Some("no answer")),
            (None, None),
            (None, Some("no answer")),
        ] {
            for page in [0, 1, 99] {
                let (lines, pages) = with(found, trouble, |shown| screen(shown, (width, height), page));
                assert_eq!(lines.len(), height, "{width}x{height}");
                assert!(lines.iter().all(|line| line.width() <= width), "{width}x{height}");
                assert!(pages >= 1);
            }
        }
    }
}

#[test]
fn all_figures_with_a_value_are_on_some_page_and_marked() {
    let report = report();
    for (width, height) in [(80, 24), (120, 40), (60, 16)] {
        let mut seen = String::new();
        let (_, pages) = with(Some(&report), None, |shown| screen(shown, (width, height), 0));
        for page in 0..pages {
            seen += &text(&with(Some(&report), None, |shown| screen(shown, (width, height), page)).0);
        }
        for figure in report.figures.iter().filter(|figure| figure.value.is_some()) {
            let marked = format!("{} {}", said(figure.value, &figure.unit), letter(figure.mark));
            assert!(seen.contains(&marked), "{}: {marked} in\n{seen}", figure.id);
        }
        for wanted in
            ["Slot 0 writing", "400 invalid_value", "3 in 1 h, 12 m", "81 50 % m", "not connected m"]
        {
            assert!(seen.contains(wanted), "{wanted} in\n{seen}");
        }
        assert!(!seen.contains("Slot 1"), "idle slots are not worth a line");
    }
}

#[test]
fn a_pipe_gets_everything_as_plain_text() {
    let report = report();
    let lines = with(Some(&report), None, |shown| whole(shown, 80));
    let text = text(&lines);
    assert!(!text.contains('\x1b'), "{text}");
    assert!(text.contains("desk\\u{1b}[2J"), "what a server says moves no cursor");
    assert!(text.starts_with("muser top  muse-tiny Q4_K  ready  up 2 h 13 min\n"), "{text}");
    assert!(text.contains(LEGEND));
    // Three rows of six, at the right end: 1, 8 and 4 of 8.
    assert!(text.contains("▁▁▁▁▁█████▄▄▄▄▄"), "{text}");
}

#[test]
fn trouble_is_said_and_the_last_figures_stay() {
    let report = report();
    let (lines, _) = with(Some(&report), Some("no answer"), |shown| screen(shown, (80, 24), 0));
    assert!(lines[0].plain().contains("away") && lines[2].plain() == "no answer");
    assert!(lines.iter().any(|line| line.plain().contains("Slot 0 writing")));
    let (lines, _) = with(None, Some("no answer"), |shown| screen(shown, (80, 24), 0));
    assert_eq!(lines[2].plain(), "no answer");
}

#[test]
fn colours_only_where_they_are_wanted() {
    let line = Line::of(Style::Bad, "a").add(Style::Good, "b").add(Style::Plain, "c").add(Style::Dim, "d");
    assert_eq!(line.ansi(true), "\x1b[1;31ma\x1b[0m\x1b[32mb\x1b[0mc\x1b[2md\x1b[0m");
    assert_eq!(line.ansi(false), "\x1b[1ma\x1b[0mbc\x1b[2md\x1b[0m");
}
