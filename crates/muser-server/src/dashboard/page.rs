//! The part of `docs/api.md` about `GET /v1/dashboard`, from the tables that its answer is made from.

use std::fmt::Write as _;

use super::figures::{COLUMNS, FIGURES};
use super::history::{INTERVAL, LENGTH};
use super::report::VERSION;

/// Writes it.
pub fn describe(page: &mut String) {
    let _ = write!(
        page,
        "\n## `GET /v1/dashboard`\n\nWhat `/dashboard` and `muser top` show, version {VERSION} (`version`): within a version fields \
         are only added. Needs a key where `/metrics` does, goes on answering while the server stops, and says nothing of a prompt. Every \
         figure has a `mark`: `measured` (counted or timed here), `derived` (arithmetic on such figures and facts of the model's \
         file) or `estimated` (rests on an assumption that its sentence names); `slots`, `errors`, `draft` and `nodes` have one for \
         the whole `list`. A `value` of `null`: there is none, as of a quantile of no times.\n\n\
         `history` has a row for each of the last {LENGTH} spans of {} s, oldest first; `first` is the number of its first row, `newest` \
         that of the newest. With `?since=N` only rows above `N` come. Another `server.started` is another history.\n\n\
         | figure | group | unit | mark | over | what |\n|---|---|---|---|---|---|\n",
        INTERVAL.as_secs(),
    );
    for figure in FIGURES {
        let (id, group, unit, mark) = (figure.id, figure.group, figure.unit, figure.mark.word());
        let _ = writeln!(page, "| `{id}` | {group} | {unit} | {mark} | {} | {} |", figure.over, figure.what);
    }
    page.push_str("\n| column of `history` | unit | mark |\n|---|---|---|\n");
    for column in COLUMNS {
        let _ = writeln!(page, "| `{}` | {} | {} |", column.id, column.unit, column.mark.word());
    }
}
