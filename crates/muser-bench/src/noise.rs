//! What else the machine did meanwhile: a figure taken on a busy machine says so.

/// CPU time counters of the machine and of this process, in clock ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    busy: u64,
    steal: u64,
    total: u64,
    own: u64,
}

/// What happened between two [`Counters`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Noise {
    /// Share of the machine's CPU time that other processes used; `None` where the system does not tell.
    pub others: Option<f64>,
    /// Share that the host took away.
    pub steal: Option<f64>,
}

/// Share of CPU time from which on a measurement counts as disturbed.
const LIMIT: f64 = 0.05;

impl Noise {
    /// Was it quiet, as far as is known?
    pub fn quiet(&self) -> bool {
        self.others.unwrap_or(0.0) + self.steal.unwrap_or(0.0) <= LIMIT
    }
}

impl Counters {
    /// Reads the counters; zeros where there is no `/proc`.
    pub fn now() -> Self {
        Self::read().unwrap_or_default()
    }

    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/stat").ok()?;
        let mut counters = Self::machine(stat.lines().next()?)?;
        // The command in field 2 may contain spaces; fields 14 and 15 are user and system time.
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        counters.own = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        Some(counters)
    }

    fn machine(line: &str) -> Option<Self> {
        let fields =
            line.split_whitespace().skip(1).take(8).map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
        let (idle, iowait, steal) = (*fields.get(3)?, *fields.get(4)?, *fields.get(7)?);
        let total: u64 = fields.iter().sum();
        Some(Self { busy: total.checked_sub(idle + iowait + steal)?, steal, total, own: 0 })
    }

    /// What happened since `earlier`.
    pub fn since(&self, earlier: &Self) -> Noise {
        let total = self.total.saturating_sub(earlier.total);
        if total == 0 {
            return Noise::default();
        }
        let busy = self.busy.saturating_sub(earlier.busy);
        let own = self.own.saturating_sub(earlier.own);
        let share = |ticks: u64| Some(ticks as f64 / total as f64);
        Noise {
            others: share(busy.saturating_sub(own)),
            steal: share(self.steal.saturating_sub(earlier.steal)),
        }
    }
}

/// Load average of the last minute.
pub fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_leave_out_our_own_time() {
        let before = Counters { own: 10, ..Counters::machine("cpu  100 0 50 800 10 0 0 5 0 0").unwrap() };
        let after = Counters { own: 60, ..Counters::machine("cpu  160 0 60 920 10 0 0 15 0 0").unwrap() };
        let noise = after.since(&before);
        assert_eq!(noise, Noise { others: Some(0.1), steal: Some(0.05) });
        assert!(!noise.quiet());
        assert!(after.since(&after).quiet());
        assert!(Counters::machine("cpu 1 2").is_none());
    }
}
