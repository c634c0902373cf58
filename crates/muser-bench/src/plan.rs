//! Which tests a benchmark has: their names are their definitions, shared with other programs' benchmarks.

use std::fmt;

/// One kind of work that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// `pp512`: a prompt of 512 tokens from nothing, logits of the last.
    Prompt(u32),
    /// `tg@2048`: one token after another, after 2,048 positions.
    Generate {
        /// Positions before the first timed token.
        depth: u32,
    },
    /// `rows8@0`: eight sequences, a token of each in every step.
    Rows {
        /// Sequences.
        rows: u32,
        /// Positions of each before the first timed step.
        depth: u32,
    },
    /// `draft8@0`: eight rows of one sequence in every step, always from the same position.
    Draft {
        /// Rows.
        rows: u32,
        /// Position of the first row.
        depth: u32,
    },
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prompt(n) => write!(f, "pp{n}"),
            Self::Generate { depth } => write!(f, "tg@{depth}"),
            Self::Rows { rows, depth } => write!(f, "rows{rows}@{depth}"),
            Self::Draft { rows, depth } => write!(f, "draft{rows}@{depth}"),
        }
    }
}

impl Test {
    /// Tokens that one timed step brings.
    pub fn tokens_per_step(self) -> u32 {
        match self {
            Self::Prompt(n) => n,
            Self::Generate { .. } => 1,
            Self::Rows { rows, .. } | Self::Draft { rows, .. } => rows,
        }
    }

    /// Sequences that are in a step.
    pub fn sequences(self) -> u32 {
        match self {
            Self::Rows { rows, .. } => rows,
            _ => 1,
        }
    }

    /// Positions that must hold KV before the first timed step.
    pub fn depth(self) -> u32 {
        match self {
            Self::Prompt(_) => 0,
            Self::Generate { depth } | Self::Rows { depth, .. } | Self::Draft { depth, .. } => depth,
        }
    }

    /// Positions that a sequence reaches when `steps` steps are timed.
    pub fn end(self, steps: u32) -> u32 {
        match self {
            Self::Prompt(n) => n,
            Self::Generate { depth } | Self::Rows { depth, .. } => depth.saturating_add(steps),
            Self::Draft { rows, depth } => depth.saturating_add(rows),
        }
    }

    /// Timed steps in a repetition.
    pub fn steps(self, gen_tokens: u32) -> u32 {
        match self {
            Self::Prompt(_) => 1,
            _ => gen_tokens,
        }
    }
}

/// All tests that the lists ask for, in a fixed order without repetitions.
pub fn tests(
    prompts: &[u32],
    gen_tokens: u32,
    depths: &[u32],
    rows: &[u32],
    draft_rows: &[u32],
) -> Vec<Test> {
    let mut all: Vec<Test> = prompts.iter().filter(|n| **n > 0).map(|&n| Test::Prompt(n)).collect();
    if gen_tokens > 0 {
        for &depth in depths {
            all.push(Test::Generate { depth });
            all.extend(rows.iter().filter(|n| **n > 0).map(|&rows| Test::Rows { rows, depth }));
            all.extend(draft_rows.iter().filter(|n| **n > 0).map(|&rows| Test::Draft { rows, depth }));
        }
    }
    let mut unique = Vec::new();
    for test in all {
        if !unique.contains(&test) {
            unique.push(test);
        }
    }
    unique
}
