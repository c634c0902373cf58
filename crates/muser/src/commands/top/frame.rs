//! One frame of `muser top`, as lines of styled pieces: for a screen of some size, or all of it as plain text.

use muser_server::dashboard::{FigurePart, Mark, Report};

use super::past::Past;
use super::words::{said, span};
use crate::output::sanitize;

/// How a piece looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// As text.
    Plain,
    /// Bright.
    Bold,
    /// Faint.
    Dim,
    /// The head of a group.
    Head,
    /// Charts, and what is well.
    Good,
    /// What wants to be looked at.
    Bad,
}

impl Style {
    fn code(self, color: bool) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Bold => Some("1"),
            Self::Dim => Some("2"),
            Self::Head => Some(if color { "1;36" } else { "1" }),
            Self::Good => color.then_some("32"),
            Self::Bad => Some(if color { "1;31" } else { "1" }),
        }
    }
}

/// A line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line(Vec<(Style, String)>);

impl Line {
    fn of(style: Style, text: impl Into<String>) -> Self {
        Self(vec![(style, text.into())])
    }

    fn add(mut self, style: Style, text: impl Into<String>) -> Self {
        self.0.push((style, text.into()));
        self
    }

    fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    /// Cut to so many characters.
    fn cut(mut self, width: usize) -> Self {
        let mut left = width;
        for (_, text) in &mut self.0 {
            let length = text.chars().count();
            if length > left {
                *text = text.chars().take(left).collect();
            }
            left = left.saturating_sub(length);
        }
        self
    }

    /// Filled to so many characters.
    fn filled(self, width: usize) -> Self {
        let missing = width.saturating_sub(self.width());
        self.add(Style::Plain, " ".repeat(missing))
    }

    /// Without styles.
    pub fn plain(&self) -> String {
        let text: String = self.0.iter().map(|(_, text)| text.as_str()).collect();
        text.trim_end().to_owned()
    }

    /// For a terminal.
    pub fn ansi(&self, color: bool) -> String {
        let mut out = String::new();
        for (style, text) in self.0.iter().filter(|(_, text)| !text.is_empty()) {
            match style.code(color) {
                Some(code) => out.extend(["\x1b[", code, "m", text, "\x1b[0m"]),
                None => out.push_str(text),
            }
        }
        out
    }
}

/// What there is to show.
pub struct Shown<'a> {
    /// Where the server is.
    pub place: &'a str,
    /// What it said last.
    pub report: Option<&'a Report>,
    /// Its past.
    pub past: &'a Past,
    /// Why it says nothing now.
    pub trouble: Option<&'a str>,
}

/// The charts: a column of the history and the figure that is its newest value.
const CHARTS: [(&str, &str); 8] = [
    ("written", "written_per_s"),
    ("read", "read_per_s"),
    ("first_p95", "first_token_p95"),
    ("next_p95", "next_token_p95"),
    ("running", "running"),
    ("waiting", "waiting"),
    ("kv_used", "kv_used"),
    ("bandwidth", "bandwidth_share"),
];

/// Groups in the order of an operator's questions.
const GROUPS: [(&str, &str); 8] = [
    ("queue", "Queue and slots"),
    ("errors", "Errors"),
    ("memory", "Memory"),
    ("reuse", "Prefixes and packs"),
    ("draft", "Draft"),
    ("roofline", "Roofline"),
    ("throughput", "Throughput"),
    ("latency", "Latency"),
];

/// Width of a column of figures, and busy slots that are shown one by one.
const COLUMN: usize = 38;
const MOST_SLOTS: usize = 8;
/// Lines that are there besides charts and figures.
const FRAME: usize = 5;

/// A frame for a screen of `width` and `height`, and how many pages its figures have. `page` counts from 0.
pub fn screen(shown: &Shown<'_>, (width, height): (usize, usize), page: usize) -> (Vec<Line>, usize) {
    let mut lines = head(shown);
    let mut pages = 1;
    if let Some(report) = shown.report {
        let room = height.saturating_sub(FRAME);
        // Figures get at least four lines.
        let mut charts = charts(shown, report, width);
        charts.truncate(room.saturating_sub(4).max(room / 2));
        let drawn = charts.len().saturating_sub(1);
        lines.extend(charts);
        lines.push(Line::default());
        let rows = height.saturating_sub(lines.len() + 1).max(1);
        let columns = (width / (COLUMN + 2)).max(1);
        let laid = lay_out(entries(report, drawn), rows);
        pages = laid.len().div_ceil(columns).max(1);
        let page = page.min(pages - 1);
        let visible = &laid[(page * columns).min(laid.len())..laid.len().min((page + 1) * columns)];
        lines.extend(side_by_side(visible, rows, width / columns));
        lines.resize(height.saturating_sub(1), Line::default());
        lines.push(foot(page, pages));
    } else {
        lines.resize(height.saturating_sub(1), Line::default());
        lines.push(Line::of(Style::Dim, "q quit"));
    }
    lines.truncate(height);
    (lines.into_iter().map(|line| line.cut(width)).collect(), pages)
}

