//! The hour that the server told of, piece by piece.

use muser_server::dashboard::Report;

/// Rows of the past, oldest first.
#[derive(Debug, Default)]
pub struct Past {
    started: u64,
    newest: u64,
    length: usize,
    columns: Vec<String>,
    rows: Vec<Vec<Option<f64>>>,
}

impl Past {
    /// Takes up what came; a server that was started anew has another past.
    pub fn take(&mut self, report: &Report) {
        let history = &report.history;
        if report.server.started != self.started || history.first > self.newest + 1 {
            self.rows.clear();
        }
        self.started = report.server.started;
        self.newest = history.newest;
        self.length = history.length;
        self.columns = history.columns.iter().map(|column| column.id.to_string()).collect();
        // What overlaps with what is there comes again.
        let known = (self.newest + 1).saturating_sub(history.first) as usize;
        if known < history.rows.len() {
            self.rows.clear();
        }
        self.rows.extend(history.rows.iter().cloned());
        let most = history.length.min(100_000);
        self.rows.drain(..self.rows.len().saturating_sub(most));
    }

    /// The row after which rows are wanted.
    pub fn since(&self) -> u64 {
        if self.rows.is_empty() { 0 } else { self.newest }
    }

    /// A column in so many cells, the newest last: means, or the longest of times. Cells before the server's start are empty.
    pub fn cells(&self, id: &str, cells: usize, longest: bool) -> Vec<Option<f64>> {
        let Some(place) = self.columns.iter().position(|column| column == id) else {
            return vec![None; cells];
        };
        let missing = self.length.saturating_sub(self.rows.len());
        let length = self.length.max(1);
        // More cells than rows: some say the same.
        let at = |cell: usize| cell * length / cells.max(1);
        (0..cells)
            .map(|cell| {
                let end = at(cell + 1).max(at(cell) + 1);
                let (from, to) = (at(cell).saturating_sub(missing), end.saturating_sub(missing));
                let rows = self.rows.get(from..to.min(self.rows.len()))?;
                let known: Vec<f64> =
                    rows.iter().filter_map(|row| row.get(place).copied().flatten()).collect();
                match (known.is_empty(), longest) {
                    (true, _) => None,
                    (false, true) => known.iter().copied().reduce(f64::max),
                    (false, false) => Some(known.iter().sum::<f64>() / known.len() as f64),
                }
            })
            .collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A report as a server would give it, with these rows of the columns `written` and `first_p95`.
    pub fn report(started: u64, first: u64, rows: &[[Option<f64>; 2]]) -> Report {
        let newest = first + rows.len() as u64 - 1;
        let column =
            |id: &str| serde_json::json!({"id": id, "label": id, "unit": "tokens/s", "mark": "measured"});
        let none = serde_json::json!({"mark": "measured", "list": []});
        let report = serde_json::json!({
            "version": 1,
            "server": {"version": "0", "state": "ready", "device": "cpu: a processor", "started": started, "uptime_s": 8000,
                       "a field of later": [1, 2]},
            "model": {"name": "muse-tiny", "quantization": "Q4_K", "context_tokens": 4096},
            "figures": [],
            "slots": none, "errors": none, "draft": none, "nodes": none,
            "history": {"interval_s": 10, "length": 6, "first": first, "newest": newest,
                        "columns": [column("written"), column("first_p95")], "rows": rows},
        });
        serde_json::from_value(report).expect("the shape that the server gives")
    }

    #[test]
    fn pieces_become_an_hour_and_another_server_another_one() {
        let mut past = Past::default();
        assert_eq!(past.since(), 0);
        let row = |n: u32| [Some(f64::from(n)), None];
        past.take(&report(5, 1, &[row(1), row(2)]));
        past.take(&report(5, 3, &[row(3), row(4), row(5), row(6), row(7)]));
        assert_eq!(past.since(), 7);
        let six = |values: [u32; 6]| values.map(|n| Some(f64::from(n))).to_vec();
        assert_eq!(past.cells("written", 6, false), six([2, 3, 4, 5, 6, 7]));
        assert_eq!(past.cells("written", 3, false), [Some(2.5), Some(4.5), Some(6.5)]);
        assert_eq!(past.cells("written", 3, true), [Some(3.0), Some(5.0), Some(7.0)]);
        assert_eq!(past.cells("first_p95", 2, true), [None, None]);
        assert_eq!(past.cells("nothing", 2, true), [None, None]);
        // The server was started anew: its first rows are all there is, at the right end.
        past.take(&report(6, 1, &[row(9)]));
        assert_eq!(past.cells("written", 3, false), [None, None, Some(9.0)]);
        // Rows were missed.
        past.take(&report(6, 100, &[row(1)]));
        assert_eq!(past.cells("written", 6, false), [None, None, None, None, None, Some(1.0)]);
    }
}