/// Everything, for a pipe.
pub fn whole(shown: &Shown<'_>, width: usize) -> Vec<Line> {
    let mut lines = head(shown);
    if let Some(report) = shown.report {
        lines.push(Line::default());
        lines.extend(charts(shown, report, width));
        lines.push(Line::default());
        let columns = lay_out(entries(report, CHARTS.len()), usize::MAX);
        lines.extend(columns.into_iter().flatten());
        lines.push(Line::default());
        lines.push(Line::of(Style::Dim, LEGEND));
    }
    lines
}

const LEGEND: &str = "m measured  d derived  e estimated";

fn foot(page: usize, pages: usize) -> Line {
    let line = Line::of(Style::Dim, format!("{LEGEND}   "));
    let line = if pages > 1 {
        line.add(Style::Bold, format!("↑↓ page {} of {pages}", page + 1)).add(Style::Dim, "   ")
    } else {
        line
    };
    line.add(Style::Bold, "q").add(Style::Dim, " quit")
}

fn letter(mark: Mark) -> &'static str {
    match mark {
        Mark::Measured => "m",
        Mark::Derived => "d",
        Mark::Estimated => "e",
    }
}

fn clean(text: &str) -> String {
    sanitize(text).replace(['\n', '\t'], " ")
}

fn head(shown: &Shown<'_>) -> Vec<Line> {
    let mut first = Line::of(Style::Bold, "muser top  ");
    let mut second = Line::of(Style::Dim, clean(shown.place));
    if let Some(report) = shown.report {
        let (server, model) = (&report.server, &report.model);
        let well = server.state == "ready" && shown.trouble.is_none();
        let state = if shown.trouble.is_some() { "away" } else { &*server.state };
        first = first
            .add(Style::Plain, clean(&format!("{} {}  ", model.name, model.quantization)))
            .add(if well { Style::Good } else { Style::Bad }, clean(state))
            .add(Style::Plain, format!("  up {}", span(server.uptime_s)));
        second = second.add(Style::Dim, clean(&format!("  {}", server.device)));
    }
    let mut lines = vec![first, second];
    let reason = shown.report.and_then(|report| report.server.reason.as_deref());
    lines.extend(shown.trouble.or(reason).map(|why| Line::of(Style::Bad, clean(why))));
    lines
}

fn find<'a>(report: &'a Report, id: &str) -> Option<&'a FigurePart> {
    report.figures.iter().find(|figure| figure.id == id)
}

fn charts(shown: &Shown<'_>, report: &Report, width: usize) -> Vec<Line> {
    let cells = width.saturating_sub(50).clamp(10, 120);
    let title = format!("{:<34}{:<cells$}   {:>11}", "", "an hour ago … now", "at most");
    let mut lines = vec![Line::of(Style::Dim, title)];
    for (column, id) in CHARTS {
        let Some(figure) = find(report, id) else { continue };
        // Beside its group's other figures it is called "of that".
        let label =
            if id == "bandwidth_share" { "Memory rate used".to_owned() } else { clean(&figure.label) };
        let values = shown.past.cells(column, cells, figure.unit == "s");
        let most = values.iter().flatten().copied().reduce(f64::max);
        let scale = match id {
            "kv_used" => find(report, "kv_total").and_then(|total| total.value).or(most),
            _ => most,
        };
        let wanted = id == "waiting" && figure.value.is_some_and(|waiting| waiting > 0.0);
        lines.push(
            Line::of(Style::Plain, format!("{label:<18}"))
                .add(
                    if wanted { Style::Bad } else { Style::Bold },
                    format!("{:>13}", said(figure.value, &figure.unit)),
                )
                .add(Style::Dim, format!(" {} ", letter(figure.mark)))
                .add(Style::Good, format!("{} ", spark(&values, scale)))
                .add(Style::Dim, format!("{:>13}", said(most, &figure.unit))),
        );
    }
    lines
}

/// Values as columns of eight heights; nothing where there is no value.
fn spark(values: &[Option<f64>], scale: Option<f64>) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let scale = scale.filter(|most| *most > 0.0).unwrap_or(1.0);
    let level = |value: f64| ((value / scale * 8.0).ceil() as usize).clamp(1, 8) - 1;
    values.iter().map(|value| value.map_or(' ', |value| LEVELS[level(value)])).collect()
}

/// A row of figures: a head, or a label with its value and mark.
enum Entry {
    Head(String),
    Row { label: String, value: String, mark: Mark, bad: bool },
}

impl Entry {
    fn row(label: &str, value: String, mark: Mark) -> Self {
        Self::Row { label: clean(label), value: clean(&value), mark, bad: false }
    }

    fn line(&self) -> Line {
        match self {
            Self::Head(title) => Line::of(Style::Head, title.clone()),
            Self::Row { label, value, mark, bad } => {
                let room = COLUMN.saturating_sub(value.chars().count() + 4);
                let label: String = label.chars().take(room).collect();
                Line::of(Style::Plain, format!("{label:<room$}  "))
                    .add(if *bad { Style::Bad } else { Style::Plain }, value.clone())
                    .add(Style::Dim, format!(" {}", letter(*mark)))
            }
        }
    }
}

/// All groups, without what the first `drawn` charts have and without what has no value.
fn entries(report: &Report, drawn: usize) -> Vec<Vec<Entry>> {
    let mut groups: Vec<Vec<Entry>> = GROUPS
        .iter()
        .map(|(group, title)| {
            let figures =
                report.figures.iter().filter(|figure| figure.group == *group && figure.value.is_some());
            let mut rows: Vec<Entry> = figures
                .filter(|figure| CHARTS[..drawn.min(CHARTS.len())].iter().all(|(_, id)| figure.id != *id))
                .map(of_figure)
                .collect();
            match *group {
                "queue" => rows.extend(slots(report)),
                "errors" => rows.extend(errors(report)),
                "draft" => rows.extend(draft(report)),
                _ => {}
            }
            rows.insert(0, Entry::Head((*title).to_owned()));
            rows
        })
        .collect();
    let nodes = report.nodes.list.iter().map(|node| {
        let said_of = if node.connected { said(node.round_trip_s, "s") } else { "not connected".to_owned() };
        Entry::row(&node.name, said_of, report.nodes.mark)
    });
    groups.insert(4, [Entry::Head("Nodes".to_owned())].into_iter().chain(nodes).collect());
    groups.retain(|group| group.len() > 1);
    groups
}

fn of_figure(figure: &FigurePart) -> Entry {
    let label = match &*figure.over {
        "now" => figure.label.to_string(),
        "start" => format!("{}, since start", figure.label),
        over => format!("{}, {over}", figure.label),
    };
    let bad =
        ["own_errors", "failed"].contains(&&*figure.id) && figure.value.is_some_and(|value| value > 0.0);
    Entry::Row { label: clean(&label), value: said(figure.value, &figure.unit), mark: figure.mark, bad }
}

fn slots(report: &Report) -> Vec<Entry> {
    let busy: Vec<_> = report.slots.list.iter().filter(|slot| slot.state != "idle").collect();
    let mut rows: Vec<Entry> = busy
        .iter()
        .take(MOST_SLOTS)
        .map(|slot| {
            let held = slot.processed_tokens + slot.generated_tokens;
            let value = if held == 0 { String::new() } else { said(Some(held as f64), "tokens") };
            Entry::row(&format!("Slot {} {}", slot.id, slot.state), value, report.slots.mark)
        })
        .collect();
    if busy.len() > MOST_SLOTS {
        rows.push(Entry::row("More busy slots", (busy.len() - MOST_SLOTS).to_string(), report.slots.mark));
    }
    rows
}

fn errors(report: &Report) -> impl Iterator<Item = Entry> {
    report.errors.list.iter().take(8).map(|error| {
        let value = format!("{} in 1 h, {}", error.last_hour, error.total);
        Entry::row(&format!("{} {}", error.status, error.code), value, report.errors.mark)
    })
}

fn draft(report: &Report) -> Option<Entry> {
    let places = report.draft.list.iter().take(6).map(|place| format!("{:.0}", 100.0 * place.accepted_share));
    let shares = places.collect::<Vec<_>>().join(" ");
    (!shares.is_empty()).then(|| Entry::row("By place", format!("{shares} %"), report.draft.mark))
}

/// Groups one below the other in columns of so many rows; no head stands alone at the end of a column.
fn lay_out(groups: Vec<Vec<Entry>>, rows: usize) -> Vec<Vec<Line>> {
    let mut columns: Vec<Vec<Line>> = vec![Vec::new()];
    for entry in groups.iter().flatten() {
        let column = columns.last_mut().filter(|column| {
            let wanted = match entry {
                Entry::Head(_) if !column.is_empty() => 3,
                Entry::Head(_) | Entry::Row { .. } => 1,
            };
            rows.saturating_sub(column.len()) >= wanted
        });
        match column {
            Some(column) => {
                if matches!(entry, Entry::Head(_)) && !column.is_empty() {
                    column.push(Line::default());
                }
                column.push(entry.line());
            }
            None => columns.push(vec![entry.line()]),
        }
    }
    columns
}

fn side_by_side(columns: &[Vec<Line>], rows: usize, width: usize) -> Vec<Line> {
    let highest = columns.iter().map(Vec::len).max().unwrap_or(0).min(rows);
    (0..highest)
        .map(|row| {
            let cells = columns.iter().map(|column| column.get(row).cloned().unwrap_or_default());
            let filled = cells.map(|cell| cell.filled(width));
            Line(filled.flat_map(|line| line.0).collect())
        })
        .collect()
}

#[cfg(test)]
mod tests;
